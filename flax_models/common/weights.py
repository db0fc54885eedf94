"""A checkpoint's tensors in the form that both towers compute with; NumPy only.

Every matrix stays [out, in]: loading is copying. What changes:

- the patch embedding's convolution becomes the matrix [hidden_size, patch_dim] that it is on
  patches which do not overlap;
- q, k and v, where a checkpoint has a product for each, become one, `qkv`;
- an MLP's products become `gate_up` [2 x aligned_intermediate_size, hidden_size], so that one
  product feeds a gated activation, or `up`, and `down`;
- the MLP's width is padded with zeros to `aligned_intermediate_size`. That is exact: the columns of
  `down` that padded channels meet are 0;
- mergers and the table of positions have one name each in all families;
- where a family's norm before the MLP comes late (gated.py), its weights and the biases around it
  have other places: see `_late_norm_mlp`.

All but the last only moves numbers. A tower that is to be trained is spared the last, so that it
has the published parameters; `published_tensors` is the way back.

What has to be computed is computed in fp32. A checkpoint whose numbers the towers' dtype has no
room for, of fp16 alone, is refused: infinities would become NaN without a word.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
from numpy.typing import DTypeLike

from flax_models.common.checkpoint import expected_tensors
from flax_models.common.config import VisionConfig
from flax_models.common.errors import CheckpointError
from flax_models.common.families import Family
from flax_models.common.finite import is_finite

# Of a channel whose gate has this for a bias, and what it multiplies its inverse: silu(32) / 32 is
# 1 in every dtype.
_GATE_OF_ONE = 32.0

# Parameters of a block whose tensors a late norm has elsewhere.
_OF_LATE_NORM = re.compile(r"blocks\.\d+\.(mlp\.|norm2\.|attn\.proj\.bias)")

# Parameters that are padded, and the axis.
_PADDED = re.compile(r"blocks\.\d+\.mlp\.((gate_up|up)\.|down\.weight)")

# Of what a matrix may lose to rounding when a norm is folded into it, beside what it and its bias
# make of normed rows: eight times what fp16 takes from numbers in its range.
_TOLERATED_LOSS = 2.0**-9


def tower_parameters(
    config: VisionConfig,
    tensors: Mapping[str, np.ndarray],
    dtype: DTypeLike,
    trainable: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield `tower_weights` in the dtypes in which the towers hold them.

    That is `dtype`, but for what `unnormed_dtype` is for: an MLP's `product_bias`.

    Raises:
        CheckpointError: as of `tower_weights`, of any parameter.
    """
    for name, weight in tower_weights(config, tensors, dtype, trainable).items():
        held = unnormed_dtype(dtype) if name.endswith(".product_bias") else dtype
        yield name, _rounded(f"the parameter {name!r}", weight, held)


def unnormed_dtype(dtype: DTypeLike) -> np.dtype:
    """Of what no norm has divided: fp32 in an fp16 tower, for which it may be too large."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


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
    config: VisionConfig,
    tensors: Mapping[str, np.ndarray],
    dtype: DTypeLike = None,
    trainable: bool = False,
) -> dict[str, np.ndarray]:
    """Rearrange what `read_checkpoint` returns into the towers' parameters.

    Args:
        config: the tower that the tensors belong to.
        tensors: every tensor of the tower under its bare Hugging Face name.
        dtype: that the towers will cast the parameters to, for those that have to be computed.
            None: the checkpoint's.
        trainable: compute none: parameters that `published_tensors` takes apart again.

    Returns:
        The parameters by the dotted path at which both towers hold them, such as
        "blocks.0.mlp.down.weight", in the dtype of the checkpoint, what was computed in `dtype`
        (`product_bias` in its `unnormed_dtype`). Unchanged tensors are not copied.

    Raises:
        KeyError: a tensor is missing.
        CheckpointError: what was computed is beyond the range of `dtype`, or below it to an extent
            that the published numbers are not.
    """
    late_norm = config.family.late_norm and not trainable
    weights = {
        ours: _joined(config, ours, [tensors[name] for name in names])
        for ours, names in _parameters(config).items()
        if not (late_norm and _OF_LATE_NORM.match(ours))
    }
    if late_norm:
        for block in range(config.depth):
            mlp = _late_norm_mlp(config, tensors, f"blocks.{block}", dtype)
            weights |= {f"blocks.{block}.mlp.{name}": weight for name, weight in mlp.items()}
    return weights


def published_tensors(
    config: VisionConfig, parameters: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Take `tower_weights(..., trainable=True)` apart: the tensors that Hugging Face would hold.

    Their gradients too, or whatever else there is for each element.

    Args:
        config: the tower that the parameters belong to.
        parameters: every parameter by its dotted path.

    Returns:
        Arrays under the names and with the shapes of `expected_tensors`, views where possible.

    Raises:
        ValueError: other parameters, such as those of a late norm or of an adapter, or one with
            something else than zeros for padding; the message names it.
    """
    table, shapes = _parameters(config), expected_tensors(config)
    if differing := sorted(table.keys() ^ parameters.keys()):
        which = "is missing" if differing[0] in table else "is none of them"
        raise ValueError(f"parameters must be those of a trainable tower: {differing[0]!r} {which}")
    tensors = {}
    for ours, names in table.items():
        for name, part in zip(names, np.split(parameters[ours], len(names)), strict=True):
            rows, *columns = shapes[name]
            kept = part[:rows, : math.prod(columns)] if columns else part[:rows]
            if np.count_nonzero(kept) < np.count_nonzero(part):
                raise ValueError(
                    f"the parameter {ours!r} must be 0 beyond the published {list(shapes[name])}"
                )
            tensors[name] = kept.reshape(shapes[name])
    return {name: tensors[name] for name in shapes}


def _parameters(config: VisionConfig) -> dict[str, list[str]]:
    """The tensors that lie one below the other in each parameter."""
    parameters: dict[str, list[str]] = {}
    for name in expected_tensors(config):
        parameters.setdefault(_our_name(config.family, name), []).append(name)
    return parameters


def _joined(config: VisionConfig, ours: str, tensors: list[np.ndarray]) -> np.ndarray:
    """A parameter of its tensors, as matrices, each with its padding."""
    parts = [x.reshape(len(x), -1) if x.ndim > 2 else x for x in tensors]
    if _PADDED.match(ours):
        padding = config.aligned_intermediate_size - config.intermediate_size
        axis = int(".down." in ours)
        parts = [_pad_axis(part, padding, axis) for part in parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _late_norm_mlp(
    config: VisionConfig, tensors: Mapping[str, np.ndarray], block: str, dtype: DTypeLike
) -> dict[str, np.ndarray]:
    """A gated MLP that has the weights of the norm before it, and the biases around it.

    - `gate_up.weight` has the norm's weights multiplied in.
    - The first two padded channels are always 1, and their columns of `down.weight` are two biases
      for the residual stream: the MLP's, and that of the attention's output. Two, since their sum
      may lose the smaller one, or be beyond fp16, where each on its own is neither.
    - The latter is missing there until then, `stream_bias`, and its share of the first product,
      `product_bias`: a sum over all channels, for which fp16 may be too narrow.

    All of it is exact but for one rounding of each number.
    """
    width, aligned = config.intermediate_size, config.aligned_intermediate_size
    gate, up = (f"{block}.mlp.{name}" for name in config.family.mlp_inputs)
    down = f"{block}.mlp.{config.family.mlp_output}"
    dtype = tensors[f"{gate}.weight"].dtype if dtype is None else np.dtype(dtype)

    def rounded(name: str) -> np.ndarray:
        return _rounded(f"the tensor {name!r}", tensors[name], dtype)

    gate_up = np.zeros((2, aligned, config.hidden_size), dtype)
    bias = np.zeros((2, aligned), dtype)
    for index, name in enumerate((gate, up)):
        gate_up[index, :width] = _folded(tensors, name, f"{block}.norm2", dtype)
        bias[index, :width] = rounded(f"{name}.bias")
    bias[:, width : width + 2] = [[_GATE_OF_ONE], [1 / _GATE_OF_ONE]]
    gate_up = gate_up.reshape(2 * aligned, -1)
    stream_bias = rounded(f"{block}.attn.proj.bias")
    down_weight = np.zeros((config.hidden_size, aligned), dtype)
    down_weight[:, :width] = rounded(f"{down}.weight")
    down_weight[:, width] = rounded(f"{down}.bias")
    down_weight[:, width + 1] = stream_bias
    product_bias = gate_up.astype(np.float32) @ stream_bias.astype(np.float32)
    return {
        "gate_up.weight": gate_up,
        "stream_bias": stream_bias,
        "product_bias": product_bias.astype(unnormed_dtype(dtype)),
        "bias": bias.reshape(-1),
        "down.weight": down_weight,
    }


def _folded(
    tensors: Mapping[str, np.ndarray], linear: str, norm: str, dtype: np.dtype
) -> np.ndarray:
    """The columns of a matrix times a norm's weights; refused where `dtype` loses too much."""
    names = f"{linear}.weight", f"{linear}.bias", f"{norm}.weight"
    weight, bias, scale = (tensors[name].astype(np.float32) for name in names)
    what = f"the tensor {names[0]!r} times {names[2]!r}"
    exact = weight * scale
    folded = _rounded(what, exact, dtype)
    if dtype == np.float16:  # which alone has few bits for small numbers
        lost = np.linalg.norm(folded - exact)
        if lost > _TOLERATED_LOSS * np.hypot(np.linalg.norm(exact), np.linalg.norm(bias)):
            published = weight.astype(dtype).astype(np.float32) * scale.astype(dtype)
            if lost > 2 * np.linalg.norm(published - exact):
                raise CheckpointError(f"{what} is too small for {dtype}: load in bfloat16")
    return folded


def _rounded(what: str, values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """The values in `dtype`, not copied where they are; refused where that makes them infinite."""
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype, copy=False)
    if rounded is not values and not is_finite(rounded):
        raise CheckpointError(f"{what} is too large for {rounded.dtype}: load in bfloat16")
    return rounded


def _our_name(family: Family, name: str) -> str:
    """The parameter that a tensor becomes, or becomes part of."""
    name = name.replace(f"{family.deepstack}.", "deepstack_mergers.")
    name = name.replace("pos_embed.", "position_table.")
    if "merger" in name:
        ours = dict(zip(family.merger, ("norm", "fc1", "fc2"), strict=True))
    else:
        first = "gate_up" if len(family.mlp_inputs) == 2 else "up"
        ours = {f"attn.{theirs}": "attn.qkv" for theirs in family.attention_inputs}
        ours |= {f"mlp.{theirs}": f"mlp.{first}" for theirs in family.mlp_inputs}
        ours[f"mlp.{family.mlp_output}"] = "mlp.down"
    for theirs, name_of_ours in ours.items():
        name = name.replace(f".{theirs}.", f".{name_of_ours}.")
    return name


def _pad_axis(array: np.ndarray, padding: int, axis: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, padding)
    return np.pad(array, widths) if padding else array
