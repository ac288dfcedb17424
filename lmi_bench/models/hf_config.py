"""Reads a model's family and layer structure from its Hugging Face config.json.

Sizes are required; other missing settings take transformers' default. An unsupported setting that
changes the arithmetic is an error, never ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec, NormKind

Config = Mapping[str, Any]


def shape_from_hf_config(name: str, config: Config) -> ModelShape:
    """The model's shape from its config.json; raises InputError like `spec_from_hf_config`."""
    shape = spec_from_hf_config(name, config).shape(name)
    return replace(shape, architecture=_architecture(config))


def spec_from_hf_config(name: str, config: Config) -> DecoderSpec:
    """The layer structure of the model `name`.

    Raises InputError for an unknown architecture (listing the supported ones), a missing number
    or an unsupported setting.
    """
    architecture = _architecture(config)
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture](_Reader(name, config))
    named = [str(each) for each in config.get("architectures") or []]
    raise InputError(
        f"model {name!r}: architecture {', '.join(named) or 'not named in config.json'} is not "
        f"supported; lmi-bench has: {', '.join(ARCHITECTURES)}"
    )


def _architecture(config: Config) -> str:
    """The first supported architecture that it names; empty without one."""
    named = map(str, config.get("architectures") or [])
    return next((each for each in named if each in ARCHITECTURES), "")


class _Reader:
    """One config.json with its model's name, which error messages quote."""

    def __init__(self, name: str, config: Config) -> None:
        self.config = config
        self._where = f"model {name!r}: config.json"

    def need(self, *keys: str) -> int:
        """The integer under the first of these keys that is present."""
        if self.get(*keys) is None:
            raise InputError(f"{self._where} has none of {', '.join(keys)}")
        return self.count(0, *keys)

    def count(self, default: int, *keys: str) -> int:
        """Like `need`, with a default if no key is present."""
        value = self.get(*keys)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{self._where}: {keys[0]} must be a whole number, got {value!r}")
        return value

    def get(self, *keys: str) -> Any:
        """The value under the first of these keys that is present and not null."""
        for key in keys:
            if self.config.get(key) is not None:
                return self.config[key]
        return None

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under this key."""
        value = self.config.get(key)
        return default if value is None else bool(value)

    def refuse(self, wrong: bool, what: str) -> None:
        """Raise InputError if `wrong`: the engine would compute this model incorrectly."""
        if wrong:
            raise InputError(f"{self._where}: {what}")

    def rope(self, max_positions: int, theta: float = 10000.0) -> dict[str, Any]:
        """Rotary position settings, from their own object or the top level."""
        rope = dict(self.get("rope_parameters", "rope_scaling") or {})
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = self.get("rope_theta") or theta
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        if rope["rope_type"] == "dynamic" or not rope.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = max_positions
        partial = rope.get("partial_rotary_factor") or self.get("partial_rotary_factor") or 1.0
        self.refuse(partial != 1.0, f"partial_rotary_factor {partial} is not supported")
        return rope

    def need_activation(self, key: str, wanted: str, family: str) -> None:
        """Raise InputError if the activation under this key is not the family's."""
        activation = self.get(key) or wanted
        problem = f"activation {activation!r} is not supported; {family} needs {wanted}"
        self.refuse(activation != wanted, problem)


def _llama_like(read: _Reader, family: str, **facts: Any) -> DecoderSpec:
    """The structure that Llama-like families share; `facts` override it per family."""
    read.need_activation("hidden_act", "silu", family)
    hidden, num_heads = read.need("hidden_size"), read.need("num_attention_heads")
    positions = read.need("max_position_embeddings")
    rope = read.rope(positions)
    common: dict[str, Any] = {
        "family": family,
        "num_layers": read.need("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": read.count(num_heads, "num_key_value_heads"),
        "head_dim": read.count(hidden // max(1, num_heads), "head_dim"),
        "ffn_size": read.need("intermediate_size"),
        "vocab_size": read.need("vocab_size"),
        "max_positions": _longest_context(positions, rope),
        "tied_embeddings": read.flag("tie_word_embeddings", default=False),
        "norm_eps": float(read.get("rms_norm_eps") or 1e-6),
        "rope": rope,
    }
    return DecoderSpec(**(common | facts))


def _longest_context(positions: int, rope: Mapping[str, Any]) -> int:
    """Maximum context length in tokens.

    By transformers' convention max_position_embeddings is the trained length with linear, dynamic
    or yarn scaling, and the scaled length with llama3 scaling.
    """
    factor = rope.get("factor")
    stretches = rope["rope_type"] in ("linear", "dynamic", "yarn")
    if not stretches or not isinstance(factor, int | float):
        return positions
    return max(positions, int(rope["original_max_position_embeddings"] * factor))


def _llama(read: _Reader) -> DecoderSpec:
    biased, mlp = (read.flag(f"{part}_bias", default=False) for part in ("attention", "mlp"))
    return _llama_like(read, "llama", qkv_bias=biased, out_bias=biased, mlp_bias=mlp)


def _mistral(read: _Reader) -> DecoderSpec:
    window = read.config.get("sliding_window", 4096)  # transformers' default
    return _llama_like(read, "mistral", windows=(window,) * read.need("num_hidden_layers"))


def _mixtral(read: _Reader) -> DecoderSpec:
    window = read.get("sliding_window")
    return _llama_like(
        read,
        "mixtral",
        rope=read.rope(read.need("max_position_embeddings"), theta=1e6),
        norm_eps=float(read.get("rms_norm_eps") or 1e-5),
        windows=(window,) * read.need("num_hidden_layers"),
        experts=read.count(8, "num_local_experts"),
        experts_per_token=read.count(2, "num_experts_per_tok"),
    )


def _qwen2(read: _Reader) -> DecoderSpec:
    return _llama_like(read, "qwen2", qkv_bias=True, windows=_qwen_windows(read))


def _qwen3(read: _Reader, family: str = "qwen3", **facts: Any) -> DecoderSpec:
    biased = read.flag("attention_bias", default=False)
    own: dict[str, Any] = {"qkv_bias": biased, "out_bias": biased, "qk_norm": True}
    own |= {"windows": _qwen_windows(read), "head_dim": read.count(128, "head_dim")}
    return _llama_like(read, family, **(own | facts))


def _qwen3_moe(read: _Reader) -> DecoderSpec:
    dense = read.get("mlp_only_layers") or read.count(1, "decoder_sparse_step") != 1
    read.refuse(bool(dense), "mixing dense and expert layers is not supported")
    hidden, num_heads = read.need("hidden_size"), read.need("num_attention_heads")
    return _qwen3(
        read,
        "qwen3_moe",
        windows=(_qwen_window(read),) * read.need("num_hidden_layers"),
        head_dim=read.count(hidden // num_heads, "head_dim"),
        ffn_size=read.need("moe_intermediate_size"),
        experts=read.count(128, "num_experts", "num_local_experts"),
        experts_per_token=read.count(8, "num_experts_per_tok"),
        renormalise=read.flag("norm_topk_prob", default=False),
    )


def _qwen_window(read: _Reader) -> int | None:
    window: int | None = read.get("sliding_window")
    return window if read.flag("use_sliding_window", default=False) else None


def _qwen_windows(read: _Reader) -> tuple[int | None, ...]:
    """Qwen's sliding windows are off by default; when on, they start at max_window_layers."""
    num_layers = read.need("num_hidden_layers")
    window = _qwen_window(read)
    kinds = read.get("layer_types")
    if window is None or not kinds:
        first = read.count(28, "max_window_layers")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _falcon(read: _Reader) -> DecoderSpec:
    """Falcon, with its current keys or those of its first release (RefinedWeb, n_head ...).

    In the first release, 7B has one KV head (`multi_query`); 40B states `n_head_kv`, which also
    implies the newer layer with two norms.
    """
    read.refuse(read.flag("alibi", default=False), "alibi positions are not supported")
    read.refuse(
        read.flag("apply_residual_connection_post_layernorm", default=False),
        "apply_residual_connection_post_layernorm is not supported",
    )
    read.need_activation("activation", "gelu", "falcon")
    hidden = read.need("hidden_size", "n_embed")
    num_heads = read.need("num_attention_heads", "n_head")
    newer = read.flag("new_decoder_architecture", default=read.get("n_head_kv") is not None)
    if newer:
        num_kv_heads = read.count(num_heads, "num_kv_heads", "n_head_kv")
    else:
        num_kv_heads = 1 if read.flag("multi_query", default=True) else num_heads
    parallel = newer or read.flag("parallel_attn", default=True)
    own_norms = not parallel or (newer and read.count(2, "num_ln_in_parallel_attn") == 2)
    biased = read.flag("bias", default=False)
    positions = read.count(2048, "max_position_embeddings")
    rope = read.rope(positions)
    return DecoderSpec(
        family="falcon",
        num_layers=read.need("num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden // max(1, num_heads),
        ffn_size=read.count(4 * hidden, "ffn_hidden_size"),
        vocab_size=read.need("vocab_size"),
        max_positions=_longest_context(positions, rope),
        tied_embeddings=read.flag("tie_word_embeddings", default=True),
        norm=NormKind.LAYER,
        norm_eps=float(read.get("layer_norm_epsilon") or 1e-5),
        gated_mlp=False,
        parallel=parallel,
        norms_per_layer=2 if own_norms else 1,
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=biased,
        rope=rope,
    )


ARCHITECTURES: Final[Mapping[str, Callable[[_Reader], DecoderSpec]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "FalconForCausalLM": _falcon,
    "RWForCausalLM": _falcon,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
"""Supported values of config.json's `architectures`."""
