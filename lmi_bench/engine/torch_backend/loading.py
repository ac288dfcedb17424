"""Loads weights into layers one at a time: the whole model's, or one rank's share of it.

Attention is split by heads and the MLP by its inner size (Shoeybi et al. 2019, arXiv:1909.08053),
embedding and head by the vocabulary. A rank builds the model like a single device, from a spec with
its own number of heads; the checkpoint returns this rank's rows or columns of each matrix. A matrix
split by columns gives partial sums, which are added over the ranks. With more ranks than KV heads,
several ranks store the same head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.quantization import QuantizedBytes
from lmi_bench.engine.torch_backend.collectives import Collectives
from lmi_bench.engine.torch_backend.layers import LayerNorm, Linear, Norm, RmsNorm, make_linear
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress
from lmi_bench.models.shape import RankHeads, split_heads, tensor_parallel_problem
from lmi_bench.models.spec import DecoderSpec, NormKind


def check_degree(name: str, spec: DecoderSpec, degree: int, strategy: str | None = None, *, plain: bool = True) -> None:
    """Raises CapacityError with the numbers if the model cannot be split `degree` ways.

    strategy  of `option.group_query_attention`; plain: its weights are not quantized
    """
    shape = spec.shape(name)
    if strategy is not None:
        split_heads(shape, degree, strategy)
        if spec.family == "falcon" or spec.latent_rank or spec.sinks or not plain:
            raise CapacityError(
                f"--group-query-attention {strategy} is for separate queries, keys and values in "
                f"floats, which {name} does not have here"
            )
        return
    problem = tensor_parallel_problem(shape, degree)
    if problem is not None:
        raise CapacityError(f"--tp {degree}: {problem}")
    if spec.family == "falcon" and shape.num_kv_heads % degree:
        raise CapacityError(
            f"--tp {degree}: {name} stores queries, keys and values together by KV head, and its "
            f"{shape.num_kv_heads} KV heads cannot be split over {degree} devices"
        )
    for size in (spec.ffn_size, spec.dense_ffn_size, spec.shared_ffn_size):
        if size % degree:
            raise CapacityError(
                f"--tp {degree}: the MLP's {size} features of {shape.name} cannot be split over {degree} devices evenly"
            )


def rank_part(
    spec: DecoderSpec, collectives: Collectives, strategy: str | None
) -> tuple[DecoderSpec, RankHeads | None]:
    """The spec of this rank's part, and its heads, which a strategy may pad; None: even parts
    without padding. Call `check_degree` first."""
    degree = collectives.degree
    heads = None
    if strategy is not None:
        heads = split_heads(spec.shape(spec.family), degree, strategy)[collectives.rank]
    part = replace(
        spec,
        num_heads=spec.num_heads // degree if heads is None else heads.query_slots,
        num_kv_heads=max(1, spec.num_kv_heads // degree) if heads is None else heads.kv_slots,
        ffn_size=-(-spec.ffn_size // degree),
        dense_ffn_size=-(-spec.dense_ffn_size // degree),
        shared_ffn_size=-(-spec.shared_ffn_size // degree),
    )
    return part, heads


def _padded(part: Tensor, side: int, size: int) -> Tensor:
    """Zeros behind the part's rows (side 0) or columns (side 1), up to `size`."""
    missing = size - part.shape[side]
    if not missing:
        return part
    return functional.pad(part, (0, 0) * (part.ndim - 1 - side) + (0, missing))


class RankCheckpoint(Checkpoint):
    """A checkpoint that returns one rank's part of each tensor.

    If the requested shape has fewer rows or columns than the stored one, the tensor is split along
    that side: into one part per rank, or per KV head, which neighbouring ranks then share.
    Projections stored as one matrix must be stored KV head by KV head, like Falcon's: a part is a
    contiguous range of rows.
    """

    def __init__(
        self,
        folder: Path,
        spec: DecoderSpec,
        collectives: Collectives,
        progress: Progress | None = None,
        *,
        beside: Path | None = None,
        heads: RankHeads | None = None,
    ) -> None:
        """spec  the whole model's; heads: this rank's, if a strategy deals them out"""
        super().__init__(folder, progress, beside=beside, spec=spec)
        self._rank, self._degree = collectives.rank, collectives.degree
        self._total_bytes //= self._degree
        self._parts = {self._degree, min(self._degree, spec.num_kv_heads)} - {1}
        ranks = (spec.latent_rank, spec.query_rank, spec.latent_rank + spec.turned)
        self._whole_sizes = {spec.hidden_size, spec.head_dim, spec.experts, *ranks, 1}
        self._head_dim = spec.head_dim
        self._heads_of: dict[str, Sequence[int]] = {}
        if heads is not None:
            self._heads_of = dict.fromkeys(("q_proj", "o_proj"), heads.query_heads)
            self._heads_of |= dict.fromkeys(("k_proj", "v_proj"), heads.kv_heads)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """This rank's part of the tensor `name`; its shape must be `shape`."""
        stored = self.stored_shape(name)
        projection = name.split(".")[-2]
        if projection in self._heads_of and not name.endswith("o_proj.bias"):
            side, size = int(projection == "o_proj"), self._head_dim
            heads = [(head * size, head * size + size) for head in self._heads_of[projection]]
            rows = [self.part(name, side, *ends) for ends in heads or [(0, 0)]]
            return _padded(torch.cat(rows, side), side, shape[side])
        if stored == shape:
            # packed values and scales are fractions of the model's own sizes
            is_plain = name.endswith((".weight", ".bias"))
            if is_plain and not self._whole_sizes.issuperset(shape):
                raise InputError(
                    f"tensor {name!r} has shape {shape}, the size of one rank's part: "
                    "the checkpoint belongs to another config.json"
                )
            return super().tensor(name, *shape)
        cut = [side for side, size in enumerate(shape) if size != stored[side]]
        side = cut[0]
        whole, size = stored[side], shape[side]
        parts, left = divmod(whole, size)
        if self._heads_of and size == -(-whole // self._degree):
            parts, left = self._degree, 0
        if len(stored) != len(shape) or len(cut) > 1 or left or parts not in self._parts:
            raise self._misfit(name, stored, shape)
        # with fewer parts than ranks, neighbouring ranks share a part
        start = min(self._rank * parts // self._degree * size, whole)
        return _padded(self.part(name, side, start, min(start + size, whole)), side, size)

    def vocabulary_rows(self, name: str, *shape: int) -> Tensor:
        """This rank's rows of an embedding or head, which as a whole must have this shape: as many
        on every rank, with zeros behind the last ones."""
        stored, rows = self.stored_shape(name), -(-shape[0] // self._degree)
        if stored != shape:
            raise self._misfit(name, stored, shape)
        start, stop = (min(rank * rows, shape[0]) for rank in (self._rank, self._rank + 1))
        return _padded(self.part(name, 0, start, stop), 0, rows)


class RowParallelLinear(Linear):
    """A linear layer over this rank's part of the inputs, summed over the ranks.

    Operations after the product must follow the sum, except a bias or a residual, which only rank 0
    adds: its `part` has the bias.
    """

    def __init__(self, part: Linear, collectives: Collectives) -> None:
        self._part = part
        self._collectives = collectives

    def __call__(self, x: Tensor) -> Tensor:
        return self._collectives.all_reduce(self._part(x))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self._part.add(x, residual) if self._collectives.rank == 0 else self._part(x)
        return self._collectives.all_reduce(y)


Embedding = Callable[[Tensor], Tensor]  # token ids to rows, shape (tokens,) to (tokens, hidden)

Head = Callable[[Tensor], Tensor]  # rows to logits, shape (rows, hidden) to (rows, vocab)


_HEAD: Final = "lm_head.weight"

Joined = Callable[[list[Tensor]], Tensor]
"""Joins the rows of several projections in the model's order."""


@dataclass(eq=False)
class WeightLoader:
    """Layers of one model, named as in its checkpoint; sizes are checked when read.

    One of several ranks loads a RankCheckpoint: its spec has this rank's heads and MLP size, and
    partial sums of a layer are added over the ranks.

    collectives  of the ranks that share the model; None: one device has all of it
    make         from a weight and its bias to a layer
    held_bytes   bytes of the weights loaded so far, as stored in memory
    quantized    of the matrices loaded so far; None without quantization
    """

    spec: DecoderSpec
    checkpoint: Checkpoint
    precision: Precision
    device: torch.device
    collectives: Collectives | None = None
    make: Callable[[Tensor, Tensor | None], Linear] = make_linear
    held_bytes: int = field(default=0, init=False)
    quantized: QuantizedBytes | None = field(default=None, init=False)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor in the compute format, rounded to the stored format first."""
        stored = self.checkpoint.tensor(name, *shape).to(self.device, self.precision.stored)
        return stored.to(self.precision.compute)

    def linear(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        *,
        bias: bool = False,
        arrange: Callable[[Tensor], Tensor] | None = None,
        summed: bool | None = None,
    ) -> Linear:
        """Projections of the same input as one matrix.

        rows     outputs of each; columns: inputs of all
        arrange  puts the rows of weight and bias into the model's order
        summed   of ranks that split the inputs: whether partial sums are added here; otherwise the
                 caller must (`join`). None: every rank has all inputs
        """
        parts = list(zip(names, rows, strict=True))

        def joined(tensors: list[Tensor]) -> Tensor:
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            return whole if arrange is None else arrange(whole)

        offset = joined([self.tensor(f"{name}.bias", n) for name, n in parts]) if bias else None
        if self.collectives is None or summed is None:
            return self.matrix(parts, columns, offset, joined)
        if self.collectives.rank > 0:
            offset = None  # a sum over the ranks must contain the bias once
        linear = self.matrix(parts, columns, offset, joined)
        return RowParallelLinear(linear, self.collectives) if summed else linear

    def matrix(self, parts: list[tuple[str, int]], columns: int, bias: Tensor | None, joined: Joined) -> Linear:
        """The linear layer of the tensors with these names and row counts."""
        weight = joined([self.tensor(f"{name}.weight", rows, columns) for name, rows in parts])
        self.held_bytes += weight.nbytes
        return self.make(weight, bias)

    def join(self, partial: Tensor) -> Tensor:
        """Sum of the ranks' partial results, in place."""
        return partial if self.collectives is None else self.collectives.all_reduce(partial)

    def factor(self, name: str, size: int) -> Tensor:
        """A norm's weight, plus 1 if the model stores it less 1; then in float32, which rounds it
        no further."""
        weight = self.tensor(f"{name}.weight", size)
        return weight.float() + 1 if self.spec.norm_plus_one else weight

    def norm(self, name: str) -> Norm:
        """The model's kind of norm over its hidden features."""
        hidden, eps = self.spec.hidden_size, self.spec.norm_eps
        weight = self.factor(name, hidden)
        if self.spec.norm is NormKind.RMS:
            return RmsNorm((weight,), eps)
        return LayerNorm((weight, self.tensor(f"{name}.bias", hidden)), eps)

    def vocabulary(self, embedding_name: str) -> tuple[Embedding, Head]:
        """Token embeddings in the stored format, and the output layer; tied ones share rows."""
        rows = self._vocabulary_rows(embedding_name)
        head_weight = self.head_rows(rows).to(self.precision.compute)
        self.held_bytes += rows.nbytes + head_weight.nbytes
        head = make_linear(head_weight)
        if self.collectives is None:
            return rows.__getitem__, head
        ranks, first = self.collectives, self.collectives.rank * len(rows)

        def embedding(token_ids: Tensor) -> Tensor:
            """Each rank leaves the rows of others zero; the ranks' sum is the whole."""
            here = (token_ids >= first) & (token_ids < first + len(rows))
            own = rows[(token_ids - first).masked_fill_(~here, 0)]
            return ranks.all_reduce(own.mul_(here[:, None]))

        return embedding, lambda x: ranks.gather_columns(head(x))[:, : self.spec.vocab_size]

    def head_rows(self, rows: Tensor) -> Tensor:
        """The output layer's weight: the embedding's `rows` if both are tied, unless the file has
        another one, which transformers then takes too."""
        if self.spec.tied_embeddings and _HEAD not in self.checkpoint:
            return rows
        head = self._vocabulary_rows(_HEAD)
        return rows if self.spec.tied_embeddings and torch.equal(head, rows) else head

    def _vocabulary_rows(self, name: str) -> Tensor:
        read = self.checkpoint.tensor
        if isinstance(self.checkpoint, RankCheckpoint):
            read = self.checkpoint.vocabulary_rows
        rows = read(name, self.spec.vocab_size, self.spec.hidden_size)
        return rows.to(self.device, self.precision.stored)
