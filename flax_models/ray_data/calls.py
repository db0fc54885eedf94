"""Which images go through a tower together: calls by patches, not by images."""

from collections.abc import Sequence

from flax_models.common.buckets import fitting_tokens
from flax_models.common.config import VisionConfig
from flax_models.common.grid import MAX_TOKENS

# Sizes up to a budget. Each is a program, whose first call takes as long as many others; a tower's
# own ladder, of more sizes, pads a little less.
_STEPS = 4

# From one size to the next beyond the budget, where images are calls alone.
_GROWTH = 1.125


def call_buckets(config: VisionConfig, budget: int) -> tuple[int, ...]:
    """The numbers of patches that calls are padded to, as `token_buckets` of a tower.

    Args:
        config: the tower's configuration.
        budget: as of `plan_calls`.
    """
    sizes = [budget * step / _STEPS for step in range(1, _STEPS + 1)]
    while sizes[-1] < MAX_TOKENS:
        sizes.append(sizes[-1] * _GROWTH)
    return tuple(sorted({fitting_tokens(config, size) for size in sizes}))


def plan_calls(tokens: Sequence[int], budget: int) -> list[list[int]]:
    """Divide images among calls of at most `budget` patches, all but the last ones nearly full.

    The largest first, each into the first call that still has room for it: what is left of a call
    goes to small images. A tower pads a call to its bucket, not an image to another, so that full
    calls are all that keeps padding low, and that the same few buckets serve them.

    Args:
        tokens: patches of each image.
        budget: patches of a call. An image that has more of them is a call alone.

    Returns:
        The numbers of each call's images, every image once.
    """
    calls: list[list[int]] = []
    room: list[int] = []
    for image in sorted(range(len(tokens)), key=lambda image: -tokens[image]):
        call = next((i for i, left in enumerate(room) if left >= tokens[image]), len(calls))
        if call == len(calls):
            calls.append([])
            room.append(budget)
        calls[call].append(image)
        room[call] -= tokens[image]
    return calls
