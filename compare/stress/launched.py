"""Which kernels a call launches, as what launches them tells: nothing here says what should serve.

Kernels go by their names without "_kernel".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

WARP_SPECIALIZED = "hopper_stream"
WIDE = "wide"
EVERYWHERE = ("rotate", "window", "stream", WIDE)
BACKWARD = ("window_backward", "stream_backward_q", "stream_backward_kv")
WARP_SPECIALIZED_BACKWARD = ("hopper_backward_q", "hopper_backward_kv")


def kernels_here(gradients: bool = False) -> tuple[str, ...]:
    """The kernels that this machine's first GPU has: whatever is launched, all are to be.

    gradients: with those for gradients.
    """
    import torch

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)
    forward = (*EVERYWHERE, WARP_SPECIALIZED) if hopper else EVERYWHERE
    if not gradients:
        return forward
    return forward + BACKWARD + (WARP_SPECIALIZED_BACKWARD if hopper else ())


@contextmanager
def noting_triton() -> Iterator[set[str]]:
    """While it is open, the attention's kernels in PyTorch are added to a set as they launch."""
    from triton_kernels.launching import backward, plan

    launched: set[str] = set()
    launch = plan.launch_kernel

    def note(call: Any, *arguments: Any) -> None:
        launch(call, *arguments)
        launched.add(_named(call.kernel.__name__))

    noted = (mock.patch.object(module, "launch_kernel", note) for module in (plan, backward))
    with next(noted), next(noted):
        yield launched


def in_jax(program: Any, interpreted: bool) -> frozenset[str]:
    """The kernels in a jaxpr: those for a GPU, or those that a CPU interprets."""
    kernels = (eqn.params for eqn in equations(program) if "interpret" in eqn.params)
    return frozenset(
        _named(kernel["name"])
        for kernel in kernels
        if kernel["name"] is not None and bool(kernel["interpret"]) is interpreted
    )


def equations(part: Any) -> Iterator[Any]:
    """All equations of a jaxpr, or of what holds one, and of those within."""
    if isinstance(part, list | tuple):
        for each in part:
            yield from equations(each)
    part = getattr(part, "jaxpr", part)
    for eqn in getattr(part, "eqns", ()):
        yield eqn
        yield from equations([*eqn.params.values()])


def _named(kernel: str) -> str:
    return kernel.removesuffix("_kernel")
