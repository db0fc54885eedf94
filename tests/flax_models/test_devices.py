"""The Flax tower where JAX has several devices: two that share a CPU, and two GPUs."""

import subprocess
import sys

import pytest

from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

pytest.importorskip("jax")
pytest.importorskip("flax")

_PROGRAM = """\
import sys

import jax
import numpy as np

if sys.argv[2] == "cpu":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

from flax_models import load_vision_tower

first, second, *_ = jax.devices(sys.argv[2])
results = {}
for device, home in ((None, first), (first, first), (second, second)):
    tower = load_vision_tower(sys.argv[1], device=device, token_buckets=[64])
    for grid in ([(1, 8, 8)], [(1, 4, 6)]):  # one that fills its bucket, one that is padded
        patches = np.ones((grid[0][1] * grid[0][2], tower.config.patch_dim), np.float32)
        embeddings = tower(patches, grid)
        assert embeddings.devices() == {home}, (device, grid, embeddings.devices())
        assert embeddings.committed, (device, grid)
        with jax.transfer_guard_device_to_device("disallow"):
            np.testing.assert_array_equal(tower(patches, grid), embeddings)
        expected = results.setdefault(len(patches), np.array(embeddings))
        np.testing.assert_array_equal(embeddings, expected)
"""


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_embeddings_are_on_the_towers_device_whatever_their_number(tmp_path, platform):
    directory = write_checkpoint(tmp_path, SMALL_TOWERS["head_dim_16"])
    command = [sys.executable, "-c", _PROGRAM, directory, platform]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
