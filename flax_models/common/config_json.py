"""What a checkpoint's config.json says of its vision tower: read, and written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax_models.common.errors import CheckpointError
from flax_models.common.families import FAMILIES, Family

# What config.json may leave out; the published towers of a family agree in it.
_OPTIONAL = ("in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size")
_OPTIONAL_OF_WINDOWS = ("window_size", "fullatt_block_indexes")

# By other names transformers takes these too: the `attribute_map` of its configurations.
_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}

# In whole models of these types the tower's settings are among those of the thinker.
_OMNI = ("qwen2_5_omni", "qwen3_omni_moe")

_MAX_JSON_BYTES = 1 << 26


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file of a checkpoint directory that holds a JSON object.

    Raises:
        CheckpointError: no such directory or file, no regular file, one above 64 MiB, or another
            content than a JSON object.
    """
    if not path.parent.is_dir():
        raise CheckpointError(f"no such checkpoint directory: {path.parent}")
    if not path.exists():
        raise CheckpointError(f"checkpoint directory {path.parent} has no {path.name}")
    if not path.is_file():  # a pipe would be waited for, and a device never ends
        raise CheckpointError(f"cannot read {path} as JSON: it is no regular file")
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise CheckpointError(
            f"cannot read {path} as JSON: it has {size:,} bytes, more than {_MAX_JSON_BYTES:,}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path} as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def read_vision_values(path: Path) -> dict[str, Any]:
    """Read a config.json into the arguments of `VisionConfig.of`.

    Args:
        path: the config.json of a whole vision-language model (the tower is its "vision_config"; in
            an Omni model that of its "thinker_config") or of a vision tower alone.

    Raises:
        CheckpointError: no such directory or file, or the file is not a JSON object.
        ValueError: an unknown model type, a missing value, one that is stated twice and differs,
            another activation or rotation than the family has.
    """
    whole = read_json_object(path)
    stated = whole.get("model_type")  # by which transformers decides, whatever is nested says
    vision = whole
    for name in ("thinker_config", "vision_config") if stated in _OMNI else ("vision_config",):
        vision = vision.get(name, vision)
        if not isinstance(vision, dict):
            raise CheckpointError(f"{name!r} in {path} is not a JSON object")
    model_type = _find_model_type(vision.get("model_type") if stated is None else stated)
    family = FAMILIES[model_type]
    vision = {**family.config_defaults, **_without_aliases(vision)}
    missing = [name for name in family.config_keys.values() if name not in vision]
    if missing:
        raise ValueError(f"it has no value for {', '.join(missing)} of the vision tower")
    activation = vision.get("hidden_act", family.activation)
    if activation != family.activation:
        raise ValueError(f"hidden_act is {activation!r}; {model_type} has {family.activation!r}")
    return {
        "model_type": model_type,
        **_sizes(family, vision),
        **_rotation(vision),
    }


def tower_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a vision tower alone, from the fields of a `VisionConfig`.

    As transformers 5 writes it, so that `read_vision_values` is the way back.
    """
    family = FAMILIES[values["model_type"]]
    values = dict(values)
    if "mlp_ratio" in family.config_keys:
        width, hidden = values["intermediate_size"], values["hidden_size"]
        # Read back it is rounded down: half a channel more does not matter, a bit less would.
        values["mlp_ratio"] = (width + 0.5) / hidden if width % hidden else width // hidden
    return {
        **{name: values[name] for name in _optional(family)},
        **{theirs: values[ours] for ours, theirs in family.config_keys.items()},
        "model_type": family.tower_type,
        "hidden_act": family.activation,
        "rope_parameters": {"rope_type": "axial", "rope_theta": values["rope_theta"]},
    }


def unknown_model_type(model_type: Any) -> str:
    """The sentence that says so."""
    return f"unknown model type {model_type!r}; supported: {', '.join(FAMILIES)}"


def _find_model_type(stated: Any) -> str:
    for model_type, family in FAMILIES.items():
        if stated in family.model_types:
            return model_type
    raise ValueError(unknown_model_type(stated))


def _without_aliases(vision: dict[str, Any]) -> dict[str, Any]:
    values = dict(vision)
    for alias, name in _ALIASES.items():
        if alias not in values:
            continue
        value = values.pop(alias)
        if values.setdefault(name, value) != value:
            raise ValueError(f"{alias} is {value!r}, but {name} is {values[name]!r}")
    return values


def _sizes(family: Family, vision: dict[str, Any]) -> dict[str, Any]:
    values = {name: vision[name] for name in _optional(family) if name in vision}
    values |= {ours: vision[theirs] for ours, theirs in family.config_keys.items()}
    if "mlp_ratio" in values:
        width, ratio = values["hidden_size"], values.pop("mlp_ratio")
        if not isinstance(width, int) or not isinstance(ratio, int | float):
            raise ValueError(
                f"embed_dim and mlp_ratio must be numbers, got {width!r} and {ratio!r}"
            )
        values["intermediate_size"] = int(width * ratio)
    return values


def _optional(family: Family) -> tuple[str, ...]:
    return _OPTIONAL + _OPTIONAL_OF_WINDOWS if family.windows else _OPTIONAL


def _rotation(vision: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of transformers 5; older files have none and mean the defaults."""
    parameters = vision.get("rope_parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters must be a JSON object, got {parameters!r}")
    kind = parameters.get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise ValueError(f"rope_type {kind!r} is not supported; a vision tower has 'axial'")
    stated = {**vision, **parameters}  # theta by itself counts where the parameters have none
    return {"rope_theta": stated["rope_theta"]} if "rope_theta" in stated else {}
