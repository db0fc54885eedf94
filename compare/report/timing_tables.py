"""What was timed of one family of workloads, as Markdown tables.

Times and ratios; of towers also rates, what a call's time is spent on, first calls and memory.
"""

from collections.abc import Iterator, Sequence

from compare.common.console import number
from compare.common.result_files import Results
from compare.report.grouping import KERNELS, OURS, RecordDict, family, peers, ranking, size, timed
from compare.report.markdown import table
from compare.workloads.kernels import FRAME_PEERS, FRAMES_MIX, FRAMES_MIX_PARTS

# Whom a peer's time is set against: ours of the same framework.
_COUNTERPART = {
    ("kernels", "torch"): "triton",
    ("kernels", "jax"): "pallas",
    ("towers", "torch"): "torch",
    ("towers", "jax"): "flax",
    ("integration", "torch"): "accelerated",
}

# Of a part's times: the unit and its microseconds.
_UNITS = {"kernels": ("µs", 1.0), "towers": ("ms", 1e3), "integration": ("ms", 1e3)}


def timing_table(results: Results, workloads: Sequence[str]) -> str:
    """Times of one family: a row for each implementation, a column for each workload.

    A cell holds the median and, for ours, the share of the floor, for a peer how many times longer
    than ours of the same framework it takes. Spread and error are the largest of the row.
    """
    floors = [_first(results.of(workload), "floor_us") for workload in workloads]
    scale = _UNITS[results.part][1]
    rows = [["floor", *(number(floor and floor / scale) for floor in floors), "", ""]]
    for label, name, cells in _cells(results, workloads, "median_us"):
        records = [timed(results, workload).get(name) for workload in workloads]
        own = [record for record in records if record is not None]
        spreads = [r["spread_us"] / r["median_us"] for r in own if "spread_us" in r]
        spread = f"{max(spreads):.1%}" if spreads else "–"
        error = max(record["relative_rms_error"] for record in own)
        rows.append([label, *cells, spread, number(error)])
    headings = _headings(results, workloads)
    return table([family(workloads[0]), *headings, "spread", "rel. RMS error"], rows)


def row_table(results: Results, workloads: Sequence[str]) -> str:
    """The same cells for calls in a row; empty where none are on record."""
    return _known_cells(results, workloads, "row_us", "calls in a row")


def device_table(results: Results, workloads: Sequence[str]) -> str:
    """The same cells for a call's kernels without the gaps between them, in which a GPU waits for
    its host; empty where none are on record.
    """
    return _known_cells(results, workloads, "profiler_us", "kernels alone")


def _known_cells(results: Results, workloads: Sequence[str], key: str, title: str) -> str:
    rows = [[label, *cells] for label, _, cells in _cells(results, workloads, key)]
    if all(set(row[1:]) == {"–"} for row in rows):
        return ""
    return table([title, *_headings(results, workloads)], rows)


def _cells(
    results: Results, workloads: Sequence[str], key: str
) -> Iterator[tuple[str, str, list[str]]]:
    """Label, name and cells of each implementation, ours first; `key` tells which time."""
    by_workload = [timed(results, workload) for workload in workloads]
    for name in ranking(results, workloads):
        cells = [_cell(results.part, records, name, key) for records in by_workload]
        yield f"**{name}**" if name in OURS else name, name, cells


def _headings(results: Results, workloads: Sequence[str]) -> list[str]:
    return [f"{size(workload)}, {_UNITS[results.part][0]}" for workload in workloads]


def _cell(part: str, records: dict[str, RecordDict], name: str, key: str) -> str:
    time_us = records.get(name, {}).get(key)
    if time_us is None:
        return "–"
    time = number(time_us / _UNITS[part][1])
    if name in OURS:
        floor = records[name].get("floor_us")
        return time if floor is None else f"**{time}** ({floor / time_us:.0%} of floor)"
    counterpart = _COUNTERPART.get((part, records[name].get("framework", "")), "")
    ours_us = records.get(counterpart, {}).get(key)
    return time if ours_us is None else f"{time} ({time_us / ours_us:.1f} x)"


def _first(records: Sequence[RecordDict], key: str) -> float | None:
    return next((record[key] for record in records if record.get(key) is not None), None)


def ratio_table(results: Results, workloads: Sequence[str]) -> str:
    """Ratios of one family's times, a row for each that could be measured.

    Pallas over Triton is by the one clock that sees both. Ours is faster than an unfused pair where
    their ratio is above 1. The host's time of a call stands with them: a short kernel may not hide
    it.
    """
    headings = [size(workload) for workload in workloads]
    columns = [_ratios(results, workload) for workload in workloads]
    rows = [
        [name, *(column.get(name, "–") for column in columns)]
        for name in dict.fromkeys(name for column in columns for name in column)
    ]
    return table(["ratio", *headings], rows) if rows else ""


def _ratios(results: Results, workload: str) -> dict[str, str]:
    records = timed(results, workload)
    times = {name: record["median_us"] for name, record in records.items()}
    found: dict[str, str] = {}
    rotation = family(workload) == "rotate"
    for name in records if rotation else KERNELS:
        if share := records.get(name, {}).get("share_of_floor"):
            found[f"floor / {name}"] = f"{share:.0%}"
    if host_us := records.get("triton", {}).get("host_us"):
        found["host time of a call, triton, µs"] = number(host_us)
    triton_us, pallas_us = (records.get(name, {}).get("profiler_us") for name in KERNELS)
    if pallas_us and triton_us:
        found["pallas / triton"] = f"{pallas_us / triton_us:.2f}"
    # Beside a rotation stands no unfused pair.
    for framework, ours in () if rotation else (("torch", "triton"), ("jax", "pallas")):
        unfused = [record["median_us"] for record in peers(records, framework)]
        if unfused and ours in times:
            found[f"fastest unfused {framework} / {ours}"] = f"{min(unfused) / times[ours]:.2f}"
    # Whole frames are held against each library, not against the fastest alone.
    for peer in FRAME_PEERS if family(workload).startswith("frames") else ():
        if peer in times and "triton" in times:
            found[f"{peer} / triton"] = f"{times[peer] / times['triton']:.2f}"
    if workload == FRAMES_MIX:
        parts = [timed(results, part) for part in FRAMES_MIX_PARTS]
        for name in KERNELS:
            if name in times and all(name in part for part in parts):
                parts_us = sum(part[name]["median_us"] for part in parts)
                found[f"{name} / its parts one by one"] = f"{times[name] / parts_us:.2f}"
    return found


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
