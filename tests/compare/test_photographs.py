import numpy as np
import pytest

pytest.importorskip("sklearn")

from compare.photographs import agreement_input, workload_input
from compare.workloads import TOWER_WORKLOADS, TowerWorkload, Visual

CLIP = TowerWorkload("x", (Visual(84, 56, frames=4),))


def test_agreement_input_has_edge_windows():
    pixel_values, grid_thw = agreement_input(252)
    assert pixel_values.shape == (grid_thw.prod(axis=1).sum(), 1176)
    assert pixel_values.dtype == np.float32
    assert len(grid_thw) == 2
    assert (grid_thw[:, 1:] % 8 != 0).any()


@pytest.mark.parametrize(
    "workload", [TOWER_WORKLOADS["tower-448"], TOWER_WORKLOADS["tower-batch-32"], CLIP]
)
def test_workload_input_has_the_workloads_grid(workload):
    pixel_values, grid_thw = workload_input(workload)
    assert [tuple(grid) for grid in grid_thw.tolist()] == list(workload.grid_thw)
    assert pixel_values.shape == (workload.tokens, 1176)
    assert pixel_values.std() > 0.1


def test_the_frames_of_a_clip_differ():
    pixel_values, _ = workload_input(CLIP)
    first, second = pixel_values.reshape(2, -1)
    assert not np.array_equal(first, second)
