"""Tower agreement and the tower benchmark, on a small tower without a GPU."""

import functools
import re
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from compare import huggingface, peers_torch, timing, tower_agreement, tower_bench, towers
from compare.ceilings import Ceilings
from compare.errors import UnavailableError
from compare.integration import bench_integration
from compare.metrics import relative_rms_error
from compare.tower_agreement import check_towers
from compare.tower_workloads import TowerWorkload, Visual
from compare.towers import HuggingFaceTower, TowerImplementation
from flax_models import ImageConfig, VisionConfig, preprocess
from tests.compare.test_peers import naive_varlen

CONFIG = VisionConfig(
    depth=2,
    hidden_size=32,
    num_heads=2,
    intermediate_size=36,
    out_hidden_size=24,
    fullatt_block_indexes=(1,),
)


QWEN2 = VisionConfig.of(
    "qwen2_vl", depth=2, hidden_size=32, num_heads=2, intermediate_size=128, out_hidden_size=24
)
QWEN3 = VisionConfig.of(
    "qwen3_vl",
    depth=2,
    hidden_size=32,
    num_heads=2,
    intermediate_size=36,
    out_hidden_size=24,
    num_position_embeddings=25,
    deepstack_visual_indexes=(0,),
)
TOWERS = {"tower": CONFIG, "qwen2-tower": QWEN2, "qwen3-tower": QWEN3}


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


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(tower_agreement, "SMALL_TOWERS", {"tower": CONFIG})


def square(side, tower="tower"):
    return TowerWorkload(f"{tower}-{side}", (Visual(side, side),), TOWERS[tower])


class Disturbed(HuggingFaceTower):
    """Right up to the last block, whose output is off by far more than rounding."""

    def hidden_states(self, pixel_values, grid_thw):
        *states, last = super().hidden_states(pixel_values, grid_thw)
        return iter([*states, last * 1.05])


class Shortened(HuggingFaceTower):
    """Forgets the last block."""

    def hidden_states(self, pixel_values, grid_thw):
        return iter(list(super().hidden_states(pixel_values, grid_thw))[:-1])


def implementation(tower):
    return TowerImplementation(
        "torch", lambda d: tower(huggingface.load(d, torch.bfloat16)), ours=True
    )


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


def test_checkpoint_tells_mistakes_apart(checkpoint):
    model = huggingface.load(checkpoint, torch.float32)
    for name, parameter in model.named_parameters():
        assert parameter.std() > 1e-3, name


@pytest.mark.skipif(
    int(metadata.version("transformers").partition(".")[0]) < 5, reason="needs transformers 5"
)
def test_varlen_attention_reaches_hugging_faces_tower(monkeypatch, config, checkpoint, inputs):
    calls = []

    def varlen(q, k, v, cu_seqlens, max_seqlen):
        calls.append(max_seqlen)
        return naive_varlen(q, k, v, cu_seqlens, max_seqlen)

    monkeypatch.setattr(peers_torch, "_torch_fa2", lambda: varlen)
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
    tower = towers._JaxTower(model=None)
    peaks = iter([3 << 20, 5 << 20, 5 << 20, 5 << 20, None, None])
    monkeypatch.setattr(tower, "_peak", lambda: next(peaks))
    seen = []
    for _ in range(3):
        tower.reset_peak_memory()
        seen.append(tower.peak_memory_mib())
    assert seen == [5, None, None]


@pytest.fixture
def benchmark_on_cpu(monkeypatch):
    ceilings = SimpleNamespace(measure=lambda: Ceilings(4e12, 4e12, 8e14))
    monkeypatch.setattr(tower_bench, "ceilings_module", ceilings)
    monkeypatch.setattr(timing, "WALL_SECONDS", 0.01)
    monkeypatch.setattr(timing, "ROW_SECONDS", 0.01)


def test_benchmark_gives_every_tower_a_time_or_a_reason(benchmark_on_cpu):
    workloads = [square(112), square(224), square(224, "qwen3-tower")]
    records, _ = tower_bench.bench_towers(workloads)
    by_name = {(r.workload, r.implementation): r for r in records}
    for workload in workloads:
        for name in ("torch", "flax", "Hugging Face SDPA"):
            record = by_name[workload.name, name]
            assert record.median_us > 0
            assert record.relative_rms_error < 0.05
            assert record.compile_s > 0
            assert record.share_of_floor == pytest.approx(record.floor_us / record.median_us)
            tokens_per_s = workload.tokens / record.row_us * 1e6
            assert record.details["tokens_per_s"] == pytest.approx(tokens_per_s)
        for name in ("Hugging Face FA2 varlen", "Hugging Face FA3 varlen"):
            record = by_name[workload.name, name]
            assert (record.median_us is None) == bool(record.note)


def test_the_accelerated_tower_is_timed_beside_hugging_faces(benchmark_on_cpu, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(compile_without_code))
    records, _ = bench_integration([square(112)])
    by_name = {record.implementation: record for record in records}
    for name in ("accelerated", "accelerated, compiled"):
        assert by_name[name].passed
        assert by_name[name].median_us > 0
        assert by_name[name].error_limit == pytest.approx(
            1.1 * by_name["Hugging Face SDPA"].relative_rms_error
        )
    assert {"Hugging Face FA2 varlen", "Hugging Face FA3 varlen"} < by_name.keys()


def compile_without_code(module, **options):
    """As Module.compile, on a backend that needs no compiler."""
    module._compiled_call_impl = torch.compile(module._call_impl, backend="eager", **options)


def test_a_wrong_tower_gets_no_time(benchmark_on_cpu, monkeypatch):
    class Wrong(HuggingFaceTower):
        def encode(self, pixel_values, grid_thw):
            return super().encode(pixel_values, grid_thw) + 1

    monkeypatch.setattr(tower_bench, "our_towers", lambda: [implementation(Wrong)])
    records, _ = tower_bench.bench_towers([square(56)])
    record = next(r for r in records if r.implementation == "torch")
    assert record.median_us is None
    assert record.row_us is None
    assert "tokens_per_s" not in record.details
    assert record.passed is False
    assert record.relative_rms_error > 0.1
    assert record.note == "not timed: the error breaks its rule"


def test_libraries_frames_are_timed_on_named_workloads_or_say_why_not(benchmark_on_cpu):
    named = TowerWorkload("tower-1344", (Visual(56, 56),), CONFIG)
    records, _ = tower_bench.bench_towers([square(56), named], towers.library_frame_towers())
    names = {"torch, FA3 frames", "torch, cuDNN frames", "flax, cuDNN frames"}
    found = {r.implementation: r for r in records if r.implementation != "Hugging Face SDPA"}
    assert found.keys() == names
    for record in found.values():
        assert record.workload == "tower-1344"
        if not torch.cuda.is_available():
            assert "needs a tower on a GPU, got device 'cpu'" in record.note
