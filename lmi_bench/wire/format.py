"""The supported protocols by name."""

from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.wire.anthropic import VERSION, AnthropicFormat
from lmi_bench.wire.embeddings import EmbeddingsFormat
from lmi_bench.wire.event import WireFormat
from lmi_bench.wire.lmi import LmiFormat
from lmi_bench.wire.openai import OpenAiChatFormat, OpenAiCompletionsFormat
from lmi_bench.wire.responses import ResponsesFormat
from lmi_bench.wire.tgi import TgiFormat

_FORMATS: dict[str, WireFormat] = {
    format_.name: format_
    for format_ in (
        *(OpenAiCompletionsFormat(), OpenAiChatFormat(), LmiFormat(), TgiFormat()),
        *(ResponsesFormat(), AnthropicFormat(), EmbeddingsFormat()),
    )
}
FORMAT_NAMES: tuple[str, ...] = tuple(_FORMATS)
DISCOVERED: Final = ("openai", "openai-chat", "lmi", "tgi")
"""Protocols that discovery tries. Servers of the others serve one of these, too."""
UNFORCED: Final = ("tgi", "anthropic")
"""Protocols without a field that forces the length of an answer."""


def find_format(name: str, *, stream: bool = True) -> WireFormat:
    """The protocol with this name; raises InputError that lists the known names."""
    if name not in _FORMATS:
        raise InputError(f"unknown protocol {name!r}: use one of {', '.join(FORMAT_NAMES)}")
    if name == "tgi" and not stream:
        return TgiFormat(stream=False)
    return _FORMATS[name]


def own_headers(protocol: str, api_key: str | None) -> dict[str, str]:
    """The headers that a protocol demands: the key, and the version of Anthropic's API."""
    if protocol != AnthropicFormat.name:
        return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return {"anthropic-version": VERSION} | ({} if api_key is None else {"x-api-key": api_key})
