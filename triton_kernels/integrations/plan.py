"""What a call of a Hugging Face vision tower needs to know of its images, planned once per grid.

The towers work out positions, windows and segments on every call, waiting for the GPU as they go.
Here that is done by Hugging Face's own functions on the CPU, kept, and handed to the tower through
the arguments that it has for precomputed values. A version of transformers without such arguments
(4.57) works them out as before, and is told only how long a frame is.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from triton_kernels.launching.choose import next_power_of_2

try:
    from transformers.vision_utils import (
        get_vision_cu_seqlens,
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
        get_vision_window_index,
    )
except ImportError:
    PRECOMPUTED = False
else:
    PRECOMPUTED = True

# Towers of 5.24 ask for bounds, and measure them for flash attention where they are given none.
try:
    from transformers.utils.generic import get_max_seqlen  # noqa: F401
except ImportError:
    BOUNDED = False
else:
    BOUNDED = True

# A plan takes less than 70 bytes a token, the hidden state of one layer 2,000 and more.
_PLANS = 8

Grid = tuple[tuple[int, int, int], ...]


class Geometry(NamedTuple):
    """A tower's sizes that a plan depends on.

    merge_size: patches a side of a merge unit. window_size: pixels a side of a window, None where
    the tower has none. patch_size: pixels a side. table: how positions are read from the learned
    table, as names and values that Hugging Face's function takes; None where there is no table.
    """

    merge_size: int
    window_size: int | None
    patch_size: int
    table: tuple[tuple[str, Any], ...] | None

    @classmethod
    def of(cls, tower: nn.Module) -> "Geometry":
        """The sizes of a Hugging Face tower."""
        return cls(
            tower.spatial_merge_size,
            getattr(tower, "window_size", None),
            tower.config.patch_size,
            _table(tower),
        )

    @property
    def longest_window(self) -> int | None:
        """Tokens of a whole window."""
        if self.window_size is None:
            return None
        units = self.window_size // self.merge_size // self.patch_size
        return (units * self.merge_size) ** 2


def _table(tower: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    if not hasattr(tower, "interpolation_mode"):
        return None
    return (
        ("num_grid_per_side", tower.num_grid_per_side),
        ("mode", tower.interpolation_mode),
        ("align_corners", tower.interpolation_align_corners),
    )


def plan_call(tower: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Add the plan to the arguments of a tower's call: a forward pre-hook.

    What the caller has precomputed takes precedence over the plan.
    """
    given = dict(zip(("hidden_states", "grid_thw"), args, strict=False)) | kwargs
    patches, grid_thw = given.get("hidden_states"), given.get("grid_thw")
    tensors = isinstance(patches, torch.Tensor) and isinstance(grid_thw, torch.Tensor)
    if not tensors or "cu_seqlens" in kwargs:
        return None
    # Where the call computes: weights may lie elsewhere between calls.
    return args, _plan_of_grid(Geometry.of(tower), grid_thw, patches.device) | kwargs


@torch.compiler.disable
def _plan_of_grid(geometry: Geometry, grid_thw: torch.Tensor, device: torch.device) -> dict:
    return _plan(geometry, tuple(map(tuple, grid_thw.tolist())), device)


@functools.lru_cache(maxsize=_PLANS)
def _plan(geometry: Geometry, grid: Grid, device: torch.device) -> dict[str, Any]:
    # A power of two, because torch.compile compiles anew for another bound.
    longest_frame = next_power_of_2(max((h * w for _, h, w in grid), default=1))
    plan: dict[str, Any] = {"longest_frame": longest_frame}
    if BOUNDED:
        plan["max_seqlen"] = longest_frame
        if geometry.window_size is not None:
            plan["max_window_seqlen"] = geometry.longest_window
    if PRECOMPUTED:
        # Made outside of inference mode, since a later call may want gradients; and on the CPU,
        # whatever device the user has PyTorch create tensors on.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            tensors = _precompute(geometry, torch.tensor(grid).reshape(-1, 3))
            plan |= {name: tensor.to(device) for name, tensor in tensors.items()}
    return plan


def _precompute(geometry: Geometry, grid_thw: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {
        "cu_seqlens": get_vision_cu_seqlens(grid_thw).int(),  # in a trace they are the grid's dtype
        "position_ids": get_vision_position_ids(grid_thw, geometry.merge_size),
    }
    if geometry.window_size is not None:
        tensors["window_index"], tensors["cu_window_seqlens"] = get_vision_window_index(
            grid_thw, geometry.merge_size, geometry.window_size, geometry.patch_size
        )
    if geometry.table is not None:
        tensors["interp_indices"], tensors["interp_weights"] = (
            get_vision_interpolation_indices_and_weights(
                grid_thw, spatial_merge_size=geometry.merge_size, **dict(geometry.table)
            )
        )
    return tensors
