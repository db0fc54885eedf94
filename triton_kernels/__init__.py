"""Fused 2D-RoPE attention over variable-length segments, in Triton for PyTorch.

- The contract: `attention` (the public functions: choose the kernel and how much to fuse, launch),
  `checks` (what is accepted, and the errors otherwise), `reference` (the unfused computation: CPU
  path, differentiable path).
- The kernels: `window_kernel` (a whole short segment in one tile), `stream_kernel` (long segments:
  query blocks, and the segments that reach into them), `softmax` (its loop over a segment's keys,
  block by block), `rotate_kernel` (rotation as a pass of its own), `tiles` (loading and rotating a
  tile, which they share).
- The kernel for long images on Hopper GPUs, where some warps load and others compute:
  `specialized_kernel`, `specialized_softmax` and `specialized_tiles`, as `stream_kernel`, `softmax`
  and `tiles` are for others.
- Launching: `launch` (block sizes, warps, stages, registers, from `launches.json`), `launch_table`
  (what that holds, and how a launch is found in it), `specialized` (when that kernel takes the
  stream kernel's place, and what `fuse="auto"` means), `run`.

Only here, not in its twin `pallas_kernels`: `operators` registers with `torch.library`, `dispatch`
says when a call need not go through it, `calls` says what is launched for a call, `launches`
launches it, and remembers it for calls like it, `descriptors` describes tensors to the copy engine,
and `rotate_in_order` and its kernel rotate in front of a library's attention. `integrations` is for
Hugging Face's models.
"""

try:
    import torch as _torch  # noqa: F401
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"triton_kernels needs PyTorch and Triton ({error}): pip install '.[torch]' in the clone"
    ) from error

from triton_kernels import operators as _operators  # noqa: F401  registers them
from triton_kernels.attention import fused_rope_attention, fused_rope_attention_qkvpacked
from triton_kernels.checks import check_cu_seqlens
from triton_kernels.reference import rope_attention_reference

__all__ = [
    "check_cu_seqlens",
    "fused_rope_attention",
    "fused_rope_attention_qkvpacked",
    "rope_attention_reference",
]
