"""A trainable tower's parameters, and the published tensors that they are.

One by one, so that what an optimizer makes of them is what it would make of Hugging Face's: no norm
is folded into a matrix, no bias moved, no width padded. Only q, k and v, where a checkpoint has a
product for each, lie one below the other; and the patch embedding's convolution is a matrix.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from compare.torch_tower.device import as_tensor
from flax_models import VisionConfig
from flax_models.common.checkpoint import CheckpointError, expected_tensors

if TYPE_CHECKING:
    from compare.torch_tower.tower import VisionTower


def save_vision_tower(tower: "VisionTower", directory: str | os.PathLike[str]) -> None:
    """Write a trainable tower as Hugging Face's own `save_pretrained` would have: a tower alone.

    Args:
        tower: loaded with trainable=True, on any device.
        directory: gets config.json and model.safetensors, in place of what it may have of these;
            made where it does not exist. Tensors are in the tower's dtype.

    Raises:
        ValueError: the tower is not trainable: its parameters are not those that are published.
    """
    if not tower.trainable:
        raise ValueError("only a tower that was loaded with trainable=True can be saved")
    tensors = published_tensors(tower.config, dict(tower.named_parameters()))
    # Copied, since safetensors refuses tensors that share memory.
    tensors = {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values = published_config(tower.config) | {"dtype": str(tower.dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def published_tensors(
    config: VisionConfig, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What belongs to a trainable tower's parameters, by the names and shapes of `read_checkpoint`.

    Args:
        config: the tower's.
        values: for parameters by name, all or some, a tensor of the parameter's shape: itself, its
            gradient, its average over steps.

    Returns:
        Views of these.
    """
    shapes, tensors = expected_tensors(config), {}
    for name, published in _published_names(config).items():
        if name in values:
            parts = values[name].split([shapes[each][0] for each in published])
            tensors |= {
                each: part.view(shapes[each]) for each, part in zip(published, parts, strict=True)
            }
    return tensors


def trainable_parameters(
    config: VisionConfig, tensors: Mapping[str, np.ndarray], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The inverse of `published_tensors`, of what `read_checkpoint` returns.

    Raises:
        CheckpointError: a tensor is too large for the dtype.
    """
    parameters = {}
    for name, published in _published_names(config).items():
        parts = [as_tensor(tensors[each]) for each in published]
        whole = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        if not whole.isfinite().all():
            raise CheckpointError(f"the tensor {published[0]!r} is too large for {dtype}")
        parameters[name] = whole.flatten(1) if whole.ndim > 2 else whole
    return parameters


def _published_names(config: VisionConfig) -> dict[str, list[str]]:
    """Of each parameter the tensors that it is."""
    names: dict[str, list[str]] = {}
    for name in expected_tensors(config):
        names.setdefault(_parameter_name(config, name), []).append(name)
    return names


def _parameter_name(config: VisionConfig, name: str) -> str:
    family = config.family
    if name.startswith("blocks."):
        own = dict.fromkeys(family.attention_inputs, "qkv") | {family.mlp_output: "down"}
        own |= zip(reversed(family.mlp_inputs), ("up", "gate"), strict=False)
        _, index, part, layer, kind = (*name.split("."), "")[:5]
        return f"blocks.{index}.{part}.{own.get(layer, layer)}.{kind}".removesuffix(".")
    name = name.replace(f"{family.deepstack}.", "deepstack_mergers.")
    for theirs, ours in zip(family.merger, ("norm", "fc1", "fc2"), strict=True):
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name.replace("pos_embed.", "position_table.")


def published_config(config: VisionConfig) -> dict[str, Any]:
    """The config.json of a tower alone."""
    family = config.family
    names = {name: name for name in ("in_channels", "patch_size", "temporal_patch_size")}
    names |= {"spatial_merge_size": "spatial_merge_size"} | dict(family.config_keys)
    if family.windows:
        names |= {name: name for name in ("window_size", "fullatt_block_indexes")}
    values = {theirs: getattr(config, ours, None) for ours, theirs in names.items()}
    if "mlp_ratio" in values:
        ratio = config.intermediate_size / config.hidden_size
        values["mlp_ratio"] = int(ratio) if ratio.is_integer() else ratio
    return values | {
        "model_type": next(name for name in family.model_types if "_vision" in name),
        "hidden_act": family.activation,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    }
