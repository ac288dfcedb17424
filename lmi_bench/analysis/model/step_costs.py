"""Unit costs of a step: seconds for each row, context token, query-key pair and prompt.

They follow once from a set-up and an engine's profile; `step_time` adds them up. Times are seconds
on each of the `tensor_parallel` devices of one model copy.
"""

from dataclasses import dataclass, replace
from typing import Final

from lmi_bench.analysis.model import memory
from lmi_bench.analysis.model.profiles import EngineProfile, StepParameters
from lmi_bench.analysis.model.setup import (
    NETWORK_LATENCY_S,
    PLAIN,
    Setup,
    across_hosts,
    attention_params,
    busiest_rank_sd,
    expert_exchange,
)
from lmi_bench.catalog.accelerators import Accelerator, Link
from lmi_bench.core.errors import InputError

_ALL_REDUCES_PER_LAYER = 2  # after attention and after the feed-forward
_ACTIVATION_BYTES = 2
_FLOP_PER_PARAMETER = 2
_FLOP_PER_PAIR = 4  # query times key, weight times value: a multiplication and an addition each
_NARROW = ("float8", "int8", "float4")
_STRETCH_POWER: Final = 1.5  # the step waits for the slowest of n processes, which compete
_HOST_RANKS: Final = 8  # processes beyond those of a host have a processor of their own
# FP32 units beside matrix units: 19.5 of 312 TFLOP/s on A100, 67 of 989 on H100 (data sheets);
# smaller devices have relatively more, so that the cost of widening is an upper bound there
_MATRIX_OVER_VECTOR: Final = 16
_NARROW_BITS: Final = 4  # of a weight, for which a profile states its shares
_WIDENING_ROWS: Final = 128  # a weight is widened again for each block of rows that needs it
_FP8_BITS: Final = 8
_FP8_WIDENING_OPS: Final = 2  # convert and scale, as INT8
# kernels of a layer with latent attention against one with KV heads: products to and from the
# latent space, their norms, and the products that absorb keys and values, beside attention itself
_LATENT_GAPS: Final = 1.9
_LATENT_LAUNCH_S: Final = 0.9e-3  # of a layer: some forty kernels, each launched by the host
_LINK_SHARE: Final = 0.8  # of PCIe: copies reach 52 to 60 of 64 GB/s (arXiv:2512.16056, table 1)


@dataclass(frozen=True, slots=True)
class ProductCosts:
    """Matrix products with the weights.

    read_s          read of all weights in a step of one row
    expert_share    routed experts' share of all weights; n rows leave unread_share ** n of them
                    unread with even routing
    rows_read       factor on reads in a step of several rows
    token_s         arithmetic of a row; head_s: of the output head for a row that gives a token
    widening_share  time to widen the weights for a block of `widening_rows` / time to read them
    first_s         time to widen all weights before the products
    """

    read_s: float
    expert_share: float
    unread_share: float
    rows_read: float
    token_s: float
    head_s: float
    widening_share: float
    widening_rows: float
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """Attention in all layers together.

    decode_read_s   read of a cached token for a decoding sequence; prompt_read_s: for a prompt
    pair_s          arithmetic of one query and key while decoding; prompt_pair_s: in a prompt,
                    which MLA computes with whole keys and values instead of latent ones
    widening_s      conversion of a cached token
    window          most tokens of limited attention, None without; sliding_share: its share of the
                    cache, sliding_pairs: of the arithmetic
    row_s           read and write of the constant state of a decoding sequence
    busy_rows       decoding sequences from which all multiprocessors read; fewer read slower, in
                    proportion. At most 1: one sequence is enough
    """

    decode_read_s: float
    prompt_read_s: float
    pair_s: float
    prompt_pair_s: float
    widening_s: float
    window: int | None
    sliding_share: float
    sliding_pairs: float
    row_s: float
    busy_rows: float = 0.0


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """What a split beyond tensor parallelism changes in a step.

    groups           attention groups; attention_share: attention's part of a row's products
    stages           of the pipeline
    busiest          standard deviations by which the busiest device exceeds the mean; 0 where all
                     devices have a slice of each expert
    experts          routed experts of a device; expert_share: their part of a row's products
    rows_per_expert_row  rows of the copy for each row that a device's experts get
    """

    groups: int
    attention_share: float
    stages: int
    busiest: float
    experts: float
    expert_share: float
    rows_per_expert_row: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """All costs of one model copy.

    unhidden      share of the shorter of reads and arithmetic that is not hidden
    gap_s         gaps between the kernels of a step
    all_reduce_s  all-reduces of a step; all_reduce_token_s: more for each row
    host_s        launch of a decoding step; host_row_s: bookkeeping of a sequence
    host_token_s  preparation of a prompt token; host_prompt_s: of a prompt
    launch_s      launch of a step with prompts, which models with latent attention compute without
                  CUDA graphs; 0 for others
    many          costs of steps with `many_rows` rows or more, where they differ
    split         of a copy that is split beyond tensor parallelism
    copy_token_s  copy of a token's cache from the host, to all devices at once
    """

    products: ProductCosts
    attention: AttentionCosts
    unhidden: float
    gap_s: float
    all_reduce_s: float
    all_reduce_token_s: float
    host_s: float
    host_row_s: float
    host_token_s: float
    host_prompt_s: float
    launch_s: float = 0.0
    many: "StepCosts | None" = None
    many_rows: int = 0
    split: SplitCosts | None = None
    copy_token_s: float = 0.0


def all_reduce_factor(tensor_parallel: int, link: Link) -> float:
    """Bytes over the narrowest link for each byte of the reduced array.

    A ring over NVLink or direct PCIe: each device sends 2 (n - 1) / n. Through one host bridge the
    traffic of all n devices adds up: 2 (n - 1).
    """
    ring = 2 * (tensor_parallel - 1) / tensor_parallel
    return ring * tensor_parallel if link.kind == "pcie" and link.is_shared else ring


@dataclass(frozen=True, slots=True)
class _Rates:
    """Sizes of stored values, and rates that the kernels reach of a device's data sheet.

    weight_bytes            of a stored weight in the weights' format
    widening_ops            vector operations that convert it to the type of the products
    read_bytes_per_s        of 16-bit weights and the cache; weight_bytes_per_s: of those weights
    flop_per_s              products with those weights; expert_flop_per_s: with routed experts
    full_flop_per_s         products with the weights that stay in 16 bits; rest_flop_per_s: with
                            the others of a format that covers experts alone
    """

    weight_bytes: float
    kv_bytes_per_value: float
    widening_ops: float
    read_bytes_per_s: float
    weight_bytes_per_s: float
    flop_per_s: float
    expert_flop_per_s: float
    full_flop_per_s: float
    rest_flop_per_s: float
    attention_flop_per_s: float
    vector_op_per_s: float

    @classmethod
    def of(cls, setup: Setup, parameters: StepParameters) -> "_Rates":
        device, fmt = setup.instance.accelerator, memory.weight_format(setup.dtype)
        dtype = compute_dtype(device, setup.dtype)
        widening_ops = _FP8_WIDENING_OPS if fmt.compute_dtype == "float8" else fmt.widening_ops
        if dtype in ("float8", "float4"):  # the device has units for it
            widening_ops = 0
        bandwidth = _known(device.bandwidth_bytes_per_s, device, "memory bandwidth")
        peak = _known(device.peak_flop_per_s(dtype), device, f"{dtype} peak")
        read_bytes_per_s = bandwidth * parameters.bandwidth_share
        # the fewer the bits, the less of the rates of 16-bit products kernels that widen reach
        narrow = _NARROW_BITS / fmt.nominal_bits if widening_ops else 0.0
        flop_per_s = peak * parameters.compute_share * parameters.narrow_share**narrow
        # attention multiplies 16-bit values whatever the weights are stored in
        wide = (device.peak_flop_per_s("float16") if dtype in _NARROW else peak) or peak
        rest = (device.peak_flop_per_s("float8") or wide) if fmt.rest_bits == _FP8_BITS else wide
        vector_op_per_s = device.float32_flop_per_s or wide / _MATRIX_OVER_VECTOR
        return cls(
            weight_bytes=fmt.bits / memory.BITS_PER_BYTE,
            kv_bytes_per_value=memory.kv_bytes_per_value(setup.dtype, setup.kv_dtype),
            widening_ops=widening_ops,
            read_bytes_per_s=read_bytes_per_s,
            weight_bytes_per_s=read_bytes_per_s * parameters.narrow_read_share**narrow,
            flop_per_s=flop_per_s,
            # each expert sees few rows, padded to whole blocks
            expert_flop_per_s=flop_per_s * parameters.moe_share,
            full_flop_per_s=(peak if fmt.covers == "all" else wide) * parameters.compute_share,
            rest_flop_per_s=rest * parameters.compute_share,
            attention_flop_per_s=wide * parameters.compute_share * parameters.attention_share,
            vector_op_per_s=vector_op_per_s * parameters.compute_share,
        )


def compute_dtype(accelerator: Accelerator, dtype: str) -> str:
    """Type of the products: FP8 and FP4 weights are widened on devices without such units."""
    wanted = memory.weight_format(dtype).compute_dtype
    widened = wanted in ("float8", "float4") and accelerator.peak_flop_per_s(wanted) is None
    return "float16" if widened else wanted


def _known(value: float | None, device: Accelerator, what: str) -> float:
    if value is None:
        raise InputError(f"no source states the {what} of {device.name}: it cannot be planned")
    return value


def _copy_token_s(setup: Setup, profile: EngineProfile) -> float:
    rate_per_s, device = profile.host_bytes_per_s, setup.instance.accelerator
    if rate_per_s is None:
        rate_per_s = _LINK_SHARE * _known(device.pcie_link.bytes_per_s, device, "PCIe rate")
    one, two = (setup.sequence_bytes(tokens, setup.attention_degree) for tokens in (1, 2))
    return (two - one) / setup.parallelism.pipeline / rate_per_s


def step_costs(setup: Setup, profile: EngineProfile) -> StepCosts:
    """The costs of one copy; raises InputError or CapacityError as `StepTimeModel` does."""
    shape, device, tensor_parallel = setup.shape, setup.instance.accelerator, setup.tensor_parallel
    parameters, layers = profile.parameters, shape.num_layers
    rates = _Rates.of(setup, parameters)
    # each rank is a process, and the step waits for the slowest; those of other copies on the host
    # compete for its processor too
    reduces_per_layer = _ALL_REDUCES_PER_LAYER // (1 + shape.parallel_branches)
    waits = reduces_per_layer / _ALL_REDUCES_PER_LAYER
    ranks = float(min(tensor_parallel, _HOST_RANKS) - 1) ** _STRETCH_POWER
    stretch: float = 1 + parameters.host_stretch_per_rank * waits * ranks
    others = (setup.host_copies - 1) * tensor_parallel
    stretch += parameters.host_stretch_per_rank * others
    stretch *= profile.host_factors.get(device.name, 1.0)
    host_s = parameters.host_per_layer_s * layers * stretch
    if rates.widening_ops and rates.weight_bytes < 1 and tensor_parallel > 1:
        host_s += parameters.narrow_launch_s * layers
    exchange_s, exchange_row_s = _exchanges(setup, parameters, reduces_per_layer)
    products = _product_costs(setup, parameters, rates)
    costs = StepCosts(
        products=products,
        attention=_attention_costs(setup, profile, rates),
        unhidden=parameters.unhidden_share,
        gap_s=parameters.gap_per_layer_s * layers * (_LATENT_GAPS if shape.latent_kv_dim else 1),
        all_reduce_s=exchange_s,
        all_reduce_token_s=exchange_row_s,
        host_s=host_s,
        # each attention group has a scheduler for its own sequences
        host_row_s=parameters.host_per_sequence_s * stretch / setup.parallelism.attention_groups,
        host_token_s=parameters.host_per_prompt_token_s,
        host_prompt_s=parameters.host_per_prompt_s,
        launch_s=_LATENT_LAUNCH_S * layers if shape.latent_kv_dim else 0.0,
        split=_split_costs(setup),
        copy_token_s=_copy_token_s(setup, profile) if profile.host_cache_bytes else 0.0,
    )
    # experts get few rows each: their weights are widened during the products
    if not products.widening_share or not profile.widen_first_rows or shape.is_moe:
        return costs
    wide = _widened_first(products, setup, rates)
    return replace(costs, many=replace(costs, products=wide), many_rows=profile.widen_first_rows)


def _split_costs(setup: Setup) -> SplitCosts | None:
    shape, parallelism, ranks = setup.shape, setup.parallelism, setup.tensor_parallel
    if parallelism == PLAIN:
        return None
    linear = shape.params_active - memory.embedding_params(shape)
    routed = memory.expert_params(shape) * shape.experts_per_token / max(1, shape.experts)
    return SplitCosts(
        groups=parallelism.attention_groups,
        attention_share=attention_params(shape) / linear,
        stages=parallelism.pipeline,
        busiest=busiest_rank_sd(ranks) if parallelism.expert_parallel else 0.0,
        experts=shape.experts / ranks,
        expert_share=routed / linear,
        rows_per_expert_row=ranks / max(1, shape.experts_per_token),
    )


def _exchanges(setup: Setup, parameters: StepParameters, reduces_per_layer: int) -> tuple[float, float]:
    """Seconds of a step's exchanges between devices, and more for each row."""
    shape, parallelism, ranks = setup.shape, setup.parallelism, setup.tensor_parallel
    row_bytes = shape.hidden_size * _ACTIVATION_BYTES
    start_s, row_s = 0.0, 0.0
    if ranks > 1:
        latency_s, byte_s = _all_reduce(setup, parameters)
        reduces: float = reduces_per_layer * shape.num_layers
        if parallelism.attention_groups > 1:
            link_s = byte_s / all_reduce_factor(ranks, setup.instance.link)
            sent = expert_exchange(setup, link_bytes_per_s=1 / link_s, latency_s=latency_s)
            start_s, row_s = (shape.num_layers * each for each in sent)
            shares = setup.attention_degree > 1  # an all-reduce after the attention of a group
            reduces = shape.num_layers * shares / parallelism.attention_groups
        more_latency_s, more_byte_s = across_hosts(setup)
        start_s += reduces * (latency_s + more_latency_s)
        row_s += reduces * row_bytes * (byte_s + more_byte_s)
    if parallelism.pipeline > 1:  # a hop between stages for each part of the batch
        start_s += parallelism.pipeline * NETWORK_LATENCY_S
        row_s += (parallelism.pipeline - 1) * row_bytes / parallelism.network_bytes_per_s
    return start_s, row_s


def _all_reduce(setup: Setup, parameters: StepParameters) -> tuple[float, float]:
    """Seconds to start an all-reduce, and seconds for each byte of the reduced array."""
    device, link = setup.instance.accelerator, setup.instance.link
    if link.kind == "none":
        raise InputError(f"{device.name}: {setup.tensor_parallel} devices need a link, have none")
    if link.kind == "pcie":
        latency_s, share = parameters.pcie_latency_s, parameters.pcie_share
    else:
        latency_s, share = parameters.nvlink_latency_s, parameters.nvlink_share
    rate = _known(link.bytes_per_s, device, f"{link.kind} rate") * share
    return latency_s, all_reduce_factor(setup.tensor_parallel, link) / rate


def _product_costs(setup: Setup, parameters: StepParameters, rates: _Rates) -> ProductCosts:
    shape, tensor_parallel = setup.shape, setup.tensor_parallel
    params = memory.StreamedParams.of(shape, setup.dtype)
    param_s = rates.weight_bytes / rates.weight_bytes_per_s
    rest_s = params.rest_bytes / rates.read_bytes_per_s
    rest_bytes = memory.weight_format(setup.dtype).rest_bits / memory.BITS_PER_BYTE
    each_s = param_s if params.packed else rest_bytes / rates.read_bytes_per_s
    read_s = (params.experts + params.packed) * param_s + rest_s + setup.repeated_params * each_s
    active = shape.params_active - memory.embedding_params(shape)
    unread_share = 1 - shape.experts_per_token / shape.experts if params.experts else 0.0
    routed = params.experts * (1 - unread_share)  # of a token
    has_rest = params.experts and not params.packed
    other_flop_per_s = rates.rest_flop_per_s if has_rest else rates.flop_per_s
    token_s = routed / rates.expert_flop_per_s + (active - routed) / other_flop_per_s
    widening_s = rates.widening_ops * (params.experts + params.packed) / rates.vector_op_per_s
    head_params = shape.vocab_size * shape.hidden_size
    return ProductCosts(
        read_s=read_s / tensor_parallel,
        expert_share=params.experts * param_s / read_s,
        unread_share=unread_share,
        rows_read=1 / parameters.rows_read_share,
        token_s=_FLOP_PER_PARAMETER * token_s / tensor_parallel,
        head_s=_FLOP_PER_PARAMETER * head_params / (tensor_parallel * rates.full_flop_per_s),
        widening_share=widening_s / read_s,
        widening_rows=_WIDENING_ROWS / (1 - unread_share),
    )


def _widened_first(narrow: ProductCosts, setup: Setup, rates: _Rates) -> ProductCosts:
    """Products of weights that are widened as a whole: read, written wide, and read again."""
    params, ranks = memory.StreamedParams.of(setup.shape, setup.dtype), setup.tensor_parallel
    wide_bytes = params.packed * _ACTIVATION_BYTES
    return replace(
        narrow,
        read_s=(wide_bytes + params.rest_bytes) / (ranks * rates.read_bytes_per_s),
        rows_read=1.0,
        token_s=narrow.token_s * rates.flop_per_s / rates.full_flop_per_s,
        widening_share=0.0,
        first_s=(wide_bytes + params.packed * rates.weight_bytes) / (ranks * rates.weight_bytes_per_s),
    )


def _attention_costs(setup: Setup, profile: EngineProfile, rates: _Rates) -> AttentionCosts:
    shape, tensor_parallel = setup.shape, setup.tensor_parallel
    growing = shape.growing_layers
    width = (shape.sliding_head_dim or shape.head_dim) / shape.head_dim
    layers = growing + (shape.cached_layers - growing) * width  # in layers that grow
    groups = setup.parallelism.attention_groups  # a token is in the cache of one of them
    values = sum(memory.kv_values(shape, setup.attention_degree)) / groups
    window, limited = memory.limited_reads(shape, setup.attention_degree)
    read_s = values * rates.kv_bytes_per_value / rates.read_bytes_per_s
    shared = not profile.shared_head_dims or shape.head_dim in profile.shared_head_dims
    # kernels without grouped heads read the cache again for each query head
    reads = 1 if shared else shape.num_heads // shape.num_kv_heads
    narrow = rates.kv_bytes_per_value < _ACTIVATION_BYTES  # each value that is read is converted
    head_flop = layers * _FLOP_PER_PAIR * shape.num_heads
    head_pair_s = head_flop / (tensor_parallel * rates.attention_flop_per_s)
    processors, busy_rows = setup.instance.accelerator.multiprocessors, 0.0
    if processors is not None and not profile.split_attention:  # a block for each KV head
        busy_rows = processors / memory.kv_heads_per_rank(shape, tensor_parallel)
    return AttentionCosts(
        decode_read_s=read_s * reads,
        prompt_read_s=read_s,
        pair_s=head_pair_s * (shape.latent_kv_dim or shape.head_dim),
        prompt_pair_s=head_pair_s * shape.head_dim,
        widening_s=values * narrow / rates.vector_op_per_s,
        window=window,
        sliding_share=limited,
        sliding_pairs=limited if shape.sparse_tokens or not layers else 1 - growing / layers,
        row_s=2 * shape.state_bytes / (tensor_parallel * rates.read_bytes_per_s),
        busy_rows=busy_rows,
    )
