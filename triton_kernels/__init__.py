"""Fused 2D-RoPE attention over variable-length segments, in Triton for PyTorch."""

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
