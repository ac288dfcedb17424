"""Tool calls in Python's words, `[f(a=1), g(b="x")]` (Llama 3.2 and 4, LFM2), or one a line (OLMo).

Values are literals, or JSON's true, false and null. What else Python knows is refused before `ast`
sees it, so that nothing is evaluated and no tree is deeper than its brackets.
"""

import ast
import json
import re
import warnings
from collections.abc import Container
from itertools import accumulate
from typing import Any, Final

MAX_CHARS: Final = 2**16  # of an answer's calls
MAX_DEPTH: Final = 32  # of brackets
_STRING: Final = "|".join(rf"{quote}(?:(?!{quote}|\\).|\\.)*+{quote}" for quote in ("'''", '"""', "'", '"'))
_VALUE: Final = rf"{_STRING}|[-+]?(?:\d[\d_]*+(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?|True|False|None|true|false|null"
_WRITTEN: Final = re.compile(
    rf"(?:[(\[{{,:\s]|(?!\d)\w++\s*+=|[\w.]{{1,99}}+\(|(?:{_VALUE})(?=\s*+[,:)\]}}\"'])|[)\]}}](?!\s*+[(\[{{]))*+",
    re.DOTALL,
)
_TOKEN: Final = re.compile(rf"{_STRING}|[()\[\]{{}}]|\b(?:true|false|null)\b(?!\s*+=)", re.DOTALL)
_IN_PYTHON: Final = {"true": "True", "false": "False", "null": "None"}
_DEPTH: Final = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)


def python_calls(text: str, tools: Container[str]) -> list[tuple[str, str]]:
    """Name, and arguments in JSON, of each call with which the text begins; none if one is no call
    of these tools, or not whole.

    >>> python_calls("[f(a=[1, None])] Done.", ["f"])
    [('f', '{"a": [1, null]}')]
    """
    found = _WRITTEN.match(text, 0, 2 * MAX_CHARS)
    written, calls = found[0] if found else "", []
    depths = accumulate(_DEPTH.get(token, 0) for token in _TOKEN.findall(written))
    if len(written) > MAX_CHARS or max(depths, default=0) > MAX_DEPTH:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python keeps as they are
            tree = ast.parse(_TOKEN.sub(lambda token: _IN_PYTHON.get(token[0], token[0]), written.strip()))
        for line in tree.body:
            value = line.value if isinstance(line, ast.Expr) else line
            for call in value.elts if isinstance(value, ast.List) else [value]:
                if not isinstance(call, ast.Call) or call.args:
                    return []
                name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
                arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
                if name not in tools or len(arguments) < len(call.keywords):
                    return []
                calls.append((name, in_json(arguments, allow_nan=False)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []
    return calls


def in_json(value: Any, *, allow_nan: bool = True) -> str:
    """JSON of a value; half a surrogate pair, which UTF-8 does not have, stays escaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=allow_nan).encode("utf-8", "backslashreplace").decode()
