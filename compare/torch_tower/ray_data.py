"""The PyTorch tower, as `flax_models.ray_data` loads it: `framework="torch"`."""

import ml_dtypes
import numpy as np
import torch

from compare.torch_tower.tower import load_vision_tower
from flax_models.ray_data.towers import Encode


def load(checkpoint: str, dtype: str, token_buckets: tuple[int, ...]) -> Encode:
    """Load it on the GPU of this process, or else on the CPU."""
    options = {"token_buckets": token_buckets, "progress": False}
    tower = load_vision_tower(checkpoint, getattr(torch, dtype), **options)

    def encode(pixel_values: np.ndarray, grid_thw: np.ndarray, output: str) -> list[np.ndarray]:
        result = tower(pixel_values, grid_thw, output=output)
        rows, features = result if isinstance(result, tuple) else (result, ())
        return [_array(part) for part in (rows, *features)]

    return encode


def _array(tensor: torch.Tensor) -> np.ndarray:
    host = tensor.cpu()
    if host.dtype == torch.bfloat16:  # which NumPy knows by another name
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()
