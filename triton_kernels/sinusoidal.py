"""Sinusoidal embeddings: tables for whole calls, and frequencies for kernels that compute them.

PE(pos, 2i) = sin(pos / 10000^(2i / head_dim)), PE(pos, 2i + 1) = cos of the same (Vaswani et al.,
Attention Is All You Need, 2017).
"""

import functools
import math

import torch

from triton_kernels.checks import MAX_HEAD_DIM

THETA = 10000.0


def sinusoidal_tables(
    positions: torch.Tensor, head_dim: int, theta: float = THETA
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for fused_sinusoidal_attention, of positions on a line or on a grid.

    On a grid the first head_dim / 2 columns tell a token's row and the others its column, each as
    the whole of a head that is half as wide tells a position on a line, as in vision transformers
    (He et al., Masked Autoencoders, 2022).

    Args:
        positions: [tokens], or [tokens, 2] of rows and columns, integers of at least 0.
        head_dim: a multiple of 8 up to 16,384.
        theta: what the wavelengths grow to, times 2 pi.

    Returns:
        cos, sin: [tokens, head_dim / 2] fp32 on the device of positions; computed in fp64.

    Raises:
        TypeError, ValueError: an argument is not as stated above, but for the values of positions.
    """
    if not isinstance(positions, torch.Tensor) or positions.dtype not in (torch.int32, torch.int64):
        got = positions.dtype if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a torch.Tensor of int32 or int64, got {got}")
    if positions.ndim != 1 and (positions.ndim != 2 or positions.shape[1] != 2):
        raise ValueError(
            f"positions must have shape [tokens] or [tokens, 2], got {tuple(positions.shape)}"
        )
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
    axes = positions[:, None] if positions.ndim == 1 else positions
    width = head_dim // axes.shape[1]  # of the columns that tell one axis
    pair = torch.arange(width // 2, dtype=torch.float64, device=positions.device)
    angles = axes.double()[..., None] * theta ** (-2 * pair / width)
    angles = angles.flatten(1)
    return angles.cos().float(), angles.sin().float()


@functools.cache
def frequency_steps(head_dim: int, device: torch.device) -> torch.Tensor:
    """10000^(-2i / head_dim) as the kernels multiply positions by it, [2, head_dim / 2] int32.

    In turns: first times 2^32, rounded, then what rounding took, times 2^56. Kept for each device.
    """
    frequencies = [THETA ** (-2 * i / head_dim) / (2 * math.pi) for i in range(head_dim // 2)]
    steps = [round(x * 2**32) for x in frequencies]
    rests = [round((x * 2**32 - n) * 2**24) for x, n in zip(frequencies, steps, strict=True)]
    return torch.tensor([steps, rests], dtype=torch.int32, device=device)
