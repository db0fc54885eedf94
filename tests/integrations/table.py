"""The tables of the models whose vision attention `accelerate` takes.

    python -m tests.integrations.table --write

writes the installed version's column of the first, and the second as that version has it.
"""

import importlib
import re
import sys
from pathlib import Path

import transformers

from flax_models.common.families import FAMILIES
from tests.integrations import families, hugging_face
from triton_kernels.integrations.forms import ATTENTIONS, fingerprint
from triton_kernels.integrations.plan import model_of
from triton_kernels.integrations.transformers import accelerate, takes_segments

FILE = Path(__file__).parents[2] / "triton_kernels" / "integrations" / "families.md"
# What ours does not compute yet.
NEEDS = {
    "inkling2": "rotation of neighbours",
    "minimax_m3_vl": "rotation of a part of a head",
}

# What stands in for a tower's layers beside its attention and frequencies, as readers know it.
STAND_INS = {
    "FusedRMSNorm": "RMSNorm",
    "FusedLayerNorm": "LayerNorm",
    "AlignedMLP": "gated MLP",
    "ActivatedMLP": "MLP with a tanh GELU",
    "PatchProduct": "convolution over patches",
}

Columns = dict[str, dict[str, str]]
Rows = dict[str, list[str]]


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


def replaced(tower) -> str:
    """What of an accelerated tower is ours, beside its attention and frequencies."""
    kinds = hugging_face.kinds_of(tower)
    return ", ".join(name for kind, name in STAND_INS.items() if kind in kinds)


def tower_of_ours(model: str) -> str:
    """Which of this project's towers a model's is."""
    return next((f"`{n}`" for n, family in FAMILIES.items() if model in family.model_types), "–")


def home_of_tower(model: str) -> str | None:
    """The model whose tower a model has, by its configuration; None where that says nothing."""
    try:
        return model_of(type(transformers.CONFIG_MAPPING[model]().vision_config))
    except Exception:  # of what has no vision, or wants more said
        return None


def parts() -> Rows:
    """Of each model that is taken: what is replaced, our tower, and which models it is within."""
    towers = {model: families.make(model) for model in families.TAKEN}
    for name, cls in hugging_face.CLASSES.items():
        towers[model_of(cls)] = hugging_face.make_tower(name)
    homes = {model: home_of_tower(model) for model in transformers.CONFIG_MAPPING}
    return {
        model: [
            replaced(accelerate(towers[model])),
            tower_of_ours(model),
            ", ".join(f"`{n}`" for n, home in homes.items() if home == model and n not in towers),
        ]
        for model in sorted(towers)
    }


def read() -> tuple[Columns, Rows]:
    """The first table's columns by version, and the second's rows by model."""
    first, second = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        for table in _TABLE.findall(FILE.read_text(encoding="utf-8"))
    )
    columns = {
        version: {row[0].strip("`"): row[index] for row in first[2:] if row[index] != "–"}
        for index, version in enumerate(first[0][1:-1], 1)
    }
    return columns, {row[0].strip("`"): row[1:] for row in second[2:]}


_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def write(columns: Columns, rows: Rows) -> None:
    """Write the tables in the places of those before."""
    versions = sorted(columns, key=lambda version: [int(part) for part in version.split(".")])
    first = [f"| | {' | '.join(versions)} | needs |", f"| --- |{' :---: |' * len(versions)} --- |"]
    for model in sorted(set().union(*columns.values())):
        cells = [columns[version].get(model, "–") for version in versions]
        first.append(f"| `{model}` | {' | '.join(cells)} | {NEEDS.get(model, '')} |")
    second = ["| | replaced too | tower of ours | also within |", "| --- | --- | --- | --- |"]
    second += [f"| `{model}` | {' | '.join(cells)} |" for model, cells in rows.items()]
    tables = ["\n".join([*lines, ""]) for lines in (first, second)]
    text = FILE.read_text(encoding="utf-8")
    FILE.write_text(_TABLE.sub(lambda _: tables.pop(0), text), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write(read()[0] | {transformers.__version__: column()}, parts())
