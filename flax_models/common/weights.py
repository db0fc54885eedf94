"""A checkpoint's tensors in the form that both towers compute with; NumPy only.

Every matrix stays [out, in]: loading is copying. What changes:

- the patch embedding's convolution becomes the matrix [hidden_size, patch_dim] that it is on
  patches which do not overlap;
- an MLP's products become `gate_up` [2 x aligned_intermediate_size, hidden_size], so that one
  product feeds a gated activation, or `up`, and `down`;
- the MLP's width is padded with zeros to `aligned_intermediate_size`. That is exact: the columns of
  `down` that padded channels meet are 0;
- where a family's norm before the MLP comes late (gated.py), its weights and the biases around it
  have other places: see `_late_norm_mlp`;
- mergers and the table of positions have one name each in all families.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
from numpy.typing import DTypeLike

from flax_models.common.config import VisionConfig
from flax_models.common.families import Family

# Of a channel whose gate has this for a bias, and what it multiplies its inverse: silu(32) / 32 is
# 1 in every dtype.
_GATE_OF_ONE = 32.0

# What a block with a late norm has in its MLP.
_OF_LATE_NORM = re.compile(r"blocks\.\d+\.(norm2\.weight|attn\.proj\.bias)")


class Biases(NamedTuple):
    """What an MLP behind a late norm adds on its way, arrays of any floating dtype.

    Attributes:
        residual: [hidden], which the residual stream lacks.
        product: [2 x width], which its product lacks by that.
        output: [2 x width], of gate and up.
    """

    residual: Any
    product: Any
    output: Any


def tower_weights(
    config: VisionConfig, tensors: Mapping[str, np.ndarray], dtype: DTypeLike = None
) -> dict[str, np.ndarray]:
    """Rearrange what `read_checkpoint` returns into the towers' parameters.

    Args:
        config: the tower that the tensors belong to.
        tensors: every tensor of the tower under its bare Hugging Face name.
        dtype: that the towers will cast the parameters to, for those that have to be computed.
            None: the checkpoint's.

    Returns:
        The parameters by the dotted path at which both towers hold them, such as
        "blocks.0.mlp.down.weight", in the dtype of the checkpoint, what was computed in `dtype`.
        Unchanged tensors are not copied.

    Raises:
        KeyError: a tensor is missing.
    """
    family = config.family
    weights = {
        _our_name(family, name): tensor
        for name, tensor in tensors.items()
        if not (name.startswith("blocks.") and ".mlp." in name)
        and not (family.late_norm and _OF_LATE_NORM.fullmatch(name))
    }
    weights["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].reshape(
        config.hidden_size, config.patch_dim
    )
    make_mlp = _late_norm_mlp if family.late_norm else _mlp
    for block in range(config.depth):
        mlp = make_mlp(config, tensors, f"blocks.{block}", dtype)
        weights |= {f"blocks.{block}.mlp.{name}": weight for name, weight in mlp.items()}
    return weights


def _mlp(
    config: VisionConfig, tensors: Mapping[str, np.ndarray], block: str, _: DTypeLike
) -> dict[str, np.ndarray]:
    """An MLP of one product, an activation and another product."""
    padding = config.aligned_intermediate_size - config.intermediate_size
    [up] = (f"{block}.mlp.{name}" for name in config.family.mlp_inputs)
    down = f"{block}.mlp.{config.family.mlp_output}"
    return {
        "up.weight": _pad_axis(tensors[f"{up}.weight"], padding, axis=0),
        "up.bias": _pad_axis(tensors[f"{up}.bias"], padding, axis=0),
        "down.weight": _pad_axis(tensors[f"{down}.weight"], padding, axis=1),
        "down.bias": tensors[f"{down}.bias"],
    }


def _late_norm_mlp(
    config: VisionConfig, tensors: Mapping[str, np.ndarray], block: str, dtype: DTypeLike
) -> dict[str, np.ndarray]:
    """A gated MLP that has the weights of the norm before it, and the biases around it.

    - `gate_up.weight` has the norm's weights multiplied in.
    - The first padded channel is always 1, and its column of `down.weight` adds two biases to the
      residual stream: the MLP's, and that of the attention's output.
    - The latter is missing there until then, `stream_bias`, and its share of the first product,
      `product_bias`.

    All of it is exact but for one rounding of each number.
    """
    width, aligned = config.intermediate_size, config.aligned_intermediate_size
    gate, up = (f"{block}.mlp.{name}" for name in config.family.mlp_inputs)
    down = f"{block}.mlp.{config.family.mlp_output}"
    dtype = tensors[f"{gate}.weight"].dtype if dtype is None else np.dtype(dtype)

    def wide(name: str) -> np.ndarray:
        return tensors[name].astype(np.float32)

    norm, stream_bias = wide(f"{block}.norm2.weight"), wide(f"{block}.attn.proj.bias")
    gate_up = np.zeros((2, aligned, config.hidden_size), dtype)
    bias = np.zeros((2, aligned), dtype)
    for index, name in enumerate((gate, up)):
        gate_up[index, :width] = wide(f"{name}.weight") * norm
        bias[index, :width] = tensors[f"{name}.bias"]
    bias[:, width] = _GATE_OF_ONE, 1 / _GATE_OF_ONE
    gate_up = gate_up.reshape(2 * aligned, -1)
    down_weight = np.zeros((config.hidden_size, aligned), dtype)
    down_weight[:, :width] = tensors[f"{down}.weight"]
    down_weight[:, width] = wide(f"{down}.bias") + stream_bias
    return {
        "gate_up.weight": gate_up,
        "stream_bias": stream_bias.astype(dtype),
        "product_bias": (gate_up.astype(np.float32) @ stream_bias).astype(dtype),
        "bias": bias.reshape(-1),
        "down.weight": down_weight,
    }


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
