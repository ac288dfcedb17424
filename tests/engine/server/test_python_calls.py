"""Calls in Python's words become calls with arguments in JSON; nothing of them is ever evaluated."""

from __future__ import annotations

import asyncio
import json

import pytest

from lmi_bench.engine.server.python_calls import MAX_CHARS, MAX_DEPTH, python_calls
from lmi_bench.engine.server.tool_calls import CallFinder
from tests.engine.server.test_openai_routes import events_of
from tests.engine.server.test_tool_calls import HISTORY, TIMES, WEATHER, Counting, parts_of, tool_server

TWICE = '[times(text="5)", count=2), weather(city=\'Par"is é\')]'
CALLS = [("times", {"text": "5)", "count": 2}), ("weather", {"city": 'Par"is é'})]
LINES = TWICE[1:-1].replace(", w", "\nw")
TOOLS = [TIMES, WEATHER]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (TWICE, ""),
        (f" \n{TWICE}\n", ""),
        (f"<|python_start|>{TWICE}<|python_end|>", ""),  # Llama 4
        (f"Now.\n<|python_start|>{TWICE}<|python_end|> So.", "Now.\n"),
        (f"Now [1].<|tool_call_start|>{TWICE}<|tool_call_end|>So.", "Now [1]."),  # LFM2
        (f"a < b\n<function_calls>\n{LINES}\n</function_calls>", "a < b\n"),  # OLMo 3
        (TWICE.replace(", w", " ,w") + " and more", ""),
    ],
)
def test_calls_are_found_wherever_the_text_is_cut(text, content):
    cut = [(text[:at], text[at:]) for at in range(len(text))] + [tuple(text)]
    for pieces in cut:
        finder, shown, found = CallFinder(None, TOOLS), "", []
        for number, piece in enumerate(pieces, start=1):
            more, thought, calls = finder.push(piece, ended=number == len(pieces))
            shown, found = shown + more, found + calls
            assert thought == ""
        assert shown == content
        assert [call["index"] for call in found] == [0, 1]
        functions = [call["function"] for call in found]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == CALLS


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ("a=True, b=None, c=true, d=null,", {"a": True, "b": None, "c": True, "d": None}),
        ("a=-1.5e-3, b=+2, c=1_000, d=.5", {"a": -0.0015, "b": 2, "c": 1000, "d": 0.5}),
        ("a=[1, (2, {'x': [false]})]", {"a": [1, [2, {"x": [False]}]]}),
        ("a={1: 'x', 'null': \"null=None\"}", {"a": {"1": "x", "null": "null=None"}}),
        (r"""a='it\'s', b="\n\\", c="\d" """, {"a": "it's", "b": "\n\\", "c": r"\d"}),
        ('a="""x"y)\n""z""", b="", c=\'\'\'\'s\'\'\'', {"a": 'x"y)\n""z', "b": "", "c": "'s"}),
        ("a='x' \n 'y', null=1, é='ü'", {"a": "xy", "null": 1, "é": "ü"}),
        (r"a='\ud83d'", {"a": "\ud83d"}),  # half a pair, which JSON has as an escape
    ],
)
def test_literals_become_json(written, expected):
    for step in (1, 2, 1000):
        content, _, calls = parts_of(CallFinder(None, TOOLS), f"[times( {written})]", step)
        assert (content, list(calls)) == ("", [0])
        assert calls[0][1].encode()
        assert json.loads(calls[0][1]) == expected


@pytest.mark.parametrize(
    "written",
    [
        *("1", "*[1]", "**{}", "a", "a=b", "a=b()", "a=1 b=2", "a=1, a=2", "a:=1", "=1", ",", "if=1"),
        *("a=__import__('os').system('true')", "a=().__class__", "a=lambda: 1", "a=[x for x in []]", "a=1 if 1 else 2"),
        *("a=f'{1}'", "a=b'x'", "a={1}", "a=...", "a=1j", "a=0x1f", "a=007", "a=1+1", "a=9**9**9", "a=not True"),
        *("a=[1][0]", "a='x'.y", "a='x' % 1", "a={[1]: 2}", "a={**{}}", "a=1 # x", "a=1e999", "a=" + "9" * 5000),
        *("a='x\ny'", "a='\0'", "a='\\ud8'", "a=[1)]", "a=[1}", "a='x", "a=(1", "a=NULL"),
        *("a=" + "-" * 5000 + "1", "a=1" + "-1" * 5000, "a=" + "not " * 5000 + "1", "a=" + "lambda:" * 5000 + "1"),
        *("a=[1]" + "[1]" * 5000, "a=x" + ".x" * 5000, "a=x" + "()" * 5000, "a=0x0" + "e-0x0" * 5000),
        "a=" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "a='" + "x" * MAX_CHARS + "'",
        "a=[" + "[]," * MAX_CHARS + "]",
    ],
)
def test_what_is_no_literal_stays_text(written):
    for text in (f"[times({written})]", f"So: <|python_start|>[times({written})]<|python_end|>"):
        for step in (1, 1000) if len(text) < 100 else (1000, len(text)):
            assert parts_of(CallFinder(None, TOOLS), text, step) == (text, "", {})


@pytest.mark.parametrize(
    "text",
    [
        *("[1] says f(x)", "[", "[]", "[times", "[times]", "[times(", "[other(a=1)]", "f(a=1)", "[ times a(b=1)]"),
        *(
            "<|python_start|>",
            "a <|python_start|>print(1)<|python_end|> b",
            "x <|python_st",
            "[times(a=1",
            "x [times(a=1)]",
        ),
    ],
)
def test_what_is_no_call_of_a_tool_stays_text(text):
    for step in range(1, len(text) + 1):
        assert parts_of(CallFinder(None, TOOLS), text, step) == (text, "", {})


def test_code_that_calls_no_tool_is_shown_as_it_comes():
    finder, text = CallFinder(None, TOOLS), "a <|python_start|>print(1)"
    shown = "".join(finder.push(piece, ended=False)[0] for piece in text)
    assert shown == text


def test_other_styles_are_found_behind_the_same_begins():
    for text in ('[{"name": "times", "arguments": {}}]', "[TOOL_CALLS]times[ARGS]{}", "<tool_call>times</tool_call>"):
        for step in range(1, len(text) + 1):
            assert parts_of(CallFinder(None, TOOLS), text, step) == ("", "", {0: ("times", "{}")})


def test_a_fault_or_the_limit_leaves_all_calls_text():
    for end in (", times(a=b)]", ", times(a=", ", other()]", "\n times()", ", a]", ", 1]"):
        text = f"[weather(city='Rome'){end}"
        assert parts_of(CallFinder(None, TOOLS), text, 3) == (text, "", {})


def test_calls_too_long_to_be_read_are_not_cut():
    """65,536 characters end between two calls."""
    lines = "times(text='a')\n" * (MAX_CHARS // 16)
    assert len(python_calls(lines, ["times"])) == MAX_CHARS // 16
    assert python_calls(lines + "times()", ["times"]) == []


def test_one_call_where_several_are_not_wanted():
    assert list(parts_of(CallFinder(1, TOOLS), TWICE, 3)[2]) == [0]


@pytest.mark.parametrize("step", [7, 10**6])
def test_two_thousand_arguments_are_one_call(step):
    named = {f"a{number}": ["x", number] for number in range(2000)}
    written = ", ".join(f"{name}={value}" for name, value in named.items())
    content, _, calls = parts_of(CallFinder(None, TOOLS), f"[times({written})]", step)
    assert (content, json.loads(calls[0][1])) == ("", named)


@pytest.mark.parametrize(
    "written",
    [
        "a='" + ")}>(" * 10_000 + "'",
        "a='" + r"\'" * 30_000 + "'",
        "a=" + "''" * 30_000,
        " " * 60_000,
        "), times(" * 5000,
        "a=[" + "{}, " * 15_000 + "]",
    ],
)
def test_calls_are_searched_at_their_begin_and_read_at_their_end(written):
    finder, text = Counting(None, TOOLS), f"<|python_start|>[times({written})]"
    _, _, calls = parts_of(finder, text, 3)
    assert len(calls) == text.count("times(")
    assert finder.searches < 20


@pytest.mark.parametrize("head", ["", "[", "<function_calls>"])
@pytest.mark.parametrize(
    "part", ["times(", "times('", "<function_calls>times(", "[", "times(a=1)(", " ", "'", "\\", "times(a=1), "]
)
def test_hostile_answers_end(head, part):
    """A search that grows with the square of the length would not end here."""
    text = head + part * (50_000 // len(part))
    content, _, calls = parts_of(CallFinder(None, TOOLS), text, 1000)
    assert bool(content) != bool(calls)
    assert content in ("", text)


def test_a_server_sends_such_calls_whole_and_streamed(tmp_path, serve_toy, scripted):
    chat = {"messages": HISTORY[:1], "tools": TOOLS, "max_tokens": 200}

    async def main():
        special = ("<|python_start|>", "<|python_end|>")
        answer = f"<|python_start|>{TWICE}<|python_end|>"
        async with tool_server(serve_toy, scripted, tmp_path, answer, special=special) as server:
            path = "/v1/chat/completions"
            return [
                json.loads((await server.post(path, chat))[2])["choices"][0],
                [event["choices"][0] for event in events_of((await server.post(path, chat | {"stream": True}))[2])],
                json.loads((await server.post(path, chat | {"tool_choice": "none"}))[2])["choices"][0],
            ]

    whole, chunks, none = asyncio.run(main())
    streamed = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    for calls in (whole["message"]["tool_calls"], streamed):
        functions = [call["function"] for call in calls]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == CALLS
    assert whole["message"]["content"] is None
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == ""
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert none["message"]["content"] == TWICE
