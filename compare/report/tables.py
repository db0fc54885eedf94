"""Result files as Markdown tables: what was checked, what withstood stress, what was timed."""

from collections.abc import Callable, Iterator, Sequence

from compare.common.console import number
from compare.common.result_files import Results
from compare.report.grouping import KERNELS, OURS, RecordDict, family, ranking, size, timed
from compare.report.markdown import speedup, table
from compare.workloads.kernels import FRAMES_MIX, FRAMES_MIX_PARTS

_STEPS = 3  # a tower's table of errors has so many of its layers, the last one besides

# Ours, whose speedup over a peer of the same framework is told.
_COUNTERPART = {
    ("kernels", "torch"): "triton",
    ("kernels", "jax"): "pallas",
    ("towers", "torch"): "torch",
    ("towers", "jax"): "flax",
    ("integration", "torch"): "accelerated",
}

# Of a part's times: the unit and its microseconds.
_UNITS = {"kernels": ("µs", 1.0), "towers": ("ms", 1e3), "integration": ("ms", 1e3)}


def agreement_line(results: Results) -> str:
    """How many checks, how many and which failed, and the largest error of each kernel."""
    checks = [record for record in results.records if "passed" in record]
    failed = [f"{r['implementation']} on {r['workload']}" for r in checks if not r["passed"]]
    named = ("triton", "pallas", "pallas against triton")
    told = ", ".join(f"{name} {number(_worst(checks, name))}" for name in named)
    outcome = "all hold"
    if failed:
        outcome = f"**{len(failed)} fail** ({', '.join(dict.fromkeys(failed))})"
    return f"{len(checks)} checks, {outcome}. Largest relative RMS error in bf16: {told}."


def _worst(checks: Sequence[RecordDict], name: str) -> float | None:
    """The largest error of a kernel in bf16; None where one is not known: it failed, or was NaN."""
    errors = [
        record["relative_rms_error"]
        for record in checks
        if record["implementation"] == name and record.get("dtype") == "bfloat16"
    ]
    return max(errors, default=None) if None not in errors else None


def layer_table(records: Sequence[RecordDict]) -> str:
    """Error of each of one family's towers after some of its layers and at the end."""
    errors = {(r.get("layer"), r["implementation"]): r["relative_rms_error"] for r in records}
    names = list(dict.fromkeys(r["implementation"] for r in records))
    layers = sorted({layer for layer, _ in errors if layer is not None})
    shown = dict.fromkeys([*layers[:: -(-len(layers) // _STEPS)], layers[-1], None])
    rows = [
        [
            "embeddings" if layer is None else f"layer {layer}",
            *(number(errors.get((layer, name))) for name in names),
        ]
        for layer in shown
    ]
    return table(["after", *names], rows)


def stress_line(results: Results) -> str:
    """Of how many cases, and what was wrong with which kernels and towers."""
    cases = sum(record["cases"] for record in results.records)
    wrong = [_outcome(record) for record in results.records if not record["passed"]]
    return f"{cases:,} cases of hostile input, far sizes and busy servers: " + (
        f"{'; '.join(wrong)}." if wrong else "nothing wrong."
    )


def stress_table(results: Results) -> str:
    """A row for each kind of stress: what was tried, cases of each kernel or tower, the outcome."""
    rows: dict[tuple[str, str], list[RecordDict]] = {}
    for record in results.records:
        rows.setdefault((record["workload"], record["tried"]), []).append(record)
    return table(
        ["tried", "cases", "what came out"],
        [
            [
                tried,
                ", ".join(f"{r['implementation']} {r['cases']:,}" for r in records),
                "; ".join(dict.fromkeys(map(_outcome, records))),
            ]
            for (_, tried), records in rows.items()
        ],
    )


def _outcome(record: RecordDict) -> str:
    name = record["implementation"]
    if not record["passed"]:
        count = record["findings"]
        return f"**{name}: {count} finding{'s' * (count != 1)}**, first: {record.get('note')}"
    if "host_growth_mib" not in record:
        return "nothing wrong"
    host, device = (f"{round(record[f'{where}_growth_mib']):+}" for where in ("host", "device"))
    return f"{name}: nothing wrong, memory {host} MiB on the host and {device} on the device"


def timing_table(results: Results, workloads: Sequence[str]) -> str:
    """Times of one family: a row for each implementation, a column for each workload.

    A cell holds the median and, for ours, the share of the floor, for a peer the speedup of ours of
    the same framework over it. Spread and error are the largest of the row.
    """
    records = [record for workload in workloads for record in results.of(workload)]
    by_workload = {record["workload"]: record.get("floor_us") for record in reversed(records)}
    scale = _UNITS[results.part][1]
    floors = [by_workload[workload] for workload in workloads]
    rows = [["floor", *(number(floor and floor / scale) for floor in floors), "", ""]]
    for label, name, cells in _cells(results, workloads, "median_us"):
        own = [r for r in records if r["implementation"] == name and r["median_us"] is not None]
        spreads = [r["spread_us"] / r["median_us"] for r in own if "spread_us" in r]
        spread = f"{max(spreads):.1%}" if spreads else "–"
        error = max(record["relative_rms_error"] for record in own)
        rows.append([label, *cells, spread, number(error)])
    unit = _UNITS[results.part][0]
    headings = [f"{size(workload)}, {unit}" for workload in workloads]
    return table([family(workloads[0]), *headings, "spread", "rel. RMS error"], rows)


def row_table(results: Results, workloads: Sequence[str]) -> str:
    """The same cells for calls in a row; empty where none are on record."""
    rows = [[label, *cells] for label, _, cells in _cells(results, workloads, "row_us")]
    return _details("calls in a row, ms", workloads, rows)


def device_table(results: Results, workloads: Sequence[str]) -> str:
    """The same cells for a call's kernels without the gaps between them, in which a GPU waits for
    its host; empty where none are on record.
    """
    rows = [[label, *cells] for label, _, cells in _cells(results, workloads, "profiler_us")]
    return _details("kernels alone, ms", workloads, rows)


def _cells(
    results: Results, workloads: Sequence[str], key: str
) -> Iterator[tuple[str, str, list[str]]]:
    """Label, name and cells of each implementation, ours first; `key` tells which time."""
    by_workload = [timed(results, workload) for workload in workloads]
    for name in ranking(results, workloads):
        cells = [_cell(results.part, records, name, key) for records in by_workload]
        yield f"**{name}**" if name in OURS else name, name, cells


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
    return time if ours_us is None else f"{time} ({speedup(time_us / ours_us)})"


def ratio_table(results: Results, workloads: Sequence[str]) -> str:
    """What the times of one family do not show, a row for each that could be measured.

    The host's time of a call, which a short kernel may not hide; Pallas' time over Triton's by the
    one clock that sees both; a mixed call's over that of its parts.
    """
    columns = [_ratios(results, workload) for workload in workloads]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return _details("ratio", workloads, rows)


def _ratios(results: Results, workload: str) -> dict[str, str]:
    records = timed(results, workload)
    found: dict[str, str] = {}
    if host_us := records.get("triton", {}).get("host_us"):
        found["host time of a call, triton, µs"] = number(host_us)
    triton_us, pallas_us = (records.get(name, {}).get("profiler_us") for name in KERNELS)
    if pallas_us and triton_us:
        found["pallas / triton"] = f"{pallas_us / triton_us:.2f}"
    if workload == FRAMES_MIX:
        parts = [timed(results, part) for part in FRAMES_MIX_PARTS]
        for name in KERNELS:
            if name in records and all(name in part for part in parts):
                parts_us = sum(part[name]["median_us"] for part in parts)
                ratio = records[name]["median_us"] / parts_us
                found[f"{name} / its parts one by one"] = f"{ratio:.2f}"
    return found


def rate_table(results: Results, workloads: Sequence[str]) -> str:
    """Tokens a second of each of our towers, and frames of clips; empty where none is on record.

    By calls in a row, where those were timed.
    """
    in_a_row = any("row_us" in record for w in workloads for record in results.of(w))
    calls = "in a row" if in_a_row else "one by one"
    title = f"thousand tokens a second, calls {calls}"
    return _details(title, workloads, _ours(results, workloads, _rate))


def resource_table(results: Results, workloads: Sequence[str]) -> str:
    """First call and peak memory of each tower."""
    title = "first call, peak memory"
    return _details(title, workloads, _ours(results, workloads, _resources, peers=True))


def _rate(record: RecordDict) -> str:
    if "tokens_per_s" not in record:
        return "–"
    tokens = number(record["tokens_per_s"] / 1e3)
    frames = record.get("frames_per_s")
    return tokens if frames is None else f"{tokens} ({frames:.0f} frames)"


def _resources(record: RecordDict) -> str:
    if not record:
        return "–"
    seconds, memory = record.get("compile_s"), record.get("peak_memory_mib")
    told = "–" if seconds is None else f"{seconds:.2f} s"
    return told if memory is None else f"{told}, {memory:.0f} MiB"


def _ours(
    results: Results,
    workloads: Sequence[str],
    show: Callable[[RecordDict], str],
    peers: bool = False,
) -> list[list[str]]:
    """A row for each of our implementations, and where wanted of its peers."""
    by_workload = [timed(results, workload) for workload in workloads]
    return [
        [name, *(show(records.get(name, {})) for records in by_workload)]
        for name in ranking(results, workloads)
        if peers or name.partition(",")[0] in OURS
    ]


def _details(title: str, workloads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a column for each workload; empty where no cell holds anything."""
    if all(set(cells) == {"–"} for _, *cells in rows):
        return ""
    return table([title, *map(size, workloads)], rows)


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
            rows.append([f"{name}, {size(workload)}", *(f"{time / 1e3:.2f}" for time in times)])
    return table(["ms", *groups, "between kernels", "floor"], rows) if rows else ""
