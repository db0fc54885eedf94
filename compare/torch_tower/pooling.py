"""Means over segments of any length, the twin of `flax_models.pooling`; no device is waited for."""

import torch
import torch.nn.functional as F

_CHUNK = 16  # rows that are summed at once


def segment_means(rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The mean of each segment's rows.

    Sums are fp32, chunk by chunk in the same order at every run, as those of a scatter are not.
    Each is of its segment's rows alone, so that no NaN spreads.

    Args:
        rows: [tokens, channels] floating.
        cu_seqlens: [segments + 1] int32 or int64, increasing from 0.

    Returns:
        [segments, channels] in the dtype of rows; of empty segments rows that mean nothing.
    """
    sums, starts, longest = rows, cu_seqlens, rows.shape[0]
    while longest > 1:
        sums, starts = _chunk_sums(sums, starts)
        longest = -(-longest // _CHUNK)
    counts = cu_seqlens.diff().clamp(min=1)
    totals = sums[starts[:-1].clamp(max=sums.shape[0] - 1)].float()
    return (totals / counts[:, None]).to(rows.dtype)


def _chunk_sums(rows: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum up to _CHUNK rows of a segment to one, fp32; returns the sums and segments' new starts.

    There are as many sums as any segments could need.
    """
    like = {"dtype": starts.dtype, "device": starts.device}
    chunks = (starts.diff() + _CHUNK - 1) // _CHUNK
    new_starts = F.pad(chunks.cumsum(0, dtype=starts.dtype), (1, 0))
    chunk = torch.arange(rows.shape[0] // _CHUNK + chunks.shape[0], **like)
    # Of each sum its segment: one further on with every segment that starts there.
    later = torch.zeros_like(chunk).index_add(0, new_starts[1:-1], torch.ones_like(chunks[1:]))
    segment = later.cumsum(0, dtype=starts.dtype)
    first = starts[segment] + (chunk - new_starts[segment]) * _CHUNK
    entries = first[:, None] + torch.arange(_CHUNK, **like)
    inside = entries < starts[segment + 1][:, None]
    taken = rows[entries.clamp(max=rows.shape[0] - 1)]
    return torch.where(inside[:, :, None], taken, 0).sum(dim=1, dtype=torch.float32), new_starts
