"""A tower for images of fixed sizes, as `torch.export` and ONNX take it."""

import dataclasses
from typing import Any

import torch
from torch import nn

from compare.torch_tower.graphs import first_rows
from compare.torch_tower.inputs import layout_arrays, layout_tensors
from compare.torch_tower.tower import Embeddings, VisionTower, host_grid, run_pass
from flax_models.common.buckets import exact_bucket
from flax_models.common.grid import as_grid
from flax_models.common.layout import plan_layout

# Those of a layout's arrays that rows are looked up by, or that such indexes are made of.
_INDEXES = ("window_order", "output_order", "cu_image_seqlens")


class FixedLayoutTower(nn.Module):
    """A tower for one `grid_thw`, whose layout is part of it.

    `torch.export.export(FixedLayoutTower(tower, grid_thw), (pixel_values,))` makes a program of it
    in which the attention is one operator, `fused_rope_attention.qkvpacked`, and all else PyTorch's
    own. It runs wherever `triton_kernels` is imported. `strict=True` needs PyTorch 2.13, which can
    trace frozen dataclasses. For `torch.onnx.export` see `triton_kernels.integrations.onnx`.

    The layout's arrays are buffers that no state dict holds.
    """

    def __init__(self, tower: VisionTower, grid_thw: Any, *, output: str = "embeddings") -> None:
        """Plan the layout.

        Args:
            tower: shared, not copied.
            grid_thw: [images, 3] integers, as of a call.
            output: "embeddings", "patches" or "pooled", as of a call.

        Raises:
            ValueError: a bad grid, or an unknown `output`.
        """
        super().__init__()
        self.tower = tower
        grid = as_grid(tower.config, host_grid(grid_thw))
        bucket = exact_bucket(tower.config, grid)
        self.layout = plan_layout(tower.config, grid, bucket, output)
        placed = layout_tensors(self.layout, tower.device)
        for name in layout_arrays(self.layout):
            # Not views of one tensor, of which `torch.export.save` would warn. ONNX indexes by
            # 64 bits. Not inference mode's, which autograd refuses.
            dtype = torch.int64 if name in _INDEXES else torch.int32
            with torch.inference_mode(False):
                array = getattr(placed, name).to(dtype, copy=True)
            self.register_buffer(name, array, persistent=False)
        self.eval()

    def forward(self, pixel_values: torch.Tensor) -> Embeddings:
        """Encode [tokens, patch_dim] floating, on the tower's device; returns what a call does.

        Raises:
            ValueError: another shape than the grid's.
        """
        arrays = dict(self.named_buffers(recurse=False))
        outputs = run_pass(self.tower, pixel_values, dataclasses.replace(self.layout, **arrays))
        # There is room for as many means as frames, of which a clip has several.
        return first_rows(outputs, self.layout.num_outputs)
