"""Tower agreement, on small towers without a GPU."""

import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from compare.agreement import towers as tower_agreement
from compare.agreement.towers import check_towers
from compare.common.errors import UnavailableError
from compare.implementations import huggingface
from compare.implementations.towers import HuggingFaceTower, TowerImplementation
from tests.compare.small_towers import CONFIG, QWEN3, TOWERS, failing_once, implementation


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
