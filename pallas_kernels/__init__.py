"""Fused 2D-RoPE attention over variable-length segments, in JAX Pallas."""

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
