"""Models by name: their shape and their checkpoint's dtype."""

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Final

from lmi_bench.catalog.tables import Index, Row, model_key, model_words, read_rows, variant_words
from lmi_bench.core.errors import InputError
from lmi_bench.models.folder import config_file, read_object
from lmi_bench.models.planning_config import planning_shape
from lmi_bench.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One row: the model's shape and its checkpoint's facts.

    gated     source and date that the Hub asks for a token; empty: it does not, as far as known
    contexts  WORD:TOKENS of variants with another context, by a word of their name
    """

    shape: ModelShape
    hf_id: str
    checkpoint_dtype: str
    gated: str
    contexts: tuple[str, ...]


_COUNTS: Final = [each.name for each in fields(ModelShape) if each.type is int]


def _from_row(row: Row) -> CatalogModel:
    counts: dict[str, Any] = {name: int(row[name] or 0) for name in _COUNTS}
    shape = ModelShape(
        name=row["model"],
        tied_embeddings=row["tied_embeddings"] == "1",
        parallel_branches=row["parallel_branches"] == "1",
        sliding_window=int(row["sliding_window"]) if row["sliding_window"] else None,
        full_attention_layers=int(row["full_attention_layers"]),
        aliases=tuple(filter(None, row["aliases"].split(";"))),
        source=row["source"],
        architecture=row["architecture"],
        **counts,
    )
    contexts = tuple(filter(None, row["variant_positions"].split(";")))
    return CatalogModel(shape, row["hf_id"], row["checkpoint_dtype"], row["gated"], contexts)


@cache
def all_model_entries() -> tuple[CatalogModel, ...]:
    """All models in the catalog with their checkpoints' facts, in table order."""
    return tuple(_from_row(row) for row in read_rows("models.csv"))


def _names(entry: CatalogModel) -> tuple[str, ...]:
    return (entry.shape.name, entry.hf_id, *entry.shape.aliases)


_INDEX = Index(
    "model",
    "Give a catalog name, or a folder with a config.json.",
    all_model_entries,
    names=_names,
    shown=2,
    key=model_key,
)


_DATE: Final = re.compile(r"\d{4}|\d{6}|thinking|preview|latest|terminus|exp|v2|bnb|qat|q\d|[0ksm]")
_OTHER_WORK: Final = re.compile(r"embed|rerank|(^|[/-])(bge|e5|gte|colbert|whisper|clip|bert)(-|$)", re.IGNORECASE)


def find_model_entry(name: str) -> CatalogModel:
    """Find a row by model name, Hugging Face id or alias; variants map to their base model.

    Raises InputError with the nearest names, or for a model of other work.
    """
    if _OTHER_WORK.search(name):
        raise InputError(
            f"model {name!r} by its name embeds, ranks or hears; only text generation by decoder models is planned"
        )
    return _read_as(name) or _INDEX.find(name)


def _read_as(name: str) -> CatalogModel | None:
    """The only row of which the name is a dated variant or a shorter form; else None.

    `Qwen3-30B-A3B-Instruct-2507` and `qwen3-30b` are `qwen3-30b-a3b`.
    """
    if _INDEX.has(name):
        return None
    words = [word for word in model_words(name) if not _DATE.fullmatch(word)]
    forms = [(entry, [model_words(each) for each in _names(entry) if each]) for entry in all_model_entries()]
    exact = [entry for entry, names in forms if words in names]
    found = exact or [entry for entry, names in forms if any(each[: len(words)] == words for each in names)]
    return found[0] if len(found) == 1 and words else None


def model_note(name: str) -> str | None:
    """The note for the user on how a name was read, or why a shape may be wrong; else None."""
    if config_file(name) is not None:
        return find_model(name).doubt or None
    read = _read_as(name)
    return None if read is None else f"model {name} is read as {read.shape.name}"


def is_gated(hub_id: str) -> bool:
    """Whether the Hub asks for a token: for a catalog model's variants by the same publisher too.

    Of a publisher whose catalog models are all gated, any other model counts as gated.
    """
    publisher = hub_id.partition("/")[0]
    own = [each for each in all_model_entries() if each.hf_id.partition("/")[0] == publisher]
    try:
        entry = find_model_entry(hub_id)
    except InputError:
        return bool(own) and all(each.gated for each in own)
    return bool(entry.gated) and entry in own


def _variant(entry: CatalogModel, name: str) -> ModelShape:
    """The shape with the context of the variant that a name states, such as an instruct model."""
    words = {*model_words(name), *variant_words(name)}
    stated = (each.split(":") for each in entry.contexts)
    tokens = next((int(number) for word, number in stated if word in words), None)
    return entry.shape if tokens is None else replace(entry.shape, max_positions=tokens)


def find_model(name: str) -> ModelShape:
    """The shape to plan with of a name, Hugging Face id, alias, folder or config.json.

    Raises InputError with the nearest names, or with what the folder lacks.
    """
    path = config_file(name)
    if path is None:
        return _variant(find_model_entry(name), name)
    folder = path.resolve().parent
    named = folder.name if path.name == "config.json" else path.stem
    return planning_shape(named, read_object(path), folder)
