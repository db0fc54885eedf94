import importlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_models.common.resample import resize_bicubic, resize_by_numpy
from tests.hostile import examples

# PyTorch 2.13 fails on an image of one pixel.
sides = st.one_of(st.integers(2, 60), st.integers(61, 900))


def assert_equals_pytorch(pixels, height, width):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(pixels)[None], (height, width), mode="bicubic", antialias=True
    )
    np.testing.assert_array_equal(resize_by_numpy(pixels, height, width), theirs[0])


@given(sides, sides, sides, sides, st.sampled_from([1, 255]))
@settings(max_examples=examples(50))
def test_equals_pytorch_in_every_bit(old_height, old_width, height, width, step):
    """Of noise, or of black and white alone, which overshoots."""
    generator = np.random.default_rng(old_height * old_width)
    pixels = generator.integers(0, 256 // step + step // 255, (3, old_height, old_width)) * step
    assert_equals_pytorch(pixels.astype(np.uint8), height, width)


@pytest.mark.parametrize(("old", "new"), [((3, 9000), (5, 28)), ((2000, 3), (32, 700))])
def test_sums_that_pass_what_fp32_holds(old, new):
    assert_equals_pytorch(np.full((3, *old), 255, dtype=np.uint8), *new)


def test_what_has_its_size_is_left_as_it_is():
    pixels = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    assert resize_bicubic(pixels, 4, 5) is pixels
    np.testing.assert_array_equal(resize_by_numpy(pixels, 4, 5), pixels)


@pytest.mark.parametrize("sides", [(90, 70), (1, 70), (90, 1)])
def test_with_pytorch_and_without_it_is_the_same(monkeypatch, sides):
    """Of memory that may only be read, as Pillow's; one pixel is more than PyTorch takes."""
    pytest.importorskip("torch")
    pixels = np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8).transpose(2, 0, 1)
    pixels.setflags(write=False)
    with_it = resize_bicubic(pixels, 28, 56)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(importlib, "import_module", None)
    np.testing.assert_array_equal(resize_bicubic(pixels, 28, 56), with_it)
