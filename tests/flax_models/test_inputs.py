"""Patches of the host on their way to the Flax tower: the same numbers by every way, in order."""

from concurrent.futures import ThreadPoolExecutor

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from flax_models import VisionConfig, encode, load_vision_tower  # noqa: E402
from flax_models.device import fetched, stage  # noqa: E402
from tests.tower_checkpoints import SMALL_TOWERS, random_patches, write_checkpoint  # noqa: E402

GRID = [(1, 8, 8)]


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("tower"), SMALL_TOWERS["head_dim_16"])
    return load_vision_tower(directory, token_buckets=[64])


def test_programs_fetch_what_is_staged():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    staged = stage(array, jax.devices()[0])
    assert staged.is_ready()
    assert staged.sharding.memory_kind == "pinned_host"
    for given in (staged, jax.device_put(array), array):
        taken = jax.jit(fetched)(given)
        assert taken.sharding.memory_kind == "device"
        np.testing.assert_array_equal(taken, array)


def test_encode_takes_staged_patches(tower):
    patches, layout = tower.prepare(random_patches(tower.config, GRID), GRID)
    graphdef, parameters = nnx.split(tower)
    run = jax.jit(lambda parameters, *inputs: encode(nnx.merge(graphdef, parameters), *inputs))
    on_device, staged = (
        run(parameters, put, layout)
        for put in (jax.device_put(patches), stage(patches, jax.devices()[0]))
    )
    assert staged.sharding == on_device.sharding
    np.testing.assert_array_equal(staged, on_device)


@pytest.mark.gpu
def test_a_row_of_calls_reads_the_patches_of_each(tmp_path):
    """Of the 7B's width, so that the GPU is still busy when the next patches are put."""
    config = VisionConfig(depth=4, out_hidden_size=256, fullatt_block_indexes=(3,))
    tower = load_vision_tower(write_checkpoint(tmp_path, config))
    grid = [(1, 48, 48)]
    calls = [random_patches(config, grid, seed) for seed in range(24)]
    expected = [np.array(tower(jax.device_put(patches), grid)) for patches in calls]
    assert len({result.tobytes() for result in expected}) == len(calls)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(4):
            in_a_row = [tower(patches, grid) for patches in calls]
            np.testing.assert_array_equal(in_a_row, expected)
            from_threads = list(threads.map(lambda patches: tower(patches, grid), calls))
            np.testing.assert_array_equal(from_threads, expected)
