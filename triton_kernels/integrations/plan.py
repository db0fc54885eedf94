"""What a call of a Hugging Face vision tower needs to know of its images, planned once per grid.

The towers work out positions, windows and segments on every call, waiting for the GPU as they go.
Here that is done by Hugging Face's own functions on the CPU, kept, and handed to the tower through
the arguments that it has for precomputed values. A version of transformers without such arguments
(4.57) works them out as before, and is told only how long a frame is.
"""

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from triton_kernels.integrations.replay import PLANNED, ReplayedTower
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

# Models whose towers take a plan, and which module of a tower reads the learned table of positions
# by Hugging Face's function. What is not planned Hugging Face works out anew in each call.
_PLANNED = {
    "cohere_compass": "",
    "dots3_note": None,
    "ernie4_5_vl_moe": None,
    "exaone4_5": None,
    "glm4v": None,
    "glm4v_moe": None,
    "glm5_next": None,
    "glm_ocr": None,
    "kimi_k25": "patch_embed.pos_emb",
    "lfm3_vl": None,
    "muse_glimmer": None,
    "muse_spark": None,
    "paddleocr_vl": "embeddings",
    "qwen2_5_omni": None,
    "qwen2_5_vl": None,
    "qwen2_vl": None,
    "qwen3_5": "",
    "qwen3_5_moe": "",
    "qwen3_omni_moe": "",
    "qwen3_vl": "",
    "qwen3_vl_moe": "",
    "qwen4_exp": "",
}
# Whose segments are whole clips, not frames.
_OF_CLIPS = {"kimi_k25"}

# A plan takes less than 70 bytes a token, the hidden state of one layer 2,000 and more.
_PLANS = 8

Grid = tuple[tuple[int, int, int], ...]


class Geometry(NamedTuple):
    """A tower's sizes that a plan depends on.

    merge_size: patches a side of a merge unit, in whose order patches come. window_size: pixels a
    side of a window, None where the tower has none. patch_size: pixels a side, None likewise.
    table: how positions are read from the learned table, as names and values that Hugging Face's
    function takes; None where there is no table. of_clips: whether a segment is a whole clip.
    """

    merge_size: int
    window_size: int | None
    patch_size: int | None
    table: tuple[tuple[str, Any], ...] | None
    of_clips: bool

    @classmethod
    def of(cls, tower: nn.Module) -> "Geometry | None":
        """The sizes of a Hugging Face tower; None of one that takes no plan."""
        model = model_of(type(tower))
        if model not in _PLANNED:
            return None
        window_size = getattr(tower, "window_size", None)
        return cls(
            getattr(tower, "spatial_merge_size", 1),
            window_size,
            None if window_size is None else tower.config.patch_size,
            _table(tower, _PLANNED[model]),
            model in _OF_CLIPS,
        )

    @property
    def longest_window(self) -> int | None:
        """Tokens of a whole window."""
        if self.window_size is None:
            return None
        units = self.window_size // self.merge_size // self.patch_size
        return (units * self.merge_size) ** 2


def longest_window(tower: nn.Module, index: int) -> int | None:
    """Tokens of a whole window where a tower's attention of this index sees windows, else None."""
    geometry = Geometry.of(tower)
    if geometry is None or geometry.window_size is None:
        return None
    kinds = getattr(tower.config, "layer_types", None)
    if kinds is None:
        sees_frames = index in tower.fullatt_block_indexes
    else:
        sees_frames = kinds[index] == "full_attention"
    return None if sees_frames else geometry.longest_window


@functools.cache
def model_of(cls: type[nn.Module]) -> str | None:
    """The model of transformers whose file a class is from, or the first of its bases that is."""
    homes = (base.__module__.split(".") for base in cls.__mro__)
    return next((home[2] for home in homes if home[:2] == ["transformers", "models"]), None)


def _table(tower: nn.Module, reader: str | None) -> tuple[tuple[str, Any], ...] | None:
    if reader is None or not hasattr(tower.get_submodule(reader), "interpolation_mode"):
        return None
    reader = tower.get_submodule(reader)
    return (
        ("num_grid_per_side", reader.num_grid_per_side),
        ("mode", reader.interpolation_mode),
        ("align_corners", reader.interpolation_align_corners),
    )


@functools.cache
def _arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of what a tower's forward takes, if it takes further keywords too; else none."""
    parameters = inspect.signature(cls.forward).parameters
    further = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(parameters)[1:] if further else ()


@torch.compiler.disable
def plan_call(tower: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Add the plan to the arguments of a tower's call: a forward pre-hook.

    What the caller has precomputed takes precedence over the plan, and segments leave none: the
    plan's bounds are not theirs.
    """
    names = _arguments(type(tower))
    given = dict(zip(names, args, strict=False)) | kwargs
    if "cu_window_seqlens" in given:
        return args, kwargs | {"own_windows": True}
    patches, grid_thw = given.get(names[0]) if names else None, given.get("grid_thw")
    tensors = isinstance(patches, torch.Tensor) and isinstance(grid_thw, torch.Tensor)
    geometry = Geometry.of(tower) if tensors and "cu_seqlens" not in given else None
    if geometry is None:
        return None
    grid = tuple(map(tuple, grid_thw.tolist()))
    # Where the call computes: weights may lie elsewhere between calls.
    plan = _plan(geometry, grid, patches.device)
    if PRECOMPUTED and len(given) == 2 and isinstance(tower, ReplayedTower):
        return (patches,), plan | {"grid_thw": grid_thw, PLANNED: grid}
    return args, plan | kwargs


@functools.lru_cache(maxsize=_PLANS)
def _plan(geometry: Geometry, grid: Grid, device: torch.device) -> dict[str, Any]:
    # A power of two, because torch.compile compiles anew for another bound.
    frames = [h * w * (t if geometry.of_clips else 1) for t, h, w in grid]
    longest_frame = next_power_of_2(max(frames, default=1))
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
        # In a trace they are the grid's dtype.
        "cu_seqlens": get_vision_cu_seqlens(grid_thw, geometry.of_clips).int(),
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
