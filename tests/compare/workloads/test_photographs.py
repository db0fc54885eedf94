import numpy as np
import pytest

pytest.importorskip("sklearn")

from compare.workloads.photographs import agreement_input, workload_input
from compare.workloads.towers import TOWER_WORKLOADS, TOWERS, TowerWorkload, Visual

CLIP = TowerWorkload("x", (Visual(84, 56, frames=4),))


@pytest.mark.parametrize("config", TOWERS.values(), ids=TOWERS)
def test_agreement_input_has_edge_windows(config):
    pixel_values, grid_thw = agreement_input(config, 252)
    assert pixel_values.shape == (grid_thw.prod(axis=1).sum(), config.patch_dim)
    assert pixel_values.dtype == np.float32
    assert len(grid_thw) == 2
    assert (grid_thw[:, 1:] % 8 != 0).any()


@pytest.mark.parametrize(
    "workload",
    [
        *map(TOWER_WORKLOADS.get, ("tower-448", "qwen3-tower-448", "tower-batch-32")),
        CLIP,
        TowerWorkload("odd", (Visual(84, 56, frames=3), Visual(56, 84))),
    ],
    ids=lambda workload: workload.name,
)
def test_workload_input_has_the_workloads_grid(workload):
    pixel_values, grid_thw = workload_input(workload)
    assert [tuple(grid) for grid in grid_thw.tolist()] == list(workload.grid_thw)
    assert pixel_values.shape == (workload.tokens, workload.config.patch_dim)
    assert pixel_values.std() > 0.1


def test_the_frames_of_a_clip_differ():
    pixel_values, _ = workload_input(CLIP)
    first, second = pixel_values.reshape(2, -1)
    assert not np.array_equal(first, second)
