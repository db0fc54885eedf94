import math

import pytest
import torch

from compare.agreement.metrics import (
    Verdict,
    equal_share,
    kernel_verdict,
    max_abs_error,
    relative_rms_error,
    tower_verdict,
    twin_verdict,
)


def test_relative_rms_error():
    reference = torch.tensor([3.0, 4.0])
    assert relative_rms_error(reference, reference) == 0
    assert relative_rms_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_rms_error(torch.ones(2), torch.zeros(2)) == pytest.approx(math.sqrt(2))


def test_shapes_must_be_equal():
    for measure in (relative_rms_error, max_abs_error, equal_share):
        with pytest.raises(ValueError, match=r"differ in shape: \(2,\) and \(2, 1\)"):
            measure(torch.ones(2), torch.ones(2, 1))


def test_nan_never_passes():
    error = relative_rms_error(torch.tensor([math.nan, 1.0]), torch.ones(2))
    assert not kernel_verdict(error, 1.0, "bfloat16").passed
    assert not Verdict(math.nan, math.inf).passed


def test_max_abs_and_equal_share():
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.5, 3.0, 3.0])
    assert max_abs_error(a, b) == 1.0
    assert equal_share(a, b) == 0.5


def test_rule_1_takes_the_tighter_of_two_limits():
    assert kernel_verdict(3.9e-3, 2.7e-3, "bfloat16").passed
    assert not kernel_verdict(4.1e-3, 2.7e-3, "bfloat16").passed
    assert not kernel_verdict(3.9e-3, 1.9e-3, "bfloat16").passed
    assert not kernel_verdict(7e-4, 6e-4, "float16").passed
    assert not kernel_verdict(1.1e-5, 1e-5, "float32").passed


def test_rule_2_and_the_tower_rule():
    assert twin_verdict(2e-3, "bfloat16").passed
    assert not twin_verdict(2.1e-3, "bfloat16").passed
    assert tower_verdict(1.09e-2, 1e-2).passed
    assert not tower_verdict(1.11e-2, 1e-2).passed
    assert tower_verdict(1.11e-2, 1e-2, ours=False).passed
