"""Fused 2D-RoPE attention over variable-length segments, in Triton for PyTorch.

- The contract: `attention` (the public functions), `attend` (one call, behind them), `checks` (what
  is accepted, and the errors otherwise), `reference` (the unfused computation: CPU path,
  differentiable path), `sinusoidal` (tables and frequencies of what is added instead of rotating),
  `operators` (what autograd and `torch.library` know of a call).
- `kernels`, what runs on the GPU: `window` (a whole short segment in one tile), `window_backward`
  (its gradients), `stream` (long segments: query blocks, and the segments that reach into them),
  `softmax` (its loop over a segment's keys), `stream_backward` (its gradients), `rotate` (rotation
  as a pass of its own), `wide` (short segments of heads that no tile holds), `tiles` (loading a
  tile, and what is done to it). `hopper_stream`, `hopper_softmax`, `hopper_backward`,
  `hopper_rotate_back` (what is written of gradients) and `hopper_tiles` are the warp-specialized
  form of these for long images on Hopper GPUs.
  `rotate_in_order` rotates in front of a library's attention.
- `launching`, from a call to its launches: `choose` (which kernel, which tiles, what
  `fuse="auto"` means) by the `table` in `launches.json`, `plan` (all launches of a call), `launch`
  (one of them), `backward` (those of the gradients), `fast_path` (what is remembered, and the way
  around PyTorch's dispatcher), `descriptors` of tensors for the copy engine, `rotate_in_order`.
- `integrations`, for Hugging Face's models and vLLM's, and the recorder of CUDA graphs.

`pallas_kernels` is its twin: the same rooms, and the same names for the same things.

Triton has a package of this name too, of other modules, which vLLM brings along and looks for here.
"""

import importlib.util as _util
from pathlib import Path as _Path

try:
    import torch as _torch  # noqa: F401
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"triton_kernels needs PyTorch and Triton ({error}): pip install '.[torch]' in the clone"
    ) from error

from triton_kernels import operators as _operators  # noqa: F401  registers them
from triton_kernels.attention import (
    fused_rope_attention,
    fused_rope_attention_qkvpacked,
    fused_sinusoidal_attention,
    fused_sinusoidal_attention_qkvpacked,
)
from triton_kernels.checks import check_cu_seqlens
from triton_kernels.reference import rope_attention_reference
from triton_kernels.sinusoidal import sinusoidal_tables

try:
    _vllm = _util.find_spec("vllm")  # imports nothing
except ValueError:  # something stands in for it
    _vllm = None
for _place in (_vllm and _vllm.submodule_search_locations) or ():
    if (_neighbour := _Path(_place, "third_party", "triton_kernels")).is_dir():
        __path__.append(str(_neighbour))

__all__ = [
    "check_cu_seqlens",
    "fused_rope_attention",
    "fused_rope_attention_qkvpacked",
    "fused_sinusoidal_attention",
    "fused_sinusoidal_attention_qkvpacked",
    "rope_attention_reference",
    "sinusoidal_tables",
]
