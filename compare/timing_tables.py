"""The times of one family of workloads, and their ratios, as Markdown tables."""

from collections.abc import Sequence

from compare.console import number
from compare.families import KERNELS, OURS, RecordDict, family, ranking, size, timed
from compare.markdown import table
from compare.results import Results
from compare.workloads import FRAMES_MIX, FRAMES_MIX_PARTS

# Whole frames are held against these one by one.
_FRAME_PEERS = tuple(f"in-place rope + {x}" for x in ("cuDNN SDPA", "FA2 varlen", "FA3 varlen"))
# Whom a peer's time is set against: ours of the same framework.
_COUNTERPART = {
    ("kernels", "torch"): "triton",
    ("kernels", "jax"): "pallas",
    ("towers", "torch"): "torch",
    ("towers", "jax"): "flax",
    ("integration", "torch"): "accelerated",
}


def timing_table(results: Results, workloads: Sequence[str]) -> str:
    """Times of one family: a row for each implementation, a column for each workload.

    A cell holds the median and, for ours, the share of the floor, for a peer how many times longer
    than ours of the same framework it takes. Spread and error are the largest of the row.
    """
    unit, scale = ("µs", 1.0) if results.part == "kernels" else ("ms", 1e3)
    names = ranking(results, workloads)
    floors = [_first(results.of(workload), "floor_us") for workload in workloads]
    rows = [["floor", *(number(floor and floor / scale) for floor in floors), "", ""]]
    for name in names:
        by_workload = [timed(results, workload) for workload in workloads]
        cells = [_cell(results.part, records, name, scale) for records in by_workload]
        own = [records[name] for records in by_workload if name in records]
        spread = max(record.get("spread_us", 0) / record["median_us"] for record in own)
        error = max(record["relative_rms_error"] for record in own)
        label = f"**{name}**" if name in OURS else name
        rows.append([label, *cells, f"{spread:.1%}", number(error)])
    headings = [f"{size(workload)}, {unit}" for workload in workloads]
    return table([family(workloads[0]), *headings, "spread", "rel. RMS error"], rows)


def _cell(part: str, records: dict[str, RecordDict], name: str, scale: float) -> str:
    record = records.get(name)
    if record is None:
        return "–"
    time = number(record["median_us"] / scale)
    if name in OURS:
        share = record.get("share_of_floor")
        return time if share is None else f"**{time}** ({share:.0%} of floor)"
    ours = records.get(_COUNTERPART.get((part, record.get("framework", "")), ""))
    return time if ours is None else f"{time} ({record['median_us'] / ours['median_us']:.1f} x)"


def _first(records: Sequence[RecordDict], key: str) -> float | None:
    return next((record[key] for record in records if record.get(key) is not None), None)


def ratio_table(results: Results, workloads: Sequence[str]) -> str:
    """What the times of one family come to; a row for each ratio that was measured.

    Pallas over Triton is by the one clock that sees both. Above 1 ours is the faster in the ratios
    to unfused pairs. The host's time, which a short kernel may be too short to hide, stands with
    them.
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
    for name in KERNELS:
        if share := records.get(name, {}).get("share_of_floor"):
            found[f"floor / {name}"] = f"{share:.0%}"
    if host_us := records.get("triton", {}).get("host_us"):
        found["host time of a call, triton, µs"] = number(host_us)
    triton_us, pallas_us = (records.get(name, {}).get("profiler_us") for name in KERNELS)
    if pallas_us and triton_us:
        found["pallas / triton"] = f"{pallas_us / triton_us:.2f}"
    for framework, ours in (("torch", "triton"), ("jax", "pallas")):
        peers = [
            times[name]
            for name, record in records.items()
            if record.get("framework") == framework and name not in OURS
        ]
        if peers and ours in times:
            found[f"fastest unfused {framework} / {ours}"] = f"{min(peers) / times[ours]:.2f}"
    for peer in _FRAME_PEERS if family(workload).startswith("frames") else ():
        if peer in times and "triton" in times:
            found[f"{peer} / triton"] = f"{times[peer] / times['triton']:.2f}"
    if workload == FRAMES_MIX:
        parts = [timed(results, part) for part in FRAMES_MIX_PARTS]
        for name in KERNELS:
            if name in times and all(name in part for part in parts):
                parts_us = sum(part[name]["median_us"] for part in parts)
                found[f"{name} / its parts one by one"] = f"{times[name] / parts_us:.2f}"
    return found
