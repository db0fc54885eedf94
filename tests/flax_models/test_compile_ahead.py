"""What XLA makes of the Flax tower for an H200, where what compiles it is installed."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.pallas_kernels.compile_ahead import what_is_missing

ROOT = Path(__file__).parents[2]


def test_what_a_block_launches_and_what_moves_with_results():
    """A block is products, attention, two norms and an activation, and nothing is copied,
    transposed or cast between them. The residual sums are in products, but for 4,096 tokens in the
    norms. Nothing that the blocks read shares memory with a result: XLA would record their kernels
    anew wherever that moves.
    """
    if missing := what_is_missing():
        pytest.skip(missing)
    result = subprocess.run(
        [sys.executable, "-m", "tests.flax_models.compile_ahead"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    records = [json.loads(line) for line in result.stdout.splitlines()]
    small_shallow, small, large_shallow, large = (Counter(r["kernels"]) for r in records)
    block = {"product": 2, "product and sum": 2, "attention": 1, "fusion": 3}
    assert small - small_shallow == block
    assert large - large_shallow == {"product": 4, "attention": 1, "fusion": 3}
    assert small_shallow.keys() == block.keys()
    assert [record["beside results"] for record in records] == [[]] * 4
