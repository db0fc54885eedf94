import itertools
import types
import weakref

import pytest
import torch

from compare.bench import ceilings as ceilings_module
from compare.bench import timing as timing_module
from compare.bench.ceilings import Ceilings
from compare.bench.timing import GraphTimer, Timing, input_sets, time_row, time_wall


def test_median_and_spread():
    timing = Timing.of([10.0, 11.0, 12.0, 13.0, 100.0])
    assert timing.median_us == 12
    assert timing.spread_us == pytest.approx(65.2 - 10.4)
    assert Timing.of([5.0]) == Timing(5.0, None, 1)


def test_the_hosts_time_is_of_one_call(monkeypatch):
    clock = itertools.count()  # a second passes from one look to the next
    monkeypatch.setattr(timing_module.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = object.__new__(GraphTimer)
    timer.call, timer._sets, timer.sets = (lambda: None), [()] * 4, 4
    assert timer.host_us() == 250e3


def test_wall_time_waits_for_every_call():
    waited = []
    timing = time_wall(lambda: len(waited), waited.append)
    assert waited == list(range(timing.samples))
    assert timing.samples >= 10
    assert timing.median_us > 0


@pytest.mark.parametrize(("alone_us", "calls"), [(1.0, 16), (50e3, 6), (5e6, 2)])
def test_only_the_last_call_of_a_row_is_waited_for(alone_us, calls, monkeypatch):
    monkeypatch.setattr(timing_module, "ROW_SECONDS", 1.0)
    seconds = iter(range(10**6))
    monkeypatch.setattr(timing_module.time, "perf_counter", lambda: next(seconds))
    made, waited = [], []

    def call():
        made.append(len(made))
        return made[-1]

    timing = time_row(call, waited.append, alone_us)
    assert waited == made[calls - 1 :: calls]
    assert len(made) == calls * timing.samples
    assert timing.samples == 3
    assert timing.median_us == pytest.approx(1e6 / calls)  # one tick a row


def test_profiled_calls_write_to_memory_of_their_own(monkeypatch):
    """A call whose result lay where the last one's did would find it in the cache."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    results, alive = [], []

    def call(x):
        alive.append(sum(result() is not None for result in results))
        result = x.clone()
        results.append(weakref.ref(result))
        return result

    timer = object.__new__(GraphTimer)  # a whole one wants a GPU
    timer.call, timer._sets = call, [(torch.ones(2),)] * 3
    timer.run_eagerly(2)
    assert alive == [0, 1, 2, 3, 4, 5]


def test_a_replay_is_a_call_of_every_set(monkeypatch):
    replays = []
    timer = object.__new__(GraphTimer)  # a whole one wants a GPU
    timer.sets = 4
    monkeypatch.setattr(timer, "_elapsed_ms", lambda n: replays.append(n) or 0.5 * n, raising=False)
    timing = timer.time(samples=5)
    assert timing.median_us == pytest.approx(500 / 4)
    assert replays[2:] == [6] * 5  # 3 ms each, once it is warm and its time known


def test_what_a_graph_does_not_write_is_nan(monkeypatch):
    """And not what an earlier replay left."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = object.__new__(GraphTimer)
    timer.arguments, timer._sets, timer._outputs = (torch.ones(2),), [(torch.zeros(2),)], []
    timer._outputs.append(torch.ones(3))
    timer._graph = types.SimpleNamespace(
        replay=lambda: timer._outputs[0][:2].copy_(*timer._sets[0])
    )
    assert torch.equal(timer.outputs()[0].nan_to_num(-1), torch.tensor([1.0, 1.0, -1.0]))


@pytest.mark.parametrize(
    ("cache", "bytes_per_set", "sets"),
    [(50 << 20, 1 << 20, 200), (50 << 20, 150 << 20, 20), (0, 1 << 20, 256)],
)
def test_inputs_outgrow_the_cache(monkeypatch, cache, bytes_per_set, sets):
    properties = types.SimpleNamespace(L2_cache_size=cache)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert input_sets(bytes_per_set) == sets
    assert input_sets(1 << 40, calls=1) == 3


def test_ceilings_count_what_is_read_and_written(monkeypatch):
    """By a clock on which every call takes half a millisecond."""
    for name in ("randn", "empty"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, device, **k: make(*a, **k))
    monkeypatch.setattr(
        ceilings_module, "elapsed_ms", lambda calls: 0.5 * len([call() for call in calls])
    )
    for name, size in (("_COPY_BYTES", 4096), ("_LARGE_COPY_BYTES", 8192), ("_MATRIX_SIDE", 16)):
        monkeypatch.setattr(ceilings_module, name, size)
    measured = ceilings_module.measure()
    assert measured.copy_bytes_per_s == pytest.approx(2 * 4096 / 5e-4)
    assert measured.large_copy_bytes_per_s == pytest.approx(2 * 8192 / 5e-4)
    assert measured.matrix_flops_per_s == pytest.approx(2 * 16**3 / 5e-4)


def test_floors():
    ceilings = Ceilings(4e12, 4.2e12, 8e14)
    assert ceilings.kernel_floor_us(4_000_000, 0) == pytest.approx(1.0)
    assert ceilings.kernel_floor_us(4_000_000, 1_600_000_000) == pytest.approx(2.0)
    assert ceilings.tower_floor_us(4_000_000, 1_600_000_000) == pytest.approx(3.0)
    assert ceilings.to_json().keys() == {
        "copy_bytes_per_s",
        "large_copy_bytes_per_s",
        "matrix_flops_per_s",
    }
