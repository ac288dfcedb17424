"""The fields of an OpenAI request, completion or chat, with vLLM's extra ones."""

from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, ConfigDict, Field, NonNegativeInt, PlainValidator

from lmi_bench.core.errors import InputError
from lmi_bench.engine.server.fields import AtLeast1, Fields, VllmFields
from lmi_bench.engine.server.streaming import MAX_CHOICES


class StreamOptions(Fields):
    """Token counts of a stream: in a last chunk, or in every chunk."""

    without_effect = ("include_obfuscation",)
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _OpenAiFields(VllmFields):
    """The fields that completions and chats share.

    max_tokens              None: up to the end of the context
    n                       answers to the prompt
    best_of                 a larger one is not supported, since all computed choices are sent
    return_token_ids        include each chunk's token ids
    truncate_prompt_tokens  keep only this many tokens at the prompt's end
    """

    neutral: ClassVar = {
        **VllmFields.neutral,
        "suffix": "",
        "use_beam_search": False,
        "return_tokens_as_token_ids": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
    }
    without_effect = ("user", "request_id", "priority")
    section = "stream_options"
    model: str | None = None
    max_tokens: AtLeast1 | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    truncate_prompt_tokens: AtLeast1 | None = None

    def model_post_init(self, context: Any) -> None:
        """Raise InputError for fields that do not go together."""
        super().model_post_init(context)
        if self.best_of not in (None, self.n):
            raise InputError(
                f"best_of={self.best_of} with n={self.n} is not supported by this server: "
                "omit best_of"
            )


def _one_prompt(prompt: Any) -> Any:
    """Text or token ids, possibly in a list of one; several prompts are not supported."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InputError(
                f"prompt has {len(prompt)} prompts: this server accepts one per request"
            )
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(type(v) is int and v >= 0 for v in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise InputError("prompt must be a non-empty string or a non-empty list of token ids")
    return prompt


class CompletionCall(_OpenAiFields):
    """`/v1/completions`. echo: put the prompt before each answer."""

    prompt: Annotated[str | list[int], PlainValidator(_one_prompt)] = Field(
        "", validate_default=True
    )
    max_tokens: AtLeast1 = 16
    num_logprobs: NonNegativeInt | None = Field(None, validation_alias="logprobs")
    echo: bool = False

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.echo and self.num_logprobs is not None:
            raise InputError(
                "echo=true with logprobs is not supported by this server, which has no "
                "log-probabilities of prompts: omit one of them"
            )


def _joined(content: Any) -> str:
    """A string, or the text of a list of text parts."""
    if isinstance(content, str):
        return content
    try:
        return "".join([part["text"] for part in content])
    except (KeyError, TypeError):
        raise ValueError("a string or a list of text parts") from None


class Message(Fields):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: str
    content: Annotated[str, PlainValidator(_joined)]


class ChatCall(_OpenAiFields):
    """`/v1/chat/completions`. chat_template_kwargs: variables for the model's chat template."""

    messages: list[Message] = Field([], min_length=1, validate_default=True)
    max_tokens: AtLeast1 | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    top_logprobs: NonNegativeInt = 0
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_logprobs(self) -> int | None:
        """See `VllmFields.sampling_with`."""
        return self.top_logprobs if self.logprobs else None


OpenAiCall = CompletionCall | ChatCall
