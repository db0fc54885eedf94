import pytest

from compare.ceilings import Ceilings
from compare.timing import Timing, time_wall


def test_median_and_spread():
    timing = Timing.of([10.0, 11.0, 12.0, 13.0, 100.0])
    assert timing.median_us == 12
    assert timing.spread_us == pytest.approx(65.2 - 10.4)
    assert Timing.of([5.0]) == Timing(5.0, 0.0, 1)


def test_wall_time_waits_for_every_call():
    waited = []
    timing = time_wall(lambda: len(waited), waited.append)
    assert waited == list(range(timing.samples))
    assert timing.samples >= 10
    assert timing.median_us > 0


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
