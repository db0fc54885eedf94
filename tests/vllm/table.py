"""The table of vLLM's versions in vllm.md: what the plugin knows of each, and which tests passed.

    python -m tests.vllm.table --write           runs the tests, in an environment with vLLM
    python -m tests.vllm.table --write FOLDER    of an unpacked wheel: what is known alone

writes the version's row.
"""

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from types import CodeType, SimpleNamespace

from triton_kernels.integrations.vllm import FINGERPRINTS, PARTS, fingerprint

FILE = Path(__file__).parents[2] / "triton_kernels" / "integrations" / "vllm.md"
TESTS = {
    "towers and parts": (
        "test_towers.py",
        "test_parts.py",
        "test_neighbour.py",
        "test_benchmark.py",
    ),
    "whole answers": ("test_answers.py",),
}
_HEAD = "| vLLM |"
_MODELS, _LAYERS = "model_executor/models", "model_executor/layers"
# By part and class, in which file each function is that its fingerprint is of.
_FUNCTIONS = {
    "attention": {
        "Qwen2_5_VisionAttention": [(f"{_MODELS}/qwen2_5_vl", "Qwen2_5_VisionAttention.forward")],
        "Qwen2VisionAttention": [
            (f"{_MODELS}/qwen2_vl", "Qwen2VisionAttention.forward"),
            (f"{_MODELS}/qwen2_vl", "Qwen2VisionAttention.split_qkv"),
        ],
    },
    "norm": {
        "RMSNorm": [
            (f"{_LAYERS}/layernorm", "RMSNorm.forward_native"),
            (f"{_LAYERS}/layernorm", "RMSNorm.forward_cuda"),
            ("model_executor/custom_op", "CustomOp.forward"),
        ]
    },
    "mlp": {
        "Qwen2_5_VisionMLP": [
            (f"{_MODELS}/qwen2_5_vl", "Qwen2_5_VisionMLP.forward"),
            (f"{_LAYERS}/linear", "MergedColumnParallelLinear.forward"),
            (f"{_LAYERS}/linear", "RowParallelLinear.forward"),
            (f"{_LAYERS}/activation", "SiluAndMul.forward_native"),
        ]
    },
}

Row = list[str]


def known(folder: Path) -> Row:
    """Of each part, whether its code in a folder of vLLM's is known; imports nothing of it."""
    of_parts = [all(_is_known(folder, *cls) for cls in _FUNCTIONS[part].items()) for part in PARTS]
    return ["known" if of_part else "no" for of_part in of_parts]


def _is_known(folder: Path, name: str, places: list[tuple[str, str]]) -> bool:
    codes = [_code(folder / f"{file}.py", function) for file, function in places]
    functions = [SimpleNamespace(__code__=code) for code in codes]
    return None not in codes and fingerprint(*functions) in FINGERPRINTS[name]


def _code(file: Path, function: str) -> CodeType | None:
    """A method's code, or that of the first base in the same file which has it."""
    if not file.exists():
        return None
    source = file.read_text(encoding="utf-8")
    found = {code.co_qualname: code for code in _codes(compile(source, str(file), "exec"))}
    bases = {
        cls.name: [base.id for base in cls.bases if isinstance(base, ast.Name)]
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
    }
    name, method = function.split(".")
    while f"{name}.{method}" not in found and bases.get(name):
        name = bases[name][0]
    return found.get(f"{name}.{method}")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def installed() -> tuple[str, Path]:
    """The version that is installed, and where."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    found = importlib.metadata.packages_distributions()["vllm"]
    return _short(importlib.metadata.version(found[0])), Path(folder)


def _short(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])


def read() -> dict[str, Row]:
    """The rows of the table, by version."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in _lines()]
    return {row[0]: row[1:] for row in rows[2:]}


def _lines() -> list[str]:
    text = FILE.read_text(encoding="utf-8")
    return text[text.index(_HEAD) :].partition("\n\n")[0].splitlines()


def write(rows: dict[str, Row]) -> None:
    """Write the table in the place of the one before."""
    columns = [*PARTS, *TESTS]
    lines = [f"{_HEAD} {' | '.join(columns)} |", f"| --- |{' :---: |' * len(columns)}"]
    for version in sorted(rows, key=lambda version: [int(part) for part in version.split(".")]):
        lines.append(f"| {version} | {' | '.join(rows[version])} |")
    text = FILE.read_text(encoding="utf-8")
    FILE.write_text(text.replace("\n".join(_lines()), "\n".join(lines)), encoding="utf-8")


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["--write"]:
        sys.exit(__doc__)
    rows = read()
    if arguments[1:]:
        folder = Path(arguments[1])
        (metadata,) = folder.glob("vllm*.dist-info/METADATA")
        version = _short(HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))["Version"])
        outcomes = rows.get(version, ["–"] * 5)[len(PARTS) :]
        folder = folder / "vllm"
    else:
        import pytest

        version, folder = installed()
        outcomes = []
        for files in TESTS.values():
            paths = [str(Path(__file__).with_name(file)) for file in files]
            options = ["-W", "default", "--confcutdir", str(Path(__file__).parent)]
            outcomes.append("fail" if pytest.main([*options, *paths]) else "pass")
    write(rows | {version: [*known(folder), *outcomes]})


if __name__ == "__main__":
    main(sys.argv[1:])
