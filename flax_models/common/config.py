"""What a vision tower is made of: the numbers that its layout, weights and layers follow from."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from flax_models.common.config_json import read_vision_values, tower_json, unknown_model_type
from flax_models.common.errors import CheckpointError
from flax_models.common.families import FAMILIES, Family

# Far above any tower, and low enough that no stranger's config.json makes its reader name millions
# of tensors or overflow a 32-bit size.
_MAX_DEPTH = 1 << 10
_MAX_SIZE = 1 << 20
_MAX_HEAD_DIM = 256  # of the kernel packages

TOO_LARGE = 1e30  # for fp32, as infinity is; NaN is not below it either

# Tensor cores like rows of whole 128-byte lines: 64 elements of a 16-bit type.
_ALIGNED_ELEMENTS = 64

# In patches: no frame of one call has more, see `grid.MAX_TOKENS`.
_ANY_FRAME = 1 << 26


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower's configuration; hashable, so it can be a static argument under jit.

    The defaults are the tower of Qwen2.5-VL 7B; `of` starts from another family's. `patch_size` and
    `window_size` are in pixels; `spatial_merge_size` is in patches a side; `temporal_patch_size` is
    in frames.

    Attributes:
        model_type: the family, a key of `families.FAMILIES`: "qwen2_5_vl".
        window_size: None where the family has no windows: every block attends within whole frames.
        fullatt_block_indexes: the blocks that attend within whole frames where others attend within
            windows. Indices past the last block name no block and are ignored, as Hugging Face
            does.
        num_position_embeddings: entries of the square table of learned positions that Qwen3-VL and
            its successors have, else None.
        deepstack_visual_indexes: the blocks after which Qwen3-VL and Qwen3-Omni take DeepStack
            features. Of indices past the last block none are taken, as Hugging Face does.
        norm_eps: of every norm; fixed in Hugging Face's towers, so no config.json holds it.

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
    window_size: int | None = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    num_position_embeddings: int | None = None
    deepstack_visual_indexes: tuple[int, ...] = ()
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        """Check every value, so that nothing built from the configuration has to."""
        if self.model_type not in FAMILIES:
            raise ValueError(unknown_model_type(self.model_type))
        for field in fields(self):
            if field.type is int:
                limit = _MAX_DEPTH if field.name == "depth" else _MAX_SIZE
                _check_positive_int(field.name, getattr(self, field.name), limit)
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < TOO_LARGE:
                raise ValueError(f"{name} must be a positive finite number, got {value!r}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}"
            )
        if self.head_dim % 4:
            raise ValueError(
                f"head_dim (hidden_size / num_heads) must be a multiple of 4, so that rows and "
                f"columns rotate equal shares in pairs; got {self.head_dim}"
            )
        self._check_windows()
        self._check_position_table()
        self._check_deepstack()

    def _check_windows(self) -> None:
        self._check_blocks("fullatt_block_indexes")
        if not self.family.windows:
            self._check_absent("window_size", None)
            self._check_absent("fullatt_block_indexes", ())
            return
        _check_positive_int("window_size", self.window_size)
        merged_patch = self.patch_size * self.spatial_merge_size
        if self.window_size % merged_patch:
            raise ValueError(
                f"window_size {self.window_size} is not a multiple of "
                f"patch_size x spatial_merge_size = {merged_patch} pixels"
            )

    def _check_position_table(self) -> None:
        if not self.family.position_table:
            self._check_absent("num_position_embeddings", None)
            return
        _check_positive_int("num_position_embeddings", self.num_position_embeddings)
        if self.position_table_side**2 != self.num_position_embeddings:
            raise ValueError(
                f"num_position_embeddings must be a square number, the entries of a square table; "
                f"got {self.num_position_embeddings}"
            )

    def _check_deepstack(self) -> None:
        self._check_blocks("deepstack_visual_indexes")
        if self.family.deepstack is None:
            self._check_absent("deepstack_visual_indexes", ())
        blocks = self.deepstack_visual_indexes
        if len(set(blocks)) < len(blocks):
            raise ValueError(
                f"deepstack_visual_indexes must be different blocks, got {list(blocks)}"
            )

    def _check_blocks(self, name: str) -> None:
        blocks = getattr(self, name)
        if not isinstance(blocks, list | tuple) or not all(
            _is_int(block) and block >= 0 for block in blocks
        ):
            raise ValueError(f"{name} must be block numbers from 0, got {blocks!r}")
        object.__setattr__(self, name, tuple(blocks))

    def _check_absent(self, name: str, absent: Any) -> None:
        if getattr(self, name) != absent:
            raise ValueError(
                f"{self.model_type} has no {name}: it must be {absent!r}, "
                f"got {getattr(self, name)!r}"
            )

    @property
    def family(self) -> Family:
        """What the towers of this model type have in common."""
        return FAMILIES[self.model_type]

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values of one patch: channels x frames x rows x columns, 1176 or 1536 as published."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches that the merger makes into one embedding: 4 in the published towers."""
        return self.spatial_merge_size**2

    @property
    def window_patches(self) -> int:
        """Patches along a side of a whole window: 8 in Qwen2.5-VL.

        Without windows more than any frame has: layouts then treat each frame as a window.
        """
        return _ANY_FRAME if self.window_size is None else self.window_size // self.patch_size

    @property
    def max_window_seqlen(self) -> int:
        """Tokens that no window passes: 64, those of a whole window, in Qwen2.5-VL."""
        return min(self.window_patches**2, _ANY_FRAME)

    @property
    def position_table_side(self) -> int:
        """Entries along a side of the table of learned positions: 48 in Qwen3-VL; 0 without one."""
        return math.isqrt(self.num_position_embeddings or 0)

    @property
    def aligned_intermediate_size(self) -> int:
        """The MLP's width as stored: `intermediate_size` up to a multiple of 64 (3420 to 3456).

        Filled with zeros the extra channels contribute exactly nothing, while rows that are no
        multiple of 16 bytes shut the fast matrix kernels out. Where the norm comes late, two of
        them carry biases (`tower_weights`).
        """
        channels = self.intermediate_size + 2 * self.family.late_norm
        return -(-channels // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS

    def sees_frames(self, block: int) -> bool:
        """Whether a block, by its number from 0, attends within whole frames, not windows."""
        return self.window_size is None or block in self.fullatt_block_indexes

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> Self:
        """Read `config.json` of a checkpoint directory; its model type chooses the family.

        Args:
            directory: holds the config.json of a whole vision-language model (the tower is its
                "vision_config"; in an Omni model that of its "thinker_config") or of a vision tower
                alone.

        Raises:
            CheckpointError: no such directory or file, or the file is not a JSON object.
            ValueError: an unknown model type, or values that no tower can be built from.
        """
        path = Path(directory) / "config.json"
        try:
            return cls.of(**read_vision_values(path))
        except CheckpointError:
            raise
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """The config.json of this tower alone, as transformers 5 writes it.

        Raises:
            ValueError: a `norm_eps` of its own, which no config.json holds.
        """
        if self.norm_eps != type(self).norm_eps:
            raise ValueError(
                f"norm_eps {self.norm_eps} cannot be written: config.json has no place for it"
            )
        return tower_json(asdict(self))

    @classmethod
    def of(cls, model_type: str, **values: Any) -> Self:
        """A family's tower as published (the 7B's or 8B's), with some values replaced.

        Raises:
            ValueError: an unknown model type, or values that no tower can be built from.
        """
        if model_type not in FAMILIES:
            raise ValueError(unknown_model_type(model_type))
        return cls(model_type=model_type, **{**FAMILIES[model_type].defaults, **values})

    @classmethod
    def qwen2_vl_7b(cls) -> Self:
        """The tower of Qwen2-VL 7B; 2B and 72B differ in out_hidden_size, 1536 and 8192."""
        return cls.of("qwen2_vl", out_hidden_size=3584)

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

    @classmethod
    def qwen3_vl_4b(cls) -> Self:
        """The tower of Qwen3-VL 4B; that of 2B differs in out_hidden_size, 2048."""
        return cls.of(
            "qwen3_vl",
            depth=24,
            hidden_size=1024,
            intermediate_size=4096,
            out_hidden_size=2560,
            deepstack_visual_indexes=(5, 11, 17),
        )

    @classmethod
    def qwen3_vl_8b(cls) -> Self:
        """The tower of Qwen3-VL 8B; that of 32B differs in out_hidden_size, 5120."""
        return cls.of("qwen3_vl", out_hidden_size=4096)


def check_head_dim(config: VisionConfig) -> None:
    """Refuse heads that the attention does not take with a ValueError; angles are of more sizes."""
    if config.head_dim % 8 or config.head_dim > _MAX_HEAD_DIM:
        raise ValueError(
            f"a tower's head_dim (hidden_size / num_heads) must be a multiple of 8, up to "
            f"{_MAX_HEAD_DIM}, got {config.head_dim}"
        )


def check_name(option: str, name: str, known: Sequence[str]) -> None:
    """Refuse an option of the towers that is none of the known names with a ValueError."""
    if name not in known:
        raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive_int(name: str, value: Any, limit: int = _MAX_SIZE) -> None:
    if not _is_int(value) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value > limit:
        raise ValueError(f"{name} must be at most {limit:,}, got {value:,}")
