"""The named workloads: agreement, benchmarks and tuning all take their shapes from here.

A kernel workload is one call of the attention operation; those of whole towers are in
`workloads.towers`. Sizes in names are pixels a side of square images: `windows-896` is what a
windowed layer of Qwen2.5-VL sees of one 896 x 896 image.
"""

import fnmatch
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from compare.common.errors import InputError
from compare.common.result_files import Record
from flax_models import Layout, VisionConfig, plan_layout, rotary_angles

PATCH = 14  # pixels a side
SIDES = (448, 672, 896, 1344)

Grid = tuple[tuple[int, int, int], ...]
Kind = Literal["windows", "frames"]
Embedding = Literal["rope", "sinusoidal"]
Workload = TypeVar("Workload")

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
# Of the error of any element, as inputs are standard normal: what public write-ups of such kernels
# hold to.
ABSOLUTE_LIMITS = {"float32": 5e-5}


@dataclass(frozen=True)
class KernelInputs:
    """The arguments of one call, as NumPy arrays: both frameworks get the same bits.

    Attributes:
        qkv: [tokens, 3, heads, head_dim], the workload's dtype.
        cos: [tokens, rotary_dim / 2] fp32; `sin` likewise.
        cu_seqlens: [segments + 1] int32.
        max_seqlen: longest segment, in tokens.
        grad: [tokens, heads, head_dim], the result's gradient, where that in qkv is asked for.
        embedding: whether cos and sin rotate Q and K or are added to them, sin to even columns and
            cos to odd ones.
    """

    qkv: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    cu_seqlens: np.ndarray
    max_seqlen: int
    grad: np.ndarray | None = None
    embedding: Embedding = "rope"


@dataclass(frozen=True)
class KernelWorkload:
    """One call of the attention operation.

    Attributes:
        name: as on the command line and in result files.
        kind: whether a segment is a window or a whole frame.
        grid_thw: (t, h, w) of each image or clip, in patches.
        dtype: a key of DTYPES.
        rotary_dim: how many of head_dim's dims rotate; None is all of them.
        peers: names of the peers that are timed beside ours; None is all of them.
        gradients: whether it is the call and its backward pass, whose result is the gradient in
            qkv.
        embedding: of positions: the images' rotate, sinusoidal ones are those within a segment.
    """

    name: str
    kind: Kind
    grid_thw: Grid
    heads: int = 16
    head_dim: int = 80
    dtype: str = "bfloat16"
    rotary_dim: int | None = None
    peers: tuple[str, ...] | None = None
    gradients: bool = False
    embedding: Embedding = "rope"

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
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return int(self.lengths.max())

    @property
    def positions(self) -> np.ndarray:
        """[tokens] int32: each token's place within its segment."""
        starts = np.repeat(self.cu_seqlens[:-1], self.lengths)
        return np.arange(len(starts), dtype=np.int32) - starts

    @property
    def tokens(self) -> int:
        """Tokens of the call."""
        return int(sum(t * h * w for t, h, w in self.grid_thw))

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes through memory: qkv and angles read once, the output written once.

        A backward pass reads qkv, the angles and the output's gradient, and writes that of qkv.
        """
        values = (4 + 7 * self.gradients) * self.tokens * self.heads * self.head_dim
        angles = 2 * (1 + self.gradients) * self.tokens * (self.rotated_dims // 2)
        return values * DTYPES[self.dtype].itemsize + angles * 4

    @property
    def matrix_flops(self) -> int:
        """Operations of the two matrix products, nothing padded; five more of a backward pass."""
        products = 2 + 5 * self.gradients
        return int(2 * products * self.heads * self.head_dim * (self.lengths**2).sum())

    def inputs(self, seed: int = 0) -> KernelInputs:
        """Fresh standard-normal qkv (and gradient), and the angles of the images' positions."""
        rng, shape = np.random.default_rng(seed), (self.heads, self.head_dim)
        qkv = rng.standard_normal((self.tokens, 3, *shape), dtype=np.float32)
        grad = None
        if self.gradients:
            grad = rng.standard_normal((self.tokens, *shape), dtype=np.float32)
        cos, sin = self._tables()
        return KernelInputs(
            qkv=qkv.astype(DTYPES[self.dtype]),
            cos=cos,
            sin=sin,
            cu_seqlens=self.cu_seqlens,
            max_seqlen=self.longest,
            grad=None if grad is None else grad.astype(DTYPES[self.dtype]),
            embedding=self.embedding,
        )

    def record(self, implementation: str, **fields: Any) -> Record:
        """A record of an implementation, by its name, on this workload."""
        return Record(
            self.name,
            implementation,
            dtype=self.dtype,
            head_dim=self.head_dim,
            heads=self.heads,
            **fields,
        )

    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Cos and sin of every token's angles, each [tokens, rotary_dim / 2] fp32."""
        if self.embedding == "rope":
            return rotary_angles(self._config(), self.layout.positions)
        frequencies = 10000.0 ** (-2 * np.arange(self.head_dim // 2) / self.head_dim)
        # Of one position each, in fp64: a table of all tokens would take its time.
        angles = np.arange(self.longest)[:, None] * frequencies
        cos, sin = (table.astype(np.float32) for table in (np.cos(angles), np.sin(angles)))
        return cos[self.positions], sin[self.positions]

    def _config(self) -> VisionConfig:
        # Angles depend on the rotated dims alone, so a partial rotation is that of a smaller head.
        return VisionConfig(hidden_size=self.heads * self.rotated_dims, num_heads=self.heads)


def _square(side: int) -> Grid:
    return ((1, side // PATCH, side // PATCH),)


_KINDS: tuple[Kind, ...] = ("windows", "frames")
# Where more shapes are measured, the peers that are the fastest on a square image of some size
# stand for all. cuDNN takes segments of one length, and is left out where they differ.
_CUDNN, _FA2, _FA3 = (f"in-place rope + {x}" for x in ("cuDNN SDPA", "FA2 varlen", "FA3 varlen"))
_JAX_PEER = "XLA rope + cuDNN (jax.nn)"
FRAME_PEERS = (_CUDNN, _FA2, _FA3)

_LANDSCAPE: Grid = ((1, 62, 90),)  # 1260 x 868 px, whose windows at the right and below are short
_EIGHT_IMAGES: Grid = (
    (1, 32, 32), (1, 62, 90), (1, 8, 8), (1, 48, 64), (1, 26, 38), (1, 96, 20), (1, 2, 34),
    (1, 64, 64),
)  # fmt: skip
_CLIP: Grid = ((8, 32, 32),)  # 16 frames of 448 px: a temporal patch is two of them
_FORTY_IMAGES: Grid = 5 * (
    (1, 8, 8), (1, 8, 16), (1, 12, 20), (1, 16, 24), (1, 24, 24), (1, 24, 32), (1, 30, 30),
    (1, 32, 32),
)  # fmt: skip

FRAMES_MIX = "frames_other-1344+forty"
# What the mix is made of: it should take hardly longer than they do one after the other.
FRAMES_MIX_PARTS = ("frames-1344", "frames_other-forty")


def _other_windows() -> list[KernelWorkload]:
    peers = _CUDNN, _FA2, _JAX_PEER
    large = KernelWorkload("windows_other-", "windows", _square(1344), peers=peers)
    ragged = replace(large, peers=(_FA2, _JAX_PEER))
    return [
        _other(large, "1344-head72", head_dim=72),
        _other(large, "1344-fp16", dtype="float16"),
        _other(ragged, "1260x868", grid_thw=_LANDSCAPE),
        _other(ragged, "8-images", grid_thw=_EIGHT_IMAGES),
        _other(large, "16x448", grid_thw=_CLIP),
    ]


def _other_frames() -> list[KernelWorkload]:
    peers = *FRAME_PEERS, _JAX_PEER
    large = KernelWorkload("frames_other-", "frames", _square(1344), peers=peers)
    # Padded to the longest, as JAX's cuDNN wants them, these would be mostly padding.
    ragged = replace(large, peers=(_FA2, _FA3))
    widths = [
        _other(large, f"{side}-head{head_dim}", grid_thw=_square(side), head_dim=head_dim)
        for head_dim in (72, 128)
        for side in SIDES
    ]
    return [
        *widths,
        _other(large, "8x1024", grid_thw=_CLIP),
        _other(ragged, "forty", grid_thw=_FORTY_IMAGES),
        _other(ragged, "1344+forty", grid_thw=(*_square(1344), *_FORTY_IMAGES)),
    ]


def _other(workload: KernelWorkload, name: str, **changes: object) -> KernelWorkload:
    return replace(workload, name=workload.name + name, **changes)


KERNEL_WORKLOADS = {
    workload.name: workload
    for workload in [
        *(
            KernelWorkload(f"{kind}-{side}", kind, _square(side))
            for kind in _KINDS
            for side in SIDES
        ),
        *_other_windows(),
        *_other_frames(),
    ]
}

# The same shapes, forward and backward.
_TRAINED = (
    *(f"{kind}-{side}" for kind in _KINDS for side in SIDES),
    *("windows_other-1344-head72", "windows_other-8-images", "windows_other-16x448"),
    *("frames_other-1344-head72", "frames_other-1344-head128", "frames_other-8x1024"),
)
TRAINING_PEERS = tuple(
    f"torch.compile rope + {attention}"
    for attention in ("FA2 varlen", "flash-attn FA2 varlen", "FA3 varlen", "cuDNN SDPA")
)
TRAINING_WORKLOADS = {
    name: replace(KERNEL_WORKLOADS[name], gradients=True, peers=(*TRAINING_PEERS, _JAX_PEER))
    for name in _TRAINED
}

# Segment lengths over which kernels are tuned and fusions compared, as frames in patches.
SEGMENT_FRAMES = {
    16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16), 576: (24, 24),
    1024: (32, 32), 2304: (48, 48), 4096: (64, 64), 9216: (96, 96),
}  # fmt: skip


def segments(length: int) -> KernelWorkload:
    """As many segments of one length, a key of SEGMENT_FRAMES, as fit into 9,216 tokens."""
    frame = (1, *SEGMENT_FRAMES[length])
    return KernelWorkload(f"segments-{length}", "frames", (frame,) * (9216 // length))


def choose(
    known: dict[str, Workload], names: list[str] | None, what: str = "workload"
) -> list[Workload]:
    """The named workloads in the table's order; all of them where no name is given.

    A name may be a pattern as in a shell: "windows-*".

    Raises:
        InputError: a name that is not in the table, or a pattern of none of its names.
    """
    found = [fnmatch.filter(known, name) for name in names or ["*"]]
    for name, matching in zip(names or [], found, strict=False):
        if not matching:
            raise InputError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    chosen = {name for matching in found for name in matching}
    return [workload for name, workload in known.items() if name in chosen]


def variant(workload: KernelWorkload, **changes: object) -> KernelWorkload:
    """A workload with some attributes changed; its name says which: "windows-448 head_dim=72"."""
    told = " ".join(f"{attribute}={value}" for attribute, value in changes.items())
    return replace(workload, name=f"{workload.name} {told}", **changes)
