"""Reads a model's family and layer structure from its Hugging Face config.json.

`architectures.csv` has a row for each setting of a family: the field of DecoderSpec, or a word that
the code below turns into some, the keys of config.json, and transformers' default. A row without
a default is required, without keys a fact of the family; `?` before a default: null means none. The
row `architectures` names the family's models.
An unsupported setting that changes the arithmetic is an error, never ignored.
"""

import csv
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec, NormKind

Config = Mapping[str, Any]
Facts = dict[str, Any]


def read_table(name: str, package: str = "lmi_bench.models") -> tuple[dict[str, str], ...]:
    """The rows of a table in a package."""
    text = resources.files(package).joinpath(name).read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


_TABLE: Final = read_table("architectures.csv")
ARCHITECTURES: Final[Mapping[str, str]] = {
    name: row["family"] for row in _TABLE if row["field"] == "architectures" for name in row["default"].split()
}
"""The family of each supported value of config.json's `architectures`."""


def shape_from_hf_config(name: str, config: Config) -> ModelShape:
    """The model's shape from its config.json; raises InputError like `spec_from_hf_config`."""
    shape = spec_from_hf_config(name, config).shape(name)
    return dataclasses.replace(shape, architecture=_architecture(config))


def spec_from_hf_config(name: str, config: Config) -> DecoderSpec:
    """The layer structure of the model `name`.

    Raises InputError for an unknown architecture (listing the supported ones), a missing number
    or an unsupported setting.
    """
    architecture = _architecture(config)
    if not architecture:
        named = ", ".join(_named(config)) or "not named in config.json"
        raise InputError(
            f"model {name!r}: architecture {named} is not supported; lmi-bench has: {', '.join(ARCHITECTURES)}"
        )
    text = config.get("text_config")  # of a model that reads images as well
    if architecture.endswith("ForConditionalGeneration") and isinstance(text, Mapping):
        kind = str(text.get("model_type") or "").removesuffix("_text")
        if kind not in ("", ARCHITECTURES[architecture]):
            raise InputError(f"model {name!r}: {architecture} with a {kind} text is not supported")
        tied = config.get("tie_word_embeddings")
        config = {**text, **({} if tied is None else {"tie_word_embeddings": tied})}
    family = ARCHITECTURES[architecture]
    read = _Reader(name, config)
    facts = {field: read.setting(*row) for field, row in _rows(family).items()}
    if family in _OWN:
        _OWN[family](read, facts)
    return _spec(read, family, facts)


def _architecture(config: Config) -> str:
    """The first supported architecture that it names; empty without one."""
    return next((each for each in _named(config) if each in ARCHITECTURES), "")


def _named(config: Config) -> list[str]:
    names = config.get("architectures")
    return [str(each) for each in names] if isinstance(names, list) else []


@cache
def _rows(family: str) -> Mapping[str, tuple[tuple[str, ...], str]]:
    """Keys and default of each field of a family."""
    rows = [row for row in _TABLE if row["family"] in ("*", family)]
    return {row["field"]: (tuple(row["keys"].split()), row["default"]) for row in rows}


class _Reader:
    """One config.json with its model's name, which error messages quote."""

    def __init__(self, name: str, config: Config) -> None:
        self.config = config
        self._where = f"model {name!r}: config.json"

    def setting(self, keys: tuple[str, ...], default: str) -> Any:
        """The value under the first key that is present and not null, checked to be of the
        default's type, or the default."""
        text, config = default.removeprefix("?"), self.config
        kind = _kind_of(text)
        if kind is bool:
            stated = text == "true"
            return bool(config.get(keys[0], stated)) if keys else stated  # null is no
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is None:
            if text != default and (not text or any(key in config for key in keys)):
                return None
            if not text:
                raise InputError(f"{self._where} has none of {', '.join(keys)}")
            return kind(text)
        value = config[key]
        if kind is str:
            self._refuse_type(key, value, str, "text")
            return value
        whole = kind is int
        self._refuse_type(key, value, int if whole else int | float, f"a {'whole ' * whole}number")
        self.refuse(not 0 <= value < 1e15, f"{key} must be 0 or more, got {value}")
        return value

    def _refuse_type(self, key: str, value: Any, wanted: Any, words: str) -> None:
        wrong = isinstance(value, bool) or not isinstance(value, wanted)
        self.refuse(wrong, f"{key} must be {words}, got {value!r}")

    def get(self, key: str) -> Any:
        """The value under this key; None for null or without it."""
        return self.config.get(key)

    def refuse(self, wrong: bool, what: str) -> None:
        """Raise InputError if `wrong`: the engine would compute this model incorrectly."""
        if wrong:
            raise InputError(f"{self._where}: {what}")

    def rope(self, facts: Facts, unstated: Facts | None = None) -> Facts:
        """Rotary position settings, from their own object, else `unstated`, or the top level."""
        own = self.get("rope_scaling") or self.get("rope_parameters")
        stated = self.settings(own or unstated)
        by_kind = [key for key, value in stated.items() if isinstance(value, Mapping)]
        self.refuse(bool(by_kind), f"rotary positions by layer ({by_kind}) are not supported")
        trained = facts.get("trained") or self.get(_TRAINED)  # counts more, as in transformers
        return self.scaling(stated if trained is None else {**stated, _TRAINED: trained}, facts)

    def scaling(self, stated: Mapping[str, Any], facts: Facts) -> Facts:
        """Complete rotary settings. Of a `turned_frac` a family rotates that share of a head's
        features; others all, whatever transformers' scalings say."""
        kind = str(stated.get("rope_type") or stated.get("type") or "default")
        if stated.get("short_factor") and kind in ("su", "yarn"):  # of Phi-3's first files
            kind = "longrope"
        rope, positions = {**stated, "rope_type": kind}, facts["max_positions"]
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = facts["theta"]
        if kind not in ("llama3", "yarn", "longrope") or not rope.get(_TRAINED):
            rope[_TRAINED] = positions
        for key in _ROPE_SIZES:
            if rope.get(key) is not None and (rope[key] != 0 or key not in _ROPE_MAY_BE_0):
                self.check_size(key, rope[key])
        if kind in ("yarn", "longrope") and rope.get("factor") is None:
            rope["factor"] = positions / rope[_TRAINED]
        turned = rope.get("partial_rotary_factor")
        if turned is None:
            turned = facts.get("turned_frac") or self.get("partial_rotary_factor") or 1.0
        ignored = "turned_frac" not in facts and turned != 1.0
        self.refuse(ignored, f"partial_rotary_factor {turned} is not supported")
        self.check_size("partial_rotary_factor", turned)
        self.refuse(turned > 1, f"partial_rotary_factor {turned} is above 1")
        rope["partial_rotary_factor"] = turned
        return rope

    def settings(self, stated: Any) -> Mapping[str, Any]:
        """Rotary settings as stated, none for null."""
        wrong = not isinstance(stated or {}, Mapping)
        self.refuse(wrong, f"{stated!r} are no rotary settings")
        return stated or {}

    def check_size(self, key: str, value: Any) -> None:
        """Raise InputError for what is no positive number."""
        self._refuse_type(key, value, int | float, "a number")
        self.refuse(not 0 < value < 1e15, f"{key} must be above 0 and below 1e15, got {value!r}")

    def windows(self, facts: Facts) -> tuple[int | None, ...]:
        """Windows by `layer_types`. Without them the layers from `first_window` to `stop_window`
        slide, but not each `full_every`-th; a family without these words does not read them."""
        num_layers, kinds = facts["num_layers"], self.get("layer_types")
        window: int | None = facts.get("window") if facts.get("windowed", True) else None
        self.refuse(num_layers > MOST_LAYERS, f"{num_layers} layers are more than {MOST_LAYERS}")
        every, first = facts.get("full_every", 0), facts.get("first_window") or 0
        stop = facts.get("stop_window")
        slides = range(first, num_layers if stop is None else stop)
        sliding = [i in slides and not (every and (i + 1) % every == 0) for i in range(num_layers)]
        if kinds is not None:
            named = isinstance(kinds, Sequence) and len(kinds) == num_layers
            known = named and all(each in ("sliding_attention", "full_attention") for each in kinds)
            wanted = f"must name sliding or full attention of each of {num_layers} layers"
            self.refuse(not known, f"layer_types {wanted}, got {kinds}")
            sliding = [kind == "sliding_attention" for kind in kinds]
            self.refuse(any(sliding) and window is None, "layer_types slide but no window is set")
            unread = not {"full_every", "first_window"} & facts.keys()
            alternate = unread and any(each != (window is not None) for each in sliding)
            self.refuse(alternate, f"layer_types that alternate are not supported: {kinds}")
        return tuple(window if each else None for each in sliding)


def _kind_of(text: str) -> type:
    """The type of a default; a whole number where there is none."""
    if text in ("true", "false"):
        return bool
    if text and not text[0].isdigit():
        return str
    return float if "." in text or "e" in text else int


_TRAINED: Final = "original_max_position_embeddings"
_TENSOR: Final = "tensors."  # before the part that a name is of
_ROPE_MAY_BE_0: Final = (
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "attention_factor"),
)
_ROPE_SIZES: Final = ("rope_theta", _TRAINED, "factor", *_ROPE_MAY_BE_0)
MOST_LAYERS: Final = 100_000  # a mistyped number must not fill the memory


def _spec(read: _Reader, family: str, facts: Facts) -> DecoderSpec:
    """What follows from a family's settings: sizes that are left out, rotation, windows."""
    heads, name = facts["num_heads"], facts["activation"]
    known = facts["activations"].split()
    message = f"activation {name!r} is not supported; {family} needs {known[0]}"
    read.refuse(name not in known, message)
    facts["num_kv_heads"] = facts["num_kv_heads"] or heads
    facts["head_dim"] = facts["head_dim"] or facts["hidden_size"] // max(1, heads)
    facts["score_scale"] = facts.get("score_scale") or max(1, facts["head_dim"]) ** -0.5
    facts["windows"] = read.windows(facts)
    rope = facts["rope"] = facts.get("rope") or read.rope(facts)
    rotated = facts.get("turned", facts["head_dim"] * rope["partial_rotary_factor"])
    read.refuse(int(rotated) % 2 > 0, f"{rotated} rotated features of a head are odd")
    if "window_rope" not in facts or (read.get("rope_scaling") or {}).get(_TRAINED):
        # Gemma 3 states its whole length, and no trained one
        facts["max_positions"] = _longest_context(facts["max_positions"], rope)
    facts["dense_layers"] = _dense_layers(read, facts)
    facts["tensors"] = {
        field.removeprefix(_TENSOR): text or "" for field, text in facts.items() if field.startswith(_TENSOR)
    }
    fields = {each.name for each in dataclasses.fields(DecoderSpec)}
    used = {field: v for field, v in facts.items() if field in fields and v is not None}
    return DecoderSpec(family=family, **used)


def _dense_layers(read: _Reader, facts: Facts) -> tuple[int, ...]:
    """Layers with one MLP instead of experts: the first `dense_count`, and of Qwen's all that
    `mlp_only_layers` names and all but each `sparse_step`-th."""
    step = facts.get("sparse_step", 1)
    named = (read.get("mlp_only_layers") or []) if "sparse_step" in facts else []
    wrong = not isinstance(named, list) or not all(type(each) is int for each in named)
    read.refuse(wrong or step < 1, f"mlp_only_layers {named!r} every {step} are not supported")
    layers = range(facts["num_layers"])
    return tuple(i for i in layers if i < facts.get("dense_count", 0) or i in named or (i + 1) % step)


def _longest_context(positions: int, rope: Mapping[str, Any]) -> int:
    """Maximum context length in tokens.

    By transformers' convention max_position_embeddings is the trained length with linear, dynamic
    or yarn scaling, and the scaled length with llama3 scaling. Longrope's frequencies beyond the
    trained length need the whole cache anew, so that a context ends there.
    """
    if rope["rope_type"] == "longrope":
        return min(positions, int(rope[_TRAINED]))
    stretches = rope["rope_type"] in ("linear", "dynamic", "yarn")
    if not stretches or rope.get("factor") is None:
        return positions
    return max(positions, int(rope[_TRAINED] * rope["factor"]))


def _falcon(read: _Reader, facts: Facts) -> None:
    """Falcon, with its current keys or those of its first release (RefinedWeb, n_head ...).

    In the first release, 7B has one KV head (`multi_query`); 40B states `n_head_kv`, which also
    implies the newer layer with two norms.
    """
    for key in ("alibi", "apply_residual_connection_post_layernorm"):
        read.refuse(bool(read.get(key)), f"{key} is not supported")
    newer = read.get("new_decoder_architecture")
    newer = read.get("n_head_kv") is not None if newer is None else bool(newer)
    if not newer:
        facts["num_kv_heads"] = 1 if read.config.get("multi_query", True) else facts["num_heads"]
    facts["ffn_size"] = facts["ffn_size"] or 4 * facts["hidden_size"]
    facts["norm"] = NormKind.LAYER
    facts["parallel"] = newer or bool(read.config.get("parallel_attn", True))
    if facts["parallel"]:
        two = newer and (read.get("num_ln_in_parallel_attn") or 2) == 2
        facts["tensors.norms"] = "ln_attn ln_mlp" if two else "input_layernorm"


def _gemma(read: _Reader, facts: Facts) -> None:
    bidirectional = bool(read.get("use_bidirectional_attention"))
    read.refuse(bidirectional, "use_bidirectional_attention is not supported")
    facts["embedding_scale"] = facts["hidden_size"] ** 0.5
    if "query_scalar" in facts:
        read.check_size("query_pre_attn_scalar", facts["query_scalar"])
        facts["score_scale"] = facts["query_scalar"] ** -0.5


def _gemma3(read: _Reader, facts: Facts) -> None:
    """Layers with a window have rotary settings of their own: `rope_parameters` by kind of layer,
    or in earlier files `rope_local_base_freq`, beside settings of the other layers."""
    _gemma(read, facts)
    capped = read.get("attn_logit_softcapping") is not None  # of no kernel that transformers takes
    read.refuse(capped, "attn_logit_softcapping is not supported")
    stated = dict(read.settings(read.get("rope_parameters")))
    kinds = ("full_attention", "sliding_attention")
    full, near = (read.settings(stated.pop(kind, None)) for kind in kinds)
    full = full or {"rope_type": "default"}  # which hides the older key `type` of a scaling
    facts["rope"] = read.scaling({**full, **read.settings(read.get("rope_scaling"))}, facts)
    facts["window_rope"] = read.scaling(near, facts | {"theta": facts["window_theta"]})
    read.refuse(bool(stated), f"rope_parameters {list(stated)} are not supported")


def _gpt_oss(read: _Reader, facts: Facts) -> None:
    facts["clamped"] = (facts["swiglu_alpha"], facts["swiglu_limit"])
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, _TRAINED: 4096}
    facts["rope"] = read.rope(facts, yarn)


def _sigmoid_experts(read: _Reader, facts: Facts) -> None:
    softmax = read.get("scoring_func") == "softmax"
    read.refuse(softmax, "scoring_func 'softmax' is not supported")
    facts["shared_ffn_size"] = facts["ffn_size"] * facts["shared_count"]


def _deepseek_v3(read: _Reader, facts: Facts) -> None:
    _sigmoid_experts(read, facts)
    read.refuse(bool(read.get("attention_bias")), "attention_bias is not supported")
    read.check_size("kv_lora_rank", facts["latent_rank"])
    read.check_size("qk_rope_head_dim", facts["turned"])
    rope, head_dim = read.rope(facts), facts["plain"] + facts["turned"]
    rope["rope_interleave"] = facts["rope_interleave"]
    all_dim, scale = rope.get("mscale_all_dim"), max(1, head_dim) ** -0.5
    factor = rope.get("factor") or 1.0
    if rope["rope_type"] != "default" and all_dim and factor > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    facts |= {"rope": rope, "head_dim": head_dim, "score_scale": scale}


_OWN: Final[Mapping[str, Callable[[_Reader, Facts], None]]] = {
    "falcon": _falcon,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _sigmoid_experts,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3": _gemma3,
}
"""What the table does not say of a family."""
