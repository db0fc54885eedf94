"""The table of the models whose vision attention `accelerate` takes, by version of transformers.

    python -m tests.integrations.table --write

writes the installed version's column.
"""

import importlib
import sys
from pathlib import Path

import transformers

from triton_kernels.integrations.forms import ATTENTIONS, fingerprint
from triton_kernels.integrations.transformers import takes_segments

FILE = Path(__file__).parents[2] / "triton_kernels" / "integrations" / "families.md"
# What ours does not compute yet.
NEEDS = {
    "inkling2": "rotation of neighbours",
    "minimax_m3_vl": "rotation of a part of a head",
}

Columns = dict[str, dict[str, str]]


def column() -> dict[str, str]:
    """Of each model of the installed transformers with attention of this kind: yes or no."""
    cells = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "cu_seqlens" not in file.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        forwards = [
            cls.forward
            for name, cls in vars(module).items()
            if name.endswith("Attention") and isinstance(cls, type) and takes_segments(cls.forward)
        ]
        if forwards:
            taken = all(fingerprint(forward) in ATTENTIONS for forward in forwards)
            cells[file.parent.name] = "yes" if taken else "no"
    return cells


def read() -> Columns:
    """The columns of the file, by version."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in FILE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    versions = rows[0][1:-1]
    return {
        version: {row[0].strip("`"): row[index] for row in rows[2:] if row[index] != "–"}
        for index, version in enumerate(versions, 1)
    }


def write(columns: Columns) -> None:
    """Write the table in the place of the one before."""
    versions = sorted(columns, key=lambda version: [int(part) for part in version.split(".")])
    lines = [f"| | {' | '.join(versions)} | needs |", f"| --- |{' :---: |' * len(versions)} --- |"]
    for model in sorted(set().union(*columns.values())):
        cells = [columns[version].get(model, "–") for version in versions]
        lines.append(f"| `{model}` | {' | '.join(cells)} | {NEEDS.get(model, '')} |")
    text = FILE.read_text(encoding="utf-8")
    before = text.partition("\n|")[0].rstrip()
    FILE.write_text("\n".join([before, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write(read() | {transformers.__version__: column()})
