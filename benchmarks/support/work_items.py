"""Maps a function over independent items: on the cores of this machine, or on a Ray cluster.

With a folder, each result is kept there as soon as it is known, so a run that was cut goes on
behind what it has, on the same cores or others. A folder is for one tree: empty it after a change.

`work` is a function of a module; its arguments and its result are JSON. On a cluster each node
needs the same tree (`pip install -e '.[distributed]'`); Ray starts an item again on another node
where its own is lost.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.host import usable_cores

Item = Sequence[Any]
Work = Callable[..., Any]
LOST_NODES = 3  # times that an item may lose its node


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of where the items run and where their results stay."""
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes here")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster instead: HOST:PORT, or auto")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep results; go on with them")


def mapped(
    work: Work,
    items: Sequence[Item],
    options: argparse.Namespace,
    tell: Callable[[Item, Any], None] = lambda _item, _result: None,
) -> list[Any]:
    """The results of `work(*item)` in the order of the items; tell: called with each new one.

    options  of `add_options`

    Raises what `work` raises; results that were known by then are kept.
    """
    folder: Path | None = options.keep
    found: dict[int, Any] = {}
    for place, item in enumerate(items):
        kept = folder and _file_of(folder, work, item)
        if kept and kept.exists():
            found[place] = json.loads(kept.read_text(encoding="utf-8"))
    missing = [place for place in range(len(items)) if place not in found]
    run = _here(options.workers) if options.ray is None else _on_cluster(options.ray)
    for number, result in run(work, [items[place] for place in missing]):
        place = missing[number]
        found[place] = json.loads(json.dumps(result))  # the same whether it was kept or not
        if folder is not None:
            _keep(_file_of(folder, work, items[place]), result)
        tell(items[place], found[place])
    return [found[place] for place in range(len(items))]


Results = Iterator[tuple[int, Any]]
"""The number of an item and its result, as they come."""


def _here(workers: int) -> Callable[[Work, Sequence[Item]], Results]:
    def run(work: Work, items: Sequence[Item]) -> Results:
        if min(workers, len(items)) < 2:
            yield from enumerate(work(*item) for item in items)
            return
        with ProcessPoolExecutor(min(workers, len(items))) as pool:
            running = {pool.submit(work, *item): number for number, item in enumerate(items)}
            try:
                for done in as_completed(running):
                    yield running[done], done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    return run


def _on_cluster(address: str) -> Callable[[Work, Sequence[Item]], Results]:
    def run(work: Work, items: Sequence[Item]) -> Results:
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as exc:
            raise InputError("--ray needs Ray: pip install 'lmi-bench[distributed]'") from exc
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        try:
            task = ray.remote(num_cpus=1, max_retries=LOST_NODES)(work)
            running = {task.remote(*item): number for number, item in enumerate(items)}
            while running:
                (done,), _ = ray.wait([*running], num_returns=1)
                yield running.pop(done), ray.get(done)
        finally:
            ray.shutdown()

    return run


def _file_of(folder: Path, work: Work, item: Item) -> Path:
    text = json.dumps([work.__qualname__, *item])
    return folder / f"{work.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _keep(path: Path, result: object) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(f".{os.getpid()}")
    begun.write_text(json.dumps(result), encoding="utf-8")
    begun.replace(path)
