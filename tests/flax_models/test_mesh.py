"""A tower on several devices: two that share a CPU, and two GPUs; how images are divided."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

from flax_models import VisionTower, plan_layout
from flax_models.mesh import prepare_shares

IMAGES = np.array([(1, 4, 6), (1, 10, 12), (2, 6, 4), (1, 8, 8), (1, 2, 2)])


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def test_two_devices_compute_what_one_does(tmp_path, platform):
    command = [sys.executable, "-m", "tests.flax_models.two_devices", tmp_path]
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} if platform == "cpu" else {}
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | devices,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.fixture
def tower(tiny_config):
    return VisionTower(tiny_config)


def numbered_patches(config, grid):
    """Each row full of its own number."""
    return np.repeat(np.arange(grid.prod(axis=1).sum(), dtype=np.float32)[:, None], 1176, axis=1)


def numbers_out(patches, layout):
    """What `encode` would return if a tower did nothing, of rows of one number: [rows, ...]."""
    numbers = patches[layout.window_order, 0]
    if layout.output == "pooled":
        starts = layout.cu_image_seqlens
        return np.array([numbers[a:b].sum() for a, b in itertools.pairwise(starts)])
    merged = numbers.reshape(-1, 4) if layout.output == "embeddings" else numbers
    return merged[layout.output_order]


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("output", ["embeddings", "patches", "pooled"])
def test_rows_of_all_devices_are_put_in_the_images_order(tower, output, devices):
    import jax

    patches = numbered_patches(tower.config, IMAGES)
    shares = prepare_shares(tower, patches, IMAGES, devices, output=output)
    whole = plan_layout(tower.config, IMAGES, output=output)
    layouts = [jax.tree.map(lambda x, i=i: x[i], shares.layout) for i in range(devices)]
    rows = np.concatenate(list(map(numbers_out, shares.patches, layouts)))
    assert shares.num_outputs == whole.num_outputs
    in_order = rows[shares.order.ravel()][: shares.num_outputs]
    np.testing.assert_array_equal(in_order, numbers_out(patches, whole)[: whole.num_outputs])


def test_devices_get_equally_many_patches_as_far_as_images_allow(tower):
    grid = np.concatenate([IMAGES] * 7)
    shares = prepare_shares(tower, numbered_patches(tower.config, grid), grid, 4)
    loads = shares.layout.num_tokens
    assert loads.sum() == grid.prod(axis=1).sum()
    assert loads.max() - loads.min() <= 4  # the smallest image


def test_bad_input_of_shares_is_refused(tower):
    patches = numbered_patches(tower.config, IMAGES)
    with pytest.raises(ValueError, match="devices must be at least 1, got 0"):
        prepare_shares(tower, patches, IMAGES, 0)
    with pytest.raises(ValueError, match=r"pixel_values must be \[260, 1176\], a row for"):
        prepare_shares(tower, patches[1:], IMAGES, 2)
    with pytest.raises(TypeError, match="pixel_values must be floating-point, got int64"):
        prepare_shares(tower, patches.astype(np.int64), IMAGES, 2)
