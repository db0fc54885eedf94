"""What XLA makes of the Pallas kernels for an H200, where what compiles them is installed."""

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from pallas_kernels.launching.compile import HAVE_MOSAIC
from tests.pallas_kernels.compile_ahead import HEAD_DIMS, LENGTHS, WAYS, what_is_missing

ROOT = Path(__file__).parents[2]
BY_DEFAULT = {"windows": "qk", "frames": "none"}
KERNELS = {"windows": "window_kernel", "frames": "stream_kernel"}
WARP_SPECIALIZED = (
    "hopper_stream_kernel", "hopper_backward_q_kernel", "hopper_backward_kv_kernel",
)  # fmt: skip
ROTATION = {"qk": [], "none": ["rotate_kernel"]}
BACKWARD = {
    "windows": ["window_backward_kernel"],
    "frames": ["stream_backward_kv_kernel", "stream_backward_q_kernel"],
}


@pytest.fixture(scope="module")
def compiled():
    if missing := what_is_missing():
        pytest.skip(missing)
    result = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.compile_ahead"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def warp_specialized(compiled):
    if not HAVE_MOSAIC:
        pytest.skip("the kernel is for JAX 0.11.2 and 0.12")
    found = [r for r in compiled if r["kernel"].startswith("hopper")]
    kernels = {(r["kernel"], r["head_dim"]) for r in found}
    assert kernels == set(itertools.product(WARP_SPECIALIZED, HEAD_DIMS))
    return found


def test_the_warp_specialized_kernels_products_do_not_wait_for_each_other(warp_specialized):
    assert [r for r in warp_specialized if r["serial"]] == []


def test_the_warp_specialized_kernels_loops_neither_zero_sums_nor_spill(warp_specialized):
    """Sums that are made behind the last barrier before their product start from nothing."""
    if any(r["loops"] is None for r in warp_specialized):
        pytest.skip("there is no nvdisasm")
    for record in warp_specialized:
        whole, partial, *again = record["loops"]
        assert whole["spills"] == 0
        if record["kernel"] == "hopper_stream_kernel":
            # The last computes rows again, in few calls if any: it may spill.
            assert [loop["zeroing"] for loop in (whole, partial, *again)] == [0, 0, 0]
            assert partial["spills"] == 0


def test_every_call_is_compiled(compiled):
    """To the kernels that are to serve it: XLA also compiles what the reference computes."""
    found = defaultdict(list)
    for record in (r for r in compiled if "calls" in r and r["kernel"].endswith("_kernel")):
        call = record["calls"], record["head_dim"], record["fuse"], record["gradient"]
        found[call].append(record["kernel"])
    expected = {}
    for name, head_dim, (fuse, gradient) in itertools.product(LENGTHS, HEAD_DIMS, WAYS):
        kernels = [*ROTATION[BY_DEFAULT[name] if fuse == "auto" else fuse], KERNELS[name]]
        kernels += BACKWARD[name] if gradient else []
        expected[name, head_dim, fuse, gradient] = sorted(kernels)
    assert {call: sorted(kernels) for call, kernels in found.items()} == expected


def test_what_calls_and_gradients_take_by_default_does_not_spill(compiled):
    calls = [r for r in compiled if "calls" in r]
    default = [r for r in calls if r["fuse"] in ("auto", BY_DEFAULT[r["calls"]])]
    assert [r for r in default if r["spilled"]] == []
    assert [r for r in calls if r["serial"]] == []


@pytest.mark.parametrize(("head_dim", "programs"), [(72, 3), (80, 4)])
def test_window_programs_that_share_a_multiprocessor(compiled, head_dim, programs):
    """XLA knows no bound on registers: this notices what the kernel's text does to them.

    A head of 72 columns masks 8 of its tail's, which costs it a program.
    """
    windows = [r for r in compiled if (r["kernel"], r["head_dim"]) == ("window_kernel", head_dim)]
    assert windows
    for registers in (r["registers"] for r in windows):
        assert 65536 // (registers * 128) >= programs  # of 128 threads
