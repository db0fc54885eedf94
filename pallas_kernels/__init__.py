"""Fused 2D-RoPE attention over variable-length segments, in JAX Pallas.

- The contract: `attention` (the public functions), `checks` (what is accepted, and the errors
  otherwise), `reference` (the unfused computation, which also differentiates), `sinusoidal`
  (tables and frequencies of what is added instead of rotating), `sharding` (heads that are split
  over devices).
- `kernels`, what runs on the GPU: `window` (a whole short segment in one tile), `window_backward`
  (its gradients), `stream` (long segments) with its `softmax`, `stream_backward` (its gradients),
  `rotate` (rotation as a pass of its own), `wide` (short segments of heads that no tile holds),
  and `tiles`, which they share. `hopper_stream`,
  `hopper_softmax` and `hopper_tiles` are the same for the warp-specialized kernel, which serves
  long images on Hopper GPUs.
- `launching`, from a call to its launches: `choose` (which kernel, how much is fused, and from
  `table` and `launches.json` its sizes), `plan` (all launches of a call), `backward` (those of the
  gradients), `launch`, `compile` (by XLA, or through `triton_lowering` by the Triton package),
  `devices`, `platforms` (programs for several, as `jax.export` makes them).

The twin in PyTorch, `triton_kernels`, has the same rooms.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"pallas_kernels needs JAX ({error}): pip install '.[jax]' in the clone"
    ) from error

from pallas_kernels.attention import (
    fused_rope_attention,
    fused_rope_attention_qkvpacked,
    fused_sinusoidal_attention,
    fused_sinusoidal_attention_qkvpacked,
)
from pallas_kernels.checks import check_cu_seqlens
from pallas_kernels.launching.platforms import export_checks
from pallas_kernels.reference import rope_attention_reference
from pallas_kernels.sinusoidal import sinusoidal_tables

__all__ = [
    "check_cu_seqlens",
    "export_checks",
    "fused_rope_attention",
    "fused_rope_attention_qkvpacked",
    "fused_sinusoidal_attention",
    "fused_sinusoidal_attention_qkvpacked",
    "rope_attention_reference",
    "sinusoidal_tables",
]
