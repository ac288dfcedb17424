"""How long one step takes: named physical parts, and which of them binds.

    decode step  = max(GPU, host) + host_per_sequence * B * (1 + stretch * (tp - 1) ** 1.5)
      GPU        = both(weight_bytes / (tp * bandwidth * share), flop / (tp * peak * share))
                   + both(kv_bytes / ..., attention_flop / ...) + all-reduces
                   + gap_per_layer * layers
      both(a, b) = max(a, b) + unhidden * min(a, b)      unhidden 0 on GPUs
      host       = host_per_layer * layers * (1 + stretch * (tp - 1) ** 1.5)
    prefill of T = GPU + host_per_prompt_token * T + host_per_prompt a prompt
    all-reduce   = r a layer, latency + bytes * factor(tp, link) / link rate
                   r = 2, or 1 where attention and feed-forward are parallel branches
    stretch      = stretch_per_rank * r / 2: ranks wait for the slowest at each all-reduce

Seconds, bytes and FLOP of one model copy. A forecast with an engine's profile, where `roofline`
gives the bound of the hardware alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.model.kv_cache import KV_BYTES_PER_VALUE, kv_heads_per_rank
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.step_trace import StepTrace
from lmi_bench.analysis.model.weights import embedding_params, streamed_params, streamed_params_of
from lmi_bench.catalog.accelerators import Accelerator, Link
from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.models.shape import ModelShape

Binding = Literal["bandwidth", "compute", "link", "host"]

_ALL_REDUCES_PER_LAYER = 2  # after attention and after the feed-forward
_ACTIVATION_BYTES = 2
_FLOP_PER_PARAMETER = 2
_FLOP_PER_PAIR = 4  # query times key, weight times value: a multiplication and an addition each
_NARROW = ("float8", "int8")
_STRETCH_POWER: Final = 1.5  # the slowest of n processes, which also get into each other's way
_ON_THE_LINE = 1e-12
# FP32 units beside matrix units: 19.5 of 312 TFLOP/s on A100, 67 of 989 on H100 (data sheets);
# smaller devices have relatively more, so that the cost of widening is an upper bound there
_MATRIX_OVER_VECTOR: Final = 16
_NARROW_BYTES: Final = 0.5  # a weight, for which a profile states its share
_ROWS_PER_WIDENING: Final = 128  # a weight is widened again for each block of rows that needs it


class PricedSteps(Protocol):
    """What closed forms, traces and simulations ask of a model of step times."""

    def step_time_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        ...

    def step_times_s(self, trace: StepTrace) -> NDArray[np.float64]:
        """Seconds of each row of a trace, its repeats included, shape (rows,)."""
        ...

    def pricer(self) -> Callable[[int, int, int, int, float, int], float]:
        """`step_time_s` as a plain function of counts."""
        ...

    def explain(self, step: StepShape) -> StepParts:
        """The step's time by part."""
        ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """One step's time in seconds, part by part.

    weights_s, kv_s        reading weights and cache; compute_s: arithmetic, at the same time
    all_reduce_s           adding up the ranks' halves, after them
    gap_s                  what kernels take that neither reads nor arithmetic explain
    host_s                 launching the step, at the same time as the GPU part
    host_per_sequence_s    bookkeeping of the batch; host_per_prompt_token_s: of the prompts,
                           by token and by prompt
    total_s                the step; binding: the part that a faster step would need
    """

    weights_s: float
    kv_s: float
    compute_s: float
    all_reduce_s: float
    gap_s: float
    host_s: float
    host_per_sequence_s: float
    host_per_prompt_token_s: float
    total_s: float
    binding: Binding


def all_reduce_factor(tensor_parallel: int, link: Link) -> float:
    """Bytes that pass the narrowest link for each byte of the reduced array.

    NVLink: a ring, each device sends 2 (n - 1) / n, and so over PCIe where devices reach each
    other. Where the same traffic of all n devices crosses one host bridge: 2 (n - 1).
    """
    ring = 2 * (tensor_parallel - 1) / tensor_parallel
    return ring * tensor_parallel if link.kind == "pcie" and link.is_shared else ring


class StepTimeModel:
    """Predicts steps of one model copy on `tensor_parallel` devices; a StepTime.

    widening_ops_per_param  vector operations that make a stored weight one that can be multiplied

    Raises InputError where a figure that it needs is unknown, CapacityError where the KV heads
    cannot be shared out.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: Accelerator,
        tensor_parallel: int,
        link: Link,
        profile: EngineProfile,
        *,
        weight_bytes_per_param: float = 2.0,
        kv_bytes_per_value: float = KV_BYTES_PER_VALUE,
        compute_dtype: str = "float16",
        widening_ops_per_param: float = 0.0,
    ) -> None:
        parameters = profile.parameters
        self.shape = shape
        self.tensor_parallel = tensor_parallel
        self.profile = profile
        bandwidth = self._known(device.bandwidth_bytes_per_s, device, "memory bandwidth")
        peak = self._known(device.peak_flop_per_s(compute_dtype), device, f"{compute_dtype} peak")
        self._read_bytes_per_s = bandwidth * parameters.bandwidth_share
        self._flop_per_s = peak * parameters.compute_share
        if shape.is_moe:  # each expert sees few rows, padded to whole blocks
            self._flop_per_s *= parameters.moe_share
        self._weight_bytes_per_s = self._read_bytes_per_s
        self._wide_flop_per_s = self._flop_per_s
        if widening_ops_per_param:
            # the fewer the bits, the less of the rate of 16-bit products such kernels reach
            narrow = parameters.narrow_share ** (_NARROW_BYTES / weight_bytes_per_param)
            self._weight_bytes_per_s *= narrow
            self._flop_per_s *= narrow
        # attention multiplies 16-bit values whatever the weights are stored in
        wide = device.peak_flop_per_s("float16") if compute_dtype in _NARROW else peak
        self._attention_flop_per_s = (
            (wide or peak) * parameters.compute_share * parameters.attention_share
        )
        self._unhidden = parameters.unhidden_share
        self._rows_read = 1 / parameters.rows_read_share  # times a lone row's reading
        vector_op_per_s = device.fp32_flop_per_s or (wide or peak) / _MATRIX_OVER_VECTOR
        vector_op_per_s *= parameters.compute_share
        self._widening_s_per_param = widening_ops_per_param / (tensor_parallel * vector_op_per_s)
        self._weight_bytes_per_param = weight_bytes_per_param
        self._dense_streamed_bytes = (
            None if shape.is_moe else streamed_params(shape, 1) * weight_bytes_per_param
        )
        values = shape.latent_kv_dim or 2 * shape.head_dim * kv_heads_per_rank(
            shape, tensor_parallel
        )
        self._kv_bytes_per_layer_token = values * kv_bytes_per_value
        shared = not profile.shared_head_dims or shape.head_dim in profile.shared_head_dims
        # of the cache by a decode step, over once: kernels that do not know groups of heads
        self._decode_reads_each = 1 if shared else shape.num_heads // shape.num_kv_heads
        narrow_cache = kv_bytes_per_value < _ACTIVATION_BYTES  # a conversion a value that is read
        self._kv_widening_s = values * narrow_cache / vector_op_per_s
        self._linear_flop_per_token = (
            _FLOP_PER_PARAMETER * (shape.params_active - embedding_params(shape)) / tensor_parallel
        )
        self._head_flop_per_row = (
            _FLOP_PER_PARAMETER * shape.vocab_size * shape.hidden_size / tensor_parallel
        )
        pair_width = shape.latent_kv_dim or shape.head_dim
        self._pair_flop_per_layer = _FLOP_PER_PAIR * shape.num_heads * pair_width / tensor_parallel
        # each rank is a process of its own, and the step waits for the slowest
        self._reduces_per_layer = _ALL_REDUCES_PER_LAYER // (1 + shape.parallel_branches)
        waits = self._reduces_per_layer / _ALL_REDUCES_PER_LAYER
        stretch: float = (
            1
            + parameters.host_stretch_per_rank
            * waits
            * float(tensor_parallel - 1) ** _STRETCH_POWER
        )
        stretch *= profile.host_factors.get(device.name, 1.0)
        self._host_s = parameters.host_per_layer_s * shape.num_layers * stretch
        if widening_ops_per_param and weight_bytes_per_param < 1 and tensor_parallel > 1:
            self._host_s += parameters.narrow_launch_s * shape.num_layers
        self._host_per_sequence_s = parameters.host_per_sequence_s * stretch
        self._host_per_prompt_token_s = parameters.host_per_prompt_token_s
        self._host_per_prompt_s = parameters.host_per_prompt_s
        self._gap_s = parameters.gap_per_layer_s * shape.num_layers
        self._all_reduce_base_s, self._all_reduce_per_token_s = self._all_reduce_terms(device, link)
        self._decode_coefficients = self._collect_decode()

    @staticmethod
    def _known(value: float | None, device: Accelerator, what: str) -> float:
        if value is None:
            raise InputError(f"no source states the {what} of {device.name}: it cannot be planned")
        return value

    def _all_reduce_terms(self, device: Accelerator, link: Link) -> tuple[float, float]:
        """Seconds of a step's all-reduces: without a token, and by token."""
        if self.tensor_parallel == 1:
            return 0.0, 0.0
        if link.kind == "none":
            raise InputError(
                f"{device.name}: {self.tensor_parallel} devices need a link and have none"
            )
        parameters = self.profile.parameters
        if link.kind == "pcie":
            latency_s, share = parameters.pcie_latency_s, parameters.pcie_share
        else:
            latency_s, share = parameters.nvlink_latency_s, parameters.nvlink_share
        rate = self._known(link.bytes_per_s, device, f"{link.kind} rate") * share
        count = self._reduces_per_layer * self.shape.num_layers
        token_bytes = self.shape.hidden_size * _ACTIVATION_BYTES
        factor = all_reduce_factor(self.tensor_parallel, link)
        return count * latency_s, count * token_bytes * factor / rate

    def _attended(self, tokens: float, sequences: int) -> float:
        """Layer-tokens that attention reads: `tokens` in all, windows cut at their width."""
        shape = self.shape
        growing = shape.growing_layers
        if shape.sliding_window is None or growing == shape.num_layers:
            return shape.num_layers * tokens
        inside = min(tokens, shape.sliding_window * sequences)
        return growing * tokens + (shape.num_layers - growing) * inside

    def explain(self, step: StepShape) -> StepParts:
        """The step's time by part; `binding` says what limits it."""
        tokens = step.num_tokens
        weight_stream = self._dense_streamed_bytes
        if weight_stream is None:
            weight_stream = streamed_params(self.shape, tokens) * self._weight_bytes_per_param
        weights_s = weight_stream / (self.tensor_parallel * self._weight_bytes_per_s)
        widened = weight_stream / self._weight_bytes_per_param
        widening_s = self._widening_s_per_param * widened * -(-tokens // _ROWS_PER_WIDENING)
        if tokens > 1:
            weights_s *= self._rows_read
        decode_reads = self._attended(step.decode_context_tokens, step.decode_sequences)
        prefill_reads = self._attended(step.prefill_context_tokens, step.prefill_sequences)
        kv_s = (
            self._kv_bytes_per_layer_token
            * (decode_reads * self._decode_reads_each + prefill_reads)
            / self._read_bytes_per_s
        )
        # a window of w keys bounds the pairs of a prompt of n tokens by n * w
        pairs = step.prefill_context_pairs
        prefill_pairs = self._attended(pairs, step.prefill_tokens)
        linear_flop = self._linear_flop_per_token * tokens + self._head_flop_per_row * (
            step.decode_tokens + step.prefill_sequences
        )
        # each drafted token of a sequence looks at its whole context, which is read once
        rows = step.decode_tokens / step.decode_sequences if step.decode_sequences else 1.0
        pair_flop = self._pair_flop_per_layer * (decode_reads * rows + prefill_pairs)
        linear_s = linear_flop / self._flop_per_s + widening_s
        products_s = self._both(weights_s, linear_s)
        if self._widens_first and tokens >= self.profile.widen_first_rows:
            first_s, wide_read_s = self._widen_first_s()
            weights_s, linear_s = first_s, linear_flop / self._wide_flop_per_s
            products_s = first_s + self._both(wide_read_s, linear_s)
        pair_s = pair_flop / self._attention_flop_per_s
        pair_s += self._kv_widening_s * (decode_reads + prefill_reads)
        compute_s = linear_s + pair_s
        all_reduce_s = self._all_reduce_base_s + self._all_reduce_per_token_s * tokens
        # matrix products and attention are kernels of their own: each is bound by itself
        gpu_s = products_s + self._both(kv_s, pair_s)
        gpu_s += all_reduce_s + self._gap_s
        host_s = self._host_s if step.decode_sequences else 0.0
        per_sequence_s = self._host_per_sequence_s * step.decode_sequences
        per_prompt_token_s = self._host_per_prompt_token_s * step.prefill_tokens
        per_prompt_token_s += self._host_per_prompt_s * step.prefill_sequences
        binding = self._binding(
            host_s, per_sequence_s + per_prompt_token_s, weights_s + kv_s, compute_s, all_reduce_s
        )
        total_s = max(gpu_s, host_s) + per_sequence_s + per_prompt_token_s
        return StepParts(
            weights_s,
            kv_s,
            compute_s,
            all_reduce_s,
            self._gap_s,
            host_s,
            per_sequence_s,
            per_prompt_token_s,
            total_s,
            binding,
        )

    @property
    def _widens_first(self) -> bool:
        """Whether weights are widened as a whole before the products of many rows.

        Experts see few rows each.
        """
        narrow = self._widening_s_per_param > 0 and self.profile.widen_first_rows > 0
        return narrow and self._dense_streamed_bytes is not None

    def _widen_first_s(self) -> tuple[float, float]:
        """Seconds of writing a dense model's weights in 16 bits, and of reading them again."""
        narrow_bytes = (self._dense_streamed_bytes or 0.0) / self.tensor_parallel
        wide_bytes = narrow_bytes / self._weight_bytes_per_param * _ACTIVATION_BYTES
        first_s = (narrow_bytes + wide_bytes) / self._weight_bytes_per_s
        return first_s, wide_bytes / self._read_bytes_per_s

    def _both(self, read_s: float, compute_s: float) -> float:
        """Seconds of reading and arithmetic at the same time, as far as one hides the other."""
        if read_s < compute_s:
            return compute_s + self._unhidden * read_s
        return read_s + self._unhidden * compute_s

    @staticmethod
    def _binding(
        host_s: float, serial_s: float, memory_s: float, compute_s: float, all_reduce_s: float
    ) -> Binding:
        gpu_s = max(memory_s, compute_s) + all_reduce_s
        if host_s > gpu_s or serial_s > gpu_s:
            return "host"
        if all_reduce_s > max(memory_s, compute_s):
            return "link"
        return "bandwidth" if memory_s >= compute_s else "compute"

    def step_time_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        coefficients = self._decode_coefficients
        rows = shape.decode_sequences
        if coefficients is None or shape.prefill_tokens or not 0 < rows == shape.decode_tokens:
            return self.explain(shape).total_s
        # simulations ask for millions of plain decode steps: the same sum, already collected
        weights_s, flop_token_s, context_s = coefficients
        context = shape.decode_context_tokens
        tokens = shape.decode_tokens
        gpu_s = (
            self._both(
                weights_s if tokens == 1 else weights_s * self._rows_read, flop_token_s * tokens
            )
            + context_s * context
            + self._gap_s
            + self._all_reduce_base_s
            + self._all_reduce_per_token_s * tokens
        )
        return (
            gpu_s if gpu_s > self._host_s else self._host_s
        ) + self._host_per_sequence_s * shape.decode_sequences

    def _collect_decode(self) -> tuple[float, float, float] | None:
        """Seconds of reading the weights, of arithmetic by token, of attention by context token.

        None where a decode step is not linear in them: experts, a sliding window, narrow formats.
        """
        plain = not self._widening_s_per_param and not self._kv_widening_s
        if self._dense_streamed_bytes is None or self.shape.sliding_window is not None or not plain:
            return None
        layers = self.shape.num_layers
        return (
            self._dense_streamed_bytes / (self.tensor_parallel * self._weight_bytes_per_s),
            (self._linear_flop_per_token + self._head_flop_per_row) / self._flop_per_s,
            self._both(
                self._kv_bytes_per_layer_token
                * layers
                * self._decode_reads_each
                / self._read_bytes_per_s,
                self._pair_flop_per_layer * layers / self._attention_flop_per_s,
            ),
        )

    def step_times_s(self, trace: StepTrace) -> NDArray[np.float64]:
        """Seconds of each row of a trace, its repeats included, shape (rows,).

        The same sum as `step_time_s`, over arrays.
        """
        tokens = trace.decode_sequences + trace.prefill_tokens
        weight_stream: float | NDArray[np.float64] | None = self._dense_streamed_bytes
        if weight_stream is None:
            weight_stream = self._weight_bytes_per_param * streamed_params_of(self.shape, tokens)
        weights_s = weight_stream / (self.tensor_parallel * self._weight_bytes_per_s)
        weights_s = weights_s * np.where(tokens > 1, self._rows_read, 1.0)
        decode_reads = self._attended_of(trace.decode_context_tokens, trace.decode_sequences)
        prefill_reads = self._attended_of(trace.prefill_context_tokens, trace.prefill_sequences)
        prefill_pairs = self._attended_of(trace.prefill_context_pairs, trace.prefill_tokens)
        kv_s = (
            self._kv_bytes_per_layer_token
            * (decode_reads * self._decode_reads_each + prefill_reads)
            / self._read_bytes_per_s
        )
        widened = weight_stream / self._weight_bytes_per_param
        linear_flop = self._linear_flop_per_token * tokens + self._head_flop_per_row * (
            trace.decode_sequences + trace.prefill_sequences
        )
        linear_s = linear_flop / self._flop_per_s
        linear_s += self._widening_s_per_param * widened * np.ceil(tokens / _ROWS_PER_WIDENING)
        pair_flop = self._pair_flop_per_layer * (decode_reads + prefill_pairs)
        pair_s = pair_flop / self._attention_flop_per_s
        pair_s += self._kv_widening_s * (decode_reads + prefill_reads)
        products_s = self._both_of(weights_s, linear_s)
        if self._widens_first:
            first_s, wide_read_s = self._widen_first_s()
            wide_s = self._both_of(wide_read_s, linear_flop / self._wide_flop_per_s)
            many = tokens >= self.profile.widen_first_rows
            products_s = np.where(many, first_s + wide_s, products_s)
        gpu_s = (
            products_s
            + self._both_of(kv_s, pair_s)
            + self._gap_s
            + self._all_reduce_base_s
            + self._all_reduce_per_token_s * tokens
        )
        host_s = np.where(trace.decode_sequences > 0, self._host_s, 0.0)
        step_s = (
            np.maximum(gpu_s, host_s)
            + self._host_per_sequence_s * trace.decode_sequences
            + self._host_per_prompt_token_s * trace.prefill_tokens
            + self._host_per_prompt_s * trace.prefill_sequences
        )
        return np.asarray(step_s * trace.repeat, dtype=np.float64)

    def _both_of(
        self, read_s: float | NDArray[np.float64], compute_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """`_both` over arrays."""
        both_s = np.maximum(read_s, compute_s) + self._unhidden * np.minimum(read_s, compute_s)
        return np.asarray(both_s, dtype=np.float64)

    def pricer(self) -> Callable[[int, int, int, int, float, int], float]:
        """`step_time_s` as a plain function of counts, for loops of many steps.

        Arguments: decode sequences and their context tokens; prompts, their tokens, their pairs
        and their cached tokens.
        """
        narrow = self._widening_s_per_param or self._kv_widening_s
        if self.shape.sliding_window is not None or narrow:
            return self.price_by_shape
        layers = self.shape.num_layers
        kv_s = self._kv_bytes_per_layer_token * layers / self._read_bytes_per_s
        flop_pair_s = self._pair_flop_per_layer * layers / self._attention_flop_per_s
        flop_token_s = (self._linear_flop_per_token + self._head_flop_per_row) / self._flop_per_s
        weights_of = self._weights_by_tokens()
        prompt_token_s = self._linear_flop_per_token / self._flop_per_s
        head_s = self._head_flop_per_row / self._flop_per_s
        fixed_s = self._gap_s + self._all_reduce_base_s
        reduce_s, host_s = self._all_reduce_per_token_s, self._host_s
        row_s, prompt_host_s = self._host_per_sequence_s, self._host_per_prompt_token_s
        admitted_s = self._host_per_prompt_s
        both = self._both
        decode_kv_s = kv_s * self._decode_reads_each
        attention_s = both(decode_kv_s, flop_pair_s)

        def price(
            rows: int, context: int, prompts: int, tokens: int, pairs: float, cached: int
        ) -> float:
            if not tokens:
                gpu_s = both(weights_of(rows), flop_token_s * rows) + attention_s * context
                gpu_s += fixed_s + reduce_s * rows
                return (gpu_s if gpu_s > host_s else host_s) + row_s * rows
            every = rows + tokens
            linear_s = prompt_token_s * every + head_s * (rows + prompts)
            gpu_s = both(weights_of(every), linear_s) + both(
                decode_kv_s * context + kv_s * cached, flop_pair_s * (context + pairs)
            )
            gpu_s += fixed_s + reduce_s * every
            if rows and host_s > gpu_s:
                gpu_s = host_s
            return gpu_s + row_s * rows + prompt_host_s * tokens + admitted_s * prompts

        return price

    def _weights_by_tokens(self) -> Callable[[int], float]:
        """Seconds of reading the weights of a step of so many tokens."""
        rate = self.tensor_parallel * self._weight_bytes_per_s
        if self._dense_streamed_bytes is not None:
            lone_s = self._dense_streamed_bytes / rate
            rows_s = lone_s * self._rows_read
            return lambda tokens: lone_s if tokens == 1 else rows_s
        known: dict[int, float] = {}

        def experts_s(tokens: int) -> float:
            seconds = known.get(tokens)
            if seconds is None:
                streamed = streamed_params(self.shape, tokens) * self._weight_bytes_per_param
                seconds = known[tokens] = streamed / rate * (self._rows_read if tokens > 1 else 1)
            return seconds

        return experts_s

    def price_by_shape(
        self,
        rows: int,
        context: int,
        prompts: int,
        tokens: int,
        pairs: float,
        cached: int,
        *,
        decode_tokens: int | None = None,
    ) -> float:
        """Seconds of the step of these counts, without a short cut.

        decode_tokens  rows of the decoding sequences, where each has several
        """
        return StepTimeModel.explain(
            self,
            StepShape(
                prefill_sequences=prompts,
                prefill_tokens=tokens,
                prefill_context_pairs=round(pairs),
                prefill_context_tokens=cached,
                decode_sequences=rows,
                decode_tokens=rows if decode_tokens is None else decode_tokens,
                decode_context_tokens=context,
            ),
        ).total_s

    def _attended_of(
        self, tokens: NDArray[np.float64], sequences: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """`_attended` over arrays."""
        shape = self.shape
        growing = shape.growing_layers
        if shape.sliding_window is None or growing == shape.num_layers:
            return shape.num_layers * tokens
        inside = np.minimum(tokens, shape.sliding_window * sequences)
        return np.asarray(growing * tokens + (shape.num_layers - growing) * inside)

    def decode_run_s(self, first: StepShape, steps: int) -> float:
        """Seconds of `steps` identical decode steps in a row, each context one token longer.

        The time is piecewise linear in the context, so a stretch whose middle lies on the line
        between its ends is a sum of an arithmetic series; other stretches are halved.
        """

        def at(index: int) -> float:
            return self.step_time_s(
                replace(
                    first,
                    decode_context_tokens=first.decode_context_tokens
                    + index * first.decode_sequences,
                )
            )

        def total(low: int, high: int, low_s: float, high_s: float) -> float:
            """The steps low to high, both included."""
            if high - low < 2:
                return low_s if high == low else low_s + high_s
            middle = (low + high) // 2
            middle_s = at(middle)
            chord_s = low_s + (high_s - low_s) * (middle - low) / (high - low)
            if abs(middle_s - chord_s) <= _ON_THE_LINE * middle_s:
                return (low_s + high_s) / 2 * (high - low + 1)
            left_s = total(low, middle, low_s, middle_s)
            return left_s + total(middle, high, middle_s, high_s) - middle_s

        if steps < 1:
            return 0.0
        return total(0, steps - 1, at(0), at(steps - 1))
