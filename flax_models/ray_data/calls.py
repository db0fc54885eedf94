"""Which images go through a tower together: calls by patches, not by images."""

from collections.abc import Sequence


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
