"""Result files as Markdown tables: what was checked, what withstood stress, what was timed."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from compare.common.console import number
from compare.common.result_files import Results
from compare.report.grouping import (
    KERNELS,
    OURS,
    UNITS,
    VLLM,
    VLLM_WITH_OURS,
    Column,
    RecordDict,
    family,
    kind,
    ranking,
    size,
    timed,
)
from compare.report.markdown import speedup, table
from compare.workloads.kernels import FRAMES_MIX, FRAMES_MIX_PARTS
from compare.workloads.scale import STAGES
from compare.workloads.towers import VLLM_WORKLOADS, TowerWorkload

_SERVER = "server"  # the kind of stress whose cases are calls of towers
_WORDS = {"hopper_stream": "warp-specialized"}  # for a kernel's name
_LOSSES = 6  # a table of losses shows so many of them, the last one besides
_STEPS = 3  # a tower's table of errors has so many of its layers, the last one besides

_CLOCKS = {"calls in a row": "row_us", "kernels alone": "profiler_us"}

# Ours, whose speedup over a peer of the same framework is told.
_COUNTERPART = {
    ("kernels", "torch"): "triton",
    ("kernels", "jax"): "pallas",
    ("towers", "torch"): "torch",
    ("towers", "jax"): "flax",
    ("integration", "torch"): "accelerated",
    ("vllm", "torch"): VLLM_WITH_OURS,
    ("invariance", "torch"): "triton",
    ("invariance", "jax"): "pallas",
    ("training", "torch"): "triton",
    ("training", "jax"): "pallas",
    ("tower training", "torch"): "accelerated",
}


def agreement_line(results: Results) -> str:
    """How many checks, how many and which failed, and the largest error of each kernel."""
    checks = [record for record in results.records if "passed" in record]
    failed = [f"{r['implementation']} on {r['workload']}" for r in checks if not r["passed"]]
    named = ("triton", "pallas", "pallas against triton")
    told = ", ".join(f"{name} {number(_worst(checks, name))}" for name in named)
    named_once = ", ".join(dict.fromkeys(failed))
    outcome = f"**{len(failed)} fail** ({named_once})" if failed else "all hold"
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


def loss_table(records: Sequence[RecordDict]) -> str:
    """Losses of one workload's steps, and how far they are from fp32's and the first tower's."""
    curves = {"fp32": records[0]["fp32_losses"]} | {
        record["implementation"]: record["losses"] for record in records
    }
    steps = len(curves["fp32"])
    shown = dict.fromkeys([*range(0, steps, -(-steps // _LOSSES)), steps - 1])
    rows = [
        [f"step {step + 1}", *(number(losses[step], 4) for losses in curves.values())]
        for step in shown
    ]
    for name in dict.fromkeys(["fp32", records[0]["implementation"]]):
        distances = (_distance(losses, curves[name]) for losses in curves.values())
        rows.append([f"distance from {name}", *map(number, distances)])
    return table(["loss of", *curves], rows)


def _distance(losses: Sequence[float], others: Sequence[float]) -> float:
    return math.dist(losses, others) / math.hypot(*others)


def stress_line(results: Results) -> str:
    """How many cases of kernels, by which kernel, and calls of towers; what was wrong with which.

    Of files that do not say so, without kernels.
    """
    cases, calls, reached = 0, 0, Counter()
    for record in results.records:
        if record["workload"] == _SERVER:
            calls += record["cases"]
        else:
            cases += record["cases"]
            reached.update(record.get("kernels", {}))
    wrong = [_outcome(record) for record in results.records if not record["passed"]]
    return (
        f"{cases:,} cases of hostile and extreme input to both frameworks' kernels"
        f"{_reached(reached)}, {calls:,} calls of busy towers: "
        f"{'; '.join(wrong) if wrong else 'nothing wrong'}."
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
                ", ".join(
                    f"{r['implementation']} {r['cases']:,}{_reached(r.get('kernels', {}))}"
                    for r in records
                ),
                "; ".join(dict.fromkeys(map(_outcome, records))),
            ]
            for (_, tried), records in rows.items()
        ],
    )


def _reached(kernels: Mapping[str, int]) -> str:
    """How many cases reached which kernel; nothing where that is not known."""
    told = ", ".join(f"{_WORDS.get(kernel, kernel)} {cases:,}" for kernel, cases in kernels.items())
    return f" ({told})" if told else ""


def _outcome(record: RecordDict) -> str:
    name = record["implementation"]
    if not record["passed"]:
        count = record["findings"]
        return f"**{name}: {count} finding{'s' * (count != 1)}**, first: {record.get('note')}"
    if "host_growth_mib" not in record:
        return "nothing wrong"
    host, device = (f"{round(record[f'{where}_growth_mib']):+}" for where in ("host", "device"))
    return f"{name}: nothing wrong, memory {host} MiB on the host and {device} on the device"


def scale_tables(results: Results) -> list[str]:
    """Of a folder's encoding: a row for each measurement, and one for where its time goes."""
    timed_ = [record for record in results.records if record["median_us"] is not None]
    one_gpu = {_run(r): r["images_per_s"] for r in timed_ if r["gpus"] == 1}
    rates, stages = [], []
    for record in timed_:
        name = record["implementation"]
        row = f"{size(record['workload'])}: {f'**{name}**' if name in OURS else name}"
        cores = record.get("cores_wanted")
        several = record["gpus"] > 1 and _run(record) in one_gpu
        shares = (record.get(key) for key in ("share_of_alone", "busy", "padding"))
        rates.append(
            [
                row,
                f"{record['photographs']:,}",
                number(record["images_per_s"]),
                f"{record['patches_per_s']:,.0f}",
                speedup(record["images_per_s"] / one_gpu[_run(record)]) if several else "–",
                *("–" if share is None else f"{share:.1%}" for share in shares),
                number(record.get("reading_ms")),
                f"{number(cores)} of {record['cores']}" if cores else "–",
                number(record["relative_rms_error"]),
            ]
        )
        sum_ms = sum(record["stages_ms"].values())
        stages.append(
            [row]
            + [
                f"{number(ms)} ({ms / sum_ms:.0%})" if ms is not None else "–"
                for ms in map(record["stages_ms"].get, STAGES)
            ]
        )
    headings = ["", "photographs", "images/s", "patches/s", "over one GPU", "of the tower alone"]
    headings += ["towers busy", "padding", "reading, ms of a core", "cores for 90 %"]
    return [
        table([*headings, "rel. RMS error"], rates),
        table(["ms a photograph", *STAGES], stages),
    ]


def _run(record: RecordDict) -> tuple[str, str]:
    """What the same measurement on other GPUs shares: our framework, and its name."""
    return size(record["workload"]).partition("-")[0], record["implementation"]


def timing_tables(results: Results, workloads: Sequence[str]) -> list[str]:
    """The tables of one family that hold anything: its times, and what those do not show.

    Of kernels ratios. Of towers calls in a row; a call's kernels without the gaps between them, in
    which a GPU waits for its host; rates, by calls in a row where those were timed; where the time
    goes; first call and peak memory.
    """
    columns = [timed(results, workload) for workload in workloads]
    names = ranking(results, workloads)
    found = [_medians(results, workloads, columns, names)]
    of_kind = kind(results, workloads)
    if of_kind == "vllm":
        found.append(vllm_table(results, workloads))
    if of_kind == "invariance":
        return found
    if of_kind in ("kernels", "training"):
        ratios = [_ratios(results, workload) for workload in workloads]
        told = dict.fromkeys(name for column in ratios for name in column)
        rows = _rows(told, ratios, lambda column, name: column.get(name, "–"))
        found.append(_details("ratio", workloads, rows))
        rows = _rows(names, columns, _memory)
        found.append(_details("most memory of a call, MiB", workloads, rows))
    else:
        for title, key in _CLOCKS.items():
            rows = _rows(names, columns, partial(_time, of_kind, key))
            found.append(_details(f"{title}, ms", workloads, _bold(rows)))
        in_a_row = any("row_us" in record for column in columns for record in column.values())
        rates = f"thousand tokens a second, calls {'in a row' if in_a_row else 'one by one'}"
        ours = [name for name in names if name.partition(",")[0] in OURS]
        found += [
            _details(rates, workloads, _rows(ours, columns, _rate)),
            _groups(workloads, columns),
            _details("first call, peak memory", workloads, _rows(names, columns, _resources)),
        ]
    return [text for text in found if text]


def _medians(
    results: Results, workloads: Sequence[str], columns: Sequence[Column], names: Sequence[str]
) -> str:
    """A row for each implementation, with the largest spread and error of the row."""
    of_kind = kind(results, workloads)
    unit, unit_us = UNITS[of_kind]
    # A workload that nobody could be timed on has a floor as well.
    floors = [results.of(workload)[0].get("floor_us") for workload in workloads]
    rows = _bold(_rows(names, columns, partial(_time, of_kind, "median_us")))
    for name, row in zip(names, rows, strict=True):
        own = [column[name] for column in columns if name in column]
        spreads = [r["spread_us"] / r["median_us"] for r in own if "spread_us" in r]
        row += [
            f"{max(spreads):.1%}" if spreads else "–",
            number(max(r["relative_rms_error"] for r in own)),
        ]
    floor = ["floor", *(number(us and us / unit_us) for us in floors), "", ""]
    headings = [f"{size(workload)}, {unit}" for workload in workloads]
    headings = [family(workloads[0]), *headings, "spread", "rel. RMS error"]
    return table(headings, [floor, *rows])


def _rows(
    names: Iterable[str], columns: Sequence[Column], show: Callable[[Column, str], str]
) -> list[list[str]]:
    """A row for each name: that, and what `show` makes of it in each column."""
    return [[name, *(show(column, name) for column in columns)] for name in names]


def _bold(rows: list[list[str]]) -> list[list[str]]:
    """The rows with the names of ours in bold."""
    return [[f"**{name}**" if name in OURS else name, *cells] for name, *cells in rows]


def _details(title: str, workloads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a column for each workload; empty where no cell holds anything."""
    known = any(set(cells) != {"–"} for _, *cells in rows)
    return table([title, *map(size, workloads)], rows) if known else ""


def _time(of_kind: str, key: str, records: Column, name: str) -> str:
    """A time and, for ours, the share of the floor, for a peer the speedup of ours over it."""
    time_us = records.get(name, {}).get(key)
    if time_us is None:
        return "–"
    time = number(time_us / UNITS[of_kind][1])
    if name in OURS:
        floor = records[name].get("floor_us")
        return time if floor is None else f"**{time}** ({floor / time_us:.0%} of floor)"
    counterpart = _COUNTERPART.get((of_kind, records[name].get("framework", "")), "")
    ours_us = records.get(counterpart, {}).get(key)
    return time if ours_us is None else f"{time} ({speedup(time_us / ours_us)})"


def vllm_table(results: Results, workloads: Sequence[str]) -> str:
    """vLLM's time over that with the plugin: as it comes, and each by its best own setting."""
    columns = [timed(results, workload) for workload in workloads]
    rows = [
        [f"{which}, {clock}", *(_over_our_time(column, key, best) for column in columns)]
        for which, best in (("as it comes", False), ("each by its best setting", True))
        for clock, key in _CLOCKS.items()
    ]
    return _details("vLLM's time over ours", workloads, rows)


def sizes_table() -> str:
    """Sequence lengths of what is measured in vLLM, by family."""
    rows = []
    for name, workload in VLLM_WORKLOADS.items():
        if family(name) == "vllm":
            other = VLLM_WORKLOADS[name.replace("vllm", "vllm_qwen3", 1)]
            longest = max(h * w for _, h, w in workload.grid_thw)
            lengths = workload.tokens, workload.windows, longest, _merged(workload)
            cells = (*lengths, other.tokens, _merged(other))
            rows.append([size(name), *(f"{cell:,}" for cell in cells)])
    of_both = ("patches", "tokens to the language model")
    headings = [
        f"Qwen2.5-VL: {of_both[0]}",
        *("windows", "longest frame", of_both[1], f"Qwen3-VL: {of_both[0]}", of_both[1]),
    ]
    return table(["size", *headings], rows)


def _merged(workload: TowerWorkload) -> int:
    return workload.tokens // workload.config.merge_unit


def _over_our_time(records: Column, key: str, best: bool) -> str:
    times: dict[bool, list[float]] = {True: [], False: []}
    for name, record in records.items():
        if name.startswith(VLLM) and key in record and (best or "," not in name):
            times[name.startswith(VLLM_WITH_OURS)].append(record[key])
    return f"{min(times[False]) / min(times[True]):.2f}" if all(times.values()) else "–"


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


def _rate(records: Column, name: str) -> str:
    record = records.get(name, {})
    if "tokens_per_s" not in record:
        return "–"
    tokens = number(record["tokens_per_s"] / 1e3)
    frames = record.get("frames_per_s")
    return tokens if frames is None else f"{tokens} ({frames:.0f} frames)"


def _memory(records: Column, name: str) -> str:
    return number(records.get(name, {}).get("peak_memory_mib"))


def _resources(records: Column, name: str) -> str:
    record = records.get(name, {})
    seconds, memory = record.get("compile_s"), record.get("peak_memory_mib")
    told = "–" if seconds is None else f"{seconds:.2f} s"
    return told if memory is None else f"{told}, {memory:.0f} MiB"


def _groups(workloads: Sequence[str], columns: Sequence[Column]) -> str:
    """Where the time of our towers goes, by groups of kernels; empty where no profiler saw it."""
    rows, groups = [], {}
    for workload, column in zip(workloads, columns, strict=True):
        for name, record in column.items():
            if "groups_us" in record:
                groups = record["groups_us"]
                rest = record["median_us"] - record["profiler_us"]
                times = (*groups.values(), rest, record["floor_us"])
                rows.append([f"{name}, {size(workload)}", *(f"{t / 1e3:.2f}" for t in times)])
    return table(["ms", *groups, "between kernels", "floor"], rows) if rows else ""
