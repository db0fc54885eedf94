"""Tower agreement, on small towers without a GPU."""

import re
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from compare.agreement import towers as tower_agreement
from compare.agreement.metrics import relative_rms_error
from compare.agreement.towers import check_towers
from compare.common.errors import UnavailableError
from compare.implementations import huggingface, towers
from compare.implementations.towers import HuggingFaceTower, TowerImplementation
from flax_models import ImageConfig, preprocess
from flax_models.common.checkpoint import read_checkpoint
from tests.compare.naive import naive_varlen
from tests.compare.small_towers import CONFIG, QWEN3, TOWERS, failing_once, implementation


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


@pytest.mark.parametrize("name", tower_agreement.SMALL_TOWERS)
def test_a_random_checkpoints_attention_is_not_uniform(name, tmp_path):
    """Or a wrong rotation would change little: its gain is what spreads a query's logits."""
    config = tower_agreement.SMALL_TOWERS[name]
    huggingface.random_checkpoint(tmp_path, config)
    tensors = read_checkpoint(config, tmp_path)
    for block in range(config.depth):
        q, k, v = np.split(tensors[f"blocks.{block}.attn.qkv.weight"].astype(np.float32), 3)
        assert q.std() / v.std() == pytest.approx(1.5, rel=0.05)
        assert k.std() / v.std() == pytest.approx(1.5, rel=0.05)
        assert v.std() == pytest.approx(config.hidden_size**-0.5, rel=0.05)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(tower_agreement, "SMALL_TOWERS", {"tower": CONFIG})


class Disturbed(HuggingFaceTower):
    """Right up to the last block, whose output is off by far more than rounding."""

    def hidden_states(self, pixel_values, grid_thw):
        *states, last = super().hidden_states(pixel_values, grid_thw)
        return iter([*states, last * 1.05])


class Shortened(HuggingFaceTower):
    """Forgets the last block."""

    def hidden_states(self, pixel_values, grid_thw):
        return iter(list(super().hidden_states(pixel_values, grid_thw))[:-1])


def unavailable(directory):
    raise UnavailableError("no such tower")


def test_our_towers_agree_after_every_layer(monkeypatch):
    compared = {name: TOWERS[name] for name in ("tower", "qwen3-tower")}
    monkeypatch.setattr(tower_agreement, "SMALL_TOWERS", compared)
    records = check_towers(small=True)
    assert {record.workload for record in records} == {f"{name}-photographs" for name in compared}
    judged = [record for record in records if record.passed is not None]
    assert all(record.passed for record in judged)
    for name in ("torch", "flax"):
        layers = [record.layer for record in judged if record.implementation == name]
        assert layers == [0, 1, None] * len(compared)


def test_a_wrong_layer_fails(small, capsys):
    records = check_towers([implementation(Disturbed)], small=True)
    failed = [record.layer for record in records if record.passed is False]
    assert failed == [1]
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tower", "reason"),
    [
        (implementation(Shortened), "differ in shape"),
        (TowerImplementation("torch", unavailable, ours=True), "no such tower"),
    ],
)
def test_a_tower_that_cannot_be_compared_fails(small, tower, reason):
    (failed,) = [r for r in check_towers([tower], small=True) if r.passed is False]
    assert re.search(reason, failed.note)


def test_a_family_without_a_reference_fails_and_the_others_are_checked(monkeypatch, capsys):
    monkeypatch.setattr(tower_agreement, "SMALL_TOWERS", {"tower": CONFIG, "qwen3-tower": QWEN3})
    monkeypatch.setattr(huggingface, "load", failing_once(huggingface.load))
    failed, *others = check_towers([implementation(HuggingFaceTower)], small=True)
    assert failed.workload == "tower-photographs"
    assert failed.passed is False
    assert failed.note == "OutOfMemoryError: no room for the reference"
    assert {record.workload for record in others} == {"qwen3-tower-photographs"}
    assert [record.passed for record in others] == [None] * 3 + [True] * 3
    assert "FAILED OutOfMemoryError" in capsys.readouterr().out


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
