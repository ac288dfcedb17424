"""Compiles every kernel for a GPU that need not be there; run in a process without an interpreter.

Prints a line a kernel: its name, the bytes of its machine code and of the shared memory that a
program takes.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmi_bench.engine.torch_backend.quantization import gpu_kernels
from lmi_bench.engine.triton_backend import expert_kernels, experts, kernels

H100 = GPUTarget("cuda", 90, 32)
BF16, F16, F32, I32, I64 = "*bf16", "*fp16", "*fp32", "*i32", "*i64"
U8, I8, FP8 = "*u8", "*i8", "*fp8e4nv"
HEADS = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128}
CASES = {
    "add_rms_norm_kernel": ((BF16, BF16, BF16, BF16, "i32", "fp32"), {"HAS_DELTA": True, "BLOCK": 4096}),
    "turn_and_store_kernel": (
        (BF16, BF16, BF16, BF16, I64, BF16, BF16, BF16, "fp32"),
        HEADS | {"HAS_NORM": True, "BLOCK": 128},
    ),
    "paged_attention_kernel": (
        (BF16, BF16, BF16, I64, I64, F32, F32, F32, "i32", "i32", "i32", "fp32"),
        HEADS | {"PAGE": 64, "TILE": 64, "GROUP_BLOCK": 16, "DIM_BLOCK": 128, "SPLITS": 8},
    ),
    "join_splits_kernel": ((F32, F32, F32, BF16), HEADS | {"DIM_BLOCK": 128, "SPLITS": 8}),
    "silu_multiply_kernel": ((BF16, BF16, "i32"), {"BLOCK": 1024}),
    "list_pairs_kernel": ((I64, I32, I32, "i32"), {"BLOCK": 1024}),
}

ATTENTION = CASES["paged_attention_kernel"][1]


def attention(values: str, pages: str | None = None, **changes: int) -> tuple[tuple[str, ...], dict[str, int]]:
    """The attention of a step whose queries and pages hold such values."""
    cache = (values, pages or values, pages or values, I64, I64, F32, F32, F32)
    return (*cache, "i32", "i32", "i32", "fp32"), ATTENTION | changes


SIDES = ("BLOCK_ROWS", "BLOCK_OUT", "BLOCK_IN")
for few, gated in ((True, True), (True, False), (False, True), (False, False)):
    tile = {side: experts._TILES[few][side] for side in SIDES}
    kinds = (BF16, BF16, F32, I32, I32, BF16 if gated else F32, "i32", "i32", "i32")
    name = f"expert_product_kernel {'few' if few else 'many'}{', gated' if gated else ''}"
    CASES[name] = (kinds, tile | {"PAIRS_A_ROW": 8, "GATED": gated})
CASES |= {
    "paged_attention_kernel float16, pages of 1024": attention(F16, PAGE=1024),
    "paged_attention_kernel float32": attention(F32),
    "paged_attention_kernel float8 pages": attention(BF16, FP8),
    "turn_and_store_kernel float8 pages": (
        (BF16, BF16, BF16, BF16, I64, BF16, FP8, FP8, "fp32"),
        CASES["turn_and_store_kernel"][1],
    ),
    "paged_attention_kernel heads of 256, groups of 32": attention(
        BF16, HEAD_DIM=256, DIM_BLOCK=256, GROUP_BLOCK=32, HEADS=64, KV_HEADS=2
    ),
}

TILE = {"BLOCK_OUT": 32, "BLOCK_IN": 128}
for name, rows, weight, scale in (
    ("4 bits", BF16, U8, F16),
    ("int8", BF16, I8, F32),
    ("float8", BF16, FP8, F32),
    ("int8 rows", I8, I8, F32),
    ("float8 rows", FP8, FP8, F32),
):
    nibbles, rounded = weight == U8, rows != BF16
    for block_rows, splits in ((16, 8), (64, 1)):
        CASES[f"quantized_product_kernel {name} {block_rows}"] = (
            (rows, weight, scale, U8, F32, BF16, "i32", "i32", "i32", "i32"),
            TILE
            | {"NIBBLES": nibbles, "GROUPED": not rounded, "ROUNDED": rounded}
            | {"BLOCK_ROWS": block_rows, "SPLITS": splits},
        )
    if rounded:
        CASES[f"round_rows_kernel {name}"] = ((BF16, rows, F32, "i32", "fp32", "fp32"), {"BLOCK": 16384})

for name, (types, constants) in CASES.items():
    modules = (kernels, expert_kernels, gpu_kernels)
    kernel = next(found for each in modules if (found := getattr(each, name.split(" ")[0], None)))
    free = [argument for argument in kernel.arg_names if argument not in constants]
    signature = dict(zip(free, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=H100)
    print(name, len(made.asm["cubin"]), made.metadata.shared, sep="\t")
