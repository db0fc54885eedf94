"""What agreement and stress found, as Markdown."""

from collections.abc import Sequence

from compare.common.console import number
from compare.common.result_files import Results
from compare.report.grouping import RecordDict
from compare.report.markdown import table

_PER_LAYER_ROWS = 9


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


def trust_line(results: Results) -> str:
    """Of how many cases, and what was wrong with which kernels and towers."""
    cases = sum(record["cases"] for record in results.records)
    wrong = [_outcome(record) for record in results.records if not record["passed"]]
    return f"{cases:,} cases of hostile input, far sizes and busy servers: " + (
        f"{'; '.join(wrong)}." if wrong else "nothing wrong."
    )


def trust_table(results: Results) -> str:
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


def _worst(checks: Sequence[RecordDict], name: str) -> float | None:
    """The largest error of a kernel in bf16; None where one is not known: it failed, or was NaN."""
    errors = [
        record["relative_rms_error"]
        for record in checks
        if record["implementation"] == name and record.get("dtype") == "bfloat16"
    ]
    return max(errors, default=None) if None not in errors else None
