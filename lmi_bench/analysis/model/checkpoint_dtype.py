"""Finds the number format of a model's published weights, where it is narrower than 16 bits.

`Qwen/Qwen3-32B-AWQ` and gpt-oss do not exist in 16 bits: such a plan would need up to four times
the memory. The first known counts: as stated, by `config.json`, by name, in the catalog.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lmi_bench.analysis.model.memory import checkpoint_format, weight_format
from lmi_bench.catalog.models import find_model_entry
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import config_file, read_object

USUAL_DTYPE = "float16"
_USUAL_BITS = 16

_WORDS = read_rows("dtype_words.csv", "analysis")
_NAMED: Final = ("quant_method", "quant_algo", "dtype")  # keys whose value names a format
_OF_OTHERS: Final = re.compile(r"(input|output|kv_cache|layer_quant).*|bias")  # than all weights


def dtype_of(source: str, *words: str) -> str | None:
    """The format that one of a source's words means, by the first row that fits; None: none.

    source  name, config, table or inferencex
    """
    for row in _WORDS:  # `...-GPTQ-Int8` names both: 8 bits first; of a config the narrowest
        if row["source"] == source and any(re.fullmatch(row["words"], word) for word in words):
            return row["dtype"]
    return None


def narrow_dtype(model: str) -> str | None:
    """The format below 16 bits of a model's name, folder or catalog row; else None.

    >>> narrow_dtype("Qwen/Qwen3-32B-AWQ"), narrow_dtype("gpt-oss-120b"), narrow_dtype("qwen3-32b")
    ('int4', 'mxfp4', None)
    """
    if model and config_file(model) is not None:
        return dtype_of("config", *_config_words(model))
    named = dtype_of("name", *re.split(r"[\s_./-]+", model.lower()))
    if named is not None:
        return named
    try:
        published = checkpoint_format(find_model_entry(model).checkpoint_dtype)
    except InputError:
        return None  # the lookup of the shape reports an unknown name
    return published.name if published.bits < _USUAL_BITS else None


def planned_dtype(model: str, stated: str | None = None) -> str:
    """The format to plan with: stated, else the checkpoint's, else float16.

    Raises InputError for an unknown format, also of a folder's weights.
    """
    if stated is not None:
        return weight_format(stated).name
    narrow = narrow_dtype(model)
    if narrow is None and _config_words(model):
        raise InputError(
            f"{model} has quantized weights of a format that is not known: state the nearest one "
            "with --dtype, such as --dtype int4"
        )
    return narrow or USUAL_DTYPE


def dtype_note(model: str, stated: str | None = None) -> str | None:
    """The note for the user on a format that was not stated and is not float16; else None."""
    narrow = None if stated else narrow_dtype(model)
    if narrow is None:
        return None
    return f"no --dtype: planned in {narrow}, as the weights of {model} are published"


def _config_words(model: str) -> set[str]:
    """What a folder says of the format of its quantized weights; empty if it says nothing."""
    if not model or (path := config_file(model)) is None:
        return set()
    config, beside = read_object(path), path.with_name("hf_quant_config.json")
    text = config.get("text_config")
    config = {**(text if isinstance(text, Mapping) else {}), **config}
    stated = config.get("quantization_config")
    if stated is None and beside.is_file():  # ModelOpt's
        stated = read_object(beside).get("quantization")
    if not isinstance(stated, Mapping):
        return set()
    stated = {"expert_dtype": config.get("expert_dtype"), **stated}  # DeepSeek-V4: others in FP8
    return set(_words_in(stated, "-experts" if "self_attn" in str(stated.get("ignore")) else ""))


def _words_in(stated: Mapping[str, Any], covers: str) -> Iterator[str]:
    """Words of an object and of those within it; covers: what they apply to, empty: all layers."""
    bits = stated.get("bits", stated.get("num_bits"))
    if bits is not None:
        yield f"{stated.get('type', 'int')}{bits}-{stated.get('group_size')}{covers}"
    for key, value in stated.items():
        if key == "expert_dtype" and value:
            yield f"{value}-experts"
        if _OF_OTHERS.fullmatch(key):
            continue
        if value is True or (value and key in _NAMED):
            yield key if value is True else str(value)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _words_in(each, covers)
