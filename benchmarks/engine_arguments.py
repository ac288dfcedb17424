"""The arguments of vLLM and SGLang, version by version, read from their sources without importing.

Each source is a wheel, an sdist or an unpacked folder named ENGINE-VERSION. `ast` reads the
annotated fields of the argument classes, the calls of `add_argument` and the pydantic bounds of the
configuration classes that the fields refer to. Rows that do not change from one version to the next
are one row; an argument that changes has several.

    pip download --no-deps --no-binary :all: vllm==0.26.0     (sglang: without --no-binary)
    python benchmarks/engine_arguments.py vllm vllm-*.tar.gz
    python benchmarks/engine_arguments.py sglang sglang-*.whl
"""

from __future__ import annotations

import argparse
import ast
import csv
import datetime
import itertools
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

OUT = Path(__file__).parent.parent / "lmi_bench" / "deploy" / "data" / "engine_arguments"
COLUMNS = ("name", "part", "kind", "choices", "range", "default", "since", "until")
FILES = {
    "vllm": r"vllm/(engine/arg_utils|config(/\w+)?|entrypoints/\w+/cli_args"
    r"|model_executor/layers/quantization/__init__)\.py",
    "sglang": r"sglang/srt/(server_args|arg_groups/(choices|fields/\w+))\.py",
}
CLASSES = {"vllm": {"engine": "AsyncEngineArgs", "frontend": "FrontendArgs"}, "sglang": {"engine": "ServerArgs"}}
BOUNDED = ("CacheConfig", "SchedulerConfig", "ParallelConfig", "ModelConfig")
SIZES = (
    *("max_model_len", "max_num_batched_tokens", "max_num_scheduled_tokens"),
    *("kv_cache_memory_bytes", "safetensors_prefetch_block_size"),
)
CHECKED_LATER = ("quantization",)  # its annotation takes any text, which ModelConfig refuses
STATED_RANGES = {"sglang": {"mem_fraction_static": "(0,1)"}}  # its help calls it a fraction
NUMBERS = ("int", "size", "float")
BOUNDS = {"ge": "[{}", "gt": "({}", "le": "{}]", "lt": "{})"}


@dataclass(frozen=True)
class Argument:
    """One argument in one version; range in interval notation, choices separated by blanks."""

    part: str
    kind: str
    choices: str = ""
    range: str = ""
    default: str = ""


@dataclass(frozen=True)
class Source:
    """The module-level names, the classes and the calls of `add_argument` of one version."""

    names: dict[str, ast.expr]
    classes: dict[str, ast.ClassDef]
    calls: list[ast.Call]

    def fields(self, class_name: str) -> dict[str, ast.AnnAssign]:
        """Annotated fields of a class and of its bases."""
        found: dict[str, ast.AnnAssign] = {}
        node = self.classes.get(class_name)
        if node is None:
            return found
        bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
        if class_name == "ServerArgs":  # since SGLang 0.5.20 its fields are in groups
            bases += [name for name, one in self.classes.items() if _is_group(one)]
        for base in bases:
            found |= self.fields(base)
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                found[item.target.id] = item
        return {
            name: item
            for name, item in found.items()
            if not name.startswith("_") and "no_cli=True" not in ast.unparse(item.annotation)
        }

    def values(self, node: ast.expr | None) -> list[str]:
        """The constants that a literal type or a list of choices stands for."""
        match node:
            case ast.Constant(value=None):
                return []
            case ast.Constant(value=value):
                return [str(value)]
            case ast.Name(id=name) if name in self.names:
                return self.values(self.names[name])
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [value for item in items for value in self.values(item)]
            case ast.Dict(keys=keys):
                return [value for key in keys if key for value in self.values(key)]
            case ast.BinOp(left=left, right=right):
                return self.values(left) + self.values(right)
            case ast.Starred(value=inner) | ast.Subscript(slice=inner):
                return self.values(inner)
            case ast.Call(func=ast.Attribute(value=inner, attr="keys")):
                return self.values(inner)
            case ast.Call(args=[inner, *_]):
                return self.values(inner)
        raise LookupError(ast.unparse(node) if node else "nothing")

    def parts(self, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """The kinds that an annotation allows, each with its node."""
        match node:
            case ast.Constant(value=None):
                return
            case ast.Constant(value=str(text)):
                yield from self.parts(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                yield from self.parts(left)
                yield from self.parts(right)
            case ast.Name(id=name) if name in self.names and name not in self.classes:
                yield from self.parts(self.names[name])
            case ast.Subscript(value=outer, slice=inner):
                kind = ast.unparse(outer).split(".")[-1]
                members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                if kind in ("A", "Annotated", "SkipValidation"):
                    yield from self.parts(members[0])
                elif kind in ("Optional", "Union"):
                    for member in members:
                        yield from self.parts(member)
                else:
                    yield kind.lower(), node
            case _:
                yield ast.unparse(node).split(".")[-1], node

    def kind(self, name: str, annotation: ast.expr) -> tuple[str, str]:
        """An argument's kind and its choices, in the order in which vLLM looks at its types."""
        found = dict(self.parts(annotation))
        kinds = set(found)
        if "bool" in kinds:
            return ("str" if "str" in kinds else "bool"), ""
        if "literal" in kinds and ("str" not in kinds or name in CHECKED_LATER):
            return "enum", " ".join(self.values(found["literal"]))
        if kinds & {"list", "tuple", "set", "sequence"}:
            return "list", ""
        if "int" in kinds:
            return ("size" if name in SIZES else "int"), ""
        if "float" in kinds:
            return "float", ""
        mappings = kinds & {"dict", "mapping"}
        configs = [kind for kind in kinds if kind.endswith(("Config", "Args"))]
        return ("json" if (mappings or configs) and "str" not in kinds else "str"), ""

    def origin(self, item: ast.AnnAssign) -> ast.expr | None:
        """The expression that states a field's default, in a configuration class if it is there."""
        match item.value:
            case ast.Attribute(value=ast.Name(id=place), attr=name):
                field = self.fields(place).get(name)
            case ast.Call(args=[ast.Name(id=place), ast.Constant(value=str(name))]):
                field = self.fields(place).get(name)
            case value:
                return value
        return None if field is None else field.value

    def range(self, name: str, origin: ast.expr | None) -> str:
        """The bounds of a field, or of its namesake in a configuration class, as an interval."""
        namesakes = (self.fields(place).get(name) for place in BOUNDED)
        values = (origin, *(field.value for field in namesakes if field is not None))
        return next(filter(None, map(_interval, values)), "")


def read_source(path: Path, engine: str) -> Source:
    """The parsed files of a wheel, an sdist or a folder."""
    wanted = re.compile(rf"(?:^|/)(?:python/)?{FILES[engine]}$")
    texts: list[str | bytes] = []
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.py") if wanted.search(str(file)))
        texts += [file.read_text("utf-8") for file in files]
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            texts += [wheel.read(name) for name in wheel.namelist() if wanted.search(name)]
    else:
        with tarfile.open(path) as sdist:
            members = [member for member in sdist if wanted.search(member.name)]
            texts += [file.read() for file in map(sdist.extractfile, members) if file]
    source = Source({}, {}, [])
    for tree in map(ast.parse, texts):
        for item in ast.walk(tree):
            match item:
                case ast.ClassDef(name=name):
                    source.classes[name] = item
                case ast.Call(func=ast.Attribute(attr="add_argument")):
                    source.calls.append(item)
        for item in tree.body:
            match item:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    source.names[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    source.names[name] = value
    return source


def arguments(path: Path, engine: str) -> dict[str, Argument]:
    """Every argument of one version, by name."""
    source = read_source(path, engine)
    found: dict[str, Argument] = {}
    for part, class_name in CLASSES[engine].items():
        for name, item in source.fields(class_name).items():
            kind, choices = source.kind(name, item.annotation)
            origin = source.origin(item)
            bounds = source.range(name, origin) if kind in NUMBERS else ""
            argument = Argument(part, kind, choices, bounds, _default(origin))
            names, argument = _annotated(source, item.annotation, argument)
            found.setdefault(name, argument)
            found |= {alias: argument for alias in names if alias not in found}
    for call in source.calls:
        _read_call(source, call, found, keeps_new=engine == "sglang")
    for name, interval in STATED_RANGES.get(engine, {}).items():
        found[name] = replace(found[name], range=interval)
    return {name: found[name] for name in sorted(found)}


def _annotated(source: Source, annotation: ast.expr, argument: Argument) -> tuple[list[str], Argument]:
    """What `Annotated[T, Arg(choices=..., aliases=...)]` adds: other names, and the choices."""
    names: list[str] = []
    for call in ast.walk(annotation):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Arg":
            for keyword in sorted(call.keywords, key=lambda one: str(one.arg)):  # choices first
                if keyword.arg in ("aliases", "cli_name"):
                    names += [_name(text) for text in source.values(keyword.value)]
                elif keyword.arg == "choices" and argument.kind != "list":
                    argument = _chosen(source, keyword.value, argument)
                elif keyword.arg == "type_parser" and argument.kind != "enum":
                    kind = "json" if "json" in ast.unparse(keyword.value) else "str"
                    argument = replace(argument, kind=kind)
    return names, argument


def _read_call(source: Source, call: ast.Call, found: dict[str, Argument], *, keeps_new: bool) -> None:
    """Take choices and types from a call of `add_argument`; add its other names."""
    texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    names = [_name(text) for text in texts if isinstance(text, str) and text.startswith("--")]
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if "dest" in given:
        names += source.values(given["dest"])
    known = next((name for name in names if name in found), None)
    if not names or (known is None and not keeps_new):
        return
    argument = found[known] if known else Argument("engine", "str")
    kind = {"json.loads": "json", "int": "int", "float": "float", "nullable_kvs": "str"}.get(
        ast.unparse(given["type"]) if "type" in given else "", argument.kind
    )
    if "action" in given:
        kind = "bool" if "store_true" in ast.unparse(given["action"]) else argument.kind
    if "nargs" in given and "?" not in ast.unparse(given["nargs"]):
        kind = "list"
    argument = replace(argument, kind="size" if names[0] in SIZES and kind == "int" else kind)
    if "choices" in given and kind != "list":
        argument = _chosen(source, given["choices"], argument)
    found |= dict.fromkeys(names if keeps_new else [known or ""], argument)


def _chosen(source: Source, choices: ast.expr, argument: Argument) -> Argument:
    """The argument with its choices, where constants state them."""
    try:
        values = source.values(choices)
    except LookupError:
        return argument  # from a registry at run time: any text
    return replace(argument, kind="enum", choices=" ".join(dict.fromkeys(values)), range="")


def _interval(origin: ast.expr | None) -> str:
    """The bounds of a pydantic Field, as an interval."""
    if not isinstance(origin, ast.Call):
        return ""
    stated = {keyword.arg: ast.unparse(keyword.value) for keyword in origin.keywords}
    ends = [BOUNDS[key].format(stated[key]) for key in BOUNDS if key in stated]
    low = next((end for end in ends if end[0] in "[("), "(")
    high = next((end for end in ends if end[-1] in "])"), ")")
    return f"{low},{high}" if ends else ""


def _default(origin: ast.expr | None) -> str:
    if isinstance(origin, ast.Call):
        stated = [keyword.value for keyword in origin.keywords if keyword.arg == "default"]
        origin = stated[0] if stated else None
    if not isinstance(origin, ast.Constant) or origin.value is None:
        return ""
    value = origin.value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_group(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "msgspec.Struct" for base in node.bases)


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def version_of(path: Path, engine: str) -> tuple[str, tuple[int, ...]]:
    """A version as text, and as numbers to sort by; a post-release comes after its release."""
    text = path.name.removeprefix(f"{engine}-").removesuffix(".tar.gz").split("-")[0]
    return text, tuple(int(number) for number in re.findall(r"\d+", text))


def table(paths: list[Path], engine: str) -> list[tuple[str, ...]]:
    """The rows of COLUMNS: each run of versions in which an argument stays the same."""
    ordered = sorted(paths, key=lambda path: version_of(path, engine)[1])
    versions = [version_of(path, engine)[0] for path in ordered]
    read = [arguments(path, engine) for path in ordered]
    rows: list[tuple[str, ...]] = []
    for name in sorted({name for one in read for name in one}):
        history = [one.get(name) for one in read]
        stated = next((one.range for one in history if one and one.range), "")
        history = [replace(one, range=one.range or stated) if one and one.kind in NUMBERS else one for one in history]
        start = 0
        for argument, run in itertools.groupby(history):
            end = start + len(list(run))
            if argument is not None:
                until = versions[end] if end < len(versions) else ""
                rows.append((name, *astuple(argument), versions[start], until))
            start = end
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=FILES)
    parser.add_argument("sources", nargs="+", type=Path)
    asked = parser.parse_args()
    rows = table(asked.sources, asked.engine)
    OUT.mkdir(exist_ok=True)
    with (OUT / f"{asked.engine}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    ordered = sorted((version_of(path, asked.engine) for path in asked.sources), key=lambda v: v[1])
    versions = ", ".join(text for text, _ in ordered)
    today = datetime.datetime.now(datetime.UTC).date()
    source = f"{asked.engine}: PyPI, read on {today}, versions {versions}\n"
    (OUT / f"{asked.engine}.source.txt").write_text(source, encoding="utf-8")
    print(f"{len(rows)} rows of {len({row[0] for row in rows})} arguments: {source}", end="")


if __name__ == "__main__":
    main()
