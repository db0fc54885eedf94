"""What a vision tower is made of: the numbers that its layout, weights and layers follow from."""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from flax_models.errors import CheckpointError

# The names that a config.json gives each tower: transformers 5 calls a tower alone "..._vision".
_MODEL_TYPES = {"qwen2_5_vl": "qwen2_5_vl", "qwen2_5_vl_vision": "qwen2_5_vl"}

# Sizes that no reader may guess: published towers differ in them, and so do libraries' defaults.
_REQUIRED = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size")
_OPTIONAL = (
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "window_size",
    "fullatt_block_indexes",
    "hidden_act",
)

# Tensor cores like rows of whole 128-byte lines: 64 elements of a 16-bit type.
_ALIGNED_ELEMENTS = 64


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower's configuration; hashable, so it can be a static argument under jit.

    The defaults are the tower of Qwen2.5-VL 7B. `patch_size` and `window_size` are in pixels;
    `spatial_merge_size` is in patches a side; `temporal_patch_size` is in frames.

    Attributes:
        fullatt_block_indexes: the blocks that attend within whole frames, all others within
            windows. Indices past the last block name no block and are ignored, as Hugging Face
            does.
        rms_norm_eps: of every norm; fixed in Hugging Face's tower, so no config.json holds it.

    Raises:
        ValueError: a value that no tower can be built from; the message names it.
    """

    model_type: str = "qwen2_5_vl"
    depth: int = 32
    hidden_size: int = 1280
    num_heads: int = 16
    intermediate_size: int = 3420
    out_hidden_size: int = 3584
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        """Check every value, so that nothing built from the configuration has to."""
        if self.model_type not in _MODEL_TYPES.values():
            raise ValueError(_unknown_model_type(self.model_type))
        for field in fields(self):
            if field.type is int:
                _check_positive_int(field.name, getattr(self, field.name))
        self._check_full_attention_blocks()
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}; {self.model_type} has 'silu'")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}"
            )
        if self.head_dim % 4:
            raise ValueError(
                f"head_dim (hidden_size / num_heads) must be a multiple of 4, so that rows and "
                f"columns rotate equal shares in pairs; got {self.head_dim}"
            )
        merged_patch = self.patch_size * self.spatial_merge_size
        if self.window_size % merged_patch:
            raise ValueError(
                f"window_size {self.window_size} is not a multiple of "
                f"patch_size x spatial_merge_size = {merged_patch} pixels"
            )

    def _check_full_attention_blocks(self) -> None:
        blocks = self.fullatt_block_indexes
        if not isinstance(blocks, list | tuple) or not all(
            _is_int(block) and block >= 0 for block in blocks
        ):
            raise ValueError(f"fullatt_block_indexes must be block numbers from 0, got {blocks!r}")
        object.__setattr__(self, "fullatt_block_indexes", tuple(blocks))

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values of one patch: channels x frames x rows x columns, 1176 in the published towers."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches that the merger makes into one embedding: 4 in the published towers."""
        return self.spatial_merge_size**2

    @property
    def window_patches(self) -> int:
        """Patches along a side of a whole window: 8 in the published towers."""
        return self.window_size // self.patch_size

    @property
    def max_window_seqlen(self) -> int:
        """Tokens of a whole window, which no window passes: 64 in the published towers."""
        return self.window_patches**2

    @property
    def aligned_intermediate_size(self) -> int:
        """The MLP's width as stored: `intermediate_size` up to a multiple of 64 (3420 to 3456).

        Filled with zeros the extra channels contribute exactly nothing, while rows that are no
        multiple of 16 bytes shut the fast matrix kernels out.
        """
        return -(-self.intermediate_size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Read `config.json` of a checkpoint directory.

        Args:
            directory: holds the config.json of a whole vision-language model (the tower is its
                "vision_config") or of a vision tower alone.

        Raises:
            CheckpointError: no such directory or file, or the file is not a JSON object.
            ValueError: an unknown model type, or values that no tower can be built from.
        """
        path = Path(directory) / "config.json"
        whole = _read_json_object(path)
        vision = whole.get("vision_config", whole)
        if not isinstance(vision, dict):
            raise CheckpointError(f"'vision_config' in {path} is not a JSON object")
        model_type = vision.get("model_type", whole.get("model_type"))
        if model_type not in _MODEL_TYPES:
            raise ValueError(f"{path}: {_unknown_model_type(model_type)}")
        missing = [name for name in _REQUIRED if name not in vision]
        if missing:
            raise ValueError(f"{path} has no value for {', '.join(missing)} of the vision tower")
        values = {name: vision[name] for name in (*_REQUIRED, *_OPTIONAL) if name in vision}
        try:
            return cls(
                model_type=_MODEL_TYPES[model_type],
                **values,
                **_rope_values(vision.get("rope_parameters")),
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def qwen2_5_vl_3b(cls) -> Self:
        """The tower of Qwen2.5-VL 3B."""
        return cls(intermediate_size=3420, out_hidden_size=2048)

    @classmethod
    def qwen2_5_vl_7b(cls) -> Self:
        """The tower of Qwen2.5-VL 7B."""
        return cls(intermediate_size=3420, out_hidden_size=3584)

    @classmethod
    def qwen2_5_vl_32b(cls) -> Self:
        """The tower of Qwen2.5-VL 32B."""
        return cls(intermediate_size=3456, out_hidden_size=5120)

    @classmethod
    def qwen2_5_vl_72b(cls) -> Self:
        """The tower of Qwen2.5-VL 72B."""
        return cls(intermediate_size=3456, out_hidden_size=8192)


def _rope_values(parameters: Any) -> dict[str, Any]:
    """The rotary settings of transformers 5; older files have none and mean the defaults."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters must be a JSON object, got {parameters!r}")
    kind = parameters.get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise ValueError(f"rope_type {kind!r} is not supported; a vision tower has 'axial'")
    return {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise CheckpointError(f"no such checkpoint directory: {path.parent}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint directory {path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def _unknown_model_type(model_type: Any) -> str:
    supported = ", ".join(sorted(set(_MODEL_TYPES.values())))
    return f"unknown model type {model_type!r}; supported: {supported}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive_int(name: str, value: Any) -> None:
    if not _is_int(value) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
