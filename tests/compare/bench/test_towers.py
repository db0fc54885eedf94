"""The tower benchmark, on small towers without a GPU."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from compare.agreement import metrics
from compare.bench import timing
from compare.bench import towers as tower_bench
from compare.bench.ceilings import Ceilings
from compare.bench.jax_profiler import DeviceEvent, Profile
from compare.common.errors import UnavailableError
from compare.implementations import huggingface, towers, training
from compare.implementations.towers import HuggingFaceTower
from compare.workloads.towers import TowerWorkload, Visual
from tests.compare.small_towers import CONFIG, failing_once, implementation, square


@pytest.fixture
def benchmark_on_cpu(monkeypatch):
    monkeypatch.setattr(timing, "WALL_SECONDS", 0.01)
    monkeypatch.setattr(timing, "ROW_SECONDS", 0.01)


def bench(workloads, *measured):
    found = tower_bench.bench_towers(workloads, Ceilings(4e12, 4e12, 8e14), *measured)
    return list(itertools.chain.from_iterable(found))


@pytest.mark.long
def test_benchmark_gives_every_tower_a_time_or_a_reason(benchmark_on_cpu):
    workloads = [square(112), square(128, "qwen3-tower")]
    records = bench(workloads)
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


@pytest.mark.long
def test_steps_of_training_are_judged_by_a_gradient(benchmark_on_cpu, monkeypatch):
    """The rule's 1.1 is for whole towers. Of two narrow layers few roundings decide: over eight
    sizes each of our towers was 0.77 to 1.21 times as far from fp32 as Hugging Face's.
    """
    monkeypatch.setattr(metrics, "TOWER_FACTOR", 1.5)
    workload = replace(square(112), gradients=True)
    records = bench([workload], training.trained_towers(), trained())
    names = ("Hugging Face SDPA", "accelerated", "torch", "flax")
    assert [record.implementation for record in records[:4]] == list(names)
    for record in records[:4]:
        assert record.passed, record
        assert record.median_us > 0
        assert 1e-3 < record.relative_rms_error < 0.02
    assert records[3].peak_memory_mib > 0  # known on a CPU too


@pytest.mark.long
def test_fine_tuning_is_judged_by_its_losses(benchmark_on_cpu):
    workload = replace(square(112), gradients=True, steps=4)
    accelerated, _, flax, _ = training.trained_towers()
    hasty = implementation(Hasty)
    measured = [accelerated, flax, replace(hasty, name="hasty")]
    records = bench([workload], measured, trained())
    assert len(records) == 4
    for record in records[:3]:
        assert record.passed, record
        assert (record.median_us, record.note) == (None, None)
        losses, exact = record.details["losses"], record.details["fp32_losses"]
        assert losses == pytest.approx(exact, rel=0.02)
        assert exact == sorted(exact, reverse=True)
        assert exact[3] < 0.95 * exact[0]
    assert records[3].passed is False


def trained():
    return tower_bench.Reference(training.exact_training, training.training_baseline())


class Hasty(training._TrainedHuggingFace):
    """Whose gradients are twice what they should be."""

    def _embeddings(self, pixel_values, grid_thw):
        embeddings = super()._embeddings(pixel_values, grid_thw)
        return 2 * embeddings - embeddings.detach()


def test_workloads_go_from_small_to_large(benchmark_on_cpu):
    """JAX's peak memory only grows: a small call behind a large one would be said to take its."""
    records = bench([square(112), square(56), square(84)], [])
    assert [record.workload for record in records] == ["tower-56", "tower-84", "tower-112"]


def test_the_accelerated_tower_is_timed_beside_hugging_faces(benchmark_on_cpu, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(compile_without_code))
    measured = [*towers.accelerated_towers(), *towers.peer_towers()]
    records = bench([square(112)], measured)
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


def test_every_towers_kernels_are_timed_and_those_of_ours_told_apart(benchmark_on_cpu, monkeypatch):
    profiled = []

    def seen(run, calls):
        run()
        profiled.append(calls)
        return Profile([DeviceEvent("window_kernel", 0.0, 7e3)] * calls, calls)

    monkeypatch.setattr(tower_bench, "try_profile", seen)
    records = bench([square(56)], towers.our_towers())
    by_name = {record.implementation: record for record in records}
    assert {record.profiler_us for record in records} == {7.0}
    assert "groups_us" not in by_name["Hugging Face SDPA"].details
    for name in ("torch", "flax"):
        assert by_name[name].details["groups_us"]["windowed attention"] == 7.0
        assert by_name[name].details["kernels_us"] == {"window_kernel": 7.0}
    assert profiled == [1, 5, 5]


def test_a_wrong_tower_gets_no_time(benchmark_on_cpu, monkeypatch):
    class Wrong(HuggingFaceTower):
        def encode(self, pixel_values, grid_thw):
            return super().encode(pixel_values, grid_thw) + 1

    def seen(run, calls):
        return Profile([DeviceEvent("window_kernel", 0.0, 7e3)] * calls, calls)

    monkeypatch.setattr(tower_bench, "our_towers", lambda: [implementation(Wrong)])
    monkeypatch.setattr(tower_bench, "try_profile", seen)
    records = bench([square(56)])
    record = next(r for r in records if r.implementation == "torch")
    times = record.median_us, record.spread_us, record.row_us, record.profiler_us
    assert times == (None,) * 4
    assert record.details == {}
    assert record.passed is False
    assert record.relative_rms_error > 0.1
    assert record.note == "not timed: the error breaks its rule"


def test_a_family_without_a_reference_is_not_timed_and_the_others_are(
    benchmark_on_cpu, monkeypatch
):
    monkeypatch.setattr(huggingface, "load", failing_once(huggingface.load))
    workloads = [square(56), square(56, "qwen2-tower")]
    records = bench(workloads, [implementation(HuggingFaceTower)])
    assert [(r.workload, r.implementation) for r in records] == [
        (workload.name, name) for workload in workloads for name in ("Hugging Face SDPA", "torch")
    ]
    assert {r.note for r in records[:2]} == {"OutOfMemoryError: no room for the reference"}
    assert all(record.median_us > 0 for record in records[2:])
    assert [record.ours for record in records] == [False, True] * 2


def test_a_gpu_that_broke_costs_only_the_towers_behind(benchmark_on_cpu, monkeypatch):
    """Nothing that is asked of it then works, memory cannot be handed back either."""
    broken = []

    class Breaking(HuggingFaceTower):
        def encode(self, pixel_values, grid_thw):
            broken.append(True)
            raise RuntimeError("illegal memory access")

    def free_memory():
        if broken:
            raise RuntimeError("illegal memory access")

    monkeypatch.setattr(tower_bench, "free_memory", free_memory)
    measured = [implementation(tower) for tower in (HuggingFaceTower, Breaking, HuggingFaceTower)]
    records = bench([square(56)], measured)
    assert [record.median_us is None for record in records] == [False, False, True, True]
    assert [record.passed for record in records] == [True, True, False, False]
    assert {r.note for r in records[2:]} == {"RuntimeError: illegal memory access"}


def test_what_is_not_installed_is_said_before_anything_is_timed(benchmark_on_cpu, monkeypatch):
    def missing(model_type):
        if model_type == "qwen3_vl":
            raise UnavailableError("transformers is too old")

    monkeypatch.setattr(huggingface, "vision_classes", missing)
    with pytest.raises(UnavailableError, match="too old"):
        bench([square(56), square(56, "qwen3-tower")], [])


def test_peers_are_held_to_a_wider_limit_than_ours(benchmark_on_cpu):
    ours = implementation(HuggingFaceTower)
    records = bench([square(56)], [ours, replace(ours, ours=False)])
    error = records[0].relative_rms_error
    assert [r.error_limit for r in records[1:]] == pytest.approx([1.1 * error, 1.5 * error])


def test_libraries_frames_are_timed_on_named_workloads_or_say_why_not(benchmark_on_cpu):
    named = TowerWorkload("tower-1344", (Visual(56, 56),), CONFIG)
    records = bench([square(56), named], towers.library_frame_towers())
    names = {"torch, FA3 frames", "torch, cuDNN frames", "flax, cuDNN frames"}
    found = {r.implementation: r for r in records if r.implementation != "Hugging Face SDPA"}
    assert found.keys() == names
    for record in found.values():
        assert record.workload == "tower-1344"
        assert record.passed is not False
        if not torch.cuda.is_available():
            assert "needs a tower on a GPU, got device 'cpu'" in record.note
