"""The named workloads: agreement, benchmarks and tuning all take their shapes from here.

A kernel workload is one call of the attention operation, a tower workload one call of a whole
tower. Sizes in names are pixels a side of square images: `windows-896` is what a windowed layer
sees of one 896 x 896 image.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import ml_dtypes
import numpy as np

from compare.errors import InputError
from flax_models import Layout, VisionConfig, plan_layout, rotary_angles

PATCH = 14  # pixels a side
SIDES = (448, 672, 896, 1344)

Grid = tuple[tuple[int, int, int], ...]
Kind = Literal["windows", "frames"]
Workload = TypeVar("Workload")

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True)
class KernelInputs:
    """The arguments of one call, as NumPy arrays: both frameworks get the same bits.

    Attributes:
        qkv: [tokens, 3, heads, head_dim], the workload's dtype.
        cos: [tokens, rotary_dim / 2] fp32; `sin` likewise.
        cu_seqlens: [segments + 1] int32.
        max_seqlen: longest segment, in tokens.
    """

    qkv: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    cu_seqlens: np.ndarray
    max_seqlen: int


@dataclass(frozen=True)
class KernelWorkload:
    """One call of the attention operation.

    Attributes:
        name: as on the command line and in result files.
        kind: whether a segment is a window or a whole frame.
        grid_thw: (t, h, w) of each image or clip, in patches.
        dtype: a key of DTYPES.
        rotary_dim: how many of head_dim's dims rotate; None is all of them.
    """

    name: str
    kind: Kind
    grid_thw: Grid
    heads: int = 16
    head_dim: int = 80
    dtype: str = "bfloat16"
    rotary_dim: int | None = None

    @property
    def rotated_dims(self) -> int:
        """Dims of a head that rotate."""
        return self.rotary_dim or self.head_dim

    @property
    def layout(self) -> Layout:
        """The token layout that the towers plan for these images."""
        return plan_layout(self._config(), np.array(self.grid_thw))

    @property
    def cu_seqlens(self) -> np.ndarray:
        """[segments + 1] int32."""
        layout = self.layout
        return layout.cu_window_seqlens if self.kind == "windows" else layout.cu_frame_seqlens

    @property
    def lengths(self) -> np.ndarray:
        """[segments] int64: tokens of each segment."""
        return np.diff(self.cu_seqlens.astype(np.int64))

    @property
    def tokens(self) -> int:
        """Tokens of the call."""
        return int(sum(t * h * w for t, h, w in self.grid_thw))

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes through memory: qkv and angles read once, the output written once."""
        values = 4 * self.tokens * self.heads * self.head_dim
        angles = 2 * self.tokens * (self.rotated_dims // 2)
        return values * DTYPES[self.dtype].itemsize + angles * 4

    @property
    def matrix_flops(self) -> int:
        """Operations of the two matrix products, nothing padded."""
        return int(4 * self.heads * self.head_dim * (self.lengths**2).sum())

    def inputs(self, seed: int = 0) -> KernelInputs:
        """Fresh standard-normal qkv and the angles of the images' real positions."""
        shape = (self.tokens, 3, self.heads, self.head_dim)
        qkv = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        cos, sin = rotary_angles(self._config(), self.layout.positions)
        return KernelInputs(
            qkv=qkv.astype(DTYPES[self.dtype]),
            cos=cos,
            sin=sin,
            cu_seqlens=self.cu_seqlens,
            max_seqlen=int(self.lengths.max()),
        )

    def _config(self) -> VisionConfig:
        # Angles depend on the rotated dims alone, so a partial rotation is that of a smaller head.
        return VisionConfig(hidden_size=self.heads * self.rotated_dims, num_heads=self.heads)


@dataclass(frozen=True)
class TowerWorkload:
    """One call of a whole tower on photographs or clips made from one.

    Attributes:
        side: pixels a side.
        frames: frames of the clip; 1 is an image.
    """

    name: str
    side: int
    frames: int = 1

    @property
    def grid_thw(self) -> Grid:
        """(t, h, w) in patches; a temporal patch is two frames, an image counts as two."""
        return ((max(1, self.frames // 2), self.side // PATCH, self.side // PATCH),)

    @property
    def tokens(self) -> int:
        """Tokens of the call, before merging."""
        return int(sum(t * h * w for t, h, w in self.grid_thw))

    def bytes_moved(self, config: VisionConfig) -> int:
        """Fewest bytes of the windowed layers' attention, all of them together."""
        windowed = config.depth - _full_layers(config)
        return windowed * self._attention(config, "windows").bytes_moved

    def matrix_flops(self, config: VisionConfig) -> int:
        """Operations of every matrix product and of the full-attention layers' attention."""
        hidden = config.hidden_size
        merged = hidden * config.merge_unit
        layer = 2 * self.tokens * hidden * (4 * hidden + 3 * config.intermediate_size)
        patch_embed = 2 * self.tokens * config.patch_dim * hidden
        merger = 2 * (self.tokens // config.merge_unit) * merged * (merged + config.out_hidden_size)
        attention = _full_layers(config) * self._attention(config, "frames").matrix_flops
        return config.depth * layer + patch_embed + merger + attention

    def _attention(self, config: VisionConfig, kind: Kind) -> KernelWorkload:
        return KernelWorkload(
            f"{self.name} {kind}", kind, self.grid_thw, config.num_heads, config.head_dim
        )


def _full_layers(config: VisionConfig) -> int:
    return sum(index < config.depth for index in set(config.fullatt_block_indexes))


def _square(side: int) -> Grid:
    return ((1, side // PATCH, side // PATCH),)


_KINDS: tuple[Kind, ...] = ("windows", "frames")

KERNEL_WORKLOADS = {
    workload.name: workload
    for workload in [
        KernelWorkload(f"{kind}-{side}", kind, _square(side)) for kind in _KINDS for side in SIDES
    ]
}

TOWER_WORKLOADS = {
    workload.name: workload
    for workload in [
        *(TowerWorkload(f"tower-{side}", side) for side in SIDES),
        TowerWorkload("tower-video-16x448", 448, frames=16),
    ]
}

INTEGRATION_WORKLOADS = {
    workload.name: workload
    for workload in [TowerWorkload(f"integration-{side}", side) for side in SIDES]
}


def choose(known: dict[str, Workload], names: list[str] | None) -> list[Workload]:
    """The named workloads in the table's order; all of them where no name is given.

    Raises:
        InputError: a name that is not in the table.
    """
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise InputError(f"unknown workload {unknown[0]!r}; known: {', '.join(known)}")
    return [workload for name, workload in known.items() if not names or name in names]


def variant(workload: KernelWorkload, **changes: object) -> KernelWorkload:
    """A workload with some attributes changed; its name says which: "windows-448 head_dim=72"."""
    told = " ".join(f"{attribute}={value}" for attribute, value in changes.items())
    return replace(workload, name=f"{workload.name} {told}", **changes)
