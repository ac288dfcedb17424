"""Reads the sizes of any decoder from its config.json, for planning; the engine reads `hf_config`.

A layer's mixer is full attention, sliding attention (a window or chunk), linear (a constant state:
state space, delta rule, convolution) or none; its MLP is dense, of experts or none. Parameters are
those of the matrices: norms and biases are below 0.3 %. `config_keys.csv` has the keys of each
figure, `families.csv` what the keys do not tell; an architecture that it lacks has a `doubt`, and
the names and shapes of the tensors give what config.json does not.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from lmi_bench.core.errors import InputError
from lmi_bench.models.hf_config import MOST_LAYERS, read_table, shape_from_hf_config
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.tensor_sizes import TensorSizes

Mixer = Literal["full", "sliding", "linear", "none"]
Mlp = Literal["dense", "experts", "none"]

# a word of a layer's type, the first that occurs; in Nemotron's files a layer is a mixer or an MLP
_MIXERS: Final[Mapping[Mixer, Sequence[str]]] = {
    "linear": ("linear", "mamba", "recurrent", "conv", "M"),
    "sliding": ("sliding", "chunk", "local"),
    "none": ("moe", "mlp", "-", "E"),
}
_ALONE: Final[Mapping[str, Mlp]] = {"-": "dense", "mlp": "dense", "E": "experts", "moe": "experts"}
_POSITIONS: Final = 131_072  # where the config states no length
_CACHE_BYTES: Final = 2  # of a value of a window or convolution
_FULL_BYTES: Final = 4  # of a recurrent state's value, unless the config says a 16-bit type
_KEYS: Final = {row["figure"]: row["keys"].split() for row in read_table("config_keys.csv")}
_FAMILIES: Final = {row["model_type"]: row for row in read_table("families.csv")}
_OF_OTHER_WORK: Final = re.compile(
    r"(?i).*For(MaskedLM|PreTraining|CTC|MultipleChoice|\w*Classification|QuestionAnswering|\w*Retrieval)"
    r"|(\w*(Bert|Roberta|CLIP|Siglip)|MPNet|T5Encoder|ViT)\w*Model"
)


def _keys(figure: str) -> Sequence[str]:
    """The keys of a figure in config.json, the first that is there counts; else its own name."""
    return _KEYS.get(figure, (figure,))


def _block(config: Mapping[str, Any]) -> int:
    """The side of the blocks of quantized weights with one scale each; 0 without blocks."""
    stated = config.get("quantization_config")
    block = stated.get("weight_block_size") if isinstance(stated, Mapping) else None
    return block[0] if isinstance(block, list) and block and type(block[0]) is int else 0


class _UnsizedError(InputError):
    """A config.json without the keys of its size."""


def planning_shape(name: str, config: Mapping[str, Any], folder: Path | None = None) -> ModelShape:
    """The shape of the model in a config.json; raises InputError that names the missing keys.

    folder  with tensors, for architectures that are not known
    """
    named = config.get("architectures")
    for each in named if isinstance(named, list) else ():
        if _OF_OTHER_WORK.fullmatch(str(each)):
            raise InputError(f"model {name!r} is a {each}, which generates no text: only decoders are planned")
    if not any(key in config for figure in ("text", "encoders", "mtp") for key in _keys(figure)):
        with suppress(InputError):  # the engine does not run it
            shape = shape_from_hf_config(name, config)
            stated = config.get("max_position_embeddings")  # the engine ends longrope earlier
            longest = stated if type(stated) is int else 0
            return replace(shape, max_positions=max(shape.max_positions, longest), weight_block=_block(config))
    tensors = TensorSizes() if folder is None else TensorSizes.of(folder)
    try:
        try:
            read = _Config(name, config)
        except _UnsizedError:
            if not tensors.layers:
                raise
            read = _Config(name, {**tensors.as_config(), **config})
            read.family = {}
        return read.shape(tensors.num_bytes)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise InputError(f"model {name!r}: config.json has a wrong value: {exc}") from exc


class _Config:
    """One config.json, looked at through its wrappers."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.outer, inner = name, config, dict(config)
        self.towers = [config.get(k) for k in _keys("encoders")]
        while text := next((k for k in _keys("text") if isinstance(inner.get(k), Mapping)), None):
            wrapped = inner.pop(text)
            self.towers += [wrapped.get(k) for k in _keys("encoders")]
            inner = {k: v for k, v in inner.items() if k not in _keys("encoders")} | dict(wrapped)
        for nested in ("attn_config", "ffn_config", "ssm_cfg"):
            inner |= {k: v for k, v in (inner.get(nested) or {}).items() if k not in inner}
        self.config = inner
        kinds = [str(each.get("model_type")).removesuffix("_text") for each in (inner, config)]
        if "ssm_cfg" in inner:  # files of the first authors
            kinds.append(str(inner.get("layer") or "mamba").lower())
        self.family = next((_FAMILIES[kind] for kind in kinds if kind in _FAMILIES), {})
        # KEY=NUMBER that files leave out, and KEY=THEIRS: a key of another meaning elsewhere
        stated = dict(each.split("=") for each in (self.family.get("defaults") or "").split())
        own = {key: int(value) if value.isdigit() else inner.pop(value, None) for key, value in stated.items()}
        self.config = inner = own | inner
        self._restore_names(inner)
        if inner.get("is_encoder_decoder"):
            raise InputError(f"model {name!r} has an encoder and a decoder: only decoders are planned")
        self.layers = self.count("layers") or len(self.listed("layer_types"))
        self.layers *= 1 + self._is("longcat_flash")  # each has two layers of attention and dense MLP
        self.hidden, self.vocab = self.count("hidden"), self.count("vocab")
        if self.layers > MOST_LAYERS:
            raise InputError(f"model {name!r}: {self.layers} layers are more than {MOST_LAYERS}")
        if missing := [_keys(figure)[0] for figure in ("layers", "hidden", "vocab") if not getattr(self, figure)]:
            raise _UnsizedError(
                f"model {name!r}: config.json has no {', '.join(missing)}: add these keys, or give "
                "a folder with the model's safetensors"
            )
        self.blocks = [each for each in self.listed("blocks") if isinstance(each, Mapping)]
        self.heads = self.count("heads") or self.count("state_heads") or max(1, self.hidden // 128)
        self.head_dim = self.count("head_dim") or max(1, self.hidden // self.heads)
        self.config |= self._of_blocks()
        if self._is("lfm2") and inner.get("block_auto_adjust_ff_dim", True):  # two thirds, rounded up
            step, factor = self.count("block_multiple_of", 256), float(inner.get("block_ffn_dim_multiplier") or 1)
            width = int(factor * int(2 * self.count("ffn") / 3))
            self.config[_keys("ffn")[0]] = step * math.ceil(width / step)
        squares = "relu2" in (inner.get("mlp_hidden_act"), inner.get("hidden_act"))
        self.matrices = 2 if squares else int(self.family.get("matrices") or 3)

    def _restore_names(self, inner: dict[str, Any]) -> None:
        """Put in place the names that models were published with, where transformers saves others."""
        if rates := inner.get("compress_rates"):
            inner["compress_ratios"] = [rates.get(kind, 0) for kind in inner.pop("layer_types")]
        for own in (inner.get("per_layer_config") or {}).values() if self._is("gemma4") else ():
            inner["global_head_dim"] = own.get("head_dim")
            inner["num_global_key_value_heads"] = own.get("num_key_value_heads")

    def count(self, figure: str, default: int = 0) -> int:
        """The whole number of a figure, of a list the largest; the default without one."""
        for key in _keys(figure):
            value = self.config.get(key)
            if isinstance(value, list) and value and all(type(each) is int for each in value):
                value = max(value)
            if type(value) is int and value > 0:
                return value
        return default

    def listed(self, figure: str) -> Sequence[Any]:
        """The list or text of a figure with an element for each layer; empty without one."""
        values = (self.config.get(key) for key in _keys(figure))
        return next((each for each in values if isinstance(each, list | str) and each), ())

    def _of_blocks(self) -> Mapping[str, int]:
        """Keys of Nemotron NAS: some blocks have no attention, their MLPs several sizes."""
        groups = [b["attention"].get("n_heads_in_group") for b in self.blocks]
        if not any(groups):
            return {}
        width = 0.0  # an MLP's inner size is a multiple of 256 (DeciLM's modeling file)
        for part in (block[name] for block in self.blocks for name in ("attention", "ffn")):
            if part.get("replace_with_linear"):
                width += self.hidden / 3
            elif "ffn_mult" in part and not part.get("no_op"):
                width += 256 * math.ceil(int(2 * (part["ffn_mult"] or 0) * self.hidden / 3) / 256)
        kv_heads = self.heads // min(filter(None, groups))
        ffn = max(1, round(width / len(self.blocks)))
        return {_keys("kv_heads")[0]: kv_heads, _keys("ffn")[0]: ffn}

    def kinds(self) -> list[tuple[Mixer, Mlp]]:
        """Mixer and MLP of every layer."""
        types = self.listed("layer_types")
        if any(str(each) in _ALONE for each in types):
            return [(self._mixer(i), _ALONE.get(str(each), "none")) for i, each in enumerate(types)]
        return [(self._mixer(i), self._mlp(i)) for i in range(self.layers)]

    def _mixer(self, layer: int) -> Mixer:
        config = self.config
        if self.blocks:
            own = self.blocks[layer]["attention"]
            return "none" if own.get("no_op") or own.get("replace_with_linear") else "full"
        if types := self.listed("layer_types"):  # of RecurrentGemma a pattern that repeats
            kind = str(types[layer % len(types)])
            return next((k for k, words in _MIXERS.items() if any(word in kind for word in words)), "full")
        own, indices = config.get("linear_attn_config"), self.listed("attention_at")
        full: object = True
        if isinstance(own, Mapping) and own.get("full_attn_layers"):
            full = layer + 1 in own["full_attn_layers"]
        elif kinds := config.get("attn_type_list"):
            full = kinds[layer]
        elif indices:
            full = layer in indices
        elif every := self.count("full_interval"):
            full = layer % every == config.get("attn_layer_offset", every - 1)
        elif self.count("state_size") and not self.count("heads"):
            full = False
        if not full:
            return "linear"
        return "sliding" if self._slides(layer) else "full"

    def _slides(self, layer: int) -> bool:
        """Whether a layer of attention has a window or chunk."""
        if not self.count("window") or self.config.get("use_sliding_window") is False:
            return False
        if flags := self.listed("sliding_flags"):
            return bool(flags[layer])
        names = (self.config.get(key) for key in _keys("window_pattern"))
        every = str(next((each for each in names if each), self.family.get("full_every", "0")))
        if every.isdecimal():
            return int(every) > 0 and (layer + 1) % int(every) != 0
        return every == "" or every[layer % len(every)] == "L"

    def _mlp(self, layer: int) -> Mlp:
        if self.count("state_size") and not self.count("heads"):
            return "none"  # state spaces alone
        if not self.count("experts") or not self.count("chosen"):
            return "dense"
        types, chosen = self.listed("mlp_types"), self.listed("expert_layers")
        if isinstance(chosen, str):
            chosen = [int(each) for each in chosen.split(",")]
        first, step = self.count("first_experts"), self.count("expert_step", 1)
        offset = self.config.get("expert_layer_offset", first or step - 1)
        sparse = layer >= first and layer % step == offset % step
        sparse &= layer <= self.count("moe_layer_end_index", self.layers)
        if types:
            sparse = types[layer] not in ("dense", 0)
        elif chosen:
            sparse = layer in chosen
        sparse = sparse and layer not in self.config.get("mlp_only_layers", ())
        return "experts" if sparse else "dense"

    def _is(self, *families: str) -> bool:
        return self.family.get("model_type") in families

    def grouped(self, mixer: Mixer) -> tuple[int, int, int]:
        """KV heads, and sizes of a key and a value, of layers with that mixer."""
        own = {"full": "num_global_key_value_heads", "sliding": "swa_num_key_value_heads"}
        kv_heads = self.count(own.get(mixer, ""), self.count("kv_heads", self.heads))
        if self.config.get("multi_query") and not self.count("kv_heads"):
            kv_heads = 1
        size = self.count("global_head_dim") if mixer == "full" else 0
        return kv_heads, size or self.head_dim, size or self.count("v_head_dim", self.head_dim)

    def attention(self, mixer: Mixer) -> int:
        """Matrices of one layer's attention."""
        h, heads, rank = self.hidden, self.heads, self.count("kv_lora_rank")
        kv_heads, key_dim, value_dim = self.grouped(mixer)
        low, query_rank = self.count("o_lora_rank"), self.count("q_lora_rank")
        keys = h * kv_heads * (key_dim + value_dim)
        if (self.config.get("attention_k_eq_v") and mixer == "full") or low:
            keys = h * kv_heads * key_dim  # keys are the values
        if rank:
            key_dim = self.count("qk_nope_head_dim") + self.count("qk_rope_head_dim")
            keys = h * (rank + self.count("qk_rope_head_dim"))
            keys += rank * heads * (self.count("qk_nope_head_dim") + value_dim)
        query, out = heads * key_dim, heads * value_dim
        total = query_rank * (h + query) if query_rank else h * query
        gated = self.config.get("attn_output_gate") or self.config.get("mla_use_output_gate")
        total += keys + h * out * bool(gated or self._is("qwen3_next", "qwen3_5", "qwen3_5_moe"))
        total += out * low + self.count("o_groups") * low * h if low else out * h
        index_heads = self.count("index_n_heads")
        return total + (query_rank * index_heads + h) * self.count("index_head_dim")

    def linear(self) -> tuple[int, int]:
        """Parameters of one layer with a constant state, and its bytes for each sequence.

        A convolution keeps one input fewer than its taps (vLLM, MambaStateShapeCalculator).
        """
        h, own = self.hidden, self.config.get("linear_attn_config")
        wide = str(self.config.get("mamba_ssm_dtype") or self.config.get("mamba_ssm_cache_dtype"))
        width = _CACHE_BYTES if "16" in wide else _FULL_BYTES
        inner = self.heads * self.head_dim  # lightning attention: queries, keys, values, gate, out
        params, state, channels, taps = 5 * h * inner, inner * self.head_dim, 0, 1
        if values := self.count("linear_num_value_heads"):  # gated delta rule
            key = self.count("linear_key_head_dim")
            keys = self.count("linear_num_key_heads") * key
            inner = values * self.count("linear_value_head_dim")
            channels, taps = 2 * keys + inner, self.count("linear_conv_kernel_dim", 1)
            params, state = h * (2 * keys + 3 * inner + 2 * values), inner * key
        elif isinstance(own, Mapping):  # Kimi's delta attention, two of whose gates have a low rank
            key, inner = own["head_dim"], own["num_heads"] * own["head_dim"]
            channels, taps = 3 * inner, int(own.get("short_conv_kernel_size") or 4)
            params, state = 4 * h * inner + 2 * key * (h + inner), inner * key
        elif size := self.count("state_size"):
            inner = self.count("state_heads") * self.count("state_head_dim")
            if not self.count("heads"):  # of a model with attention this is the MLP's
                inner = inner or self.count("intermediate_size")
            inner, groups = inner or self.count("expand", 2) * h, self.count("state_groups")
            channels, taps = inner + 2 * groups * size, self.count("state_taps", 1)
            steps = inner // self.count("state_head_dim", 64) if groups else 0  # of each head of Mamba 2
            params, state = h * (3 * inner + 2 * groups * size + steps), inner * size
            if not groups:  # the first kind: steps and a decay for each channel
                params += inner * (2 * self.count("rank", -(-h // 16)) + 3 * size)
        elif self.count("conv_L_cache"):  # gated convolution
            params, state, channels, taps = 4 * h * h, 0, h, self.count("conv_L_cache")
        return params + channels * taps, state * width + channels * (taps - 1) * _CACHE_BYTES

    def mlp_params(self, mlp: Mlp, experts: int) -> int:
        """Matrices of one layer's MLP with that many experts: all, or those of a token."""
        h = self.hidden
        dense = self.matrices * h * self.count("ffn", 4 * h)
        if mlp != "experts":
            return dense if mlp == "dense" else 0
        latent, ffn = self.count("latent"), self.count("expert_ffn")
        total = experts * self.matrices * (latent or h) * ffn + 2 * latent * h
        total += self.count("experts") * h + self.matrices * h * self.shared_ffn()
        beside = self._is("gemma4", "arctic", "longcat_flash") or bool(self.config.get("residual_moe"))
        return total + dense * beside

    def shared_ffn(self) -> int:
        """Inner size of the experts that every token uses."""
        number, own = self.count("shared"), self.count("shared_ffn")
        each = own or self.count("expert_ffn")
        return each * (number or int(bool(own) or self._is("llama4")))

    def tower_params(self) -> int:
        """Parameters of encoders of images and sound, by their layers."""
        total = self.count("encoder_params")
        for config in (each for each in self.towers if isinstance(each, Mapping)):
            width, layers, inner = (
                next((v for k in _keys(f"tower_{n}") if type(v := config.get(k)) is int), 0)
                for n in ("width", "layers", "ffn")
            )
            merged = width * int(config.get("spatial_merge_size") or 1) ** 2
            gated = config.get("hidden_act") == "silu"
            total += layers * width * (4 * width + (2 + gated) * (inner or 4 * width))
            mergers = 1 + len(config.get("deepstack_visual_indexes") or ())
            total += mergers * merged * (merged + self.hidden)
        return total

    def _caching(self, mixers: Sequence[Mixer]) -> Sequence[Mixer]:
        """Those of layers with a cache of their own; others read one before them, or an image's."""
        own = mixers[: max(1, self.layers - self.count("num_kv_shared_layers"))]
        images = self.config.get("cross_attention_layers") or ()
        own = [each for layer, each in enumerate(own) if layer not in images]
        return own[:: self.count("cla_share_factor", 1)] if self.config.get("use_cla") else own

    def shape(self, weight_bytes: int) -> ModelShape:
        """The whole shape. weight_bytes: of all tensors, 0 if not known."""
        kinds, h, side = self.kinds(), self.hidden, self.count("hidden_size_per_layer_input")
        mixers, mlps = [each for each, _ in kinds], [each for _, each in kinds]
        experts = self.count("experts") if "experts" in mlps else 0
        chosen, tower = min(self.count("chosen"), experts), self.tower_params()
        chosen = round(chosen * experts / (experts + self.count("zero_expert_num"))) if experts else 0
        tied = self.config.get("tie_word_embeddings", self.family.get("tied") == "1")
        rest = self.vocab * h * (1 if tied else 2)
        rest += sum(mixers.count(m) * self.attention(m) for m in {*mixers} - {"none", "linear"})
        states = self.layers if self._is("falcon_h1") else mixers.count("linear")
        rest += states * self.linear()[0]
        # Gemma: an embedding of each layer; last layers read the cache of those before them
        looked_up = side * self.layers * self.count("vocab_size_per_layer_input")
        rest += 3 * side * h * self.layers
        own = self._caching(mixers)
        if self.config.get("use_double_wide_mlp"):
            rest += (self.layers - len(own)) * self.mlp_params("dense", 0)
        of_mlps = [sum(self.mlp_params(each, n) for each in mlps) for n in (experts, chosen)]
        rank = self.count("kv_lora_rank")
        kv_heads, key_dim, value_dim = self.grouped("full" if "full" in mixers else "sliding")
        windowed = self.grouped("sliding") if {"full", "sliding"} <= {*mixers} else (0, 0, 0)
        if rank:
            key_dim = value_dim = self.count("qk_nope_head_dim") + self.count("qk_rope_head_dim")
        mtp = self.count("mtp")
        mtp_mlp: Mlp = "dense" if self._is("mimo_v2_flash", "ernie4_5_moe") else mlps[-1]
        shape = ModelShape(
            name=self.name,
            num_layers=self.layers,
            hidden_size=h,
            num_heads=self.heads,
            num_kv_heads=self.heads if rank else kv_heads,
            head_dim=(key_dim + value_dim) // 2,
            ffn_size=self.count("ffn", 4 * h),
            vocab_size=self.vocab,
            max_positions=self.count("positions", _POSITIONS),
            params_total=rest + tower + looked_up + of_mlps[0],
            params_active=rest + of_mlps[1],
            tied_embeddings=bool(tied),
            sliding_window=self.count("window") if "sliding" in mixers else None,
            full_attention_layers=own.count("full"),
            sliding_kv_heads=windowed[0],
            sliding_head_dim=sum(windowed[1:]) // 2,
            experts=experts,
            experts_per_token=chosen,
            expert_ffn_size=self.count("expert_ffn") if experts else 0,
            shared_experts=round(self.shared_ffn() / self.count("expert_ffn")) if experts else 0,
            latent_kv_dim=rank and rank + self.count("qk_rope_head_dim"),
            source="config.json",
            parallel_branches=all("none" in pair for pair in kinds),
            architecture=str((self.outer.get("architectures") or [""])[0]),
            cacheless_layers=self.layers - own.count("full") - own.count("sliding"),
            state_bytes=states * self.linear()[1],
            encoder_params=tower + looked_up,
            weight_block=_block(self.config),
            mtp_layers=mtp,
            mtp_params=mtp * (self.attention("full") + self.mlp_params(mtp_mlp, experts)),
        )
        return self._doubted(self._compressed(self._sparse(shape)), weight_bytes)

    def _sparse(self, shape: ModelShape) -> ModelShape:
        """Sparse attention: tokens that are read, and the FP8 index that selects them."""
        own, dim = self.config.get("sparse_attention_config") or {}, self.count("index_head_dim")
        tokens = self.count("index_topk") or (own.get("sparse_topk_blocks", 0) * own.get("sparse_block_size", 0))
        if not tokens:
            return shape
        types = [str(each) for each in self.listed("indexer_types") or ["full"]]
        values = (dim or own.get("sparse_index_dim", 0)) * types.count("full") / len(types) / 2
        layers = sum(own.get("sparse_attention_freq") or []) or shape.growing_layers
        return replace(shape, sparse_tokens=tokens, sparse_layers=layers, index_values=max(1, round(values)))

    def _compressed(self, shape: ModelShape) -> ModelShape:
        """DeepSeek-V4: a window of whole entries, and one entry for every 4 or 128 tokens."""
        ratios = [each for each in self.listed("compress_ratios") if each]
        if not ratios:
            return shape
        least, size = min(ratios), self.head_dim
        kept = sum(1 / each for each in ratios) / self.layers
        indexed = ratios.count(least) / least / self.layers
        return replace(
            shape,
            num_kv_heads=shape.num_heads,
            latent_kv_dim=max(1, round(size * kept)),
            index_values=max(1, round(shape.index_values * indexed)),
            sparse_tokens=shape.sparse_tokens * least,
            sparse_layers=self.layers,
            full_attention_layers=self.layers,
            sliding_window=None,
            state_bytes=self.layers * self.count("window") * size * _CACHE_BYTES,
        )

    def _doubted(self, shape: ModelShape, weight_bytes: int) -> ModelShape:
        """An architecture that is not known: by its tensors' bytes if the folder has them."""
        if self.family:
            return shape
        doubt = f"architecture {self.config.get('model_type') or shape.architecture} is not known: "
        wider = "; every interval is wider"
        if not weight_bytes or "quantization_config" in self.outer:
            return replace(shape, doubt=f"{doubt}planned by the sizes in its config.json{wider}")
        wide = 4 if "32" in str(self.config.get("torch_dtype", self.config.get("dtype"))) else 2
        factor = weight_bytes / wide / shape.params_total
        return replace(
            shape,
            params_total=round(shape.params_total * factor),
            params_active=round(shape.params_active * factor),
            doubt=f"{doubt}planned by the bytes of its tensors{wider}",
        )
