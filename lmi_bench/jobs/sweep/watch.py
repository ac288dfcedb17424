"""Watching the server during and after a sweep, and the processes that send to it."""

import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Literal

from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.level import Level
from lmi_bench.core.listener import Listener
from lmi_bench.core.redaction import redact, redact_text
from lmi_bench.core.server_metrics import CloudWatch
from lmi_bench.jobs.worker import sample_of
from lmi_bench.loadgen.aws.cloudwatch import timed_levels
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.channel import Job
from lmi_bench.loadgen.run.hosts import JOIN, Host, ray_workers
from lmi_bench.loadgen.run.worker_pool import WorkerPool
from lmi_bench.loadgen.watch.machine import HostCpu, open_gpu_power
from lmi_bench.loadgen.watch.server_watch import ServerWatch, why_unreadable
from lmi_bench.targets.bench import Access, Bench

DEFAULT_WAIT_S = 120.0  # CloudWatch has the values of a minute one to two minutes later
_ASK_EVERY_S = 15.0
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Client:
    """The sending processes, and the metrics pages to read.

    workers       number of processes here; auto: as many as the levels need
    hosts         where processes send instead; listen: address for those that dial in
    ray           address of a Ray cluster that has one of them a node; hosts is then one JOIN
    metrics_urls  of the server's replicas, or files of their OpenTelemetry spans; empty: the target's
                  own /metrics, if it has one
    """

    workers: int | Literal["auto"] = "auto"
    metrics_urls: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    listen: tuple[str, int] = ("127.0.0.1", 0)
    ray: str | None = None

    @property
    def source(self) -> str:
        """The option that says where the processes are."""
        if self.ray is not None:
            return "--ray"
        return "--hosts" if self.hosts else f"--workers {self.workers}"


@contextmanager
def open_pool(
    bench: Bench, access: Access, salt: str, prompts: Prompts, client: Client, listener: Listener
) -> Iterator[WorkerPool | None]:
    """The worker processes, those on other hosts at work; None if this process sends alone.

    salt  of the prompts
    Raises InputError that names the host that cannot be used.
    """
    if (client.workers == 1 and not client.hosts) or bench.asked is None:
        yield None
        return
    scenario = bench.scenario.canonical()
    if JOIN in client.hosts and redact(scenario) != scenario:
        raise InputError(
            f"{client.source}: the scenario holds a secret, such as a password in "
            "the address, which is not sent over the network: set "
            "LMI_BENCH_API_KEY or --header, on both sides"
        )
    headers = bench.metrics_headers or access.headers  # of a URL with the key; others take none
    job = Job(scenario, bench.asked, sample_of(prompts, bench.scenario), salt, headers)
    with ExitStack() as stack:
        pool = WorkerPool(job, client.workers, hosts=client.hosts, listen=client.listen, listener=listener)
        if client.ray is not None:
            nodes, pool.check = stack.enter_context(ray_workers(client.ray, client.listen))
            pool.hosts = (JOIN,) * nodes
        stack.enter_context(closing(pool))
        if pool.hosts:
            listener.note("workers: " + ", ".join(host.name for host in pool.hosts))
            pool.open()
        yield pool


def open_server_watch(bench: Bench, client: Client) -> ServerWatch | None:
    """A reader of the server's metrics, and of this machine's GPUs and CPUs if it runs here.

    Raises InputError for an option that does not fit the target.
    """
    load = bench.scenario.load
    if (client.hosts or client.workers not in (1, "auto")) and (
        load.max_sessions is not None
        or load.max_in_flight is not None
        or isinstance(bench.scenario.client.connections, int)
    ):
        raise InputError(f"{client.source}: a cap on requests needs a single process; leave it out")
    if client.hosts and client.workers != "auto":
        raise InputError(f"{client.source} and --workers: write local*4 among the hosts for four here")
    urls = client.metrics_urls
    headers: dict[str, str] = {}
    for url in urls:
        if why := why_unreadable(url, headers, bench.tls_context):
            raise InputError(f"--metrics-url {redact_text(url)} cannot be used: {why}")
    own = bench.metrics_url
    if not urls and own is not None:
        headers = dict(bench.metrics_headers)  # the key is for this server only
        if why_unreadable(own, headers, bench.tls_context) is None:
            urls = (own,)
    address = urllib.parse.urlsplit(own or "")
    is_here = address.hostname in _LOCAL_HOSTS
    if not urls and not is_here:
        return None
    return ServerWatch(
        urls,
        headers=headers,
        context=bench.tls_context,
        power=open_gpu_power() if is_here else None,
        cpu=HostCpu(address.port or 80) if is_here else None,
        shares_prefixes=bench.scenario.workload.begins_alike,
    )


def read_cloudwatch(
    bench: Bench, lines: Sequence[Level], listener: Listener, *, wait_s: float = DEFAULT_WAIT_S
) -> list[CloudWatch]:
    """CloudWatch's figures of the levels; empty if it has none or may not be read.

    wait_s  maximum wait until it has counted every invocation; Ctrl-C ends the wait
    """
    timed = timed_levels(lines)
    if bench.cloudwatch is None or not timed:
        return []
    sent = sum(line.sent for line in timed)
    end_s = time.monotonic() + wait_s
    found: list[CloudWatch] = []
    try:
        found = bench.cloudwatch(timed)
        if wait_s and _counted(found) < sent:
            listener.note(f"waiting up to {wait_s:.0f} s for CloudWatch (Ctrl-C ends the wait)")
        while _counted(found) < sent and time.monotonic() < end_s:
            time.sleep(min(_ASK_EVERY_S, max(0.0, end_s - time.monotonic())))
            found = bench.cloudwatch(timed)
    except KeyboardInterrupt:
        listener.note("the wait for CloudWatch was ended; its last minutes may be missing")
    except LmiBenchError as exc:
        listener.note(f"{exc}; the levels have no CloudWatch figures")
        return []
    if all(level.invocations is None for level in found):
        listener.note("CloudWatch has no invocations of these minutes: the levels have no figures of it")
        return []
    if _counted(found) < sent:
        listener.note(f"CloudWatch had counted {_counted(found):.0f} of {sent} invocations when read")
    return found


def _counted(levels: Sequence[CloudWatch]) -> float:
    """Invocations of all levels; a minute shared by two levels counts twice, which ends a wait."""
    return sum(level.invocations or 0.0 for level in levels)
