"""The kernels compiled for sm_80, sm_90 and sm_100 on any machine: what the binaries take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton_kernels.wgmma_descriptors import high_word_sums

ROOT = Path(__file__).parents[2]

# Bytes of shared memory that one program may have.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# What a thread may spill where speed is not promised: 64 registers. On sm_90 nothing, in the dtypes
# that tensor cores multiply, up to a head_dim of 128.
SPILL_LIMIT = 256


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.triton_kernels.compile_ahead"],
        capture_output=True, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_architecture_and_kernel_is_compiled(compiled):
    kernels = {"window_kernel", "stream_kernel", "rotate_kernel"}
    assert {(r["arch"], r["kernel"]) for r in compiled} >= {
        (arch, kernel) for arch in SHARED_LIMIT for kernel in kernels
    }


def test_shared_memory_suffices(compiled):
    assert [r for r in compiled if r["shared"] > SHARED_LIMIT[r["arch"]]] == []


def test_no_kernel_that_must_be_fast_spills(compiled):
    exempt = ("float32", "unaligned", ", 256,")
    fast = [r for r in compiled if r["arch"] == 90 and not any(e in r["variant"] for e in exempt)]
    assert fast
    assert [r for r in fast if r["stack"] > 0] == []


def test_no_kernel_spills_much(compiled):
    assert [r for r in compiled if r["stack"] > SPILL_LIMIT] == []


def test_no_wgmma_descriptor_is_broken(compiled):
    assert [r for r in compiled if r["broken_descriptors"]] == []


def sass(*instructions):
    return "\n".join(
        f"        /*{16 * i:04x}*/                   {x} ;" for i, x in enumerate(instructions)
    )


@pytest.mark.parametrize(
    ("writer", "high", "is_broken"),
    [
        ("UMOV UR4, URZ", "UR4", False),
        ("@!UP0 UMOV UR4, URZ", "UR4", False),
        ("NOP", "URZ", False),
        ("UMOV UR4, UR9", "UR4", True),
        ("ULOP3.LUT UR4, UR9, 0xf, URZ, 0xc0, !UPT", "UR4", True),
        ("NOP", "UR4", True),  # nothing wrote it
        ("UIADD3.64 UR10, UR58, 0x2, URZ", "UR11", True),  # the upper of a pair
    ],
)
@pytest.mark.parametrize("layout", ["0x40000040", "-0x7fffffe0", "-0x3ffffff0"])
def test_broken_descriptors_are_found(writer, high, is_broken, layout):
    add = f"UIADD3.X UR13, {high}, {layout}, URZ, UP0, !UPT"
    sums, broken = high_word_sums(
        sass(writer, "UIADD3 UR12, UP0, UR8, 0x2, URZ", add, "UMOV UR4, 0x1")
    )
    assert sums == [add]
    assert len(broken) == is_broken


def test_other_sums_are_no_descriptors():
    assert high_word_sums(sass("UIADD3.X UR7, UR19, URZ, URZ, UP1, !UPT", "EXIT")) == ([], [])
