"""The fields of an OpenAI request, completion or chat, with vLLM's extra ones."""

from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AliasChoices, ConfigDict, Field, NonNegativeInt, PlainValidator

from lmi_bench.core.errors import InputError
from lmi_bench.engine.grammar import calls_grammar
from lmi_bench.engine.server.fields import AtLeast1, Fields, TokenIds, VllmFields
from lmi_bench.engine.server.streaming import MAX_CHOICES


class StreamOptions(Fields):
    """Token counts of a stream: in a last chunk, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Guided(Fields):
    """Grammars for the answer, by the names that vLLM had at first."""

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    def grammars(self) -> list[tuple[str, Any]]:
        """The kind and the value of each, for `read_grammar`."""
        kinds = ("json", "regex", "choice", "grammar")
        found = [(kind, getattr(self, f"guided_{kind}")) for kind in kinds]
        return [pair for pair in found if pair[1] is not None]


class _Structured(_Guided):
    """`structured_outputs`."""

    model_config = ConfigDict(extra="forbid", alias_generator=lambda name: name.removeprefix("guided_"))
    json_object: bool = False


class _ResponseFormat(Fields):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] = Field({})


class _OpenAiFields(_Guided, VllmFields):
    """The fields that completions and chats share.

    max_tokens              None: up to the end of the context
    n                       answers to the prompt
    best_of                 a larger one is not supported, since all computed choices are sent
    return_token_ids        include each chunk's token ids
    response_format, structured_outputs, guided_json ...  at most one grammar for the answer
    truncate_prompt_tokens  keep only this many tokens at the prompt's end
    """

    section = "stream_options"
    model: str | None = None
    max_tokens: AtLeast1 | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    truncate_prompt_tokens: AtLeast1 | None = None
    response_format: _ResponseFormat = _ResponseFormat()
    structured_outputs: _Structured = _Structured()

    def model_post_init(self, context: Any) -> None:
        """Raise InputError for fields that do not go together."""
        super().model_post_init(context)
        if self.best_of not in (None, self.n):
            raise InputError(f"best_of={self.best_of} with n={self.n} is not supported by this server: omit best_of")

    def constraint(self) -> tuple[str, Any] | None:
        """The kind and the value of the grammar that the answer must follow, for `read_grammar`.

        Raises InputError if there are several."""
        form, structured = self.response_format, self.structured_outputs
        found = self.grammars() + structured.grammars()
        if form.type == "json_object" or structured.json_object:
            found.append(("json", {"type": "object"}))
        if form.type == "json_schema":
            found.append(("json", form.json_schema.get("schema")))
        if len(found) > 1:
            raise InputError(f"an answer can follow one grammar: {len(found)} were sent")
        return found[0] if found else None


def _prompts(sent: Any) -> list[str | list[int]]:
    """Text or token ids, or a list of several."""
    several = isinstance(sent, list) and sent and isinstance(sent[0], str | list)
    for prompt in sent if several else [sent]:
        is_ids = isinstance(prompt, list) and all(type(v) is int and v >= 0 for v in prompt)
        if not prompt or not (is_ids or isinstance(prompt, str)):
            raise InputError("prompt must be a non-empty string or a non-empty list of token ids, or several")
    return sent if several else [sent]


class CompletionCall(_OpenAiFields):
    """`/v1/completions`.

    echo        put the prompt before each answer; with logprobs, its tokens' as well
    max_tokens  0: with echo, the prompt alone
    """

    prompts: Annotated[list[str | list[int]], PlainValidator(_prompts)] = Field(
        [], validate_default=True, validation_alias="prompt"
    )
    add_special_tokens: bool = True
    max_tokens: NonNegativeInt = 16
    num_logprobs: NonNegativeInt | None = Field(None, validation_alias="logprobs")
    echo: bool = False
    most_tool_calls: ClassVar[int | None] = 0
    tool_choice: ClassVar[Any] = "none"

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not (self.max_tokens or self.echo):
            raise InputError("max_tokens must be at least 1, got 0")


def _joined(content: Any) -> str:
    """A string, or the text of a list of text parts."""
    if isinstance(content, str):
        return content
    try:
        return "\n".join([part["text"] for part in content])  # as in vLLM
    except (KeyError, TypeError):
        raise ValueError("a string or a list of text parts") from None


def _arguments(sent: Any) -> dict[str, Any]:
    """A call's arguments, which clients send as JSON, as the object that templates take."""
    try:
        found = orjson.loads(sent or "{}") if isinstance(sent, str) else sent
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("an object in JSON")
    return found


class _Function(Fields):
    name: str
    parameters: dict[str, Any] | None = None
    arguments: Annotated[dict[str, Any], PlainValidator(_arguments)] = Field({})


class _Tool(Fields):
    """A call, or a tool that may be called."""

    function: _Function = Field(default_factory=dict, validate_default=True)


class Message(Fields):
    """One message of a chat, with the fields that the template may know, such as `name`."""

    role: str
    content: Annotated[str, PlainValidator(_joined)] = ""
    tool_calls: list[_Tool] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as transformers takes it: reasoning by each name that templates know (gpt-oss'
        refuses `thinking` beside content), no empty list of calls, which some take for a call."""
        found = self.model_dump(exclude_none=True, exclude=None if self.tool_calls else {"tool_calls"})
        thought = found.get("reasoning") or found.get("reasoning_content")
        if isinstance(thought, str):
            found |= {"reasoning": thought, "reasoning_content": thought}
            found |= {} if self.content else {"thinking": thought}
        return found


class DetokenizeCall(Fields):
    tokens: TokenIds = ()
    model: str | None = None


class ChatCall(_OpenAiFields):
    """`/v1/chat/completions`.

    chat_template_kwargs  variables for the model's chat template, as reasoning_effort and
                          documents are
    tools, tool_choice    functions that the model may call; "none": its text is not searched
    """

    messages: list[Message] = Field([], min_length=1, validate_default=True)
    echo: ClassVar[bool] = False
    max_tokens: AtLeast1 | None = Field(None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool = False
    top_logprobs: NonNegativeInt = 0
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        for tool in self.tools:
            _Tool.read(tool)
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs: true")

    def constraint(self) -> tuple[str, Any] | None:
        found, choice = super().constraint(), self.tool_choice
        if found and self.most_tool_calls != 0:
            raise InputError(
                "an answer that may call tools cannot follow a grammar too: "
                "set tool_choice to none, or omit the tools or the grammar"
            )
        if choice in ("none", "auto"):
            return found
        named = choice.get("function") if isinstance(choice, dict) else None
        functions = [tool["function"] for tool in self.tools]
        forced = [f for f in functions if choice == "required" or {"name": f["name"]} == named]
        if not forced:
            raise InputError(
                "tool_choice must be none, auto, required or one of the tools: "
                '{"type": "function", "function": {"name": ...}}'
            )
        return "grammar", calls_grammar(forced, several=self.most_tool_calls is None)

    @property
    def most_tool_calls(self) -> int | None:
        """Calls that the answer may have; None: any number."""
        if not self.tools or self.tool_choice == "none":
            return 0
        several = self.parallel_tool_calls and not isinstance(self.tool_choice, dict)
        return None if several else 1

    @property
    def num_logprobs(self) -> int | None:
        """See `VllmFields.sampling_with`."""
        return self.top_logprobs if self.logprobs else None

    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        named = {"reasoning_effort", "documents", "tools"}
        return self.model_dump(include=named, exclude_defaults=True) | self.chat_template_kwargs


OpenAiCall = CompletionCall | ChatCall
