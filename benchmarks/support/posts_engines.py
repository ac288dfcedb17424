"""The claims of the posts about the optimization toolkit, the LMI container and batching."""

from __future__ import annotations

import re
from collections.abc import Callable

from benchmarks.support.posts_program import Claim, Output, Shown, every, near, points, same

_LOADS = (1, 2, 4, 8, 16, 32, 64)
_PLAIN = (
    "predict --model llama-3-70b --instance ml.p5.48xlarge --tp 8 --input-tokens 622 "
    f"--output-tokens 250 --concurrency {','.join(map(str, _LOADS))}"
)
_FEW, _MANY = (f"{_PLAIN} --draft llama-3.2-1b --draft-acceptance {share}" for share in (0.6, 0.8))
_SPECULATED = (_PLAIN, _FEW, _MANY)
_QUESTIONS = (
    "sweep scenarios/questions-622-250.yaml --target sim:ml.p5.48xlarge --model llama-3-70b "
    "--tp 8 --concurrency 16 --requests-per-user 20"
)
_70B = "explain memory --model llama-3-70b --parameters-b 70"
_STORED = "explain memory --model llama-3-70b --dtype int4"
_SAVINGS = "explain savings ml.g5.12xlarge ml.p4d.24xlarge"
_COMPILE = "compile demo-15m --shapes 1x256 -o DIR"
_DEFAULT_SHAPES = 6  # of `compile`: 1, 4 and 16 sequences at two lengths
_START = '-p "a prompt" --model demo-15m --max-new-tokens 4 --max-model-len 256'
_ARTEFACT = f"generate {_START} --backend torch --artefact DIR"
_ARTICLE = 'generate --model demo-15m -p "An article"'
_GREEDY = 'generate -p "One request joins a batch and another joins a batch" --max-new-tokens 96'
_JOIN = (
    "sweep --target sim:ml.g5.12xlarge --model llama-2-7b --tp 4 --profile tgi-2023 "
    "--mix 256/64,256/256 --concurrency 8 --requests-per-user 6"
)
_RECORDED = "recommend --model {} --instance ml.g5.12xlarge --tp 4 --input-tokens 32 "
_RECORDED += "--output-tokens 64 --objective latency --graphs {}"
_MIXTRAL = "deploy check tests/data/deploy/mistral_tensorrt.properties --djl-version 0.26.0"
_PROBE = "deploy write --model mixtral-8x7b --instance ml.p4d.24xlarge --startup-timeout 1800 --max-model-len 4096"
_FALCON = "explain memory --model falcon-40b --parameters-b 40"
_A10G = "--dtype bfloat16 --memory-gb 24"
_SUMS = f"{_FALCON} --dtype float32 --batch 39 --tokens 2048 --overhead-gb 2"
_SIM = (
    "sweep --target sim:ml.g5.48xlarge --model falcon-40b --tp 8 --profile tgi-2023 "
    "--concurrency 64 --requests-per-user 3"
)
_PAGED = "--policy rolling --kv-layout paged --max-batch 32 --prefill-tokens 1024"
_DYNAMIC = "--policy dynamic --batch-size 4"
_FIRST = "--input-tokens 32 --output-tokens 128 --max-model-len 160"
_SECOND = "--input-tokens 256 --output-tokens 32 --max-model-len 288"
_SCENARIO = "sweep scenarios/{}.yaml --target sim:ml.g5.48xlarge --model falcon-40b --tp 8 "
_SCENARIO += "--profile tgi-2023 --concurrency 8"

Check = Callable[..., Shown]


def no_gpu(out: Output) -> Shown:
    """What needs a GPU, where the program finds none."""
    here = next(row for row in out.data["findings"] if row["check"] == "GPU")
    return Shown(f"`doctor`: {here['found'].partition(';')[0]}", None)


def _speed(out: Output, users: int) -> float:
    """Users over the time between tokens, as the toolkit's post counts throughput."""
    return 1000 * users / out.predicted("tpot_ms")[users]["predicted"]


def _span(out: Output, users: int) -> tuple[float, float]:
    figure = out.predicted("tpot_ms")[users]
    return 1000 * users / figure["high"], 1000 * users / figure["low"]


def _best_gain(plain: Output, drafted: Output) -> tuple[float, int]:
    return max((_speed(drafted, users) / _speed(plain, users), users) for users in _LOADS)


def _gain(plain: Output, few: Output, many: Output) -> Shown:
    low, high = (_best_gain(plain, drafted)[0] for drafted in (few, many))
    return Shown(f"{low:.2f} to {high:.2f} x at one user", low <= 2 <= high)


def _halved(slow: Output, fast: Output) -> Shown:
    before, after = slow.term("1M blended"), fast.term("1M blended")
    return points(100 * (1 - after / before), 50, 0.1, "% less")


def _nearest(plain: Output) -> int:
    """The load at which the plain engine is nearest to the post's 1,200 tokens a second."""
    return min(_LOADS, key=lambda users: abs(_speed(plain, users) - 1200))


def _plain_speed(plain: Output) -> Shown:
    users = _nearest(plain)
    low, high = _span(plain, users)
    text = f"{_speed(plain, users):,.0f} tok/s at {users} users ({low:,.0f} to {high:,.0f})"
    return Shown(text, low <= 1200 <= high)


def _drafted_speed(plain: Output, few: Output, many: Output) -> Shown:
    users = _nearest(plain)
    (low, _), (_, high) = _span(few, users), _span(many, users)
    slow, fast = _speed(few, users), _speed(many, users)
    text = f"{slow:,.0f} to {fast:,.0f} tok/s at {users} users ({low:,.0f} to {high:,.0f})"
    return Shown(text, low <= 2400 <= high)


def _cost_falls(plain: Output, few: Output, many: Output) -> Shown:
    saved = [100 * (1 - 1 / _best_gain(plain, drafted)[0]) for drafted in (few, many)]
    return Shown(f"{saved[0]:.0f} to {saved[1]:.0f} % less a token", saved[1] >= 30)


def _latency_falls(plain: Output, few: Output, _many: Output) -> Shown:
    saved = {u: 100 * (1 - _speed(plain, u) / _speed(few, u)) for u in (1, 2, 4, 8)}
    text = ", ".join(f"{cut:.0f} % at {users}" for users, cut in saved.items())
    return Shown(f"{text} users", min(saved.values()) >= 25)


def _mean_length(out: Output) -> Shown:
    lengths = out.requests("input_tokens")
    return near(sum(lengths) / len(lengths), 622, 0.02, f"tokens over {len(lengths)} requests")


def _quarter(out: Output) -> Shown:
    return near(out.term("1M output") / out.term("1M blended") - 1, 3, 1e-6, "to 1, / 4")


def _prices(*outs: Output) -> Shown:
    parts = [near(o.term("1M blended"), p, 2e-3, "USD") for o, p in zip(outs, (0.0579, 0.0289), strict=True)]
    return every(*parts)


def _stored(nominal: Output, stored: Output) -> Shown:
    shown = near(stored.term("weights as stored"), 35, 0.02, "GB as stored")
    return Shown(f"{shown.text}; {nominal.term('weights'):.1f} GB by bits alone", shown.agrees)


def _less(full: Output, nominal: Output, stored: Output) -> Shown:
    bits = full.term("weights") / nominal.term("weights")
    shown = near(full.term("weights") / stored.term("weights as stored"), 4, 0.02, "x as stored")
    return Shown(f"{shown.text}; {bits:.2f} x by bits alone", shown.agrees)


def _savings(then: Output, now: Output) -> Shown:
    shown = points(then.term("cheaper by"), 79.88, 2)
    text = f"{shown.text}, break-even at {then.term('break-even'):.1f} % of the throughput"
    return Shown(f"{text}; by today's prices {now.term('cheaper by'):.1f} %", shown.agrees)


def _widths(out: Output) -> Shown:
    found = sorted({int(n) for n in re.findall(r"awq-int(\d)", out.text)})
    return same(found, [3, 4], " and ".join(map(str, found)) + " bits")


def _start_up(compiled: Output, loaded: Output) -> float:
    """Per cent of a start that a prepared artefact saves."""
    return 100 * compiled.seconds / (compiled.seconds + loaded.seconds)


def _spared(claimed: float) -> Check:
    def check(compiled: Output, loaded: Output) -> Shown:
        cut = _start_up(compiled, loaded)
        text = f"{cut:.0f} % ({compiled.seconds:.0f} s of compiling, {loaded.seconds:.0f} s left)"
        return Shown(text, abs(cut - claimed) <= 5)

    return check


def _setting(out: Output) -> Shown:
    cache, total = out.term("KV cache of the batch"), out.term("sum")
    text = f"planned: {cache:.1f} GB of cache, {total:.1f} GB in all"
    return Shown(text, "8,192 tokens" in out.text and "8 sequences" in out.text)


def _degree(*wanted: int) -> Check:
    def check(out: Output) -> Shown:
        line = next(each for each in out.text.splitlines() if "tensor_parallel_degree" in each)
        found = [int(n) for n in re.findall(r"(\d+) \(\d+ workers?\)", out.text)]
        text = f"degrees {', '.join(map(str, found))}" if found else line.strip()
        return Shown(text, set(wanted) <= set(found))

    return check


def _same_text(plain: Output, drafted: Output) -> Shown:
    held = re.search(r"([\d.]+% of \d+) drafted", drafted.notes)
    is_same = plain.text == drafted.text
    text = "the same text" if is_same else "another text"
    return Shown(f"{text}; {held[1] if held else '?'} guesses held", is_same and held is not None)


def _no_stage(out: Output) -> Shown:
    """Speculation is a setting of the engine: the list of techniques names no weights it writes."""
    row = next(line for line in out.text.splitlines() if "draft" in line)
    return Shown(" ".join(row.split())[:90], "save" not in row)


def _hours(compiled: Output, drafted: Output) -> Shown:
    minutes = (compiled.seconds + drafted.seconds) / 60
    return Shown(f"{minutes:.1f} minutes for compiled steps and speculation", minutes < 60)


def _recorded(*outs: Output) -> Shown:
    """ms/token without over with graphs: of the small model, of the large one."""
    values = [o.data["recommended"]["latency_per_token_p90_ms"]["predicted"] for o in outs]
    small, large = values[0] / values[1] - 1, values[2] / values[3] - 1
    text = f"{100 * small:.0f} % faster (1B), {100 * large:.0f} % (13B), both TP 4"
    return Shown(text, small >= 0.5 > 0 and small > large)


def _joined(anew: Output, kept: Output) -> Shown:
    before, after = (o.levels("latency_ms_per_token.mean")[8] for o in (anew, kept))
    cut = 100 * (1 - after / before)
    return Shown(f"{cut:.0f} % fewer ms/token with 8 users", cut > 33)


def _more(anew: Output, kept: Output) -> Shown:
    before, after = (o.levels("throughput_tokens_per_s")[8] for o in (anew, kept))
    return Shown(f"{after / before:.2f} x the tokens a second with 8 users", after / before > 1.2)


def _minutes(out: Output) -> Shown:
    minutes = _DEFAULT_SHAPES * out.seconds / 60
    return Shown(f"{minutes:.1f} minutes ({_DEFAULT_SHAPES} x {out.seconds:.0f} s)", minutes >= 2)


def _effective(key: str, value: str) -> Check:
    def check(out: Output) -> Shown:
        line = next((each for each in out.text.splitlines() if key in each), "not read")
        return Shown(" ".join(line.split())[:60], re.search(rf"\b{value}\b", line) is not None)

    return check


def _deadline(out: Output) -> Shown:
    found = {int(n) for n in re.findall(r"HealthCheckTimeoutInSeconds\D{1,4}(\d+)", str(out.data))}
    return same(found, {1800}, f"{found} s in the endpoint's requests")


def _tokens(count: int) -> Check:
    def check(out: Output) -> Shown:
        found = re.search(r"(\d+) tokens in (\d+) requests?", out.notes)
        return Shown(found[0] if found else "no count", found is not None and int(found[1]) == count)

    return check


def _chained(out: Output) -> Shown:
    found = re.search(r"(\d+) tokens in (\d+) requests?", out.notes)
    requests, tokens = (int(found[2]), int(found[1])) if found else (0, 0)
    text = f"{tokens} tokens in {requests} requests of at most 256"
    return Shown(text, requests > 1 and 256 * (requests - 1) < tokens <= 256 * requests)


def _families(out: Output) -> Shown:
    line = next(each for each in out.text.splitlines() if "compiles at start-up, new" in each)
    count = len(line.partition("new:")[2].split(","))
    return same(count, 10, f"{count} families are listed")


def _ratio(claimed: float) -> Check:
    def check(rolling: Output, dynamic: Output) -> Shown:
        fast, slow = (o.levels("throughput_tokens_per_s")[64] for o in (rolling, dynamic))
        return near(fast / slow, claimed, 0.15, f"x ({fast:.0f} against {slow:.0f} tok/s)")

    return check


def _default(value: str) -> Check:
    def check(out: Output) -> Shown:
        found = re.search(r"default ([^\n]*)", out.text)
        text = found[1] if found else "none"
        return Shown(f"default {text}", text.replace(",", " ").split()[0] == value)

    return check


def _pairs(*wanted: tuple[int, int]) -> Check:
    def check(out: Output) -> Shown:
        rows = zip(out.requests("input_tokens"), out.requests("output_tokens"), strict=True)
        found = sorted(set(rows))
        return same(found, sorted(wanted), ", ".join(f"{i} / {o}" for i, o in found))

    return check


_HOLDS = "the gain is set by the share of drafted tokens that hold, which the post does not state"
_SMALL = (
    "compiling is nearly the whole start of a model of 15M weights, which load in a second; the "
    "post's share is of models whose weights take minutes to load"
)
_STATED = "embeddings and head (2 x 128,256 x 8,192) keep 16 bits, and 128 weights share a scale"
_ENGINES_DIFFER = (
    "the published rows ran in two engines (`Python`, `MPI`), the dynamic ones at a p90 of 58 s, "
    "just below a time-out of 60 s; with one engine's step time under both schedulers, scheduling "
    "alone is left, at most 32 / 4 = 8"
)
_IMAGES = "the figures are in images only; they are throughput on a GPU machine of the post"

TOOLKIT = (
    Claim(
        "T01",
        "the toolkit about doubles throughput",
        "2 x",
        _SPECULATED,
        "predicted",
        _gain,
        "between the gains where 60 and 80 % of a 1B draft's guesses hold",
        _HOLDS,
    ),
    Claim(
        "T02",
        "and about halves the cost",
        "50 %",
        ("explain blended --price 1 --throughput 1200", "explain blended --price 1 --throughput 2400"),
        "computed",
        _halved,
        "0.1 points, at an equal price an hour",
    ),
    Claim(
        "T03",
        "Llama 3 70B on ml.p5.48xlarge, with speculation",
        "about 2,400 tok/s",
        _SPECULATED,
        "predicted",
        _drafted_speed,
        "in the 80 % intervals where 60 and 80 % of the guesses hold, at T04's load",
        _HOLDS,
    ),
    Claim(
        "T04",
        "the same, not optimized",
        "about 1,200 tok/s",
        (_PLAIN,),
        "predicted",
        _plain_speed,
        "in the 80 % interval at the nearest of 1 to 64 users",
        "the load is not stated, and none of 1, 2, 4 .. 64 users comes nearer",
    ),
    Claim(
        "T05",
        "a customer expects cheaper deployments",
        "about 30 %",
        _SPECULATED,
        "predicted",
        _cost_falls,
        "at least 30 % where 80 % of the guesses hold",
        _HOLDS,
    ),
    Claim(
        "T06",
        "and lower latency at up to 8 requests at once",
        "up to 25 %",
        _SPECULATED,
        "predicted",
        _latency_falls,
        "at least 25 % up to 8 users where 60 % of guesses hold",
        _HOLDS,
    ),
    Claim(
        "T07",
        "shortest question of the benchmark",
        "500 tokens",
        (_QUESTIONS,),
        "simulated",
        lambda o: near(min(o.requests("input_tokens")), 500, 0, "tokens"),
    ),
    Claim(
        "T08",
        "longest question",
        "1,000 tokens",
        (_QUESTIONS,),
        "simulated",
        lambda o: near(max(o.requests("input_tokens")), 1000, 0, "tokens"),
    ),
    Claim("T09", "mean question", "622 tokens", (_QUESTIONS,), "simulated", _mean_length, "2 %"),
    Claim(
        "T10",
        "most new tokens of an answer",
        "250 tokens",
        (_QUESTIONS,),
        "simulated",
        lambda o: near(max(o.requests("output_tokens")), 250, 0, "tokens"),
    ),
    Claim(
        "T11",
        "blended price: input tokens for each output token",
        "3 to 1",
        ("explain blended --price 1 --throughput 1200",),
        "computed",
        _quarter,
    ),
    Claim(
        "T12",
        "blended price: throughput is users over the p50 time between tokens",
        "formula",
        ("explain blended --price 1 --concurrency 48 --itl 40",),
        "computed",
        lambda o: near(o.term("throughput"), 48 / 0.040, 1e-6, "tok/s from 48 / 40 ms"),
    ),
    Claim(
        "T13",
        "blended price of 1M tokens, per USD an hour",
        "0.0579 and 0.0289 USD",
        ("explain blended --price 1 --throughput 1200", "explain blended --price 1 --throughput 2400"),
        "computed",
        _prices,
        "0.2 %",
    ),
    Claim(
        "T14",
        "weights of Llama 3 70B in AWQ INT4",
        "35 GB",
        (f"{_70B} --dtype int4", _STORED),
        "computed",
        _stored,
        "2 %",
        _STATED,
    ),
    Claim(
        "T15",
        "and in half precision",
        "140 GB",
        (f"{_70B} --dtype float16",),
        "computed",
        lambda o: near(o.term("weights"), 140, 0.01, "GB"),
        "1 %",
    ),
    Claim(
        "T16",
        "so AWQ INT4 makes them smaller by",
        "4 x",
        (f"{_70B} --dtype float16", f"{_70B} --dtype int4", _STORED),
        "computed",
        _less,
        "2 %",
        _STATED,
    ),
    Claim(
        "T17",
        "ml.g5.12xlarge against ml.p4d.24xlarge, a year's savings plan",
        "79.88 % cheaper",
        (f"{_SAVINGS} --dear-price 37.688", _SAVINGS),
        "computed",
        _savings,
        "2 points, by the on-demand prices of its day (p4d 37.688 USD/h)",
    ),
    Claim("T18", "AWQ's widths", "3 or 4 bits", ("optimize --list",), "run", _widths),
    Claim(
        "T19",
        "a compiled artefact shortens loading, at the least",
        "40 %",
        (_COMPILE, _ARTEFACT),
        "measured",
        _spared(40),
        "5 points",
        _SMALL,
    ),
    Claim("T20", "and at the most", "60 %", (_COMPILE, _ARTEFACT), "measured", _spared(60), "5 points", _SMALL),
    Claim(
        "T21",
        "length of the compilation benchmark",
        "8,192 tokens",
        ("explain memory --model llama-3-8b --batch 8 --tokens 8192",),
        "computed",
        _setting,
        "the setting is planned",
    ),
    Claim(
        "T22",
        "its batch",
        "8 sequences",
        ("explain memory --model llama-3-8b --batch 8 --tokens 8192",),
        "computed",
        _setting,
        "the setting is planned",
    ),
    Claim(
        "T23",
        "Llama 3 8B on ml.inf2.48xlarge",
        "TP 24",
        ("deploy backends --model llama-3-8b --instance ml.inf2.48xlarge --djl-version 0.29.0",),
        "run",
        _degree(24),
        "the degree is offered",
        "32 query heads cannot be split evenly over 24 cores; Neuron pads them to 48, and this "
        "program's ranks do not pad",
    ),
    Claim(
        "T24",
        "Llama 3 70B on ml.trn1.32xlarge",
        "TP 32",
        ("deploy backends --model llama-3-70b --instance ml.trn1.32xlarge --djl-version 0.29.0",),
        "run",
        _degree(32),
        "the degree is offered",
    ),
    Claim(
        "T25",
        "speculation loses no accuracy",
        "none",
        (_GREEDY, f"{_GREEDY} --draft ngram"),
        "measured",
        _same_text,
        "greedy text equal, letter by letter",
    ),
    Claim(
        "T26",
        "speculation costs no preparing job",
        "0 USD",
        ("optimize --list",),
        "run",
        _no_stage,
        "it is a setting, and writes no weights",
    ),
    Claim(
        "T27",
        "optimizing takes hours instead of months",
        "hours",
        (_COMPILE, f"{_GREEDY} --draft ngram"),
        "measured",
        _hours,
        "below an hour here",
    ),
    Claim(
        "T28",
        "five graphs of throughput, prices and loading times",
        "in images",
        ("doctor",),
        "run",
        no_gpu,
        why=_IMAGES,
    ),
)

CONTAINER = (
    Claim(
        "M01",
        "CUDA graphs speed up vLLM, most for small models with tensor parallelism",
        "up to 50 %",
        tuple(_RECORDED.format(model, state) for model in ("llama-3.2-1b", "llama-2-13b") for state in ("off", "on")),
        "predicted",
        _recorded,
        "at least 50 % for the small model, less for the large one",
    ),
    Claim(
        "M02",
        "keeping the cache when a request joins lowers NeuronX's latency",
        "over 33 %",
        (f"{_JOIN} --recompute-on-join", f"{_JOIN} --insert-on-join"),
        "simulated",
        _joined,
        "more than 33 %",
    ),
    Claim(
        "M03",
        "and raises its throughput",
        "much higher",
        (f"{_JOIN} --recompute-on-join", f"{_JOIN} --insert-on-join"),
        "simulated",
        _more,
        "more than 1.2 x",
    ),
    Claim(
        "M04",
        "LMI-Dist takes tensor-parallel degrees on ml.p4d.24xlarge",
        "4 and 8",
        ("deploy backends --model llama-2-70b --instance ml.p4d.24xlarge --djl-version 0.26.0",),
        "run",
        _degree(4, 8),
        "both are offered",
    ),
    Claim(
        "M05",
        "compiling at start-up adds",
        "several minutes",
        (_COMPILE,),
        "measured",
        _minutes,
        "at least 2 minutes for the default shapes of a model of 15M weights",
    ),
    Claim(
        "M06",
        "Mixtral's file: option.max_rolling_batch_size",
        "32",
        (_MIXTRAL,),
        "run",
        _effective("max_rolling_batch_size", "32"),
    ),
    Claim(
        "M07",
        "Mixtral's file: option.model_loading_timeout",
        "7,200 s",
        (_MIXTRAL,),
        "run",
        _effective("model_loading_timeout", "7200"),
    ),
    Claim(
        "M08", "start-up health check of the container, which binds before M07", "1,800 s", (_PROBE,), "run", _deadline
    ),
    Claim(
        "M09",
        "content generation: most new tokens",
        "512",
        (f"{_ARTICLE} --max-new-tokens 512 --ignore-eos --confidence",),
        "measured",
        _tokens(512),
    ),
    Claim(
        "M10",
        "chained generation: most new tokens of each request",
        "256",
        (f"{_ARTICLE} --max-new-tokens 256 --until-done --ignore-eos",),
        "measured",
        _chained,
    ),
    Claim(
        "M11",
        "0.26.0 against 0.25.0 on Llama 2 70B and Mixtral",
        "not printed",
        ("doctor",),
        "run",
        no_gpu,
        why="the post promises figures and prints none; both need GPU machines",
    ),
    Claim(
        "M12",
        "families that TensorRT-LLM newly compiles at start-up",
        "10",
        ("deploy backends --model llama-2-7b --instance ml.p4d.24xlarge --djl-version 0.26.0",),
        "run",
        _families,
    ),
)

BATCHING = (
    Claim(
        "F01",
        "Falcon-40B, 32 in / 128 out: continuous paged over dynamic batching",
        "10 x",
        (f"{_SIM} {_FIRST} {_PAGED}", f"{_SIM} {_FIRST} {_DYNAMIC}"),
        "simulated",
        _ratio(10),
        "15 %",
        _ENGINES_DIFFER,
    ),
    Claim(
        "F02",
        "the same, 256 in / 32 out",
        "2.3 x",
        (f"{_SIM} {_SECOND} {_PAGED}", f"{_SIM} {_SECOND} {_DYNAMIC}"),
        "simulated",
        _ratio(2.3),
        "15 %",
        _ENGINES_DIFFER,
    ),
    Claim(
        "F03",
        "Falcon-40B in FP32: weights",
        "160 GB",
        (_SUMS,),
        "computed",
        lambda o: near(o.term("weights"), 160, 1e-3, "GB"),
        "0.1 %",
    ),
    Claim(
        "F04",
        "in bfloat16",
        "about 80 GB",
        (f"{_FALCON} {_A10G} --tp 4",),
        "computed",
        lambda o: near(o.term("weights"), 80, 0.01, "GB"),
        "1 %",
    ),
    Claim(
        "F05",
        "allowance for the KV cache",
        "20 GB",
        (_SUMS,),
        "computed",
        lambda o: near(o.term("KV cache of the batch"), 20, 0.03, "GB, 39 x 2,048 tokens"),
        "3 %",
    ),
    Claim(
        "F06",
        "overhead of the framework, in the sum of 160 + 20 + 2",
        "about 2 GB",
        (_SUMS,),
        "computed",
        lambda o: near(o.term("sum"), 182, 0.01, "GB in all"),
        "1 %",
    ),
    Claim(
        "F07",
        "weights' share of each of 4 A10G",
        "about 84 %",
        (f"{_FALCON} {_A10G} --tp 4",),
        "computed",
        lambda o: points(o.term("weights' share"), 84, 1),
        "1 point",
    ),
    Claim(
        "F08",
        "left on each of 4 A10G",
        "16 %",
        (f"{_FALCON} {_A10G} --tp 4",),
        "computed",
        lambda o: points(o.term("left on a device"), 16, 1),
        "1 point",
    ),
    Claim(
        "F09",
        "left on each of 8 A10G",
        "about 60 %",
        (f"{_FALCON} {_A10G} --tp 8",),
        "computed",
        lambda o: points(o.term("left on a device"), 60, 2),
        "2 points",
    ),
    Claim("F10", "default of max_batch_delay", "100 ms", ("deploy options max_batch_delay",), "run", _default("100")),
    Claim("F11", "default of batch_size", "1", ("deploy options batch_size",), "run", _default("1")),
    Claim(
        "F12",
        "default of option.max_rolling_batch_size",
        "32",
        ("deploy options option.max_rolling_batch_size",),
        "run",
        _default("32"),
    ),
    Claim(
        "F13",
        "summary of a call, tokens in / out",
        "500 / 100",
        (_SCENARIO.format("summary-500-100"),),
        "simulated",
        _pairs((500, 100)),
    ),
    Claim(
        "F14",
        "code from a line, tokens in / out",
        "15 / 500",
        (_SCENARIO.format("code-15-500"),),
        "simulated",
        _pairs((15, 500)),
    ),
    Claim(
        "F15",
        "uneven requests, tokens in / out",
        "20 / 500 and 500 / 20",
        (_SCENARIO.format("mixed-20-500"),),
        "simulated",
        _pairs((20, 500), (500, 20)),
    ),
)
