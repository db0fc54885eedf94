"""Towers behind one interface: what is loaded, which attention reaches it, whose memory counts."""

from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from compare.agreement.metrics import relative_rms_error
from compare.implementations import huggingface, towers
from compare.implementations.towers import HuggingFaceTower
from compare.workloads.towers import SMALL_TOWERS
from flax_models import ImageConfig, preprocess
from flax_models.common.checkpoint import read_checkpoint
from tests.compare.naive import naive_varlen
from tests.compare.small_towers import TOWERS


@pytest.fixture(scope="module", params=TOWERS)
def config(request):
    return TOWERS[request.param]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, config):
    directory = tmp_path_factory.mktemp("checkpoint")
    huggingface.random_checkpoint(directory, config)
    return directory


@pytest.fixture(scope="module")
def inputs(config):
    pixels = np.random.default_rng(0).integers(0, 256, (140, 196, 3), dtype=np.uint8)
    return preprocess([pixels], replace(ImageConfig.of(config), min_pixels=1))


@pytest.mark.parametrize("name", SMALL_TOWERS)
def test_a_random_checkpoints_attention_is_not_uniform(name, tmp_path):
    """Or a wrong rotation would change little: its gain is what spreads a query's logits."""
    config = SMALL_TOWERS[name]
    huggingface.random_checkpoint(tmp_path, config)
    tensors = read_checkpoint(config, tmp_path)
    for block in range(config.depth):
        q, k, v = np.split(tensors[f"blocks.{block}.attn.qkv.weight"].astype(np.float32), 3)
        assert q.std() / v.std() == pytest.approx(1.5, rel=0.05)
        assert k.std() / v.std() == pytest.approx(1.5, rel=0.05)
        assert v.std() == pytest.approx(config.hidden_size**-0.5, rel=0.05)


def test_checkpoint_tells_mistakes_apart(checkpoint):
    model = huggingface.load(checkpoint, torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.std() > 1e-3, name


@pytest.mark.skipif(
    int(metadata.version("transformers").partition(".")[0]) < 5, reason="needs transformers 5"
)
def test_varlen_attention_reaches_hugging_faces_tower(monkeypatch, config, checkpoint, inputs):
    calls = []

    def naive(q, k, v, cu_seqlens, max_seqlen):
        calls.append(max_seqlen)
        return naive_varlen(q, k, v, cu_seqlens, max_seqlen)

    monkeypatch.setattr(huggingface, "load_varlen", lambda name: naive)
    results = []
    for attention in ("SDPA", "FA2"):
        tower = HuggingFaceTower(huggingface.load(checkpoint, torch.float32, attention))
        results.append(tower.tensor(tower.encode(*tower.put(*inputs))))
    assert relative_rms_error(*results) < 1e-5
    frame = int(inputs[1].prod())
    assert calls == ([64, frame] if config.family.windows else [frame, frame])


def test_true_fp32_puts_settings_back():
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [setting.fp32_precision for setting in settings]
    with huggingface.true_fp32():
        assert [setting.fp32_precision for setting in settings] == ["ieee", "ieee"]
    assert [setting.fp32_precision for setting in settings] == before


def test_a_peak_of_jax_that_did_not_grow_is_not_the_calls_own(monkeypatch):
    peaks = iter([3 << 20, 5 << 20, 5 << 20, 5 << 20])
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": next(peaks)})
    device_without = SimpleNamespace(memory_stats=lambda: None)
    found = iter([[device]] * 4 + [[device_without]] * 2)
    monkeypatch.setattr("jax.devices", lambda: next(found))
    tower = towers.JaxTower(model=None)
    seen = []
    for _ in range(3):
        tower.reset_peak_memory()
        seen.append(tower.peak_memory_mib())
    assert seen == [5, None, None]
