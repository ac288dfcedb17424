"""The supported protocols by name."""

from lmi_bench.core.errors import InputError
from lmi_bench.wire.event import Splitter, WireEvent, WireFormat
from lmi_bench.wire.lmi import LmiFormat
from lmi_bench.wire.openai import OpenAiChatFormat, OpenAiCompletionsFormat
from lmi_bench.wire.tgi import TgiFormat

__all__ = ["FORMAT_NAMES", "Splitter", "WireEvent", "WireFormat", "find_format"]

_FORMATS: dict[str, WireFormat] = {
    format_.name: format_
    for format_ in (OpenAiCompletionsFormat(), OpenAiChatFormat(), LmiFormat(), TgiFormat())
}
FORMAT_NAMES: tuple[str, ...] = tuple(_FORMATS)


def find_format(name: str, *, stream: bool = True) -> WireFormat:
    """The protocol with this name; raises InputError that lists the known names."""
    if name not in _FORMATS:
        raise InputError(f"unknown protocol {name!r}: use one of {', '.join(FORMAT_NAMES)}")
    if name == "tgi" and not stream:
        return TgiFormat(path="/generate")
    return _FORMATS[name]
