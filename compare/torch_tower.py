"""The Qwen2.5-VL vision tower in PyTorch, the twin of `flax_models.tower`; inference only.

Built from the same arrays, with the same call. Shapes may vary freely here, so nothing is padded.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from compare.torch_blocks import Block, PatchEmbed, PatchMerger, Segments
from flax_models import Layout, VisionConfig, plan_layout, read_checkpoint
from flax_models.layout import check_patches, inverse_frequencies
from flax_models.weights import tower_weights

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class VisionTower(nn.Module):
    """A vision tower; `load_vision_tower` makes one that holds a checkpoint's weights.

    Attributes:
        config: the tower's configuration.
        implementation: of the attention, as in `triton_kernels`.
    """

    def __init__(self, config: VisionConfig, *, implementation: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.implementation = implementation
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.depth)])
        self.merger = PatchMerger(config)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.patch_embed.proj.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, activations and embeddings."""
        return self.patch_embed.proj.weight.dtype

    def forward(self, pixel_values: Any, grid_thw: Any) -> torch.Tensor:
        """Encode images and clips, all in one call.

        Args:
            pixel_values: [tokens, patch_dim] floating, the patches of all images as `preprocess`
                returns them: a tensor on any device, or an array.
            grid_thw: [images, 3] integers: frames, rows and columns of each image in patches. On
                the GPU it costs a synchronisation.

        Returns:
            Embeddings [tokens / merge_unit, out_hidden_size] in `dtype` on `device`, in Hugging
            Face's order: image after image, in each frame after frame, in each row after row of
            merge units.

        Raises:
            ValueError: a bad grid, or `pixel_values` that do not match it.
            TypeError: `pixel_values` are not floating-point.
        """
        return encode(self, *self.prepare(pixel_values, grid_thw))

    def prepare(self, pixel_values: Any, grid_thw: Any) -> tuple[torch.Tensor, Layout]:
        """Check a call's input and bring it to `device`, as the input of `encode`.

        Args and errors are those of a call.

        Returns:
            The patches [tokens, patch_dim], and their layout with tensors on `device` for arrays.
        """
        if isinstance(grid_thw, torch.Tensor):
            grid_thw = grid_thw.cpu()
        layout = plan_layout(self.config, grid_thw)
        patches = _check_patches(self.config, pixel_values, layout)
        return patches.to(self.device), layout_tensors(layout, self.device)

    @torch.no_grad()
    def hidden_states(self, pixel_values: Any, grid_thw: Any) -> Iterator[torch.Tensor]:
        """Run block by block, to compare with another tower after each.

        Args and errors are those of a call.

        Yields:
            The hidden state after each block, [tokens, hidden_size] in `dtype`, in window order:
            the order in which Hugging Face's blocks return theirs too.
        """
        yield from _block_outputs(self, *self.prepare(pixel_values, grid_thw))


def load_vision_tower(
    directory: str | os.PathLike[str],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    *,
    implementation: str = "auto",
    compile: bool = False,
    progress: bool | None = None,
) -> VisionTower:
    """Load a tower from a checkpoint in Hugging Face's format.

    Args:
        directory: of a vision tower, or of a whole vision-language model, of which only the tower
            is read.
        dtype: bfloat16, float16 or float32; the checkpoint's own dtype does not matter.
        device: where the tower lives. None: the GPU if there is one, else the CPU.
        implementation: of the attention, as in `triton_kernels`.
        compile: have `torch.compile` fuse what lies between the matrix products and the attention
            of a block. The first call compiles for every image size to come.
        progress: show progress on standard error. None: only where that is a terminal.

    Raises:
        CheckpointError: a checkpoint that cannot be used, see `read_checkpoint`.
        ValueError: an unknown model type or dtype, or no such device.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    target = _find_device(device)
    config = VisionConfig.from_pretrained(directory)
    with torch.device("meta"):  # no parameter is allocated before its values are there
        tower = VisionTower(config, implementation=implementation)
    show = sys.stderr.isatty() if progress is None else progress
    weights = tower_weights(config, read_checkpoint(config, directory, progress=show))
    parameters = {name: _as_tensor(weight).to(target, dtype) for name, weight in weights.items()}
    tower.load_state_dict(parameters, assign=True)
    if compile:
        for block in tower.blocks:
            block.compile(dynamic=True)
    return tower.requires_grad_(False).eval()


@functools.lru_cache(maxsize=32)
def layout_tensors(layout: Layout, device: torch.device) -> Layout:
    """A layout with tensors on a device for arrays; remembered, as `plan_layout` remembers its."""
    tensors = {
        name: torch.tensor(value, device=device)
        for name, value in vars(layout).items()
        if isinstance(value, np.ndarray)
    }
    return dataclasses.replace(layout, **tensors)


@torch.no_grad()
def encode(tower: VisionTower, pixel_values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Encode patches: what a call does after `VisionTower.prepare`, on the device alone.

    Args:
        tower: the tower.
        pixel_values: [tokens, patch_dim] floating, on the tower's device.
        layout: as `layout_tensors` returns it for the tower's device; it may be padded to a bucket.

    Returns:
        Embeddings [tokens / merge_unit, out_hidden_size] in the tower's dtype, in Hugging Face's
        order. Of a padded layout the first `layout.num_merged` rows are the images', the others
        mean nothing.

    Raises:
        ValueError: `pixel_values` have another shape than the layout asks for.
    """
    for hidden in _block_outputs(tower, pixel_values, layout):  # noqa: B007
        pass
    return tower.merger(hidden)[layout.output_order]


def _block_outputs(
    tower: VisionTower, pixel_values: torch.Tensor, layout: Layout
) -> Iterator[torch.Tensor]:
    """Yield the hidden state after each block, [tokens, hidden_size] in window order."""
    config = tower.config
    expected = (len(layout.window_order), config.patch_dim)
    if pixel_values.shape != expected:
        raise ValueError(
            f"pixel_values must have the layout's shape {list(expected)}, "
            f"got {list(pixel_values.shape)}"
        )
    cos, sin = _rotary_angles(config, layout.positions)
    of_implementation = functools.partial(
        Segments, cos=cos, sin=sin, implementation=tower.implementation
    )
    windows = of_implementation(
        cu_seqlens=layout.cu_window_seqlens, max_seqlen=layout.max_window_seqlen
    )
    frames = of_implementation(
        cu_seqlens=layout.cu_frame_seqlens, max_seqlen=layout.max_frame_seqlen
    )
    hidden = tower.patch_embed(pixel_values[layout.window_order])
    for index, block in enumerate(tower.blocks):
        segments = frames if index in config.fullatt_block_indexes else windows
        hidden = block(hidden, segments)
        yield hidden


def _rotary_angles(
    config: VisionConfig, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layout.rotary_angles` on the device: cos and sin, fp32 [tokens, head_dim / 2]."""
    frequencies = _frequencies(config, positions.device)
    angles = positions.float()[:, :, None] * frequencies  # [tokens, 2, head_dim / 4]
    angles = angles.reshape(len(positions), -1)
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=32)
def _frequencies(config: VisionConfig, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(inverse_frequencies(config)).to(device)


def _check_patches(config: VisionConfig, pixel_values: Any, layout: Layout) -> torch.Tensor:
    if not isinstance(pixel_values, torch.Tensor):
        pixel_values = _as_tensor(np.asarray(pixel_values))
    check_patches(config, layout, pixel_values.shape)
    if not pixel_values.is_floating_point():
        raise TypeError(f"pixel_values must be floating-point, got {pixel_values.dtype}")
    return pixel_values


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """A NumPy array as a tensor, bfloat16 included, which PyTorch does not take by itself."""
    array = np.require(array, requirements=("C", "W"))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _find_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device '{device}' was asked for, but PyTorch finds {torch.cuda.device_count()} GPUs"
        )
    return device
