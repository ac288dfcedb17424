"""Libraries for structured output compared: what a grammar costs at a vocabulary of 128,256.

A byte-level tokenizer is trained on Python's own library; then each library takes the tokenizer,
compiles one JSON schema, and computes the mask before every token of two answers. One thread.

    pip install llguidance xgrammar
    python benchmarks/grammar_libraries.py --out benchmarks/results/grammar_libraries.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
from importlib.metadata import distribution
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 128_256
END = [1, 3]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
ANSWERS = [
    '{"name":"Ann Miller","age":42,"tags":["a","c"],"address":{"street":"12 Long Street, apt 4","zip":"12345"}}',
    '{"name":"Bob","age":7,"tags":[],"address":{"street":"somewhere else, a long text of many words","zip":"99999"}}',
]


def trained(vocab: int = VOCAB, most_chars: float = 60e6) -> Tokenizer:
    """A tokenizer of `vocab` tokens, of Python's own library and its packages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    paths = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = (path for root in paths for path in sorted(root.rglob("*.py")))
    texts, chars = [], 0
    for file in files:
        texts.append(file.read_text("utf-8", errors="ignore"))
        chars += len(texts[-1])
        if chars > most_chars:
            break
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>", "<|start|>", "<|end|>"],
            show_progress=False,
        ),
    )
    return tokenizer


def of_llguidance(tokenizer):
    """Seconds to take the tokenizer and to compile, and a maker of (mask, take) functions."""
    import llguidance
    from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

    start_s = time.perf_counter()
    known = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB, eos_token=END)
    taken_s = time.perf_counter()
    grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    compiled = llguidance.LLMatcher(known, grammar)
    compiled_s = time.perf_counter()
    bits = allocate_token_bitmask(1, VOCAB)

    def follow():
        matcher = compiled.deep_copy()
        return lambda: fill_next_token_bitmask(matcher, bits, 0), matcher.consume_token

    return taken_s - start_s, compiled_s - taken_s, follow


def of_xgrammar(tokenizer):
    """The same of xgrammar."""
    import torch
    import xgrammar

    start_s = time.perf_counter()
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.BYTE_LEVEL, vocab_size=VOCAB, stop_token_ids=END)
    taken_s = time.perf_counter()
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    compiled = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=True)
    compiled_s = time.perf_counter()
    bits = torch.full((1, (VOCAB + 31) // 32), -1, dtype=torch.int32)

    def follow():
        matcher = xgrammar.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(bits, 0), matcher.accept_token

    return taken_s - start_s, compiled_s - taken_s, follow


def mask_times_s(tokenizer, follow):
    """Seconds of the mask before each token of the answers, the second of two rounds."""
    for _ in range(2):
        times_s = []
        for answer in ANSWERS:
            mask, take = follow()
            for token_id in tokenizer.encode(answer).ids:
                start_s = time.perf_counter()
                mask()
                times_s.append(time.perf_counter() - start_s)
                assert take(token_id), answer
    return sorted(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file; the default is to print")
    out = parser.parse_args().out
    tokenizer = trained()
    lines = [
        "# Libraries for structured output",
        "",
        f"One JSON schema, a vocabulary of {tokenizer.get_vocab_size():,}, one thread.",
        "",
        "| library | needs | tokenizer s | compile ms | mask us, median | 99th percentile |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, prepare in (("llguidance", of_llguidance), ("xgrammar", of_xgrammar)):
        taken_s, compiled_s, follow = prepare(tokenizer)
        times_s = mask_times_s(tokenizer, follow)
        requires = distribution(name).requires or []
        needs = sorted(line.split(">")[0].split(";")[0] for line in requires if "extra" not in line)
        figures = (
            f"{taken_s:.2f} | {compiled_s * 1e3:,.1f} | {statistics.median(times_s) * 1e6:.0f} | "
            f"{times_s[int(0.99 * len(times_s))] * 1e6:,.0f}"
        )
        version = distribution(name).version
        lines.append(f"| {name} {version} | {', '.join(needs) or 'nothing'} | {figures} |")
    text = "\n".join(lines) + "\n"
    print(text) if out is None else out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
