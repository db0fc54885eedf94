"""A tower as `jax.export` writes it, for machines that serve."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

pytest.importorskip("flatbuffers")

from flax_models import encode, load_vision_tower
from pallas_kernels import export_checks
from tests.pallas_kernels.no_gpu import cuda_device, hide_gpus, kernels_in
from tests.tower_checkpoints import SMALL_TOWERS, random_patches, write_checkpoint

GRID = [(1, 12, 16)]
FRAMES = {"rotate_kernel", "stream_kernel"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The same is exported on every machine."""
    hide_gpus(monkeypatch)
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("family", "kernels"),
    [("head_dim_80", {*FRAMES, "window_kernel", "gated_kernel"}), ("qwen3_vl", FRAMES)],
)
def test_a_program_for_cuda_launches_the_towers_kernels(tmp_path, family, kernels):
    """And for a CPU, in the same file, it is the tower that runs there."""
    directory = write_checkpoint(tmp_path, SMALL_TOWERS[family])
    cpu = jax.local_devices(backend="cpu")[0]
    tower = load_vision_tower(directory, jnp.bfloat16, device=cpu)
    inputs = tower.prepare(random_patches(tower.config, GRID), GRID)
    leaves, structure = jax.tree.flatten((tower, *inputs))
    run = jax.jit(lambda leaves: encode(*structure.unflatten(leaves)))
    with cuda_device():
        checks = {"disabled_checks": export_checks()}
        made = export.export(run, platforms=("cpu", "cuda"), **checks)(leaves)
    served = export.deserialize(made.serialize())
    assert set(kernels_in(served)) == {("triton", name) for name in kernels}
    for ours, theirs in zip(*map(jax.tree.leaves, (served.call(leaves), run(leaves))), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
