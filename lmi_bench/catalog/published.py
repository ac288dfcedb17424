"""Published measurements that ship with the program, for validating predictions.

`data/published/README.md` explains the figures and names their sources.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from lmi_bench.catalog.tables import Row, number_or_none, read_rows
from lmi_bench.core.units import ms_to_s


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """One measured cell of the JumpStart tables.

    replicas                 instances behind the endpoint, each with one copy of the model
    latency_s_per_token      end-to-end latency / output tokens, about the 90th percentile
    """

    table: str
    model: str
    instance_type: str
    tensor_parallel: int
    replicas: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    throughput_tokens_per_s: float | None
    latency_s_per_token: float | None


def _cell(row: Row) -> PublishedCell:
    latency_ms = number_or_none(row.get("latency_ms_per_token", ""))
    return PublishedCell(
        table=row["table"],
        model=row["model"],
        instance_type=row["instance"],
        tensor_parallel=int(row["tp"]),
        replicas=int(row.get("instance_count") or 1),
        input_tokens=int(row["input_tokens"]),
        output_tokens=int(row["output_tokens"]),
        concurrency=int(row["concurrency"]),
        throughput_tokens_per_s=number_or_none(row.get("throughput_tokens_per_s", "")),
        latency_s_per_token=None if latency_ms is None else ms_to_s(latency_ms),
    )


def published_table(name: str) -> Path:
    """The path of a bundled table such as `jumpstart_concurrency.csv`."""
    return Path(str(files("lmi_bench.catalog") / "data" / "published" / name))


def jumpstart_cells(*tables: str) -> tuple[PublishedCell, ...]:
    """The cells of these tables: Llama 2 7B and 13B by `concurrency`, instance, degree and number of
    instances; `min_latency` and `max_throughput` of 15 models."""
    return tuple(_cell(row) for table in tables for row in read_rows(f"published/jumpstart_{table}.csv"))
