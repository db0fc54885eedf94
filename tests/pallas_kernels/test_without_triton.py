"""The day that JAX has no Pallas Triton backend: what goes on, and what is said."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_models import load_vision_tower
from pallas_kernels.launching.choose import can_warp_specialize
from pallas_kernels.launching.devices import local_gpu
from pallas_kernels.launching.plan import rotate_by_kernel, rotate_by_xla
from tests.kernel_cases import make_case
from tests.pallas_kernels import without_triton
from tests.tower_checkpoints import SMALL_TOWERS, random_patches, write_checkpoint

# In a process of its own, in which importing the backend fails. Not of the modules behind it, which
# JAX 0.11.2 imports for Mosaic's kernels too.
HIDE = """
import runpy, sys
sys.modules["jax.experimental.pallas.triton"] = None
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="module")
def found():
    process = subprocess.run(
        [sys.executable, "-c", HIDE, without_triton.__name__],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_xla_computes_what_no_kernel_does_and_says_so_once(found):
    assert found["window"] == found["window by Mosaic"] == 0
    warned = ["XLA attends within windows"] if local_gpu() else []
    assert [text.partition(": ")[2][:26] for text in found["warnings"]] == warned


def test_mosaics_kernel_serves_what_it_did(found):
    assert found["long by Mosaic"] == can_warp_specialize()
    assert found["long"] < 2e-2


def test_a_kernel_that_is_asked_for_is_refused(found):
    assert found["refused"].startswith("implementation='kernel' needs its backend: JAX ")


@pytest.mark.parametrize("family", ["head_dim_80", "qwen3_vl"])
def test_towers_compute_the_same(found, family, tmp_path):
    config = SMALL_TOWERS[family]
    tower = load_vision_tower(write_checkpoint(tmp_path / "tower", config), "float32")
    result = jax.tree.leaves(
        tower(random_patches(config, without_triton.GRID), without_triton.GRID)
    )
    assert np.abs(np.asarray(result[0])).mean() == pytest.approx(found[family], rel=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "norms"),
    [(80, 80, ""), (88, 40, ""), (128, 128, ""), (80, 70, "qk")],
)
def test_xla_rotates_as_the_kernel_does(head_dim, rotary_dim, norms):
    case = make_case((21,), head_dim=head_dim, rotary_dim=rotary_dim, heads=3, norms=norms)
    qkv, cos, sin, _ = map(jnp.asarray, case.packed)
    weights = tuple(map(jnp.asarray, case.norms.values())) or (None, None)
    further = {"norms": weights, "norm_eps": 1e-6}
    ours, theirs = (
        np.asarray(rotate(qkv, 0, 2, cos, sin, 24, **further, **options)[:21], np.float32)
        for rotate, options in ((rotate_by_xla, {}), (rotate_by_kernel, {"interpret": True}))
    )
    used = ours.shape[-1] // 3 // 16 * 16 * 3
    # Whose sums may round otherwise.
    rounding = 2.0**-7 if norms else 0
    np.testing.assert_allclose(ours[..., :used], theirs[..., :used], rtol=rounding, atol=0)
