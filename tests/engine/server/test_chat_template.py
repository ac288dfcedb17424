"""A model's own chat template gives the prompt that transformers gives, and harms nobody."""

from __future__ import annotations

import asyncio
import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from lmi_bench.core.errors import InputError
from lmi_bench.engine.chat_template import ChatTemplate
from lmi_bench.engine.server.openai_request import ChatCall
from lmi_bench.engine.tokenizer import Tokenizer

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
LLAMA_2 = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
UNUSUAL = (
    "{% for message in messages %}\n"
    "  {% if loop.index > 2 %}{% break %}{% endif %}\n"
    "  {% generation %}{{ message | tojson }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{{ [1, 2] | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':')) }}"  # Kimi K2
    "{{ messages[0] | tojson(ensure_ascii=False) }}{{ messages | tojson(sort_keys=true) }}"  # GLM
    "{{ tools is not none }}{{ documents }}"
)
CHATS = [
    [{"role": "user", "content": " Hi <b>you</b> & 日本 "}],
    [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Three"}],
]


def folder_with(folder, template, *, where="tokenizer_config.json", special=()):
    """A byte-level tokenizer that puts <s> before a text, and a chat template."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = FastTokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", *special)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    bos = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    if where == "tokenizer_config.json":
        config["chat_template"] = template
    elif where == "chat_template.json":
        (folder / where).write_text(json.dumps({"chat_template": template}))
    else:
        (folder / where).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_template(folder):
    """Settings of a server that has the folder's template and tokenizer."""
    template = ChatTemplate.from_folder(folder)
    return {"codec": Tokenizer.from_folder(folder), "app_options": {"chat_template": template}}


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, UNUSUAL])
@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_becomes_the_tokens_that_transformers_gives(tmp_path, template, chat):
    folder = folder_with(tmp_path, template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    theirs.chat_template = template
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate.from_folder(folder).render(chat) == text
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_text_parts_are_lines_of_one_content(tmp_path):
    """vLLM's form for templates that take a text."""
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    call = ChatCall.read({"messages": [{"role": "user", "content": parts}]})
    assert call.messages[0].for_template()["content"] == "first\nsecond"


@pytest.mark.parametrize("where", ["chat_template.jinja", "chat_template.json"])
def test_a_template_may_stand_in_a_file_of_its_own(tmp_path, where):
    found = ChatTemplate.from_folder(folder_with(tmp_path, "[{{ bos_token }}]", where=where))
    assert found.render([]) == "[<s>]"


def test_of_several_templates_the_default_one_is_taken(tmp_path):
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert ChatTemplate.from_folder(folder_with(tmp_path, several)).render([]) == "d"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_request_with_tools_gets_the_template_for_tools(tmp_path, where):
    texts = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}"}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    if where == "chat_template.jinja":
        beside = tmp_path / "additional_chat_templates" / "tool_use.jinja"
        beside.parent.mkdir()
        beside.write_text(texts["tool_use"])
        named = texts["default"]
    folder = folder_with(tmp_path, named, where=where)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "</s>"}))
    ours, theirs = ChatTemplate.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    parameters = {"type": "object", "properties": {}}
    function = {"name": "weather", "description": "", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    assert ours.takes_tools
    for given, wanted in ((None, CHATS[0][0]["content"]), (tools, "weather")):
        assert theirs.apply_chat_template(CHATS[0], tools=given, tokenize=False) == wanted
        assert ours.render(CHATS[0], {"tools": given}) == wanted


def test_a_folder_without_a_template_has_none(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None
    assert ChatTemplate.from_folder(folder_with(tmp_path, None)) is None


def test_a_request_may_set_what_the_template_asks_for(tmp_path, serve_toy):
    """`chat_template_kwargs`, as vLLM has it; without a template it means nothing."""
    template = "{{ '' if enable_thinking is defined and not enable_thinking else 'think' }}!"
    options = with_template(folder_with(tmp_path, template))
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}

    async def main():
        async with serve_toy(**options) as server:
            replies = [
                await server.post("/v1/chat/completions", body | more)
                for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
            ]
            wrong = await server.post("/v1/chat/completions", body | {"chat_template_kwargs": 1})
        return [json.loads(reply[2])["usage"]["prompt_tokens"] for reply in replies], wrong[0]

    assert asyncio.run(main()) == ([len("think!"), len("!")], 400)


def test_what_a_template_refuses_is_a_bad_request(tmp_path, serve_toy):
    options = with_template(folder_with(tmp_path, LLAMA_2))

    async def main():
        async with serve_toy(**options) as server:
            body = {"messages": [{"role": "assistant", "content": "a"}], "max_tokens": 1}
            refused = await server.post("/v1/chat/completions", body)
            body["messages"][0]["role"] = "user"
            return refused, await server.post("/v1/chat/completions", body)

    refused, answered = asyncio.run(main())
    assert refused[0] == 400
    assert b"rejects these messages: Conversation roles must alternate" in refused[2]
    # <s>[INST] a [/INST]: the first is one token, the 16 characters behind it one each
    assert json.loads(answered[2])["usage"]["prompt_tokens"] == 1 + len("[INST] a [/INST]")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(1000000) | list }}",
        "{{ nothing.there }}",
    ],
)
def test_a_template_reaches_nothing_beyond_its_messages(tmp_path, template):
    found = ChatTemplate.from_folder(folder_with(tmp_path, template))
    with pytest.raises(InputError, match="rejects these messages"):
        found.render([{"role": "user", "content": "a"}])


def test_a_text_that_is_no_template_is_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer_config.json: the chat template cannot be"):
        ChatTemplate.from_folder(folder_with(tmp_path, "{% for %}"))


def test_special_tokens_of_a_prompt_are_added_or_not_as_asked(tmp_path, serve_toy):
    """`add_special_tokens`, as vLLM has it; a chat has those of its template."""
    options = with_template(folder_with(tmp_path, "{{ bos_token }}{{ messages[0].content }}"))
    begin = options["codec"].encode("")[0]
    chat = {"messages": [{"role": "user", "content": "a"}]}

    async def main():
        async with serve_toy(**options) as server:
            bodies = ({"prompt": "a"}, {"prompt": "a", "add_special_tokens": False}, chat)
            found = [await server.post("/tokenize", body) for body in bodies]
            tokens = [json.loads(body)["tokens"] for _, _, body in found]
            text = await server.post("/detokenize", {"tokens": tokens[0]})
            bare = {"max_tokens": 1, **bodies[1]}
            usage = json.loads((await server.post("/v1/completions", bare))[2])["usage"]
            return tokens, json.loads(text[2]), usage["prompt_tokens"]

    (added, bare, of_chat), text, num_prompt = asyncio.run(main())
    assert added == of_chat == [begin, *bare]
    assert (len(bare), num_prompt, text) == (1, 1, {"prompt": "<s>a"})
