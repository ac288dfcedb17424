"""Frozen values of JSON files: checked when read, written back unchanged.

A value that was read keeps the order of its keys and keys that this version does not know, so that
`to_json(from_json(content)) == content` holds for files of older and newer versions too.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from lmi_bench.core.errors import InputError

OPTIONAL: Mapping[str, object] = {"optional": True}
"""Metadata of a field whose key is left out of the file if the value is None."""
LARGEST = 2.0**63  # of the figures in a file: results computed from them stay finite


def key_of(name: str) -> Mapping[str, object]:
    """Metadata of a field whose key in the file is another."""
    return {"key": name}


class Slot(NamedTuple):
    """The field of a key and its accepted values.

    accepts   Python types of the JSON value
    of        the JsonValue class, if the value is an object of known keys or a list of such
    optional  left out of the file if the value is None
    is_tuple  a list in the file, a tuple here
    kind      the field's annotation: plain values in lists and mappings are checked by it
    """

    name: str
    accepts: frozenset[type]
    of: "type[JsonValue] | None"
    optional: bool = False
    required: bool = False
    is_tuple: bool = False
    kind: Any = Any

    def takes(self, value: Any) -> bool:
        """Whether a JSON value is one of the field's; NumPy's are subclasses, true is no number."""
        is_one = not isinstance(value, bool) and isinstance(value, tuple(self.accepts))
        if is_one and isinstance(value, (int, float)):
            return abs(value) <= LARGEST
        is_plain = self.of is None and isinstance(value, (list, tuple, Mapping))
        return (is_one or type(value) in self.accepts) and (not is_plain or _fits(value, self.kind))

    def read(self, value: Any, where: str, key: str) -> Any:
        """The value of a JSON value, or of one in a list."""
        if self.of is None:
            return value
        return self.of.from_json(value, f"{where}: {key}" if where else key)


@dataclass(frozen=True, slots=True)
class JsonValue:
    """Base of the values; a subclass is a frozen dataclass whose fields are its keys, in order.

    The key of a field without a default must be in the object.
    """

    file_keys: tuple[str, ...] | None = field(default=None, kw_only=True, compare=False, repr=False)
    unknown: Mapping[str, Any] | None = field(default=None, kw_only=True, compare=False, repr=False)

    @classmethod
    def from_json(cls, content: object, where: str = "") -> Self:
        """The value of a JSON object; InputError names `where` and the field that is damaged."""
        return cls(**cls._read(content, where))

    def to_json(self) -> dict[str, Any]:
        """The JSON object: the keys it was read with, then those set since."""
        slots, content = self.slots(), {}
        for key in self.file_keys or ():
            known = key in slots
            content[key] = self._written(slots[key].name) if known else (self.unknown or {})[key]
        for key, slot in slots.items():
            if key not in content and not self._is_left_out(slot):
                content[key] = self._written(slot.name)
        return content

    @classmethod
    def slots(cls) -> Mapping[str, Slot]:
        """The slot of each key, in the order of writing."""
        return slots_by_field(cls)

    @classmethod
    def _read(cls, content: object, where: str) -> dict[str, Any]:
        """The constructor's arguments from a JSON object."""
        if not isinstance(content, Mapping):
            raise InputError(f"{where}: an object is expected, not {_shown(content)}")
        slots = cls.slots()
        values: dict[str, Any] = {"file_keys": tuple(content)}
        unknown = {}
        for key, value in content.items():
            slot = slots.get(key)
            if slot is None:
                unknown[key] = value
            elif not slot.takes(value):
                raise InputError(f"{where}: {key} must be {_names(slot)}, not {_shown(value)}")
            elif slot.is_tuple and value is not None:
                values[slot.name] = tuple(slot.read(each, where, key) for each in value)
            else:
                values[slot.name] = None if value is None else slot.read(value, where, key)
        for key, slot in slots.items():
            if slot.required and key not in content:
                raise InputError(f"{where}: it has no `{key}`")
        if unknown:
            values["unknown"] = unknown
        return values

    def _written(self, name: str) -> Any:
        return _json_of(getattr(self, name))

    def _is_left_out(self, slot: Slot) -> bool:
        """Whether a key that was not read stays out of the file."""
        if self.file_keys is None:
            return slot.optional and self._written(slot.name) is None
        return bool(getattr(self, slot.name) == _defaults(type(self))[slot.name])


def _json_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json_of(each) for each in value]
    return value.to_json() if isinstance(value, JsonValue) else value


_SLOTS: dict[type, dict[str, Slot]] = {}
_DEFAULTS: dict[type, dict[str, Any]] = {}


def slots_by_field(cls: type[JsonValue]) -> dict[str, Slot]:
    """The slot of each field of a class, from its annotations."""
    if cls not in _SLOTS:
        hints = get_type_hints(cls)
        _SLOTS[cls] = {
            each.metadata.get("key", each.name): slot_of(each.name, hints[each.name])._replace(
                optional="optional" in each.metadata, required=_defaults(cls)[each.name] is MISSING
            )
            for each in fields(cls)
            if each.name not in ("file_keys", "unknown")
        }
    return _SLOTS[cls]


def _defaults(cls: type[JsonValue]) -> dict[str, Any]:
    if cls not in _DEFAULTS:
        _DEFAULTS[cls] = {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(cls)
        }
    return _DEFAULTS[cls]


def slot_of(name: str, annotation: Any) -> Slot:
    """The slot of a key with an annotation's type."""
    accepts: set[type] = set()
    of = None
    kinds = _alternatives(annotation)
    for each in kinds:
        kind = get_origin(each) or each
        if kind is tuple and _is_value(get_args(each)[0]):
            of = get_args(each)[0]
        if _is_value(kind):
            of = kind
            accepts.add(dict)
        elif kind is float:
            accepts |= {int, float}
        elif isinstance(kind, type) and issubclass(kind, Mapping):
            accepts.add(dict)
        elif isinstance(kind, type) and issubclass(kind, Sequence) and kind is not str:
            accepts |= {list, tuple}
        else:
            accepts.add(kind)
    is_tuple = any(get_origin(each) is tuple for each in kinds)
    return Slot(name, frozenset(accepts), of, is_tuple=is_tuple, kind=annotation)


def check_types(kind: type, values: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a value that the field of that name cannot have; other keys are passed.

    kind  a dataclass; numbers must be below 2**63, and mappings and `tuple[X, ...]` are looked into
    """
    for key, annotation in get_type_hints(kind).items():
        if key in values and not _fits(values[key], annotation):
            raise InputError(f"{where}: {key} cannot be {_shown(values[key])}")


def _fits(value: Any, annotation: Any) -> bool:
    return any(_fits_one(value, each) for each in _alternatives(annotation))


def _fits_one(value: Any, annotation: Any) -> bool:
    kind, parts = get_origin(annotation) or annotation, get_args(annotation)
    if kind is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and abs(value) <= LARGEST
    if kind in (int, bool, str, types.NoneType):
        return type(value) is kind and (kind is not int or abs(value) <= LARGEST)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(each, parts[1]) for each in value.values())
    if kind in (tuple, Sequence) and isinstance(value, (list, tuple)):
        kinds = parts if kind is tuple and parts[-1] is not ... else parts[:1] * len(value)
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    return kind not in (tuple, Sequence)  # the others are checked where it is made


def _is_value(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, JsonValue)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _names(slot: Slot) -> str:
    if float in slot.accepts:
        return "a number"
    names = {
        int: "a whole number",
        str: "a text",
        bool: "true or false",
        dict: "an object",
        list: "a list of its kind of values",
    }
    return next(names[kind] for kind in names if kind in slot.accepts)


def _shown(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= 40 else f"{text[:37]}..."
    is_large = isinstance(value, (int, float)) and abs(value) > LARGEST
    return f"{text}, which is too large" if is_large else text
