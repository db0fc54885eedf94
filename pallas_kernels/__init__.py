"""Fused 2D-RoPE attention over variable-length segments, in JAX Pallas.

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

Only here, not in its twin `triton_kernels`: `compile` and `triton_lowering` let the Triton package,
where it is installed, compile the kernels on a GPU for XLA to launch (else XLA does both);
`specialized_call` says what shared memory and barriers that kernel gets, as Mosaic wants to know;
`sharding` is for heads that are split over devices along a mesh's explicit axes.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"pallas_kernels needs JAX ({error}): pip install '.[jax]' in the clone"
    ) from error

from pallas_kernels.attention import fused_rope_attention, fused_rope_attention_qkvpacked
from pallas_kernels.checks import check_cu_seqlens
from pallas_kernels.reference import rope_attention_reference

__all__ = [
    "check_cu_seqlens",
    "fused_rope_attention",
    "fused_rope_attention_qkvpacked",
    "rope_attention_reference",
]
