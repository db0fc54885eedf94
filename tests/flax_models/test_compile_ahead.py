"""What XLA makes of the Flax tower for an H200, where what compiles it is installed."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from flax_models.gated_product import HAVE_MOSAIC
from tests.pallas_kernels.compile_ahead import what_is_missing

ROOT = Path(__file__).parents[2]
# What takes a result's memory at the start, and in the end writes the first of its two parts.
WRITING_A_RESULT = ("loop_broadcast_fusion", "loop_dynamic_update_slice_fusion")


@pytest.mark.long
def test_what_a_block_launches_and_what_moves_with_results():
    """A block is products, attention, norms and an activation, and nothing is copied, transposed or
    cast between them. Where the second norm comes late, the activation applies it: of 4,096 tokens
    in the kernel that multiplies, by what one before it computes. The residual sums are in
    products, which write them over the stream that they read, but for 4,096 tokens of Qwen2-VL in
    the norms. Nothing shares memory with a result: XLA would record anew whatever touches it.
    """
    if missing := what_is_missing():
        pytest.skip(missing)
    result = subprocess.run(
        [sys.executable, "-m", "tests.flax_models.compile_ahead"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    records = [json.loads(line) for line in result.stdout.splitlines()]
    for results, record in zip([1] * 8 + [2] * 4, records, strict=True):
        names = Counter(re.sub(r"\.\d+$", "", name) for name in record["beside results"])
        assert names == dict.fromkeys(WRITING_A_RESULT, results)
    kernels = [Counter(record["kernels"]) for record in records]
    small_late, large_late, small, large, small_deep, large_deep = (
        deep - shallow for shallow, deep in zip(kernels[::2], kernels[1::2], strict=True)
    )
    sums_in_products = {"product": 2, "product and sum in place": 2}
    assert small_late == sums_in_products | {"ours": 2, "fusion": 1}
    in_one_kernel = {"product": 1, "product and sum in place": 2, "ours": 3, "fusion": 1}
    assert large_late == (in_one_kernel if HAVE_MOSAIC else small_late)
    rotation_and_attention = {"ours": 2}
    assert small == sums_in_products | rotation_and_attention | {"fusion": 3}
    assert small_deep == large_deep == sums_in_products | rotation_and_attention | {"fusion": 2}
    assert large == {"product": 4, "ours": 2, "fusion": 3}
    # Of each of the two programs that have it, of however many layers, one kernel at most.
    assert records[-1]["spilled"] in ([[0], [0, 0]] if HAVE_MOSAIC else [[]])
    assert {kind for each in kernels for kind in each} == {*sums_in_products, "ours", "fusion"}
