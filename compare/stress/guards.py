"""Memory around tensors that tells whether a kernel read or wrote beside them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

GUARD = 4096  # elements before and behind a tensor: whole tiles of every kernel
# Not NaN, so that a NaN that is written beside a result shows.
_AROUND_RESULTS = 7.0


def guarded(
    x: torch.Tensor, value: float = float("nan"), guard: int = GUARD
) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous copy of x inside a larger buffer that is filled with a value, and that buffer.

    Args:
        x: any shape and dtype.
        value: around the copy; what reads it shows in the result.
        guard: elements before and behind; no multiple of 16 bytes makes the copy unaligned.
    """
    buffer = torch.full((x.numel() + 2 * guard,), value, dtype=x.dtype, device=x.device)
    inside = buffer[guard : guard + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside, buffer


@contextmanager
def guarded_results() -> Iterator[list[torch.Tensor]]:
    """While it is open, floating tensors that torch.empty and its like make hold NaN in guards.

    Yields:
        The buffers of all tensors made so far, in order; see `intact`.
    """
    buffers = []

    def between_guards(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: object, **options: object) -> torch.Tensor:
            x = make(*arguments, **options)
            if not x.is_floating_point():
                return x
            inside, buffer = guarded(torch.full_like(x, float("nan")), _AROUND_RESULTS)
            buffers.append(buffer)
            return inside

        return made

    names = ("empty", "empty_like", "empty_strided")
    makers = {name: between_guards(getattr(torch, name)) for name in names}
    with mock.patch.multiple(torch, **makers):
        yield buffers


def intact(buffer: torch.Tensor) -> bool:
    """Whether nothing was written beside a tensor of `guarded_results`."""
    around = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
    return bool((around == _AROUND_RESULTS).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal in every bit; NaN equals the same NaN."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))
