"""Markdown: tables, why numbers are missing, and where the numbers that are there come from."""

from collections.abc import Sequence

from compare.common.result_files import Results


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column left and the others right aligned."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    lines = [[cell.replace("|", r"\|") for cell in cells] for cells in [headings, rule, *rows]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


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
    """What the parts were measured on, with what and when, the ceilings of each run, its note."""
    software: dict[str, list[str]] = {}
    for results in parts:
        packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
        used = f"{results.device}, driver {results.driver or 'unknown'}, {packages}"
        software.setdefault(used, []).append(_run(results))
    lines = [f"{'; '.join(runs)}: {used}." for used, runs in software.items()]
    lines += [f"{results.part.capitalize()}: {results.note}" for results in parts if results.note]
    return "<br>\n".join(lines)


def _run(results: Results) -> str:
    told = [results.date[:10]]
    if results.ceilings:
        told += [
            f"copy of 94 MiB {results.ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
            f"of 1 GiB {results.ceilings['large_copy_bytes_per_s'] / 1e12:.2f}",
            f"bf16 products {results.ceilings['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s",
        ]
    return f"{results.part} ({', '.join(told)})"
