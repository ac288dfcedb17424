"""What `doctor` does: examines this machine, its software and settings, without changing any."""

import datetime as dt
import importlib.metadata
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from lmi_bench.core import host
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Listener
from lmi_bench.core.native_build import RECEIVER, NativeUnavailableError, library
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.units import bytes_to_gib, plural
from lmi_bench.jobs.settings.setup import DoctorSettings

State = Literal["ok", "warn", "fail"]
Outcome = tuple[State, str, str]
"""State, what was found with its figures, and a sentence that says what to mend; empty if ok."""

_WATCH_S: Final = 0.2
_BUSY_SHARE, _STEAL_SHARE = 0.5, 0.01  # of the cores; above, latencies are another's
_FAST_CLOCKS: Final = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_STREAMS: Final = 32, 1024  # the highest default level; what large sweeps use
_MEMORY_GIB: Final = 0.5, 2.0
_DISK_GIB: Final = 0.05, 1.0
_FEW_PORTS: Final = 10_000
_OLD_PROFILE_DAYS: Final = 365
_TERMINAL_COLUMNS: Final = 80
_EXTENSIONS: Final = {"x86_64": ("avx2", "avx512f", "avx512_bf16", "amx_bf16"), "aarch64": ("asimd", "bf16", "sve")}
_CREDENTIALS: Final = {
    "aws_access_key_id": "keys",
    "sso_session": "SSO",
    "sso_start_url": "SSO",
    "role_arn": "a role",
    "credential_process": "a program",
    "web_identity_token_file": "a web identity",
}
_CREDENTIAL_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was examined, its state, what was found, and what to mend."""

    check: str
    state: State
    found: str
    mend: str = ""


def doctor(settings: DoctorSettings, listener: Listener) -> list[Finding]:
    """Examine the machine, and the endpoint if one is named; raises InputError for a bad URL."""
    checks: dict[str, Callable[[], Outcome]] = {
        "cores": _cores,
        "load": _load,
        "clock": _clock,
        "open files": _open_files,
        "receive times": _receive_times,
        "C receiver": _receiver,
        "processor": _processor,
        "memory": _memory,
        "disk": partial(_disk, settings.runs),
        "ports": _ports,
        "GPU": _gpu,
        "packages": _packages,
        "AWS credentials": _aws_credentials,
        "AWS region": _aws_region,
        "profiles": _profiles,
        "prices": _prices,
        "proxies": _proxies,
        "terminal": _terminal,
    }
    if settings.target is not None:
        checks["endpoint"] = _endpoint_check(settings, settings.target, listener)
    return [finding(name, check) for name, check in checks.items()]


def finding(name: str, check: Callable[[], Outcome], unknown: State = "warn") -> Finding:
    """The line of a check; `unknown`: its state if the check cannot be made."""
    try:
        return Finding(name, *check())
    except Exception as exc:  # noqa: BLE001 - a check that cannot be made is a line as well
        what = redact_text(f"{type(exc).__name__}: {exc}").partition("\n")[0]
        return Finding(name, unknown, f"unknown ({what})", "This check could not be made here.")


def _judged(found: str, *faults: tuple[object, str]) -> Outcome:
    """A warning with what mends the first fault that holds; ok if none does."""
    for holds, mend in faults:
        if holds:
            return "warn", found, mend
    return "ok", found, ""


def _by_limits(value: float, limits: tuple[float, float], found: str, mend: str) -> Outcome:
    """Fails below the first limit, warns below the second."""
    return ("fail", found, mend) if value < limits[0] else _judged(found, (value < limits[1], mend))


def _cores() -> Outcome:
    usable, nominal = host.usable_cores(), os.cpu_count() or 1
    return _judged(
        f"{usable} of {plural(nominal, 'core')} usable",
        (usable < nominal, "Raise the container's CPU quota or the CPU affinity to use the rest."),
        (usable == 1, "Give the load generator 2 cores: anything else delays its reads."),
    )


def _load() -> Outcome:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    found, steal = f"load average {load:.2f} on {plural(cores, 'core')}", 0.0
    stat = Path("/proc/stat")
    if stat.exists():
        before = _processor_times(stat)
        time.sleep(_WATCH_S)
        after = _processor_times(stat)
        spent = [late - early for early, late in zip(before, after, strict=True)]
        steal = spent[7] / max(1, sum(spent[:8]))
        found += f", steal {steal:.1%} in {_WATCH_S:g} s"
    shared = "Move to a machine whose cores are not shared: its pauses are in p99."
    busy = load > _BUSY_SHARE * cores
    return _judged(found, (steal > _STEAL_SHARE, shared), (busy, "End other programs before you measure."))


def _processor_times(stat: Path) -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal ... of all cores, in ticks."""
    return [int(each) for each in stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]


def _clock() -> Outcome:
    from lmi_bench.loadgen.http.kernel_time import SAMPLE_EVERY_S, KernelClock

    path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = path.read_text(encoding="ascii").strip() if path.exists() else ""
    clock = KernelClock()
    clock.sample()
    reads = [time.monotonic_ns() for _ in range(2000)]
    for _ in range(int(_WATCH_S / SAMPLE_EVERY_S)):
        time.sleep(SAMPLE_EVERY_S)
        clock.sample()
    found = (
        f"source {source or 'not stated'}, resolution "
        f"{time.get_clock_info('monotonic').resolution * 1e9:g} ns, a read takes "
        f"{(reads[-1] - reads[0]) / len(reads):.0f} ns, {plural(clock.steps, 'step')} of the wall "
        f"clock in {_WATCH_S:g} s"
    )
    if any(late < early for early, late in itertools.pairwise(reads)):
        return "fail", found, "Use another machine: the monotonic clock runs backwards."
    is_slow = source and source not in _FAST_CLOCKS
    return _judged(
        found,
        (clock.steps, "Let the clock be slewed, not stepped (chronyd), while you measure."),
        (is_slow, "Choose a clock source that needs no system call, such as tsc."),
    )


def _open_files() -> Outcome:
    import resource

    from lmi_bench.loadgen.http.target import SPARE_DESCRIPTORS

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return "ok", "no hard limit", ""
    streams = max(0, hard - SPARE_DESCRIPTORS)
    found = f"hard limit {hard:,}: {plural(streams, 'concurrent stream')}"
    needed = _STREAMS[1] + SPARE_DESCRIPTORS
    mend = f"Raise the hard limit to {needed:,} or more (ulimit -Hn, LimitNOFILE, --ulimit nofile)."
    return _by_limits(streams, _STREAMS, found, mend)


def _receive_times() -> Outcome:
    from lmi_bench.loadgen.http.kernel_time import stamping_socket

    if (stamping := stamping_socket()) is not None:
        stamping.close()
        return "ok", "the kernel stamps received packets", ""
    found = "the kernel does not stamp received packets: token times are those of the read"
    return "warn", found, "Measure on Linux without a sandbox that hides SO_TIMESTAMPNS."


def _receiver() -> Outcome:

    if sys.platform != "linux":
        return "warn", "Python reads the streams", "Measure on Linux: the C receiver needs epoll."
    try:
        path = library(RECEIVER, build=False)
    except NativeUnavailableError as exc:
        mend = f"Install a C compiler such as gcc, or name one in {RECEIVER.variable}."
        return "warn", f"Python reads the streams, which carries fewer: {exc}", mend
    return "ok", f"{path} is built" if path.is_file() else "is built at the first sweep", ""


def _processor() -> Outcome:
    listed, machine = host.instruction_sets().split(), host.host_facts()["machine"]
    wanted = _EXTENSIONS.get(machine, ()) if listed else ()
    found = host.cpu_info("model name") or machine
    has = [name for name in wanted if name in listed]
    for word, names in (("with", has), ("without", [each for each in wanted if each not in has])):
        found += f", {word} {', '.join(names)}" if names else ""
    mend = "Run the bundled engine on a processor with vector instructions."
    return _judged(found, (wanted and not has, mend))


def _memory() -> Outcome:
    free = bytes_to_gib(host.available_memory_bytes())
    found = f"{free:.1f} of {bytes_to_gib(host.memory_bytes()):.1f} GiB available"
    mend = f"Free memory or raise the container's limit to {_MEMORY_GIB[1]:g} GiB or more."
    return _by_limits(free, _MEMORY_GIB, found, mend)


def _disk(runs: Path) -> Outcome:
    folder = next(each for each in (runs, *runs.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = bytes_to_gib(shutil.disk_usage(folder).free)
    except OSError as exc:
        found = f"{runs} cannot be written ({exc.strerror})"
        return "fail", found, "Name another folder with `sweep --out`, or mend its permissions."
    mend = f"Make room: a long sweep writes up to {_DISK_GIB[1]:g} GiB."
    return _by_limits(free, _DISK_GIB, f"{free:.1f} GiB free for {runs}", mend)


def _ports() -> Outcome:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not path.exists():
        return "ok", "not listed by this system", ""
    first, last = map(int, path.read_text(encoding="ascii").split())
    found = f"{last - first + 1:,} ephemeral ports, {first} to {last}"
    mend = "Widen net.ipv4.ip_local_port_range: each connection to an address takes one port."
    return _judged(found, (last - first + 1 < _FEW_PORTS, mend))


def _gpu() -> Outcome:
    torch = host.installed_versions(("torch",)).get("torch", "")
    engine = f"torch {torch} (not loaded)" if torch else "no torch"
    program = shutil.which("nvidia-smi")
    if program is None:
        return "ok", f"no nvidia-smi, so no NVIDIA GPU; {engine}", ""
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603  the driver's own program, no shell
            query, capture_output=True, text=True, timeout=1.5, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        found = f"{program} fails ({type(exc).__name__}); {engine}"
        return "warn", found, "Reinstall the driver, or restart the machine, to use its GPU."
    gpus = done.stdout.strip().splitlines()
    found = f"{'; '.join(gpus) or 'nvidia-smi lists none'}; {engine}"
    mend = "Install torch's CUDA build: this one computes on the processor only."
    return _judged(found, (gpus and "+cpu" in torch, mend))


def _packages() -> Outcome:
    from packaging.requirements import Requirement  # comes with matplotlib

    required, engine = [], []
    for each in map(Requirement, importlib.metadata.requires("lmi-bench") or ()):
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            required.append(each)
        elif each.marker.evaluate({"extra": "engine"}):
            engine.append(each)
    versions = host.installed_versions([each.name for each in (*required, *engine)])
    missing = [each for each in required if each.name not in versions]
    old = [
        each
        for each in (*required, *engine)
        if each.name in versions and not each.specifier.contains(versions[each.name], True)
    ]
    listed = ", ".join(f"{each.name} {versions.get(each.name, 'missing')}" for each in engine)
    found = (
        f"Python {host.host_facts()['python']}, {len(required) - len(missing)} of {len(required)} "
        f"required packages; engine extra: {listed}"
    )
    faults = " ".join(f"'{each.name}{each.specifier}'" for each in (*missing, *old))
    mend = f"Install what is needed: pip install {faults}"
    return ("fail", found, mend) if missing else _judged(found, (faults, mend))


def _aws_credentials() -> Outcome:
    """Names of what is set, without a request: neither AWS nor the metadata service is asked."""
    variables = [name for name in _CREDENTIAL_VARIABLES if os.environ.get(name)]
    profiles, profile, is_named = _aws_profiles()
    kinds = [kind for key, kind in _CREDENTIALS.items() if key in profiles.get(profile, {})]
    named = [f"{name} is set" for name in variables]
    named += [f"profile {profile} has {kinds[0]}"] if kinds else []
    shown = ", ".join(named) or "none in the environment and in the profile files"
    if is_named and profile not in profiles:
        found = f"{shown}; profile {profile} is not in the files"
        return "fail", found, "Name an existing profile in AWS_PROFILE, or unset it."
    if "AWS_ACCESS_KEY_ID" in variables and not os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return "fail", f"{shown} without AWS_SECRET_ACCESS_KEY", "Set both variables, or neither."
    mend = "Run `aws configure`, for SageMaker only; a role of this machine was not asked for."
    return _judged(shown, (not named, mend))


def _aws_profiles() -> tuple[dict[str, dict[str, Any]], str, bool]:
    """The profiles of the AWS files, the name in use, and whether the environment names it."""
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    named = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    try:
        profiles = Session().full_config["profiles"]
    except BotoCoreError as exc:  # its text quotes the line, which may be a key
        path = exc.kwargs.get("path", "of AWS")
        raise InputError(f"the file {path} cannot be read") from None
    return profiles, named or "default", named is not None


def _aws_region() -> Outcome:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        if os.environ.get(name):
            return "ok", f"{os.environ[name]}, from {name}", ""
    profiles, profile, _ = _aws_profiles()
    if region := profiles.get(profile, {}).get("region"):
        return "ok", f"{region}, from profile {profile}", ""
    return "warn", "none", "Set AWS_REGION before you use a SageMaker endpoint."


def _profiles() -> Outcome:
    from lmi_bench.analysis.model.builtin_profiles import TGI_2023, TRT_LLM_B200, VLLM

    shipped = (VLLM, TRT_LLM_B200, TGI_2023)
    days = [(_today() - dt.date.fromisoformat(each.fitted_date)).days for each in shipped]
    found = "; ".join(
        f"{each.name} {each.version}, fitted {each.fitted_date} ({plural(age, 'day')} ago) on {each.fitted_on}"
        for each, age in zip(shipped, days, strict=True)
    )
    mend = "Calibrate on a run of today's engine version: lmi-bench calibrate RUN_DIR --out P."
    return _judged(found, (max(days) > _OLD_PROFILE_DAYS, mend))


def _prices() -> Outcome:
    from lmi_bench.catalog.instances import all_instances
    from lmi_bench.catalog.prices import STALE_DAYS, on_platform, price_day

    found, stale = [], 0
    for platform in ("sagemaker", "ec2"):
        machines = [on_platform(each, platform) for each in all_instances()]
        days = [price_day(each) for each in machines if each.price_usd_per_hour is not None]
        known = [day for day in days if day is not None]
        old = sum((_today() - day).days > STALE_DAYS for day in known)
        stale += old
        dates = f", {min(known)} to {max(known)}" if known else ""
        found.append(
            f"{platform}: {len(days)} of {len(machines)}{dates}, {old} older than {STALE_DAYS} "
            f"days, {days.count(None)} undated"
        )
    return _judged("; ".join(found), (stale, "Get today's with `lmi-bench catalog refresh`."))


def _today() -> dt.date:
    return dt.datetime.now(tz=dt.UTC).date()


def _proxies() -> Outcome:
    names = [each for name in _PROXIES for each in (name, name.lower()) if os.environ.get(each)]
    mend = "Its delay is in every TTFT: list hosts to reach directly in NO_PROXY."
    found = f"{', '.join(names)} set" if names else "none in the environment"
    return _judged(found, (names, mend))


def _terminal() -> Outcome:
    if not sys.stdout.isatty():
        return "ok", "no terminal: tables have all columns, without colour", ""
    columns = shutil.get_terminal_size().columns
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in (None, "", "dumb")
    found = f"{columns} columns, {'without' if plain else 'with'} colour"
    mend = f"Widen it to {_TERMINAL_COLUMNS} columns or more: narrow tables leave columns out."
    return _judged(found, (columns < _TERMINAL_COLUMNS, mend))


def _endpoint_check(settings: DoctorSettings, url: str, listener: Listener) -> Callable[[], Outcome]:
    """The check of an endpoint; raises InputError for a URL or a header that is none."""
    from lmi_bench.loadgen.ask.discover import discover
    from lmi_bench.loadgen.ask.probe import Probe
    from lmi_bench.loadgen.http.endpoint import parse_endpoint
    from lmi_bench.targets.bench import Access, read_headers
    from lmi_bench.wire.format import find_format
    from lmi_bench.wire.openai import OpenAiCompletionsFormat

    parse_endpoint(url, find_format(OpenAiCompletionsFormat.name))
    access = Access(settings.api_key, read_headers(settings.header))
    shown = redact_text(url, access.secrets())

    def check() -> Outcome:
        listener.note(f"asking {shown} what it serves, with a real request of two tokens")
        try:
            found = discover(Probe(url, access.all_headers(), tell=listener.note))
        except InputError as exc:
            what = redact_text(str(exc), access.secrets())
            return "fail", what, "Mend the address, the key or the server, and ask again."
        notes = "".join(f"; {note}" for note in found.notes)
        return "ok", redact_text(f"{found.describe()}{notes}", access.secrets()), ""

    return check
