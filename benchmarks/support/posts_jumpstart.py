"""The claims of the post that benchmarked SageMaker JumpStart's endpoints."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.support.posts_program import Claim, Output, Shown, inside, near, same

_BATCH = "explain batch --model llama-2-7b --accelerator"
_MEMORY = "explain memory --model llama-2-7b --memory-gb 24"
_256 = "--input-tokens 256 --output-tokens 256 --profile tgi-2023"
_G5 = f"predict --model llama-2-7b --instance ml.g5.2xlarge {_256} --concurrency 1,64"
_SWEEP = f"sweep --target sim:ml.g5.2xlarge --model llama-2-7b {_256} --concurrency 1,2,4,8,16,32,64"
_CLIENT = (
    "sweep --target sim:ml.g5.2xlarge --model llama-2-7b --profile tgi-2023 --input-tokens 8 "
    "--output-tokens 100 --requests-per-level 1000 --concurrency 128"
)
_FIGURE = f"predict --model llama-2-7b --instance ml.g5.12xlarge --tp 4 {_256} --concurrency 128,192,256,384"
_DEFAULTS = "deploy defaults llama-2-7b ml.g5.2xlarge"
_DEGREES = (1, 2, 4, 8)
_P4D = tuple(
    f"predict --model llama-2-7b --instance ml.p4d.24xlarge --tp {degree} {_256} --concurrency 512"
    for degree in _DEGREES
)
_WHOLE = f"recommend --model {{}} --instance ml.p4d.24xlarge --objective throughput {_256}"
_CAUSES = (
    f"predict --model llama-2-7b --instance ml.g5.2xlarge {_256} --concurrency 128",
    "predict --model llama-3-8b --instance ml.p5.48xlarge --tp 1 --dtype float16 "
    "--input-tokens 1024 --output-tokens 16 --concurrency 256",
)
_TWO_MODELS = "recommend --portfolio benchmarks/support/posts_two_models.yaml --instance ml.g5.12xlarge"
_TIME_OUT_S = 60
_TIME_OUT = (
    'python -c "from lmi_bench.core.scenario import parse_scenario as p; '
    "print(p({'target': 'sagemaker:NAME', 'stream': False}).timeout_s)\""
)
_CONNECT = (
    'python -c "import inspect; from lmi_bench.loadgen.http.target import HttpTarget as T; '
    "print(inspect.signature(T).parameters['connect_timeout_s'].default)\""
)
_ATTEMPTS = 'python -c "from lmi_bench.loadgen.run.retry import MAX_ATTEMPTS as n; print(n)"'

Check = Callable[..., Shown]


def _left(out: Output) -> Shown:
    return near(24 - out.term("weights"), 10, 0.06, "GB")


def _last_level(out: Output) -> Shown:
    """The request that ends last, by users: a level ends a row once it passes the time-out."""
    figures = out.predicted("latency_p90_ms_per_token")
    seconds = {users: each["predicted"] * 256 / 1000 for users, each in figures.items()}
    text = ", ".join(f"{s:.0f} s at {users}" for users, s in seconds.items())
    over = min((users for users, s in seconds.items() if s > _TIME_OUT_S), default=None)
    return Shown(f"p90 {text} users", seconds[192] <= _TIME_OUT_S and over in (256, 384))


def _knee(out: Output) -> Shown:
    knee = next(each for each in out.data["knees"] if each["rule"] == "latency_limit")
    latency = out.levels("latency_ms_per_token.p90")
    users, limit = knee["concurrency"], knee["why"].partition(";")[0]
    text = f"knee at {users} users: {limit}; 32 users have {latency[32]:.0f} ms/token"
    return Shown(text, "<= 100 ms/token" in limit and users in (16, 32))


def _variable(name: str, value: str) -> Check:
    def check(out: Output) -> Shown:
        found = dict(line.split("=", 1) for line in out.text.splitlines() if "=" in line)
        return same(found.get(name), value, f"{name}={found.get(name)}")

    return check


def _sent(out: Output) -> Shown:
    """The level's requests without the first of each user, which no latency counts."""
    (level,) = out.data["levels"]
    counted = level["requests"] - level.get("start_requests", 0)
    return near(counted, 1000, 0, f"requests counted, {level['requests']:,} sent")


def _each_100(out: Output) -> Shown:
    """Tokens of the requests that are counted: 100 of each of 1,000."""
    counted = [each["output_tokens"] for each in out.data["requests"] if not each.get("at_start")]
    return near(sum(counted), 100_000, 0, f"tokens of {len(counted):,} requests")


def _client_speed(out: Output) -> Shown:
    (speed,) = out.levels("throughput_tokens_per_s").values()
    return near(speed, 1255, 0.13, "tok/s")


def _client_time(out: Output) -> Shown:
    (speed,) = out.levels("throughput_tokens_per_s").values()
    return near(100_000 / speed, 80, 0.13, "s")


def _users(out: Output) -> Shown:
    (level,) = out.data["levels"]
    return near(level["concurrency"], 128, 0, "users in a closed loop")


def _best_degree(*outs: Output) -> Shown:
    speeds = {
        degree: out.predicted("throughput_tokens_per_s")[512]["predicted"]
        for degree, out in zip(_DEGREES, outs, strict=True)
    }
    best = max(speeds, key=lambda degree: speeds[degree])
    text = ", ".join(f"TP {degree} {speed:,.0f}" for degree, speed in speeds.items())
    return Shown(f"TP {best} ({text} tok/s)", best == 4)


def _layout(degree: int, copies: int) -> Check:
    def check(out: Output) -> Shown:
        best = out.data["recommended"]
        found = best["tensor_parallel"], best["replicas"]
        return same(found, (degree, copies), f"TP {found[0]} x {found[1]} copies")

    return check


def _shared(out: Output) -> Shown:
    apart, together = out.data["separate_usd_per_hour"], out.data["usd_per_hour"]
    return near(100 * (1 - together / apart), 50, 0.1, "% less")


def _two_causes(*outs: Output) -> Shown:
    found = [out.data["predictions"][0]["regime"] for out in outs]
    return same(found, ["kv_memory", "compute"], " and ".join(found))


def _printed(claimed: float, unit: str) -> Check:
    def check(out: Output) -> Shown:
        return near(float(out.text), claimed, 0, unit)

    return check


_RAN_ELSEWHERE = (
    "108 tokens a request let all 128 users run at once, where the tables' 512 let 28: what the "
    "host spends on each running sequence is extrapolated 4.6 times beyond the cells of this "
    "device, and the post's run has 128 client threads with retries in it"
)

JUMPSTART = (
    Claim(
        "J01",
        "A10G: FP16 compute",
        "70 TFLOPS",
        (f"{_BATCH} A10G",),
        "computed",
        lambda o: Shown("70 TFLOP/s", any("70 TFLOP/s" in t["formula"] for t in o.data["terms"])),
        "the data sheet's",
    ),
    Claim(
        "J02",
        "A10G: memory bandwidth",
        "600 GB/s",
        (f"{_BATCH} A10G",),
        "computed",
        lambda o: Shown("600 GB/s", any("600 GB/s" in t["formula"] for t in o.data["terms"])),
        "the data sheet's",
    ),
    Claim(
        "J03",
        "A10G: operations a byte",
        "116",
        (f"{_BATCH} A10G",),
        "computed",
        lambda o: near(o.term("operations a byte"), 116, 0.01, "FLOP/byte"),
        "1 %",
    ),
    Claim(
        "J04",
        "A100 of p4d: operations a byte",
        "208",
        (f"{_BATCH} A100-40",),
        "computed",
        lambda o: near(o.term("operations a byte"), 208, 0.01, "FLOP/byte"),
        "1 %",
        "the post rounds the data sheet's 1,555 GB/s to 1.5 TB/s: 312 / 1.555 = 200.6",
    ),
    Claim(
        "J05",
        "Llama 2 7B: attention's intensity at 4,096 tokens",
        "62",
        (f"{_BATCH} A10G",),
        "computed",
        lambda o: near(o.term("intensity of attention over"), 62, 0.01, "FLOP/byte"),
        "1 %",
    ),
    Claim(
        "J06",
        "Llama 2 7B: FP16 weights",
        "about 14 GB",
        (_MEMORY,),
        "computed",
        lambda o: near(o.term("weights"), 14, 0.05, "GB"),
        "5 %",
    ),
    Claim(
        "J07",
        "A10G: memory",
        "24 GB",
        ("explain memory --model llama-2-7b --accelerator A10G",),
        "computed",
        lambda o: near(100 * o.term("weights") / o.term("weights' share"), 24, 0.01, "GB"),
        "1 %",
    ),
    Claim("J08", "left of it for the KV cache", "10 GB", (_MEMORY,), "computed", _left, "6 %"),
    Claim(
        "J09",
        "so sequences of 4,096 tokens that fit",
        "4",
        (_MEMORY,),
        "computed",
        lambda o: near(o.term("sequences that fit"), 4, 0),
    ),
    Claim(
        "J10",
        "A10G: critical batch size",
        "116",
        (f"{_BATCH} A10G",),
        "computed",
        lambda o: near(o.term("critical batch size, weights only"), 116, 0.01, "rows"),
        "1 %",
    ),
    Claim("J11", "a SageMaker invocation's time-out", "60 s", (_TIME_OUT,), "run", _printed(60, "s")),
    Claim(
        "J12",
        "ml.g5.12xlarge, last load of the figure before the time-out",
        "192 users",
        (_FIGURE,),
        "predicted",
        _last_level,
        "p90 below 60 s at 192 users, above it by 384",
    ),
    Claim(
        "J13",
        "Llama 2 7B on ml.g5.2xlarge, one user",
        "30 tok/s",
        (_G5,),
        "predicted",
        lambda o: inside(o.predicted("throughput_tokens_per_s")[1], 30, "tok/s"),
        "in the 80 % interval; the profile was fitted to this table",
    ),
    Claim(
        "J15",
        "the same, 64 users",
        "486 tok/s",
        (_G5,),
        "predicted",
        lambda o: inside(o.predicted("throughput_tokens_per_s")[64], 486, "tok/s"),
        "in the 80 % interval; the profile was fitted to this table",
    ),
    Claim(
        "J16",
        "example of a limit that sets the knee",
        "100 ms/token",
        (_SWEEP,),
        "simulated",
        _knee,
        "the default limit, and a knee within a doubling of the table's 32",
    ),
    Claim(
        "J17",
        "TGI: MAX_BATCH_PREFILL_TOKENS",
        "4,096",
        (_DEFAULTS,),
        "run",
        _variable("MAX_BATCH_PREFILL_TOKENS", "4096"),
    ),
    Claim(
        "J18", "TGI with Llama 2: MAX_TOTAL_TOKENS", "4,096", (_DEFAULTS,), "run", _variable("MAX_TOTAL_TOKENS", "4096")
    ),
    Claim(
        "J19", "TGI with Llama 2: MAX_INPUT_LENGTH", "4,095", (_DEFAULTS,), "run", _variable("MAX_INPUT_LENGTH", "4095")
    ),
    Claim(
        "J20", "TGI: MAX_CONCURRENT_REQUESTS", "128", (_DEFAULTS,), "run", _variable("MAX_CONCURRENT_REQUESTS", "128")
    ),
    Claim("J21", "batch client: requests", "1,000", (_CLIENT,), "simulated", _sent),
    Claim("J22", "batch client: tokens", "100,000", (_CLIENT,), "simulated", _each_100),
    Claim(
        "J23",
        "batch client: throughput",
        "1,255 tok/s",
        (_CLIENT,),
        "simulated",
        _client_speed,
        "13 %, as published repeats differ at most",
        _RAN_ELSEWHERE,
    ),
    Claim("J24", "batch client: duration", "about 80 s", (_CLIENT,), "simulated", _client_time, "13 %", _RAN_ELSEWHERE),
    Claim("J25", "batch client: threads", "128", (_CLIENT,), "simulated", _users),
    Claim("J26", "client: connect_timeout", "10 s", (_CONNECT,), "run", _printed(10, "s")),
    Claim(
        "J27",
        "client: attempts in all, standard mode",
        "20",
        (_ATTEMPTS,),
        "run",
        _printed(20, "attempts"),
        why="`sweep --retries aws-standard` has the three attempts of "
        "botocore's standard mode; the post's client raises them to 20",
    ),
    Claim(
        "J28",
        "hours of 1M tokens at 486 tok/s",
        "0.5716 h",
        ("explain blended --price 1 --throughput 486",),
        "computed",
        lambda o: near(o.term("1M output"), 0.5716, 1e-3, "USD at 1 USD/h"),
        "0.1 %",
    ),
    Claim(
        "J29",
        "Llama 2 7B on ml.p4d.24xlarge, one copy, 512 users: best degree",
        "TP 4",
        _P4D,
        "predicted",
        _best_degree,
        "the same degree",
    ),
    Claim(
        "J30",
        "the same, the whole machine",
        "TP 1 x 8 copies",
        (_WHOLE.format("llama-2-7b"),),
        "predicted",
        _layout(1, 8),
        "the same layout",
    ),
    Claim(
        "J31",
        "Llama 2 13B, the whole machine",
        "TP 2 x 4 copies",
        (_WHOLE.format("llama-2-13b"),),
        "predicted",
        _layout(2, 4),
        "the same layout",
    ),
    Claim(
        "J32",
        "inference components: lower cost of deployments",
        "50 % on average",
        (_TWO_MODELS,),
        "predicted",
        _shared,
        "10 % of it, for two models that each need half a machine",
    ),
    Claim(
        "J33", "causes of a knee", "2: KV memory, or compute", _CAUSES, "predicted", _two_causes, "a set-up for each"
    ),
)
