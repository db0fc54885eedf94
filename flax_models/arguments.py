"""Values on the command lines of this package."""

import argparse

from flax_models.common.video_config import is_rate


def positive(text: str) -> int:
    """A positive integer, as a type of argparse's."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def rate(text: str) -> float:
    """A finite number above 0, as a type of argparse's."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not is_rate(number):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number
