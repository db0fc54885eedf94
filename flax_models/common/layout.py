"""From grids of patches to the order, the segments and the positions of a tower's tokens.

Hugging Face's order of tokens: images one after another, in each its frames, in each its merge
units (spatial_merge_size x spatial_merge_size patches) row by row, in each its patches row by row.
Window order is the same with the merge units of each window brought together; a tower permutes
into it once at its entrance and out of it once at its exit. In a tower without windows each frame
takes the place of a window, and the two orders are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flax_models.common.buckets import Bucket, bucket_of_tokens, exact_bucket
from flax_models.common.config import VisionConfig, check_name
from flax_models.common.grid import as_grid, count_tokens

# What a tower makes of an image: the language model's embeddings, the hidden states of its patches
# before the merger, or their mean.
OUTPUTS = ("embeddings", "patches", "pooled")

# Remembered layouts take 13 to 16 bytes a token, 8 more with a table of positions, all of them at
# most 210 MB, and as much on the device of a tower that is called with them. Larger calls run for
# so long that planning them anew does not show.
_CACHED_LAYOUTS = 128
_CACHED_TOKENS = 1 << 16


@dataclass(frozen=True, eq=False)
class Layout:
    """How the tokens of some images and clips lie in memory; all arrays read-only int32.

    Sizes are the padded ones: `tokens`, `windows` and `frames` of the bucket where there is one,
    else exactly those of the images. Padding tokens stand at the end of both orders and belong to
    no segment.

    Attributes:
        window_order: [tokens]; `in_window_order = in_hugging_face_order[window_order]`.
        output_order: [tokens / merge_unit]; the same for the way back, on merged embeddings:
            `in_hugging_face_order = in_window_order[output_order]`. For the output "patches"
            [tokens], on hidden states: `in_raster_order = in_window_order[output_order]`. None for
            "pooled".
        positions: [tokens, 2]; row and column of each token within its frame, in patches, in
            window order; 0 for padding.
        frame_sizes: [tokens, 2]; rows and columns of the frame that each token lies in, in patches,
            in window order; 1 for padding. None in a tower without a table of learned positions,
            which is stretched over each frame.
        cu_window_seqlens: [windows + 1]; cumulative starts of the windows, in window order.
        cu_frame_seqlens: [frames + 1]; cumulative starts of the frames, the same in both orders.
        cu_image_seqlens: [frames + 1]; cumulative starts of the images and clips, for the output
            "pooled"; None for others.
        max_window_seqlen: upper bound on the tokens of a window, the same for every image.
        max_frame_seqlen: upper bound on the tokens of a frame: a bucket's own, else the largest.
        num_tokens: tokens that are not padding.
        num_merged: merged embeddings that are not padding.
        num_outputs: rows of the output that are not padding.
        output: one of `OUTPUTS`.
    """

    window_order: np.ndarray
    output_order: np.ndarray | None
    positions: np.ndarray
    frame_sizes: np.ndarray | None
    cu_window_seqlens: np.ndarray
    cu_frame_seqlens: np.ndarray
    cu_image_seqlens: np.ndarray | None
    max_window_seqlen: int
    max_frame_seqlen: int
    num_tokens: int
    num_merged: int
    num_outputs: int
    output: str


def plan_layout(
    config: VisionConfig,
    grid_thw: Any,
    pad_to: int | Bucket | None = None,
    output: str = "embeddings",
) -> Layout:
    """Plan the layout of some images and clips. The last ones planned are remembered.

    Args:
        config: the tower's configuration.
        grid_thw: [images, 3] integers, anything `np.asarray` takes: frames (after the temporal
            patch), rows and columns of each image or clip, in patches.
        pad_to: the bucket to pad to (see `choose_bucket`), or only its number of tokens. None: no
            padding.
        output: what the tower is to return, one of `OUTPUTS`.

    Raises:
        ValueError: a bad grid (see `grid.as_grid`), images that don't fit `pad_to`, or an unknown
            `output`; before anything large is allocated.
    """
    check_name("output", output, OUTPUTS)
    grid = as_grid(config, grid_thw)
    tokens = pad_to.tokens if isinstance(pad_to, Bucket) else pad_to or count_tokens(grid)
    plan = _remembered_plan if tokens <= _CACHED_TOKENS else _plan
    return plan(config, grid.tobytes(), pad_to, output)


def output_rows(config: VisionConfig, grid: np.ndarray, output: str) -> np.ndarray:
    """Rows of a tower's output for each image of a checked grid, [images] integers."""
    tokens = grid.prod(axis=1)
    if output == "pooled":
        return np.ones_like(tokens)
    return tokens if output == "patches" else tokens // config.merge_unit


def inverse_frequencies(config: VisionConfig) -> np.ndarray:
    """Return theta ** (-2 i / (head_dim / 2)), fp32 [head_dim / 4].

    Computed in fp32 step by step as Hugging Face does, so that the angles agree in every bit that
    the platforms' power functions allow.
    """
    channels = config.head_dim // 2  # half of a head rotates by rows, half by columns
    exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    return np.float32(1) / np.float32(config.rope_theta) ** exponents


def check_patches(config: VisionConfig, num_tokens: int, shape: Sequence[int]) -> None:
    """Check the shape of pixel_values, before padding, against the patches of their grid.

    Raises:
        ValueError: it is not [num_tokens, config.patch_dim].
    """
    expected = (num_tokens, config.patch_dim)
    if tuple(shape) != expected:
        raise ValueError(
            f"pixel_values must be {list(expected)}, a row for each patch of grid_thw, "
            f"got {list(shape)}"
        )


def rotary_angles(config: VisionConfig, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute cos and sin of each token's rotation.

    Args:
        config: the tower's configuration.
        positions: [tokens, 2] non-negative integers, row and column of each token.

    Returns:
        (cos, sin), each fp32 [tokens, head_dim / 2]: the first head_dim / 4 columns turn with the
        row, the others with the column.

    Raises:
        ValueError: positions of another shape or dtype, or negative ones.
    """
    positions = np.asarray(positions)
    if positions.ndim != 2 or positions.shape[1] != 2 or positions.dtype.kind not in "iu":
        raise ValueError(
            f"positions must be integers of shape [tokens, 2], "
            f"got {positions.dtype} {list(positions.shape)}"
        )
    if positions.size and positions.min() < 0:
        raise ValueError(f"positions must not be negative, got {positions.min()}")
    # An image has far fewer rows and columns than tokens: one table serves them all.
    table_rows = int(positions.max(initial=0)) + 1
    angles = np.arange(table_rows, dtype=np.float32)[:, None] * inverse_frequencies(config)
    shape = (len(positions), config.head_dim // 2)
    return np.cos(angles)[positions].reshape(shape), np.sin(angles)[positions].reshape(shape)


def _plan(
    config: VisionConfig, grid_bytes: bytes, pad_to: int | Bucket | None, output: str
) -> Layout:
    grid = np.frombuffer(grid_bytes, dtype=np.int64).reshape(-1, 3)
    num_tokens = count_tokens(grid)
    bucket = _resolve_bucket(config, grid, pad_to)
    merge_unit = config.merge_unit
    units = _merge_units(config, grid)

    # Both orders, at the granularity of merge units: `place` sends each unit to its place in
    # window order, `order` is the inverse.
    padded_units = bucket.tokens // merge_unit
    place = np.arange(padded_units, dtype=np.int32)
    place[: len(units.place)] = units.place
    order = np.empty_like(place)
    order[place] = np.arange(padded_units, dtype=np.int32)

    patches = np.arange(merge_unit, dtype=np.int32)
    window_order = (order[:, None] * np.int32(merge_unit) + patches).reshape(-1)

    positions = np.zeros((padded_units, merge_unit, 2), dtype=np.int32)
    unit_order = order[: len(units.place)]
    patch_h_w = np.stack(np.divmod(patches, config.spatial_merge_size), axis=-1)
    unit_h_w = np.stack([units.row[unit_order], units.column[unit_order]], axis=-1)
    positions[: len(unit_order)] = unit_h_w[:, None, :] * config.spatial_merge_size + patch_h_w

    frame_sizes = None
    if config.num_position_embeddings is not None:
        frame_sizes = np.ones_like(positions)
        frame_h_w = np.stack([units.height[unit_order], units.width[unit_order]], axis=-1)
        frame_sizes[: len(unit_order)] = frame_h_w[:, None, :] * config.spatial_merge_size
        frame_sizes = _frozen(frame_sizes.reshape(-1, 2))

    positions = positions.reshape(-1, 2)

    output_order = place if output == "embeddings" else None
    if output == "patches":
        output_order = _raster_order(config, units, unit_order, positions)

    frame_tokens = np.repeat(grid[:, 1] * grid[:, 2], grid[:, 0])
    cu_image_seqlens = None
    if output == "pooled":
        cu_image_seqlens = _cumulative(grid.prod(axis=1), bucket.frames)
    return Layout(
        window_order=_frozen(window_order),
        output_order=None if output_order is None else _frozen(output_order),
        positions=_frozen(positions),
        frame_sizes=frame_sizes,
        cu_window_seqlens=_cumulative(_window_tokens(config, grid), bucket.windows),
        cu_frame_seqlens=_cumulative(frame_tokens, bucket.frames),
        cu_image_seqlens=cu_image_seqlens,
        max_window_seqlen=config.max_window_seqlen,
        max_frame_seqlen=bucket.frame_tokens,
        num_tokens=num_tokens,
        num_merged=num_tokens // merge_unit,
        num_outputs=int(output_rows(config, grid, output).sum()),
        output=output,
    )


_remembered_plan = lru_cache(maxsize=_CACHED_LAYOUTS)(_plan)


def _resolve_bucket(config: VisionConfig, grid: np.ndarray, pad_to: int | Bucket | None) -> Bucket:
    """The sizes to pad to; without padding, exactly those of the images."""
    exact = exact_bucket(config, grid)
    if pad_to is None:
        return exact
    if not isinstance(pad_to, Bucket):
        return bucket_of_tokens(config, grid, pad_to)
    if pad_to.tokens % config.merge_unit:
        raise ValueError(
            f"{pad_to} has tokens that are no multiple of the merge unit {config.merge_unit}"
        )
    for name in ("tokens", "windows", "frames", "frame_tokens"):
        if getattr(exact, name) > getattr(pad_to, name):
            raise ValueError(f"the images have {name} = {getattr(exact, name):,}, above {pad_to}")
    return pad_to


class _MergeUnits(NamedTuple):
    """Merge units in Hugging Face's order, each [units] int64."""

    start: np.ndarray  # of the frame, in merge units
    row: np.ndarray  # within the frame, in merge units
    column: np.ndarray
    height: np.ndarray  # of the frame, in merge units
    width: np.ndarray
    place: np.ndarray  # in window order


def _merge_units(config: VisionConfig, grid: np.ndarray) -> _MergeUnits:
    """Place every merge unit in window order, in closed form: nothing is sorted or looped over."""
    side = config.window_patches // config.spatial_merge_size  # of a window, in merge units
    heights, widths = grid[:, 1:].T // config.spatial_merge_size
    frame_units = np.repeat(heights * widths, grid[:, 0])
    frame_starts = np.cumsum(frame_units) - frame_units

    # Of the frame that each unit lies in:
    start = np.repeat(frame_starts, frame_units)
    height = np.repeat(np.repeat(heights, grid[:, 0]), frame_units)
    width = np.repeat(np.repeat(widths, grid[:, 0]), frame_units)

    row, column = np.divmod(np.arange(len(start)) - start, width)
    window_row = row - row % side  # of the window's first row and column
    window_column = column - column % side
    window_height = np.minimum(side, height - window_row)
    window_width = np.minimum(side, width - window_column)
    place = (
        start
        + window_row * width  # whole rows of windows above
        + window_height * window_column  # windows to the left in this row of windows
        + (row - window_row) * window_width  # rows above within the window
        + (column - window_column)
    )
    return _MergeUnits(start, row, column, height, width, place)


def _raster_order(
    config: VisionConfig, units: _MergeUnits, unit_order: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """From window order to rows of patches, frame by frame, [tokens] int32; padding stays."""
    merge_unit = config.merge_unit
    start = np.repeat(units.start[unit_order] * merge_unit, merge_unit)
    width = np.repeat(units.width[unit_order] * config.spatial_merge_size, merge_unit)
    row, column = positions[: len(start)].T
    order = np.arange(len(positions), dtype=np.int32)
    order[start + row * width + column] = np.arange(len(start), dtype=np.int32)
    return order


def _window_tokens(config: VisionConfig, grid: np.ndarray) -> np.ndarray:
    """Tokens of each window in window order, [windows] int64; none is empty."""
    side = config.window_patches
    windows_h, windows_w = -(-grid[:, 1:].T // side)
    counts = grid[:, 0] * windows_h * windows_w
    image = np.repeat(np.arange(len(grid)), counts)
    index = np.arange(len(image)) - (np.cumsum(counts) - counts)[image]
    row, column = np.divmod(index % (windows_h * windows_w)[image], windows_w[image])
    heights = np.minimum(side, grid[image, 1] - row * side)
    return heights * np.minimum(side, grid[image, 2] - column * side)


def _cumulative(lengths: np.ndarray, segments: int) -> np.ndarray:
    """Starts of segments and the end of the last, [segments + 1]; the segments added are empty."""
    starts = np.zeros(segments + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1 : len(lengths) + 1])
    starts[len(lengths) + 1 :] = starts[len(lengths)]
    return _frozen(starts)


def _frozen(array: np.ndarray) -> np.ndarray:
    """Make an array read-only: layouts are shared by every call with the same images."""
    array.flags.writeable = False
    return array
