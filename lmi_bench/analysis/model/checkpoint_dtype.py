"""Finds the number format of a model's published weights, where it is narrower than 16 bits.

`Qwen/Qwen3-32B-AWQ` and gpt-oss do not exist in 16 bits: such a plan would need up to four times
the memory. The first known counts: as stated, by `config.json`, by name, in the catalog.
"""

import re
from collections.abc import Mapping
from typing import Any

from lmi_bench.analysis.model.memory import checkpoint_format, weight_format
from lmi_bench.catalog.models import find_model_entry
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import config_file, read_object

USUAL_DTYPE = "float16"
_USUAL_BITS = 16

_WORDS = read_rows("dtype_words.csv", "analysis")
_MX_GROUP = 32  # weights with one scale in MXFP4; 16 in NVFP4


def dtype_of(source: str, *words: str) -> str | None:
    """The format that one of a source's words means, by the first row that fits; None: none.

    source  name, method, algorithm, bits, table or inferencex
    """
    for row in _WORDS:  # 8 bits before 4: `...-GPTQ-Int8` names both
        if row["source"] == source and any(re.fullmatch(row["words"], word) for word in words):
            return row["dtype"]
    return None


def narrow_dtype(model: str) -> str | None:
    """The format below 16 bits of a model's name, folder or catalog row; else None.

    >>> narrow_dtype("Qwen/Qwen3-32B-AWQ"), narrow_dtype("gpt-oss-120b"), narrow_dtype("qwen3-32b")
    ('int4', 'mxfp4', None)
    """
    if model and (path := config_file(model)) is not None:
        return _of_config(read_object(path))
    named = dtype_of("name", *re.split(r"[\s_./-]+", model.lower()))
    if named is not None:
        return named
    try:
        published = checkpoint_format(find_model_entry(model).checkpoint_dtype)
    except InputError:
        return None  # the lookup of the shape reports an unknown name
    return published.name if published.bits < _USUAL_BITS else None


def planned_dtype(model: str, stated: str | None = None) -> str:
    """The format to plan with: stated, else the checkpoint's, else float16; raises InputError."""
    if stated is not None:
        return weight_format(stated).name
    return narrow_dtype(model) or USUAL_DTYPE


def dtype_note(model: str, stated: str | None = None) -> str | None:
    """The note for the user on a format that was not stated and is not float16; else None."""
    narrow = None if stated else narrow_dtype(model)
    if narrow is None:
        return None
    return f"no --dtype: planned in {narrow}, as the weights of {model} are published"


def _of_config(config: Mapping[str, Any]) -> str | None:
    """The format of a quantized folder: AWQ, GPTQ, FP8, MXFP4, NVFP4, compressed-tensors."""
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    stated = config.get("quantization_config", inner)
    if not isinstance(stated, Mapping):
        return None
    groups = stated.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [each.get("weights") for each in groups.values() if isinstance(each, Mapping)]
        stated = next((each for each in weights if isinstance(each, Mapping)), {})
        if stated.get("type") == "float":
            four = "mxfp4" if stated.get("group_size") == _MX_GROUP else "nvfp4"
            return {8: "float8", 4: four}.get(int(stated.get("num_bits") or 0))
    method = str(stated.get("quant_method"))
    if method.startswith("modelopt"):
        return dtype_of("algorithm", str(stated.get("quant_algo")))
    bits = stated.get("bits", stated.get("num_bits"))
    return dtype_of("method", method) or (
        dtype_of("bits", str(bits)) if type(bits) is int else None
    )
