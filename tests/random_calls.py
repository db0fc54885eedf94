"""What users send: calls of images of any size, as grids of patches."""

import numpy as np

from flax_models.common.images import smart_resize


def tokens_of(grid):
    return sum(t * h * w for t, h, w in grid)


def random_calls(seed, images, at_most):
    """Calls of one to `at_most` images each, of random sides of 56 to 1344 px, to 20,000 tokens."""
    generator = np.random.default_rng(seed)
    calls = []
    for _ in range(images):
        height, width = smart_resize(*map(int, generator.integers(56, 1345, 2)), max_pixels=10**9)
        grid = (1, height // 14, width // 14)
        room = calls and len(calls[-1]) < generator.integers(1, at_most + 1)
        if room and tokens_of([*calls[-1], grid]) <= 20_000:
            calls[-1].append(grid)
        else:
            calls.append([grid])
    return calls
