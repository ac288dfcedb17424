"""The JSON objects of requests: pydantic reads them, and one function says what is wrong.

A null counts as missing. Types are strict: a number is no text, and true is no number.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PlainValidator, ValidationError, model_validator

from lmi_bench.core.errors import InputError, drop_frames
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server.state import MAX_STOP_STRINGS
from lmi_bench.models.hf_config import read_table

_SHOWN_CHARS = 80
_TABLE: Final = read_table("fields.csv", __package__)
_MUST: Final = {row["error"]: row["must"] for row in read_table("errors.csv", __package__)}
"""What a field must be, by pydantic's type of error."""


def load_json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InputError if it is not one."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InputError(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise InputError(f"the body must be a JSON object, got {_show(value)}")
    return value


class Fields(BaseModel):
    """One JSON object of a request.

    neutral  unsupported fields, each with the value that has no effect, in JSON: `fields.csv`;
             an empty text: any value changes nothing here
    section  the field that is itself an object of fields, if there is one
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    neutral: ClassVar[Mapping[str, str]] = {}
    section: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        names = {base.__name__.strip("_") for base in cls.__mro__}
        cls.neutral = {row["field"]: row["neutral"] for row in _TABLE if row["object"] in names}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Itself, since it is frozen: pydantic copies a field's default for each request."""
        return self

    @classmethod
    def read(cls, body: bytes | Mapping[str, Any]) -> Self:
        """The fields of a body, decoded or not. Raises InputError that names the first invalid."""
        values = load_json_object(body) if isinstance(body, bytes) else body
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
        name = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in error["loc"])
        name = name.removeprefix(".").removeprefix("parameters.")
        facts = error.get("ctx", {})
        if "error" in facts:  # a validator's, whose frames end in this one
            drop_frames(facts["error"])
        must = _MUST.get(error["type"], error["msg"]).format(**facts)
        got = f"{facts['actual_length']} entries" if "actual_length" in facts else _show(error["input"])
        raise InputError(f"{name} must {must}" + f", got {got}" * (error["type"] != "missing"))

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict) or None not in values.values():
            return values
        return {name: value for name, value in values.items() if value is not None}

    def model_post_init(self, context: Any) -> None:
        """Raise InputError for unsupported fields, unless their value has no effect."""
        for name, sent in (self.model_extra or {}).items():
            if (neutral := self.neutral.get(name)) and sent != orjson.loads(neutral):
                raise InputError(
                    f"{name}={_show(sent)} is not supported by this server: omit {name} or set it to {neutral}"
                )

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that the server does not know, those of the section last."""
        names = [name for name in self.model_extra or () if name not in self.neutral]
        return names + (getattr(self, self.section).ignored if self.section else [])


def _strings(value: Any) -> tuple[str, ...]:
    """A string, or a list of strings; none of them empty."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise ValueError("a list of non-empty strings")
    return tuple(values)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
        raise ValueError("a list of token ids")
    return tuple(value)


AtLeast1 = Annotated[int, Field(ge=1)]
Strings = Annotated[tuple[str, ...], PlainValidator(_strings)]
StopStrings = Annotated[Strings, Field(max_length=MAX_STOP_STRINGS)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids)]
StopTokens = Annotated[TokenIds, Field(max_length=MAX_STOP_STRINGS)]


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """OpenAI's map of token ids, as texts, to additions of -100 to 100."""
    try:
        found = tuple((int(token_id), float(bias)) for token_id, bias in value.items())
    except (AttributeError, TypeError, ValueError):
        raise ValueError("an object of token ids and numbers") from None
    if not all(token_id >= 0 and abs(bias) <= 100 for token_id, bias in found):
        raise ValueError("an object of token ids from 0 on, and numbers from -100 to 100")
    return found


LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias)]


class VllmFields(Fields):
    """The sampling parameters that OpenAI's and LMI's requests share with vLLM.

    top_k  -1 is off; seed: -1 is a random one
    """

    include_stop_str_in_output: bool = False
    stop: StopStrings = ()
    stop_token_ids: StopTokens = ()
    ignore_eos: bool = False
    min_tokens: NonNegativeInt = 0
    temperature: float = 1.0
    top_k: int = Field(0, ge=-1)
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    min_p: float = 0.0
    logit_bias: LogitBias = ()

    def sampling_with(self, num_logprobs: int | None, **own: Any) -> SamplingParams:
        """The engine's settings, with `own` ones. Raises InputError for a value out of range.

        num_logprobs  most likely tokens per position to return; None: no log-probabilities
        """
        fields = vars(self)
        settings = {name: fields[name] for name in _SHARED} | own
        if self.top_k == -1:
            settings["top_k"] = 0
        if self.seed == -1:
            settings["seed"] = None
        settings["logprobs"], settings["top_logprobs"] = num_logprobs is not None, num_logprobs or 0
        return SamplingParams(**settings)


_SHARED: Final = VllmFields.model_fields.keys() & set(SamplingParams.__match_args__)


def _show(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # nested too deeply
        text = "a value nested too deeply"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
