"""Bicubic resizing in the integers that PyTorch resizes with, and thereby torchvision."""

import functools
import importlib
import itertools
import sys

import numpy as np

# Values along an axis that are computed by one matrix product, whose matrix is mostly zeros beyond
# them.
_BLOCK = 16

# Bytes of rows that are resized together: they stay in a cache, and a large image takes little more
# memory than its pixels.
_TOGETHER = 1 << 22

_MIDDLE = 128

# Of the cubic whose curvature torchvision and Pillow choose for anti-aliased resizing.
_CURVATURE = -0.5


def resize_bicubic(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image with anti-aliasing, first along its rows.

    Equal in every bit to `torch.nn.functional.interpolate(mode="bicubic", antialias=True)` of uint8
    on a CPU, by which torchvision resizes there. In a process that has loaded PyTorch it is that
    function, which is much faster.

    Args:
        pixels: uint8 [channels, old height, old width].
        height: of the result, in pixels.
        width: of the result, in pixels.

    Returns:
        uint8 [channels, height, width]; `pixels` itself where nothing changes.
    """
    if (height, width) == pixels.shape[1:]:
        return pixels
    # PyTorch 2.13 fails on an image of one pixel.
    if "torch" in sys.modules and min(pixels.shape[1:]) > 1:
        return _by_pytorch(pixels, height, width)
    return resize_by_numpy(pixels, height, width)


def _by_pytorch(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    torch = importlib.import_module("torch")  # another thread may be loading it
    source = torch.from_dlpack(pixels)[None]  # which may be memory that is only read
    options = {"mode": "bicubic", "antialias": True}
    return torch.nn.functional.interpolate(source, (height, width), **options)[0].numpy()


def resize_by_numpy(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """`resize_bicubic` without PyTorch."""
    return _resize_columns(_resize_rows(pixels, width), height)


def _resize_rows(pixels: np.ndarray, new: int) -> np.ndarray:
    """Resize the last axis of uint8 [channels, rows, old] to `new`."""
    channels, rows, old = pixels.shape
    if old == new:
        return pixels
    offsets, blocks = _plan(old, new)
    resized = np.empty((channels, rows, new), dtype=np.uint8)
    together = max(_TOGETHER // (old * offsets.itemsize), 1)
    for channel, start in itertools.product(range(channels), range(0, rows, together)):
        source = _centred(pixels[channel, start : start + together], offsets.dtype)
        sums = np.empty((len(source), new), offsets.dtype)
        for number, (first, matrix) in enumerate(blocks):
            columns = slice(number * _BLOCK, number * _BLOCK + len(matrix))
            np.matmul(source[:, first : first + matrix.shape[1]], matrix.T, out=sums[:, columns])
        _round(sums, offsets, resized[channel, start : start + together])
    return resized


def _resize_columns(pixels: np.ndarray, new: int) -> np.ndarray:
    """Resize the second axis of uint8 [channels, old, columns] to `new`."""
    channels, old, columns = pixels.shape
    if old == new:
        return pixels
    offsets, blocks = _plan(old, new)
    resized = np.empty((channels, new, columns), dtype=np.uint8)
    for channel, (number, (first, matrix)) in itertools.product(range(channels), enumerate(blocks)):
        source = _centred(pixels[channel, first : first + matrix.shape[1]], offsets.dtype)
        rows = slice(number * _BLOCK, number * _BLOCK + len(matrix))
        _round(matrix @ source, offsets[rows, None], resized[channel, rows])
    return resized


def _centred(pixels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Pixels less the middle of their range: their sums are half as large."""
    return (pixels ^ np.uint8(_MIDDLE)).view(np.int8).astype(dtype)


def _round(sums: np.ndarray, offsets: np.ndarray, out: np.ndarray) -> None:
    """From sums of centred pixels to the nearest of 256 values, halves upwards."""
    sums += offsets
    out[...] = np.clip(sums, 0, 255, out=sums)  # rounds down


@functools.lru_cache(maxsize=8)
def _plan(old: int, new: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Weights as multiples of a power of two.

    Returns:
        offsets: [new], what the middle adds to each sum, and a half.
        blocks: for each `_BLOCK` new values, the first old one that they need, and the weights
            [new, old], like the offsets in a dtype in which every sum of centred pixels is exact,
            and with its offset all below 256.
    """
    first, weights, precision = _weights(old, new)
    most = _MIDDLE * np.abs(weights).sum(axis=1).max()
    exact = np.float32 if most < 2**24 and precision <= 16 else np.float64
    offsets = (_MIDDLE * weights.sum(axis=1) * 2.0**-precision + 0.5).astype(exact)
    blocks = []
    for start in range(0, new, _BLOCK):
        starts, taps = first[start : start + _BLOCK], weights[start : start + _BLOCK]
        columns = starts[:, None] - starts[0] + np.arange(taps.shape[1])
        matrix = np.zeros((len(taps), columns.max() + 1), dtype=exact)
        np.put_along_axis(matrix, columns, taps * 2.0**-precision, axis=1)
        # Beyond the last old value there are only weights of 0.
        blocks.append((int(starts[0]), matrix[:, : old - starts[0]]))
    return offsets, blocks


def _weights(old: int, new: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The first old row of each new one [new], its weights [new, taps] int64, their precision."""
    scale = old / new
    stretch = max(scale, 1.0)  # the filter's, which grows only where pixels are averaged
    centres = scale * (np.arange(new) + 0.5)
    first = np.maximum((centres - 2 * stretch + 0.5).astype(np.int64), 0)
    count = np.minimum((centres + 2 * stretch + 0.5).astype(np.int64), old) - first
    taps = np.arange(count.max())
    weights = _cubic((taps + first[:, None] - centres[:, None] + 0.5) * (1.0 / stretch))
    weights[taps >= count[:, None]] = 0
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # one after the other, as PyTorch sums them
    largest, precision = weights.max(), 0
    while precision < 22 and int(0.5 + largest * 2 ** (precision + 1)) < 2**15:  # fits in int16
        precision += 1
    scaled = weights * 2**precision
    return first, np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int64), precision


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys's cubic convolution, 0 from a distance of 2 on."""
    a, x = _CURVATURE, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
