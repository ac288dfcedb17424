"""The paged key-value cache as tensors, head-major so that a head's page is contiguous.

Each layer has one tensor of keys and one of values, shape (num_blocks, kv_heads, block_size,
head_dim); for latent attention both are one, as its values are a part of its keys. A head's page is
block_size * head_dim contiguous values: a gather copies it whole and a matrix product reads it in
order. Every product would copy token-major pages once more.

A float8 cache (E4M3) has no scales: its relative precision is the same from 2^-6 to 448, and larger
keys and values become 448.
"""

import math
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from lmi_bench.core.errors import CapacityError
from lmi_bench.engine.torch_backend.memory import zeroed_bytes
from lmi_bench.models.shape import ModelShape

FLOAT8: Final = torch.float8_e4m3fn


def copyable(values: Tensor) -> Tensor:
    """Float8 as bytes: torch's operators with indices do not take it on every device."""
    return values.view(torch.uint8) if values.dtype is FLOAT8 else values


@dataclass(frozen=True, slots=True)
class KvLayoutShape:
    """The dimensions of a cache, except its number of blocks.

    latent  keys and values are stored once
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    latent: bool = False

    @classmethod
    def of(cls, shape: ModelShape, block_size: int, dtype: torch.dtype) -> Self:
        """The layout of a model's cache, or of one rank's part of it."""
        if size := shape.latent_kv_dim:
            return cls(shape.num_layers, 1, size, block_size, dtype, latent=True)
        return cls(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, dtype)

    def stored(self, new: Tensor) -> Tensor:
        """Keys or values in the cache's format, to copy."""
        if self.dtype is FLOAT8:
            new = new.clamp(-torch.finfo(FLOAT8).max, torch.finfo(FLOAT8).max)
        return copyable(new.to(self.dtype))

    @property
    def page_bytes(self) -> int:
        """Bytes of a layer's keys of one block: KV heads * head size * tokens * dtype bytes."""
        return self.num_kv_heads * self.head_dim * self.block_size * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return (1 if self.latent else 2) * self.num_layers * self.page_bytes


class KvCache:
    """Pages of every layer; initially zero, so that masked rows never contain NaN."""

    def __init__(self, shape: KvLayoutShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.keys = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]
        self.values = self.keys
        if not shape.latent:
            self.values = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.shape.bytes_per_block

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store keys and values of a step's tokens, shape (tokens, kv_heads, head_dim) each.

        slots  shape (tokens * kv_heads,), from `slots_of`
        """
        head_dim = self.shape.head_dim
        parts = ((self.keys[layer], k), (self.values[layer], v))
        for pages, new in parts[: 1 if self.shape.latent else 2]:
            stored = self.shape.stored(new).reshape(-1, head_dim)
            copyable(pages).view(-1, head_dim).index_copy_(0, slots, stored)

    def head_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, to copy, as rows of one head's page: (blocks * heads, block,
        dim)."""
        shape = (-1, self.shape.block_size, self.shape.head_dim)
        return copyable(self.keys[layer]).view(shape), copyable(self.values[layer]).view(shape)


def slots_of(blocks: Tensor, offsets: Tensor, shape: KvLayoutShape) -> Tensor:
    """Index of each (token, head) in the cache, counted in head_dim vectors.

    blocks, offsets  shape (tokens,): each token's block id and its index in the block
    returns          shape (tokens * kv_heads,)
    """
    heads = torch.arange(shape.num_kv_heads, device=blocks.device)
    pages = blocks[:, None] * shape.num_kv_heads + heads
    return (pages * shape.block_size + offsets[:, None]).reshape(-1)


def head_page_rows(block_tables: Tensor, num_kv_heads: int) -> Tensor:
    """Rows of `KvCache.head_pages` in the order (sequence, head, page), so that one gather makes
    each head's context contiguous.

    block_tables  shape (sequences, pages)
    returns       shape (sequences * kv_heads * pages,)
    """
    heads = torch.arange(num_kv_heads, device=block_tables.device)[None, :, None]
    return (block_tables[:, None, :] * num_kv_heads + heads).reshape(-1)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed pages; on a CPU the system commits their memory at the first write."""
    if device.type != "cpu":
        try:
            return torch.zeros(size, dtype=dtype, device=device)
        except torch.OutOfMemoryError as exc:
            raise CapacityError(
                f"the KV cache of {size[0]:,} blocks does not fit into the memory of {device}: "
                "lower --num-blocks or --memory-share"
            ) from exc
    return zeroed_bytes(math.prod(size) * dtype.itemsize).view(dtype).view(size)
