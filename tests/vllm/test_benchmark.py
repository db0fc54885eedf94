"""What `python -m compare vllm` measures: towers that the real vLLM has built."""

import numpy as np
import pytest
import torch

pytest.importorskip("ml_dtypes")

from compare.agreement.metrics import relative_rms_error, tower_verdict
from compare.implementations import huggingface
from compare.implementations import vllm as in_vllm
from compare.implementations.towers import HuggingFaceTower, exact_tower
from compare.workloads.towers import SMALL_TOWERS

GRID = [[1, 8, 8], [2, 6, 10]]
OTHER = [[2, 6, 4], [1, 8, 12]]  # fits into what is recorded for the first
NAMES = [
    "vLLM",
    in_vllm.WITH_OURS,
    *(
        pytest.param(f"{name}, CUDA graphs", marks=pytest.mark.gpu)
        for name in ("vLLM", in_vllm.WITH_OURS)
    ),
]


class Checkpoint:
    """A random one, and the tower rule for calls on it."""

    def __init__(self, folder, config):
        self.folder, self.patch_dim = folder, config.patch_dim
        huggingface.random_checkpoint(folder, config)

    def run(self, tower, grid, encode=None):
        tokens = sum(t * h * w for t, h, w in grid)
        patches = np.random.default_rng(0).standard_normal((tokens, self.patch_dim), np.float32)
        call = tower.put(patches, np.array(grid))
        return tower.tensor((encode or tower.encode)(*call)).float()

    def verdict(self, result, grid):
        with exact_tower(self.folder) as tower:
            exact = self.run(tower, grid)
        usual = self.run(HuggingFaceTower(huggingface.load(self.folder, torch.bfloat16)), grid)
        return tower_verdict(
            relative_rms_error(result, exact), relative_rms_error(usual, exact), ours=True
        )


@pytest.fixture(params=SMALL_TOWERS)
def checkpoint(request, process, lines, monkeypatch, tmp_path):
    monkeypatch.setattr(in_vllm, "_start_distributed", lambda: None)  # `process` has
    return Checkpoint(tmp_path, SMALL_TOWERS[request.param])


@pytest.mark.parametrize("name", NAMES)
def test_towers_are_hugging_faces(checkpoint, name):
    (tower,) = (t.load(checkpoint.folder) for t in in_vllm.vllm_towers() if t.name == name)
    assert checkpoint.verdict(checkpoint.run(tower, GRID), GRID).passed
    fused = [m.is_fused for m in tower.model.modules() if hasattr(m, "is_fused")]
    assert any(fused) == name.startswith(in_vllm.WITH_OURS)


@pytest.mark.gpu
def test_a_compiled_encoder_has_ours_too(checkpoint):
    settings = {"compilation_config": {"compile_mm_encoder": True}}
    tower = in_vllm._load(True, settings, checkpoint.folder)
    assert checkpoint.verdict(checkpoint.run(tower, GRID), GRID).passed


@pytest.mark.gpu
def test_a_recorded_encoder_follows_images_and_weights(checkpoint):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    settings = {"compilation_config": {"cudagraph_mm_encoder": True}}
    tower = in_vllm._load(True, settings, checkpoint.folder)
    manager = in_vllm._recorded(tower._config, tower.model, GRID)

    def replay(pixel_values, grid_thw):
        with torch.inference_mode():
            return manager.execute({"pixel_values": pixel_values, "image_grid_thw": grid_thw})

    before = checkpoint.run(tower, GRID, replay)
    other = checkpoint.run(tower, OTHER, replay)
    assert checkpoint.verdict(other, OTHER).passed
    for p in tower.model.visual.parameters():
        p.data.zero_()
    assert not torch.equal(checkpoint.run(tower, GRID, replay), before)
    loader = get_model_loader(tower._config.load_config)
    with set_current_vllm_config(tower._config):
        loader.load_weights(tower.model, tower._config.model_config)
    assert torch.equal(checkpoint.run(tower, GRID, replay), before)
    assert not manager.graph_misses
