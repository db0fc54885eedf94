"""The PyTorch tower on a GPU that is not PyTorch's current one, and on two at a time."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from compare.torch_tower import load_vision_tower  # noqa: E402
from tests.compare.torch_tower.torch_results import numpy  # noqa: E402
from tests.tower_checkpoints import GRIDS, random_patches  # noqa: E402
from tests.tower_contract import FP32_TOLERANCE, relative_error, side_by_side  # noqa: E402

pytestmark = pytest.mark.gpu(2)

_GRIDS = [GRIDS["mix"], GRIDS["edge_windows"], GRIDS["one_whole_window"]]


@pytest.fixture(scope="module")
def towers(directory):
    """The same tower on two GPUs, recorded, and compiled for each: last bits may differ."""
    return [load_vision_tower(directory, torch.float32, f"cuda:{index}") for index in (0, 1)]


def run(tower, patches, grid):
    result = tower(patches, grid)
    embeddings = result[0] if isinstance(result, tuple) else result
    assert embeddings.device == tower.device
    return side_by_side(result, numpy)


def assert_close(ours, theirs):
    assert relative_error(ours, theirs) < FP32_TOLERANCE


@pytest.mark.parametrize("current", [0, 1])
def test_both_compute_the_same(config, towers, current):
    with torch.cuda.device(current):
        for grid in _GRIDS:
            patches = torch.from_numpy(random_patches(config, grid))
            first, *others = (
                run(tower, patches.to(place), grid)
                for place in ("cpu", "cuda:0", "cuda:1")
                for tower in towers
            )
            for other in others:
                assert_close(other, first)
        assert torch.cuda.current_device() == current


def test_both_at_a_time(config, towers):
    calls = [(random_patches(config, grid, seed), grid) for seed in range(4) for grid in _GRIDS]
    expected = [run(towers[0], *call) for call in calls]

    def run_all(tower):
        return [run(tower, *call) for call in calls]

    with ThreadPoolExecutor() as threads:
        for results in threads.map(run_all, towers * 2):
            for result, wanted in zip(results, expected, strict=True):
                assert_close(result, wanted)


def test_a_tower_that_moves_records_anew(config, directory):
    tower = load_vision_tower(directory, torch.float32, "cuda:0")
    patches = random_patches(config, _GRIDS[0])
    before = run(tower, patches, _GRIDS[0])
    assert_close(run(tower.to("cuda:1"), patches, _GRIDS[0]), before)
