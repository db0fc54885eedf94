"""The blocks' kernels compiled for an H200 on any machine: what the binaries take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Each launch says whether to fuse multiply-adds: Triton 3.9 warns that its default will change.
WARNING_IS_ERROR = ("-W", "error:TRITON_DEFAULT_FP_FUSION")
DTYPES = ("torch.bfloat16", "torch.float16")


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, *WARNING_IS_ERROR, "-m", "tests.compare.torch_tower.compile_ahead"],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_is_compiled(compiled):
    kernels = (
        *("norm_scale_kernel", "gated_product_kernel", "gated_kernel", "layer_norm_kernel"),
        "aligned_operands_kernel",
    )
    assert [(r["dtype"], r["kernel"]) for r in compiled] == [
        (d, k) for d in DTYPES for k in kernels
    ]


def test_no_kernel_spills(compiled):
    assert [r for r in compiled if r["stack"] or r["loop_spills"]] == []


def test_gate_and_up_are_one_product_of_256_columns(compiled):
    """Two products of 128 columns are slower."""
    for record in compiled:
        is_product = record["kernel"] in ("gated_product_kernel", "aligned_operands_kernel")
        assert list(record["products"]) == (["64x256x16"] if is_product else []), record
        assert record["broken_descriptors"] == []


def test_a_program_fits_a_multiprocessor(compiled):
    assert all(r["shared"] <= 227 * 1024 for r in compiled)
