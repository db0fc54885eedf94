"""What is tuned: classes of shapes, the workload that stands for each, and the launches to try."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from compare.workloads.kernels import KERNEL_WORKLOADS, KernelWorkload, segments, variant

# A launch as plain values, by the names of the packages' own Launch.
Fields = dict[str, int]

# Each measured head_dim is the largest that its launch serves: a bound on registers that suits 80
# columns may be too tight for 96. Wider heads, fp32 and unaligned tensors keep the defaults.
_HEAD_DIMS = (64, 80, 128)
_WINDOW_HEAD_DIMS = (64, 80, 96, 128)
_WINDOWS = (16, 32, 64, 128)
# Length that is measured, and the longest segment that its launch serves.
_STREAMS = ((256, 512), (576, 576), (1024, 1024), (4096, None))

# Rows of the tile, which holds the whole segment; warps; a bound on registers.
_WINDOW_TILES = {
    16: ((16, 1), (16, 2), (16, 1, 128), (16, 2, 64), (16, 2, 128)),
    32: ((32, 2), (32, 4), (32, 2, 128), (32, 4, 64), (32, 4, 128), (64, 4, 128)),
    64: ((64, 4), (64, 8), (64, 4, 128), (64, 4, 168)),
    128: ((128, 4), (128, 8), (128, 8, 168), (128, 8, 128)),
}
# Rows of a query tile, rows of a key tile, warps, stages, and a bound on registers. The key tile is
# the same for all, and for both twins: a row's softmax refers to its segment's first one, and by
# others the twins' results would differ by more than their rule allows.
_STREAM_TILES = (
    (64, 64, 4, 3), (64, 64, 4, 3, 168), (64, 64, 4, 3, 128), (128, 64, 8, 3, 128),
)  # fmt: skip
# One image so small that its tiles fill the GPU hardly once, or about twice; 72 columns want other
# tiles than 80 there.
_SMALL = ("frames-448", "frames-672")
_SMALL_HEAD_DIMS = (64, 72, 80, 128)
# Of the gradients: which windows, and as above.
_WINDOWS_BACKWARD = {
    16: ((16, 1), (16, 2), (16, 1, 128)),
    64: ((64, 4, 128), (64, 4, 168), (64, 4, 255), (64, 8, 128), (64, 8)),
    128: ((128, 8), (128, 8, 255), (128, 16, 128)),
}
# Rows of a query tile, rows of a key tile, warps; with 2 and 3 stages, and as many registers as
# there are. A program keeps its own tile and goes through the others.
_BACKWARD_BY_QUERIES = (
    (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8),
)  # fmt: skip
_STREAM_BACKWARD = {
    "stream_backward_q": _BACKWARD_BY_QUERIES,
    "stream_backward_kv": tuple((k, q, warps) for q, k, warps in _BACKWARD_BY_QUERIES),
}
_BACKWARD_HEAD_DIMS = (64, 96, 128)
# Rows of a tile, heads of a program.
_ROTATE_TILES = ((8, 2), (16, 1), (16, 2), (16, 4), (32, 1))


@dataclass(frozen=True)
class Case:
    """A class of shapes.

    Attributes:
        kernel: as in the table of launches.
        max_head_dim: largest head_dim of the class.
        max_length: longest segment of the class, None where any is.
        workload: what is measured for it.
        fuse: so that the kernel does what it does by default.
        candidates: launches to try beside the one in the table.
        max_rows: most tokens times heads of the class, None where any number is.
    """

    kernel: str
    max_head_dim: int
    max_length: int | None
    workload: KernelWorkload
    fuse: str
    candidates: tuple[Fields, ...]
    max_rows: int | None = None

    def __str__(self) -> str:
        length = f", length <= {self.max_length}" if self.max_length else ""
        rows = f", rows <= {self.max_rows}" if self.max_rows else ""
        return f"{self.kernel}, head_dim <= {self.max_head_dim}{length}{rows}"


def tuning_cases(kernels: tuple[str, ...]) -> list[Case]:
    """Every class of the named kernels, keys of `CASES`."""
    return [case for kernel in kernels for case in CASES[kernel]()]


def _window_cases() -> Iterator[Case]:
    for head_dim, length in itertools.product(_WINDOW_HEAD_DIMS, _WINDOWS):
        tries = tuple(
            _fields(rows, rows, warps, 1, *bound) for rows, warps, *bound in _WINDOW_TILES[length]
        )
        workload = variant(segments(length), head_dim=head_dim)
        yield Case("window", head_dim, length, workload, "qk", tries)


def _window_backward_cases() -> Iterator[Case]:
    for head_dim, (length, tiles) in itertools.product(
        _WINDOW_HEAD_DIMS, _WINDOWS_BACKWARD.items()
    ):
        tries = tuple(_fields(rows, rows, warps, 1, *bound) for rows, warps, *bound in tiles)
        workload = variant(segments(length), head_dim=head_dim, gradients=True)
        yield Case("window_backward", head_dim, length, workload, "auto", tries)


def _stream_backward_cases(kernel: str) -> Iterator[Case]:
    tries = tuple(
        _fields(*tile, stages, 255) for tile in _STREAM_BACKWARD[kernel] for stages in (2, 3)
    )
    for head_dim in _BACKWARD_HEAD_DIMS:
        workload = variant(segments(4096), head_dim=head_dim, gradients=True)
        yield Case(kernel, head_dim, None, workload, "auto", tries)


def _stream_cases() -> Iterator[Case]:
    tries = tuple(_fields(*tile) for tile in _STREAM_TILES)
    for name, head_dim in itertools.product(_SMALL, _SMALL_HEAD_DIMS):
        workload = variant(KERNEL_WORKLOADS[name], head_dim=head_dim)
        rows = workload.tokens * workload.heads
        yield Case("stream", head_dim, None, workload, "none", tries, rows)
    for head_dim, (length, longest) in itertools.product(_HEAD_DIMS, _STREAMS):
        workload = variant(segments(length), head_dim=head_dim)
        yield Case("stream", head_dim, longest, workload, "none", tries)


def _rotate_cases() -> Iterator[Case]:
    # In short segments, whose attention takes no longer: PyTorch's clock knows but whole calls.
    tries = tuple(_fields(block, group, 4, 2) for block, group in _ROTATE_TILES)
    small, large = KERNEL_WORKLOADS["windows-672"], segments(64)
    for head_dim, base in itertools.product(_HEAD_DIMS, (small, large)):
        workload = variant(base, head_dim=head_dim)
        rows = workload.tokens * workload.heads if base is small else None
        yield Case("rotate", head_dim, None, workload, "none", tries, rows)


CASES = {
    "window": _window_cases,
    "stream": _stream_cases,
    "rotate": _rotate_cases,
    "window_backward": _window_backward_cases,
    **{kernel: partial(_stream_backward_cases, kernel) for kernel in _STREAM_BACKWARD},
}


def _fields(*values: int) -> Fields:
    """A launch of these values; without a last one there is no bound on registers."""
    names = ("block", "block_k", "num_warps", "num_stages", "maxnreg")
    return dict(zip(names, values, strict=False))
