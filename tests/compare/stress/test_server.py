"""A server's life: a right tower lives it, and what is wrong with others is found."""

import dataclasses
import functools
import itertools
import mmap
import threading

import pytest
import torch

pytest.importorskip("jax")
pytest.importorskip("transformers")

from compare.implementations.towers import our_towers
from compare.stress import server
from compare.stress.server import Traffic
from flax_models import VisionConfig
from tests.tower_checkpoints import write_checkpoint

CONFIG = VisionConfig(
    depth=2, hidden_size=16, num_heads=2, intermediate_size=8, out_hidden_size=8,
    fullatt_block_indexes=(1,),
)  # fmt: skip
TRAFFIC = Traffic(calls=200, threads=4, requests=5, images=2, side=8, growth_mib=20)


class FakeTower:
    """A tower's interface around a function (pixel_values, grid_thw) -> array."""

    framework = "fake"

    def __init__(self, encode):
        self.encode = encode

    def tensor(self, embeddings):
        return torch.from_numpy(embeddings)


def double(pixel_values, grid_thw):
    return 2 * pixel_values


def live(encode, traffic=TRAFFIC, seconds=60):
    return server.live(FakeTower(encode), CONFIG, traffic, seconds)


def test_a_right_tower_lives():
    life = live(double)
    assert (life.calls, life.findings) == (200, [])


@pytest.mark.parametrize("implementation", our_towers(), ids=lambda tower: tower.name)
def test_our_towers_live(implementation, tmp_path):
    """More sizes than layouts are kept on the device, all of one bucket: compiled once."""
    tower = implementation.load(write_checkpoint(tmp_path, CONFIG))
    life = server.live(tower, CONFIG, dataclasses.replace(TRAFFIC, threads=8, requests=40), 60)
    assert (life.calls, life.findings) == (200, [])


def test_calls_stop_in_time_but_not_before_the_tower_is_warm():
    assert live(double, seconds=0).calls == 200 * 4 // 20


def test_a_call_that_gets_the_images_of_another_is_found():
    held = []

    def mix(pixel_values, grid_thw):
        held.append(pixel_values)
        return 2 * held[-2 if len(held) % 50 == 0 else -1][: len(pixel_values)]

    assert any("error" in finding or "differ" in finding for finding in live(mix).findings)


@pytest.mark.parametrize(("off", "found"), [(0.02, True), (0.005, False)])
def test_a_result_that_drifts_is_found(off, found):
    calls = itertools.count()

    def drift(pixel_values, grid_thw):
        return (2 + 2 * off * (next(calls) >= TRAFFIC.requests)) * pixel_values

    assert any("error" in finding for finding in live(drift).findings) == found


def test_a_call_that_fails_is_found():
    calls = iter(range(10**6))

    def fail(pixel_values, grid_thw):
        if next(calls) == 100:
            raise RuntimeError("out of memory\nand much more about it")
        return 2 * pixel_values

    assert live(fail).findings == ["RuntimeError: out of memory"]


def test_a_leak_is_found():
    held = []

    def leak(pixel_values, grid_thw):
        # Half a MiB of the system's own: the process may have had more from earlier tests.
        held.append(mmap.mmap(-1, 1 << 19))
        held[-1].write(bytes(1 << 19))
        return 2 * pixel_values

    assert any(f.startswith("host memory grew by") for f in live(leak).findings)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([0, 50, *[100] * 18], 0),  # warming up
        ([100, 100, *[100, 180] * 9], -80),  # a cache that lets go
        (list(range(20)), 19 - 3 - 5),  # a leak
        ([5, 7, 9, 12], 3),  # stopped when it was warm
    ],
)
def test_growth_of_memory(held, expected):
    assert server.growth(held) == expected


def test_a_cache_without_a_limit_is_found(monkeypatch):
    remember = functools.cache(lambda x: x)
    monkeypatch.setattr(server, "remember", remember, raising=False)
    calls = iter(range(10**6))

    def forgetless(pixel_values, grid_thw):
        remember(next(calls))
        return 2 * pixel_values

    (finding,) = live(forgetless).findings
    assert finding.startswith("the cache of compare.stress.server.remember grew from")


def test_a_tower_that_compiles_at_every_call_is_found(tmp_path, monkeypatch):
    rounds = server._WARM_ROUNDS + 2
    monkeypatch.setattr(server, "_ROUNDS", rounds)
    (flax,) = (tower for tower in our_towers() if tower.name == "flax")
    tower = flax.load(write_checkpoint(tmp_path, CONFIG))
    lock, sizes = threading.Lock(), itertools.count(256, 8)

    def encode(pixel_values, grid_thw):
        with lock:
            tower.model.token_buckets = (next(sizes),)
            tower.encode(pixel_values, grid_thw)
        return 2 * pixel_values

    traffic = dataclasses.replace(TRAFFIC, calls=rounds, requests=2)
    findings = live(encode, traffic).findings
    assert any("the cache of flax_models.compiled grew" in finding for finding in findings)
