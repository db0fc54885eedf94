"""What else is measured of towers, as Markdown tables: rates, first calls, memory, kernels."""

from collections.abc import Sequence

from compare.console import number
from compare.families import RecordDict, ranking, size, timed
from compare.markdown import table
from compare.results import Results


def rate_table(results: Results, workloads: Sequence[str]) -> str:
    """Tokens a second of each tower, and frames of clips; empty where none is on record.

    By calls in a row, where those were timed.
    """
    rows, in_a_row = [], False
    for name in ranking(results, workloads):
        records = [timed(results, workload).get(name, {}) for workload in workloads]
        rows.append([name, *map(_rates, records)])
        in_a_row |= any("row_us" in record for record in records)
    if all(set(row[1:]) == {"–"} for row in rows):
        return ""
    headings = [size(workload) for workload in workloads]
    calls = "in a row" if in_a_row else "one by one"
    return table([f"thousand tokens a second, calls {calls}", *headings], rows)


def _rates(record: RecordDict) -> str:
    if "tokens_per_s" not in record:
        return "–"
    tokens = number(record["tokens_per_s"] / 1e3)
    frames = record.get("frames_per_s")
    return tokens if frames is None else f"{tokens} ({frames:.0f} frames)"


def resource_table(results: Results, workloads: Sequence[str]) -> str:
    """First call and peak memory of each tower."""
    rows = []
    for name in ranking(results, workloads):
        records = [timed(results, workload).get(name, {}) for workload in workloads]
        cells = [
            f"{number(record.get('compile_s'))} s, {number(record.get('peak_memory_mib'), 5)} MiB"
            if record
            else "–"
            for record in records
        ]
        rows.append([name, *cells])
    headings = [size(workload) for workload in workloads]
    return table(["first call, peak memory", *headings], rows)


def group_table(results: Results, workloads: Sequence[str]) -> str:
    """Where the time of our towers goes, by groups of kernels; empty where no profiler saw it."""
    rows, groups = [], {}
    for workload in workloads:
        for name, record in timed(results, workload).items():
            if "groups_us" not in record:
                continue
            groups = record["groups_us"]
            rest = record["median_us"] - record["profiler_us"]
            times = (*groups.values(), rest, record["floor_us"])
            label = f"{name}, {size(workload)}"
            rows.append([label, *(number(time / 1e3, 2) for time in times)])
    return table(["ms", *groups, "between kernels", "floor"], rows) if rows else ""
