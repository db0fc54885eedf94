"""The comparison needs both frameworks; where PyTorch is missing there is nothing to test here."""

import gc
import importlib.util

import pytest

from compare.common.environment import configure

configure()  # as the command line does, before any test imports a framework

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="module")
def frameworks_are_no_garbage():
    """Benchmarks collect garbage between towers, which takes its time for millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", params=["head_dim_16", "qwen3_vl"])
def config(request):
    """Of a small tower: with windows; and without, with a table of positions and DeepStack."""
    from tests.tower_checkpoints import SMALL_TOWERS

    return SMALL_TOWERS[request.param]


@pytest.fixture(scope="module")
def directory(config, tmp_path_factory):
    """Its checkpoint."""
    from tests.tower_checkpoints import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tower"), config)


@pytest.fixture(scope="module")
def tower(directory):
    """Its PyTorch tower, as it is without torch.compile and CUDA graphs."""
    import torch

    from compare.torch_tower import load_vision_tower

    return load_vision_tower(directory, torch.float32, compile=False, cuda_graphs=False)
