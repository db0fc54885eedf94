"""How much memory a pass needs, so that one that cannot fit is refused before it starts."""

from collections.abc import Callable

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
from numpy.typing import DTypeLike

from flax_models.common.config import VisionConfig

# Smaller passes take less than a gigabyte, for which the device need not be asked.
_CHECKED_TOKENS = 1 << 15
_GIB = 1 << 30


def pass_bytes(config: VisionConfig, tokens: int, dtype: DTypeLike) -> int:
    """Estimate the most bytes that a pass holds at once beside parameters and input.

    Gate and up are counted also where a kernel keeps them to itself, see `gated_product`.

    Args:
        config: the tower's configuration.
        tokens: padded tokens of the call.
        dtype: the tower's.
    """
    dtype = np.dtype(dtype)
    hidden, width = config.hidden_size, config.aligned_intermediate_size
    # The residual stream, normed; what comes before the activation, gate and up or one, and after
    # it. Behind a late norm of fp16 gate and up are fp32.
    before = len(config.family.mlp_inputs) * width
    if config.family.late_norm and dtype == np.float16:
        before *= 2
    in_mlp = 2 * hidden + before + width
    in_attention = 8 * hidden  # the residual stream, normed; q, k, v; q and k rotated; attended
    return tokens * dtype.itemsize * max(in_mlp, in_attention)


def check_memory(
    config: VisionConfig, tokens: int, dtype: DTypeLike, free: Callable[[], int | None]
) -> None:
    """Refuse a large pass that cannot fit.

    Args:
        config, tokens, dtype: as for `pass_bytes`.
        free: returns the free bytes of the device's memory, None where they are not known; called
            for large passes only.

    Raises:
        MemoryError: it needs more than is free; the message says how much of each.
    """
    if tokens <= _CHECKED_TOKENS or (available := free()) is None:
        return
    needed = pass_bytes(config, tokens, dtype)
    if needed > available:
        raise MemoryError(
            f"a call of {tokens:,} tokens needs about {needed / _GIB:.1f} GiB beside parameters "
            f"and patches, but {available / _GIB:.1f} GiB of the device's memory are free: encode "
            "fewer images or frames at once"
        )
