"""A checkpoint's tensors in the form that both towers compute with; NumPy only.

Names stay Hugging Face's but for what changes shape or meaning, and every matrix stays
[out, in]: loading is copying. What changes:

- the patch embedding's convolution becomes the matrix [hidden_size, patch_dim] that it is on
  patches which do not overlap;
- `gate_proj` and `up_proj` become one `gate_up` [2 x aligned_intermediate_size, hidden_size], so
  that one product feeds the activation;
- the MLP's width is padded with zeros to `aligned_intermediate_size`. That is exact: a padded
  channel is silu(0) x 0 = 0, and its column of `down` is 0 too.
"""

from collections.abc import Mapping

import numpy as np

from flax_models.config import VisionConfig

# Hugging Face numbers the merger's two layers by their place around the activation.
_RENAMED = {
    "merger.fc1.weight": "merger.mlp.0.weight",
    "merger.fc1.bias": "merger.mlp.0.bias",
    "merger.fc2.weight": "merger.mlp.2.weight",
    "merger.fc2.bias": "merger.mlp.2.bias",
}


def tower_weights(config: VisionConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rearrange what `read_checkpoint` returns into the towers' parameters.

    Args:
        config: the tower that the tensors belong to.
        tensors: every tensor of the tower under its bare Hugging Face name.

    Returns:
        The parameters by the dotted path at which both towers hold them, such as
        "blocks.0.mlp.gate_up.weight", in the dtype of the checkpoint. Unchanged tensors are not
        copied.

    Raises:
        KeyError: a tensor is missing.
    """
    weights = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    weights |= {new: tensors[old] for new, old in _RENAMED.items()}
    weights["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].reshape(
        config.hidden_size, config.patch_dim
    )
    padding = config.aligned_intermediate_size - config.intermediate_size
    for block in range(config.depth):
        mlp = f"blocks.{block}.mlp"
        for kind in ("weight", "bias"):
            halves = (tensors[f"{mlp}.{half}.{kind}"] for half in ("gate_proj", "up_proj"))
            weights[f"{mlp}.gate_up.{kind}"] = np.concatenate(
                [_pad_axis(half, padding, axis=0) for half in halves]
            )
        weights[f"{mlp}.down.weight"] = _pad_axis(
            tensors[f"{mlp}.down_proj.weight"], padding, axis=1
        )
        weights[f"{mlp}.down.bias"] = tensors[f"{mlp}.down_proj.bias"]
    return weights


def _pad_axis(array: np.ndarray, padding: int, axis: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, padding)
    return np.pad(array, widths)
