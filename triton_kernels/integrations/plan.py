"""What a call of a Hugging Face vision tower needs to know of its images, planned once per grid.

The towers work out positions, windows and segments on every call, waiting for the GPU as they go.
Here that is done by Hugging Face's own functions on the CPU, kept, and handed to the tower through
the arguments that it has for precomputed values. A version of transformers without such arguments
(4.57) works them out as before, and is told only how long a frame is.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from triton_kernels.integrations.forms import fingerprint
from triton_kernels.integrations.layers import BOUND
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
    "muse_glimmer": "patch_embedder",
    "muse_spark": "patch_embedder",
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
    "video_llama_3": None,
}
# Whose segments are whole clips, not frames.
_OF_CLIPS = {"kimi_k25"}
# Whose blocks get nothing but segments and angles, so that bounds come with the segments; and whose
# tables are read by columns first from some version on, by what the reader says.
_MUSE = {"muse_glimmer", "muse_spark"}
_AS_IT_IS = (0, 1, 2)
_READERS = {
    "66d8eecb730c": _AS_IT_IS,  # 5.17
    "202db9b96093": (0, 2, 1),  # 5.24
}
# What towers take beside that, by name: the function of their own file that works it out of the
# grid, and the tower's setting, a number or some, that it takes too.
_OWN_INDICES = {
    "frame_index": ("get_vision_frame_index", None),
    "temporal_merge_index": ("get_vision_temporal_merge_index", "merge_kernel_size"),
    "pixel_shuffle_index": ("get_vision_pixel_shuffle_index", "merge_size"),
}

# A plan takes less than 70 bytes a token, the hidden state of one layer 2,000 and more.
_PLANS = 8

Grid = tuple[tuple[int, int, int], ...]
Order = tuple[int, int, int]


class Geometry(NamedTuple):
    """A tower's sizes that a plan depends on.

    merge_size: patches a side of a merge unit, in whose order patches come; of a tower that is told
    so in each call, of each image. window_size: pixels a side of a window, None where the tower has
    none. patch_size: pixels a side, None likewise. table: how positions are read from the learned
    table, as names and values that Hugging Face's function takes; None where there is no table.
    order: in which order that function gets a grid's numbers. of_clips: whether a segment is a
    whole clip. own: names, functions and settings of what the tower alone takes.
    """

    merge_size: int | tuple[int, ...]
    window_size: int | None = None
    patch_size: int | None = None
    table: tuple[tuple[str, Any], ...] | None = None
    order: Order = _AS_IT_IS
    of_clips: bool = False
    own: tuple[tuple[str, Callable, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, tower: nn.Module) -> "Geometry | None":
        """The sizes of a Hugging Face tower; None of one that takes no plan."""
        model = model_of(type(tower))
        if model not in _PLANNED:
            return None
        window_size = getattr(tower, "window_size", None)
        table, order = _table(tower, _PLANNED[model])
        return cls(
            getattr(tower, "spatial_merge_size", 1),
            window_size,
            None if window_size is None else tower.config.patch_size,
            table,
            order,
            model in _OF_CLIPS,
            _own_indices(tower),
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
    if geometry is None or geometry.window_size is None or model_of(type(tower)) in _MUSE:
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


def _table(tower: nn.Module, path: str | None) -> tuple[tuple[tuple[str, Any], ...] | None, Order]:
    """`Geometry.table` and `Geometry.order`."""
    reader = None if path is None else tower.get_submodule(path)
    order = _order(type(reader)) if hasattr(reader, "interpolation_mode") else None
    if order is None:
        return None, _AS_IT_IS
    table = [
        ("num_grid_per_side", reader.num_grid_per_side),
        ("mode", reader.interpolation_mode),
        ("align_corners", reader.interpolation_align_corners),
    ]
    if hasattr(reader, "interpolation_padding"):
        table.append(("padding", reader.interpolation_padding))
    return tuple(table), order


@functools.cache
def _order(reader: type[nn.Module]) -> Order | None:
    """In which order a table's reader takes a grid's numbers; None where that is not known."""
    if model_of(reader) not in _MUSE:
        return _AS_IT_IS
    return _READERS.get(fingerprint(reader.forward))


def _own_indices(tower: nn.Module) -> tuple[tuple[str, Callable, tuple[int, ...]], ...]:
    """`Geometry.own`."""
    found = []
    for name, function, setting in _own_functions(type(tower)):
        value = () if setting is None else getattr(tower, setting)
        found.append((name, function, (value,) if isinstance(value, int) else tuple(value)))
    return tuple(found)


@functools.cache
def _own_functions(tower: type[nn.Module]) -> list[tuple[str, Callable, str | None]]:
    """Those of _OWN_INDICES that the tower's file has."""
    file = sys.modules[tower.__module__]
    return [
        (name, getattr(file, function), setting)
        for name, (function, setting) in _OWN_INDICES.items()
        if hasattr(file, function)
    ]


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
    sizes = ("grid_thw", "merge_sizes") if "merge_sizes" in names else ("grid_thw",)
    needed = [given.get(name) for name in (*names[:1], *sizes)]
    if not names or not all(isinstance(x, torch.Tensor) for x in needed):
        return None
    geometry = Geometry.of(tower) if "cu_seqlens" not in given else None
    if geometry is None:
        return None
    patches, grid_thw, *merge_sizes = needed
    grid = tuple(map(tuple, grid_thw.tolist()))
    if merge_sizes:
        geometry = geometry._replace(merge_size=tuple(merge_sizes[0].tolist()))
    # Where the call computes: weights may lie elsewhere between calls.
    plan = _plan(geometry, grid, patches.device)
    if PRECOMPUTED and len(given) == len(needed) and isinstance(tower, ReplayedTower):
        plan = plan | {PLANNED: (grid, geometry.merge_size)}
    further = {name: value for name, value in given.items() if name not in (names[0], *sizes)}
    return (patches,), {name: given[name] for name in sizes} | plan | further


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
            grid_thw, merge_size = torch.tensor(grid).reshape(-1, 3), geometry.merge_size
            of_images = not isinstance(merge_size, int)
            if of_images:
                merge_size = torch.tensor(merge_size)
            precomputed = _precompute(geometry, grid_thw, merge_size)
            plan |= tree_map_only(torch.Tensor, lambda x: x.to(device), precomputed)
        setattr(plan["cu_seqlens"], BOUND, longest_frame)
        if geometry.window_size is not None:
            setattr(plan["cu_window_seqlens"], BOUND, geometry.longest_window)
        if of_images:  # such a tower goes through them image by image: on the host
            plan |= {"grid_thw": grid_thw, "merge_sizes": merge_size}
    return plan


def _precompute(
    geometry: Geometry, grid_thw: torch.Tensor, merge_size: int | torch.Tensor
) -> dict[str, Any]:
    tensors = {
        # In a trace they are the grid's dtype.
        "cu_seqlens": get_vision_cu_seqlens(grid_thw, geometry.of_clips).int(),
        "position_ids": get_vision_position_ids(grid_thw, merge_size),
    }
    if geometry.window_size is not None:
        tensors["window_index"], tensors["cu_window_seqlens"] = get_vision_window_index(
            grid_thw, merge_size, geometry.window_size, geometry.patch_size
        )
    if geometry.table is not None:
        tensors["interp_indices"], tensors["interp_weights"] = (
            get_vision_interpolation_indices_and_weights(
                grid_thw[:, list(geometry.order)],
                spatial_merge_size=merge_size,
                **dict(geometry.table),
            )
        )
    return tensors | {name: work_out(grid_thw, *own) for name, work_out, own in geometry.own}
