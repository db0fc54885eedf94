"""A checkpoint's tensors in the form that both towers compute with; NumPy only.

Every matrix stays [out, in]: loading is copying. What changes:

- the patch embedding's convolution becomes the matrix [hidden_size, patch_dim] that it is on
  patches which do not overlap;
- an MLP's products become `gate_up` [2 x aligned_intermediate_size, hidden_size], so that one
  product feeds a gated activation, or `up`, and `down`;
- the MLP's width is padded with zeros to `aligned_intermediate_size`. That is exact: the columns of
  `down` that padded channels meet are 0;
- mergers and the table of positions have one name each in all families.
"""

from collections.abc import Mapping

import numpy as np

from flax_models.config import VisionConfig
from flax_models.families import Family


def tower_weights(config: VisionConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rearrange what `read_checkpoint` returns into the towers' parameters.

    Args:
        config: the tower that the tensors belong to.
        tensors: every tensor of the tower under its bare Hugging Face name.

    Returns:
        The parameters by the dotted path at which both towers hold them, such as
        "blocks.0.mlp.up.weight", in the dtype of the checkpoint. Unchanged tensors are not copied.

    Raises:
        KeyError: a tensor is missing.
    """
    family = config.family
    weights = {
        _our_name(family, name): tensor
        for name, tensor in tensors.items()
        if not (name.startswith("blocks.") and ".mlp." in name)
    }
    weights["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].reshape(
        config.hidden_size, config.patch_dim
    )
    padding = config.aligned_intermediate_size - config.intermediate_size
    up = "gate_up" if family.gated_mlp else "up"
    for block in range(config.depth):
        mlp = f"blocks.{block}.mlp"
        for kind in ("weight", "bias"):
            first, *others = (
                _pad_axis(tensors[f"{mlp}.{name}.{kind}"], padding, axis=0)
                for name in family.mlp_inputs
            )
            weights[f"{mlp}.{up}.{kind}"] = np.concatenate([first, *others]) if others else first
        down = f"{mlp}.{family.mlp_output}"
        weights[f"{mlp}.down.weight"] = _pad_axis(tensors[f"{down}.weight"], padding, axis=1)
        weights[f"{mlp}.down.bias"] = tensors[f"{down}.bias"]
    return weights


def _our_name(family: Family, name: str) -> str:
    """The parameter that a tensor outside the MLPs becomes."""
    name = name.replace("deepstack_merger_list.", "deepstack_mergers.")
    name = name.replace("pos_embed.", "position_table.")
    if "merger" in name:
        for theirs, ours in zip(family.merger, ("norm", "fc1", "fc2"), strict=True):
            name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def _pad_axis(array: np.ndarray, padding: int, axis: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, padding)
    return np.pad(array, widths) if padding else array
