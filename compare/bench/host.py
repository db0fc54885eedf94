"""What a warmed-up call costs the host, beside PyTorch's own work for one launch."""

from typing import Any

import torch

from compare.bench.timing import GraphTimer


def add(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, _: Any) -> torch.Tensor:
    """One eager addition, what a call's host time is measured in; takes a kernel's arguments."""
    return cos + sin


def host_details(timer: GraphTimer, addition: GraphTimer) -> dict[str, float]:
    """A call's host time in microseconds, and how many eager additions take as long.

    addition: of `add`, timed in the same run, as a busy host slows both.
    """
    call_us = timer.host_us()
    return {"host_us": call_us, "host_additions": call_us / addition.host_us()}
