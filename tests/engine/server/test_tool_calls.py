"""Tools reach the model's template, and its calls reach the client, streamed or not."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from transformers import PreTrainedTokenizerFast

from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.server.openai_request import ChatCall
from lmi_bench.engine.server.tool_calls import CallFinder
from tests.engine.server.test_chat_template import folder_with, with_template
from tests.engine.server.test_openai_routes import events_of

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools> Answer <tool_call>{...}</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}{%- set call = tool_call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = (
    '{% if tools %}Respond with {"name": name, "parameters": {}}.{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now, in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = '{"city": "Rome"}'
PARIS = '{"name": "weather", "arguments": {"city": "Paris é"}}'
ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
HISTORY = [
    {"role": "user", "content": "And in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "Rain."},
]


def test_a_history_of_calls_is_rendered_as_transformers_renders_it(tmp_path):
    """transformers wants the arguments as an object, and OpenAI's clients send them as a text."""
    folder = folder_with(tmp_path, QWEN)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    theirs.chat_template = QWEN
    history = json.loads(json.dumps(HISTORY))
    history[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Paris"}
    expected = theirs.apply_chat_template(history, tools=[WEATHER], add_generation_prompt=True, tokenize=False)
    call = ChatCall.read({"messages": HISTORY, "tools": [WEATHER]})
    messages = [message.for_template() for message in call.messages]
    assert ["tool_calls" in message for message in messages] == [False, True, False]
    text = ChatTemplate.from_folder(folder).render(messages, call.template_variables())
    assert text == expected
    assert '"arguments": {"city": "Paris"}' in text


NESTED = """<tool_call>{"name": "weather", "arguments": {"city": "<tool_call>{}}"}}</tool_call>"""


@pytest.mark.parametrize(
    ("text", "content", "cities"),
    [
        (f"Let me see.\n<tool_call>\n{PARIS}\n</tool_call>", "Let me see.\n", ["Paris é"]),
        (f"<tool_call>{PARIS}</tool_call>\n<tool_call>{ROME} Now?", "", ["Paris é", "Rome"]),
        (f"a <tool_call>no</tool_call> <tool_call>{ROME}", "a <tool_call>no</tool_call> ", ["Rome"]),
        (NESTED, "", ["<tool_call>{}}"]),
        ("a <tool_call>{no}</tool_call> b", None, []),
        ('if a <tool_c and {"name": 1}', None, []),
        (f"{ROME}; {ROME}", "", ["Rome", "Rome"]),
        (f" [{PARIS}, {ROME}]\n", "", ["Paris é", "Rome"]),
        (ROME.replace("{", '{"type": "function", ', 1), "", ["Rome"]),
        (f"It is {ROME}", None, []),
        ('{"city": "Rome"}', None, []),
        ('{"name": "weather"', None, []),
        ('{"name": "weather", "arguments": "Rome"}', None, []),
    ],
)
def test_calls_are_found_however_the_text_is_cut(text, content, cities):
    """What is no call stays text, every character of it; arguments come as the model wrote them."""
    for seed in range(30):
        rng = random.Random(seed)
        finder, shown, found, at = CallFinder(None), "", [], 0
        while at < len(text):
            step = rng.randint(1, 1 + seed)
            piece, _, more = finder.push(text[at : at + step], ended=at + step >= len(text))
            at += step
            shown += piece
            found += more
        assert shown == (text if content is None else content)
        heads = [call for call in found if "id" in call]
        assert [call["index"] for call in heads] == list(range(len(cities)))
        assert len({call["id"] for call in heads}) == finder.num_found == len(cities)
        for head, city in zip(heads, cities, strict=True):
            assert (head["type"], head["function"]["name"]) == ("function", "weather")
            pieces = [c["function"]["arguments"] for c in found if c["index"] == head["index"]]
            assert json.loads("".join(pieces)) == {"city": city}
            assert seed or len(pieces) > 5


TIMES = {
    "type": "function",
    "function": {
        "name": "times",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}},
    },
}
STYLES = [  # as each model's own template writes it, and its published parsers read it
    ('<tool_call>\n{"arguments": {"text": "5", "count": 2}, "name": "times"}\n</tool_call>', ""),
    ('<tool_call>{"id": 1, "name": "times", "arguments": {"text": "5", "count": 2}}', ""),
    (
        "Now.<tool_call>times\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "Now.",
    ),
    (
        "<tool_call>\n<function=times>\n<parameter=text>\n5\n</parameter>\n"
        "<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    (
        "Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>times\n```json\n"
        '{"text": "5", "count": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Now.",
    ),
    ('<｜tool▁call▁begin｜>times<｜tool▁sep｜>{"text": "5", "count": 2}<｜tool▁call▁end｜>', ""),
    (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.times:0"
        '<|tool_call_argument_begin|>{"text": "5", "count": 2}<|tool_call_end|>',
        "",
    ),
    ('Now.[TOOL_CALLS]times[CALL_ID]9[ARGS]{"text": "5", "count": 2}', "Now."),
    ('[TOOL_CALLS][{"name": "times", "arguments": {"text": "5", "count": 2}}]', ""),
    ('functools[{"name": "times", "arguments": {"text": "5", "count": 2}}]', ""),
    ('<|python_tag|>{"name": "times", "parameters": {"text": "5", "count": 2}}', ""),
    ('[{"arguments": {"text": "5", "count": 2}, "name": "times"}]', ""),
]


def parts_of(finder, text, step):
    """Content, reasoning, and arguments of each call by index, of a text cut into pieces."""
    content, thought, calls = "", "", {}
    for at in range(0, len(text), step):
        more, thoughts, added = finder.push(text[at : at + step], ended=at + step >= len(text))
        content, thought = content + more, thought + thoughts
        for call in added:
            name, arguments = calls.get(call["index"], (call["function"].get("name"), ""))
            calls[call["index"]] = name, arguments + call["function"]["arguments"]
    return content, thought, calls


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(("text", "content"), STYLES)
def test_calls_are_found_in_the_style_of_each_family(text, content, step):
    found, _, calls = parts_of(CallFinder(None, [TIMES]), text, step)
    assert found == content
    assert [(name, json.loads(more)) for name, more in calls.values()] == [("times", {"text": "5", "count": 2})]


PAIRS = "<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n" * 40


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"<tool_call>times\n{PAIRS}</tool_call>", 1),
        (f"<tool_call>times\n{PAIRS}", 0),  # cut by the length
        ("\n" * 20_000, 0),
        ("<|python_tag|>" + " " * 20_000, 0),
    ],
)
def test_an_answer_is_searched_in_time_that_grows_with_its_length(text, num_calls):
    """A search that tries each division of the pairs or of the blanks anew does not end in hours."""
    content, _, calls = parts_of(CallFinder(None, [TIMES]), text, 1000)
    assert len(calls) == num_calls
    assert content == ("" if calls else text)


class Counting(CallFinder):
    """Counts its searches."""

    searches = 0

    def _divided(self, *, ended):
        self.searches += 1
        return super()._divided(ended=ended)


@pytest.mark.parametrize(
    "begin", ['<tool_call>{"name": "times", "arguments": ', "<tool_call>times<arg_key>text", '{"a": ']
)
def test_a_long_call_is_not_searched_anew_for_each_token(begin):
    finder = Counting(None, [TIMES])
    parts_of(finder, begin + '{"text": "' + "word " * 1000, 5)
    assert finder.searches < 20


class Keeping(CallFinder):
    """Notes the most characters that it keeps to read again."""

    most_kept = 0

    def push(self, text, *, ended):
        found = super().push(text, ended=ended)
        self.most_kept = max(self.most_kept, len(self._text))
        return found


@pytest.mark.parametrize("head", ["final", "analysis", "commentary to=functions.f"])
@pytest.mark.parametrize("num_messages", [1, 100])
def test_what_channels_have_said_is_not_read_again_for_each_token(head, num_messages):
    words = "word " * (1000 // num_messages)
    text = f"<|channel|>{head}<|message|>{words}<|end|><|start|>assistant" * num_messages
    finder = Keeping(None, in_channels=True)
    content, thought, calls = parts_of(finder, text, 5)
    assert finder.most_kept < 80  # a head
    found = content + thought + "".join(arguments for _, arguments in calls.values())
    assert found == "word " * 1000
    assert (bool(content), bool(thought)) == (head == "final", head == "analysis")
    assert len(calls) == ("to=" in head) * num_messages


def test_an_answer_in_no_channel_is_not_kept():
    finder = Keeping(0, in_channels=True)
    assert parts_of(finder, '{"a": "' + "word " * 1000, 5)[0] == '{"a": "' + "word " * 1000
    assert finder.most_kept == 0


def test_a_call_behind_one_with_other_fields_is_not_lost():
    text = '[{"name": "a", "arguments": {}, "id": "x"}, {"name": "b", "arguments": {"c": 1}}]'
    _, _, calls = parts_of(CallFinder(None), text, 10_000)
    assert calls == {0: ("a", "{}"), 1: ("b", '{"c": 1}')}


def test_half_a_surrogate_pair_in_arguments_stays_an_escape():
    """UTF-8 has none, so that the reply could not be sent."""
    text = r'<tool_call>{"arguments": {"text": "é\ud83d"}, "name": "times"}</tool_call>'
    assert parts_of(CallFinder(None, [TIMES]), text, 7)[2] == {0: ("times", r'{"text": "é\ud83d"}')}


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_an_answer_in_channels_has_content_reasoning_and_calls(step):
    """OpenAI's harmony format: the prompt ends with `<|start|>assistant`."""
    said = (
        "<|channel|>analysis<|message|>Greet, a < b.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Hello!<|return|>"
    )
    called = '<|channel|>commentary to=functions.times <|constrain|>json<|message|>{"text": "5"}<|call|>'
    finder = CallFinder(0, in_channels=True)
    assert parts_of(finder, said, step) == ("Hello!", "Greet, a < b.", {})
    finder = CallFinder(None, [TIMES], in_channels=True)
    assert parts_of(finder, called, step) == ("", "", {0: ("times", '{"text": "5"}')})
    finder = CallFinder(0, in_channels=True)
    assert parts_of(finder, '{"a": 1}', step)[0] == '{"a": 1}'  # by a grammar


def tool_server(serve_toy, scripted, folder, answer, template=QWEN, special=()):
    options = with_template(folder_with(folder, template, special=special))
    tokenizer = options["codec"]
    tokenizer.eos_token_ids = (tokenizer.vocab_size - 1,)
    script = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.vocab_size - 1]
    return serve_toy(executor=scripted(script), max_model_len=2048, **options)


def test_a_call_is_a_message_without_text_and_a_delta_in_a_stream(tmp_path, serve_toy, scripted):
    answer = f"<tool_call>{PARIS}</tool_call>"
    chat = {"messages": HISTORY, "tools": [WEATHER], "tool_choice": "auto", "max_tokens": 200}

    async def main():
        async with tool_server(serve_toy, scripted, tmp_path, answer) as server:
            path = "/v1/chat/completions"
            return [
                await server.post(path, chat),
                await server.post(path, chat | {"stream": True}),
                await server.post(path, chat | {"tool_choice": "none"}),
                await server.post(path, chat | {"max_tokens": 5}),
                await server.post(path, chat | {"max_tokens": answer.index("aris")}),
            ]

    whole, stream, none, short, cut = asyncio.run(main())
    (choice,) = json.loads(whole[2])["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris é"}'}
    assert sorted(call) == ["function", "id", "type"]
    chunks = [event["choices"][0] for event in events_of(stream[2])]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == ""
    head, *more = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert (head["index"], head["function"]["name"]) == (0, "weather")
    assert [sorted(piece) for piece in more] == [["function", "index"]] * len(more)
    arguments = [piece["function"]["arguments"] for piece in (head, *more)]
    assert "".join(arguments) == call["function"]["arguments"]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    (choice,) = json.loads(none[2])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer, "stop")
    assert json.loads(short[2])["choices"][0]["finish_reason"] == "length"
    (choice,) = json.loads(cut[2])["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "P'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
            {"role": "assistant", "content": "Hello!", "reasoning": "Greet."},
        ),
        (f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", None),
    ],
)
def test_special_tokens_that_divide_an_answer_are_read_not_dropped(tmp_path, serve_toy, scripted, answer, message):
    marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "[TOOL_CALLS]", "[ARGS]")
    special = (*(marks[:4] if message else marks[4:]), "<|return|>")  # the last one ends it
    chat = {"messages": HISTORY[:1], "max_tokens": 200} | ({} if message else {"tools": [WEATHER]})

    async def main():
        async with tool_server(serve_toy, scripted, tmp_path, answer, special=special) as server:
            path = "/v1/chat/completions"
            return [await server.post(path, chat | {"stream": stream}) for stream in (False, True)]

    whole, stream = asyncio.run(main())
    got = json.loads(whole[2])["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in events_of(stream[2])]
    if message:
        assert got == message
        for name in ("content", "reasoning"):
            assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    else:
        assert got["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
        assert sum("id" in call for delta in deltas for call in delta.get("tool_calls", ())) == 1


def test_only_one_call_where_several_at_once_are_not_wanted(tmp_path, serve_toy, scripted):
    chat = {"messages": HISTORY[:1], "tools": [WEATHER], "parallel_tool_calls": False}

    async def main():
        answer = f"{ROME};{ROME}"
        async with tool_server(serve_toy, scripted, tmp_path, answer, LLAMA) as server:
            return await server.post("/v1/chat/completions", chat | {"max_tokens": 200})

    (choice,) = json.loads(asyncio.run(main())[2])["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_what_a_client_repeats_of_an_answer_reaches_the_template_as_it_knows_it():
    """Templates of Llama 3 and gpt-oss take an empty list of calls for one without its call."""
    thinks = HISTORY[1] | {"reasoning": "Where?"}
    said = {"role": "assistant", "content": "Rain.", "tool_calls": [], "reasoning_content": "Told."}
    call = ChatCall.read({"messages": [thinks, said]})
    first, second = [message.for_template() for message in call.messages]
    names = ("reasoning", "reasoning_content", "thinking")
    assert [first[name] for name in names] == ["Where?"] * 3
    assert first["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert "tool_calls" not in second
    assert [second.get(name) for name in names] == ["Told.", "Told.", None]  # gpt-oss refuses both


def test_arguments_keep_their_nulls():
    call = ChatCall.read(
        {
            "messages": [
                HISTORY[1]
                | {"tool_calls": [{"function": {"name": "now", "arguments": '{"zone": null, "of": [{"a": null}]}'}}]}
            ]
        }
    )
    (shown,) = call.messages[0].for_template()["tool_calls"]
    assert shown["function"]["arguments"] == {"zone": None, "of": [{"a": None}]}


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    calls = [{"id": "1", "function": {"name": "now", "arguments": arguments}}]
    call = ChatCall.read({"messages": [{"role": "assistant", "tool_calls": calls}]})
    (shown,) = call.messages[0].for_template()["tool_calls"]
    assert shown == {"id": "1", "function": {"name": "now", "arguments": {}}}


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_model_that_knows_no_tools_is_not_asked_with_any(tmp_path, serve_toy, template):
    options = {} if template is None else with_template(folder_with(tmp_path, template))

    async def main():
        async with serve_toy(**options) as server:
            chat = {"messages": HISTORY[:1], "tools": [WEATHER]}
            return await server.post("/v1/chat/completions", chat)

    status, _, body = asyncio.run(main())
    assert (status, b"chat template knows them" in body) == (400, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arguments": "{"}, 'function.arguments must be an object in JSON, got "{"'),
        ({"arguments": "[]"}, "function.arguments must be an object in JSON"),
        ({"name": 1}, "messages[0].tool_calls[0].function.name must be a string, got 1"),
    ],
)
def test_malformed_calls_in_a_history_are_refused(tmp_path, serve_toy, scripted, fields, message):
    async def main():
        async with tool_server(serve_toy, scripted, tmp_path, "a") as server:
            bad = [HISTORY[1] | {"tool_calls": [{"function": {"name": "f"} | fields}]}]
            return await server.post("/v1/chat/completions", {"messages": bad})

    status, _, body = asyncio.run(main())
    assert (status, message in json.loads(body)["error"]["message"]) == (400, True)
