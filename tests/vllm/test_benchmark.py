"""What `python -m compare vllm` measures: towers that the real vLLM has built."""

import numpy as np
import pytest
import torch

pytest.importorskip("ml_dtypes")

from compare.agreement.metrics import relative_rms_error
from compare.implementations import huggingface
from compare.implementations import vllm as in_vllm
from compare.implementations.towers import HuggingFaceTower
from compare.workloads.towers import SMALL_TOWERS

GRID = [[1, 8, 8], [2, 6, 10]]


@pytest.mark.parametrize("family", SMALL_TOWERS)
def test_towers_are_hugging_faces(process, lines, monkeypatch, tmp_path, family):
    monkeypatch.setattr(in_vllm, "_start_distributed", lambda: None)  # `process` has
    config = SMALL_TOWERS[family]
    huggingface.random_checkpoint(tmp_path, config)
    tokens = sum(t * h * w for t, h, w in GRID)
    patches = np.random.default_rng(0).standard_normal((tokens, config.patch_dim), np.float32)

    def run(tower):
        return tower.tensor(tower.encode(*tower.put(patches, np.array(GRID)))).float()

    exact = run(HuggingFaceTower(huggingface.load(tmp_path, torch.float32)))
    usual = run(HuggingFaceTower(huggingface.load(tmp_path, torch.bfloat16)))
    limit = 1.1 * relative_rms_error(usual, exact)
    towers = {tower.name: tower for tower in in_vllm.vllm_towers()}
    for name in ("vLLM", "vLLM with ours"):
        tower = towers[name].load(tmp_path)
        assert relative_rms_error(run(tower), exact) <= limit
        fused = [m.is_fused for m in tower.model.modules() if hasattr(m, "is_fused")]
        assert any(fused) == (name == "vLLM with ours")
