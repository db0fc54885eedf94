"""The Flax tower, as the stage of towers loads it."""

import jax
import numpy as np

from flax_models import load_vision_tower
from flax_models.ray_data.towers import Encode


def load(checkpoint: str, dtype: str, token_buckets: tuple[int, ...]) -> Encode:
    """Load it on the GPU of this process, or else on the CPU."""
    tower = load_vision_tower(checkpoint, dtype, token_buckets=token_buckets, progress=False)

    def encode(pixel_values: np.ndarray, grid_thw: np.ndarray, output: str) -> list[np.ndarray]:
        result = tower(pixel_values, grid_thw, output=output)
        return [np.asarray(rows) for rows in jax.tree.leaves(result)]

    return encode
