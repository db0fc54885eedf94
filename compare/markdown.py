"""Result files as Markdown: one table for each family of workloads, ours first, peers by speed."""

from collections.abc import Sequence
from typing import Any

from compare.console import number
from compare.results import Results
from compare.tower_workloads import TOWERS
from compare.workloads import FRAMES_MIX, FRAMES_MIX_PARTS

KERNELS = ("triton", "pallas")
OURS = (*KERNELS, "pallas by XLA", "torch", "flax", "accelerated", "accelerated, compiled")
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
_PER_LAYER_ROWS = 9

RecordDict = dict[str, Any]


def family(workload: str) -> str:
    """What a workload's name says before its size: "windows" of "windows-448"."""
    return _split(workload)[0]


def size(workload: str) -> str:
    """What tells a workload from others of its family: "video-16x448" of "tower-video-16x448"."""
    return _split(workload)[1]


def families(results: Results) -> dict[str, list[str]]:
    """Workloads by family, both in the order of measurement."""
    found: dict[str, list[str]] = {}
    for record in results.records:
        of_family = found.setdefault(family(record["workload"]), [])
        if record["workload"] not in of_family:
            of_family.append(record["workload"])
    return found


def timed(results: Results, workload: str) -> dict[str, RecordDict]:
    """The workload's records that have a timing, by implementation."""
    return {r["implementation"]: r for r in results.of(workload) if r["median_us"] is not None}


def ranking(results: Results, workloads: Sequence[str]) -> list[str]:
    """Implementations with a timing: ours, then peers by speed on the last workload they ran."""
    speed: dict[str, float] = {}
    for workload in workloads:
        for name, record in timed(results, workload).items():
            speed[name] = record["median_us"]
    return sorted(speed, key=lambda name: (_order(name), speed[name]))


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


def rate_table(results: Results, workloads: Sequence[str]) -> str:
    """Tokens a second of each tower, and frames of clips; empty where none is on record."""
    rows = []
    for name in ranking(results, workloads):
        records = [timed(results, workload).get(name, {}) for workload in workloads]
        rows.append([name, *map(_rates, records)])
    if all(set(row[1:]) == {"–"} for row in rows):
        return ""
    headings = [size(workload) for workload in workloads]
    return table(["thousand tokens a second", *headings], rows)


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


def layer_families(results: Results) -> dict[str, list[RecordDict]]:
    """Records of towers that were compared layer by layer, by family."""
    found: dict[str, list[RecordDict]] = {}
    for record in results.records:
        if family(record["workload"]) in TOWERS:
            found.setdefault(family(record["workload"]), []).append(record)
    return {
        name: records
        for name, records in found.items()
        if any(record.get("layer") is not None for record in records)
    }


def layer_table(records: Sequence[RecordDict]) -> str:
    """Error of each of one family's towers after some of its layers and at the end."""
    errors = {(r.get("layer"), r["implementation"]): r["relative_rms_error"] for r in records}
    names = list(dict.fromkeys(r["implementation"] for r in records))
    layers = sorted({layer for layer, _ in errors if layer is not None})
    step = max(1, len(layers) // (_PER_LAYER_ROWS - 1))
    rows = [
        [label, *(number(errors.get((layer, name))) for name in names)]
        for label, layer in [
            *((f"layer {layer}", layer) for layer in [*layers[::step], layers[-1]]),
            ("embeddings", None),
        ]
    ]
    return table(["after", *names], list(dict.fromkeys(map(tuple, rows))))


def agreement_line(results: Results) -> str:
    """One sentence: how many checks, how many failed, the worst of the named kernels."""
    checks = [record for record in results.records if "passed" in record]
    failed = sum(not record["passed"] for record in checks)
    worst = {
        name: max((r["relative_rms_error"] or 0 for r in checks if _is_kernel(r, name)), default=0)
        for name in ("triton", "pallas", "pallas against triton")
    }
    told = ", ".join(f"{name} {number(error)}" for name, error in worst.items())
    outcome = "all hold" if not failed else f"**{failed} fail**"
    return f"{len(checks)} checks, {outcome}. Largest relative RMS error in bf16: {told}."


def trust_table(results: Results) -> str:
    """A row for each kind of stress: what was tried, cases by kernel or tower, what came out."""
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
    host, device = (f"{record[f'{where}_growth_mib']:+.0f}" for where in ("host", "device"))
    return f"{name}: nothing wrong, memory {host} MiB on the host and {device} on the device"


def notes(results: Results) -> list[str]:
    """One line for each implementation that has a reason for a missing number."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for record in results.records:
        if "note" in record:
            key = (record["implementation"], record["note"])
            reasons.setdefault(key, []).append(record["workload"])
    everything = len({record["workload"] for record in results.records})
    lines = []
    for (name, reason), where in reasons.items():
        place = "" if len(where) == everything else f" ({', '.join(where)})"
        lines.append(f"- {name}{place}: {reason}")
    return lines


def provenance(parts: Sequence[Results]) -> str:
    """What the parts were measured on, with what and when, and the ceilings of each run."""
    software: dict[str, list[str]] = {}
    for results in parts:
        packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
        used = f"{results.device}, driver {results.driver or 'unknown'}, {packages}"
        software.setdefault(used, []).append(_run(results))
    return " ".join(f"{'; '.join(runs)}: {used}." for used, runs in software.items())


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column left and the others right aligned."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, rule, *rows])


def _split(workload: str) -> tuple[str, str]:
    # A family's name may hold a dash itself, as "qwen3-tower" does.
    known = next((name for name in TOWERS if workload.startswith(f"{name}-")), None)
    name = known or workload.partition("-")[0]
    return name, workload.removeprefix(name).removeprefix("-")


def _run(results: Results) -> str:
    told = [results.date[:10]]
    if results.ceilings:
        told += [
            f"copy {results.ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s",
            f"bf16 products {results.ceilings['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s",
        ]
    return f"{results.part} ({', '.join(told)})"


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


def _order(name: str) -> int:
    return OURS.index(name) if name in OURS else len(OURS)


def _is_kernel(record: RecordDict, name: str) -> bool:
    return record["implementation"] == name and record.get("dtype") == "bfloat16"


def _first(records: Sequence[RecordDict], key: str) -> float | None:
    return next((record[key] for record in records if record.get(key) is not None), None)
