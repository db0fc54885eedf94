"""Markdown: tables, why numbers are missing, and where the numbers that are there come from."""

from collections.abc import Mapping, Sequence

from compare.common.result_files import Results

_MOST_NAMED = 12  # workloads of which a reason is told


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column left and the others right aligned."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    lines = [[cell.replace("|", r"\|") for cell in cells] for cells in [headings, rule, *rows]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def speedup(ratio: float) -> str:
    """A peer's time over ours, as "2.1x"; near 1 a second digit decides who is faster."""
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x"


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
        where = list(dict.fromkeys(where))  # a kernel is there in several ways
        names = ", ".join(where[:_MOST_NAMED])
        more = f" and {len(where) - _MOST_NAMED} more" if len(where) > _MOST_NAMED else ""
        place = "" if len(where) == everything else f" ({names}{more})"
        lines.append(f"- {name}{place}: {reason}")
    return lines


def measured_line(results: Results) -> str:
    """When a part was measured, what the GPU made in its run, and what else was noted of it."""
    told = [f"Measured {results.dates}"]
    if results.ceilings:
        told += [
            f"copy of 94 MiB {results.ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
            f"of 1 GiB {results.ceilings['large_copy_bytes_per_s'] / 1e12:.2f}",
            f"bf16 products {results.ceilings['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s",
        ]
    return f"{'; '.join(told)}. {results.note}".strip()


def software(parts: Mapping[str, Results]) -> str:
    """Driver and versions that the parts were measured with, one line for each set of them."""
    found: dict[str, list[str]] = {}
    for part, results in parts.items():
        packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
        used = f"driver {results.driver or 'unknown'}, {packages}"
        found.setdefault(used, []).append(part)
    return "<br>\n".join(f"{', '.join(names)}: {used}." for used, names in found.items())
