"""Clips and video files to patches, equal to Hugging Face's video processors of the families."""

import collections
import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flax_models.common.config import check_name
from flax_models.common.errors import ImageError
from flax_models.common.images import (
    PATCH_DTYPES,
    ImageLike,
    as_patches,
    check_animations,
    check_pixels,
    load_frames,
    reason,
    resize,
    smart_resize,
)
from flax_models.common.video_config import VideoConfig, check_sampling, is_rate

if TYPE_CHECKING:
    import av

__all__ = ["VIDEO_SUFFIXES", "VideoLike", "check_video_file", "preprocess_videos"]

VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".ts", ".webm")

# FFmpeg's readers of these. It has more, some of which open other files and addresses, such as
# playlists: nothing that a stranger's file should set off.
_FORMATS = "avi,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mpegts"
_FORMAT_NAMES = "AVI, Matroska, MP4, MPEG-TS, QuickTime or WebM"

# What Hugging Face's processors take where nobody says it.
_ASSUMED_FPS = 24

VideoLike = str | os.PathLike[str] | np.ndarray | Sequence[ImageLike]


def preprocess_videos(
    videos: VideoLike | Sequence[VideoLike],
    config: VideoConfig | None = None,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    video_fps: float | Sequence[float | None] | None = None,
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Sample frames of videos, resize and normalise them and cut them into patches.

    Equal in every bit to Hugging Face's Qwen2VLVideoProcessor and Qwen3VLVideoProcessor
    (transformers 5.17 to 5.24) on a CPU, of the same frames. Files are decoded by PyAV, whose
    frames are also theirs by the backend "pyav"; as with torchcodec, frames are turned upright by
    what the file says of its rotation.

    Args:
        videos: a list of videos, or a single one. A video is a path to a file, a uint8 array
            [frames, height, width, 3], or a list of images of one size, each as `preprocess` takes
            them. (A list of PIL images or of arrays [height, width, 3] is a single video, a list
            of paths several.)
        config: limits, sizes, normalisation and sampling; `VideoConfig.from_pretrained` reads those
            of a checkpoint. None: the defaults, which suit Qwen2-VL and Qwen2.5-VL.
        fps: frames that are sampled of each second, within `min_frames` and `max_frames`. With
            Qwen2VLVideoProcessor their number is a multiple of `temporal_patch_size`, too.
        num_frames: frames that are sampled of each video, evenly; with Qwen2VLVideoProcessor
            rounded to a multiple of `temporal_patch_size`. Without either of the two, what the
            configuration says: Qwen3-VL and Qwen3.5 sample 2 frames a second, the others take all.
        video_fps: frames a second of what is not a file, one number for all or one for each video;
            a file knows its own. None: 24 is assumed, but not for sampling by `fps` with
            Qwen2VLVideoProcessor.
        dtype: as of `preprocess`.

    Returns:
        pixel_values: [tokens, 3 x temporal_patch_size x patch_size^2] in `dtype`, as of
            `preprocess`. The last frame is repeated until `temporal_patch_size` divides their
            number.
        grid_thw: int64 [videos, 3], the patches of each video along time, height and width.
        timestamps: of each video fp64 [grid_thw[video, 0]], in seconds: of each temporal patch the
            mean of its first and last frame's, as Qwen3-VL's processor writes them into a prompt.

    Raises:
        ImageError: no videos, or one without frames; what `preprocess` refuses of frames; a file
            that cannot be read or decoded, that has no video in it, or is no AVI, Matroska, MP4,
            MPEG-TS, QuickTime or WebM file; fewer frames than are asked for, or than
            `temporal_patch_size` where frames are sampled or counted by the limits.
        ValueError: both `fps` and `num_frames`; one of them or of `video_fps` that is not above 0;
            another number of `video_fps` than videos; `fps` where a video's own is not known;
            another dtype.
        ImportError: a file, and PyAV is not installed.
    """
    config = config or VideoConfig()
    check_sampling(fps, num_frames)
    check_name("dtype", dtype, PATCH_DTYPES)
    sampled = config.do_sample_frames or not (fps is num_frames is None)
    if fps is num_frames is None:
        fps, num_frames = config.fps, config.num_frames
    items = _as_videos(videos)
    check_animations(items, "video")
    clips, timestamps = [], []
    for number, (item, rate) in enumerate(zip(items, _rates(video_fps, len(items)), strict=True)):
        with _open(item, f"video {number}", rate) as source:
            indices = np.arange(source.total)
            if sampled:
                indices = _sample(source, config, fps, num_frames)
            new_size = functools.partial(_new_size, config, len(indices))
            clips.append(resize(source.frames(indices), source.name, new_size, "torchvision"))
        seconds = indices / (source.fps or _ASSUMED_FPS)
        timestamps.append(_of_patches(seconds, config.temporal_patch_size))
    return *as_patches(clips, config, "torchvision", dtype), timestamps


def check_video_file(path: str | os.PathLike[str], config: VideoConfig) -> None:
    """Look at a video file's header alone, for what `preprocess_videos` would refuse it for.

    Raises:
        ImageError: as of `preprocess_videos`, but for damage behind the header.
        ImportError: PyAV is not installed.
    """
    with _opened(path, os.fspath(path)) as (_, stream):
        _new_size(config, config.temporal_patch_size, stream.height, stream.width)


@dataclass(frozen=True)
class _Source:
    """A video that is open.

    Attributes:
        name: for errors.
        total: its frames, at least one.
        fps: frames a second; None where nobody knows.
        frames: from indices in ascending order to the RGB frames, each loaded when asked for.
    """

    name: str
    total: int
    fps: float | None
    frames: Callable[[np.ndarray], Iterator[Image.Image]]


def _as_videos(videos: Any) -> list[Any]:
    """A list of videos, of what may be a single one."""
    if isinstance(videos, str | os.PathLike) or _is_array(videos, 4):
        return [videos]
    if not isinstance(videos, list | tuple):
        raise ImageError(f"expected a video or a list of them, got {_described(videos)}")
    if not videos:
        raise ImageError("no videos were given")
    if all(isinstance(frame, Image.Image) or _is_array(frame, 3) for frame in videos):
        return [videos]
    for number, video in enumerate(videos):
        if not isinstance(video, str | os.PathLike | list | tuple) and not _is_array(video, 4):
            raise ImageError(
                f"video {number} must be a path, an array [frames, height, width, 3] or a list of "
                f"images, got {_described(video)}"
            )
    return list(videos)


def _is_array(value: Any, axes: int) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == axes


def _described(value: Any) -> str:
    shape = f" {list(value.shape)}" if isinstance(value, np.ndarray) else ""
    return type(value).__name__ + shape


def _rates(video_fps: Any, videos: int) -> list[float | None]:
    """Frames a second of each video, of what may be one number for all."""
    rates = list(video_fps) if isinstance(video_fps, list | tuple) else [video_fps] * videos
    if len(rates) != videos:
        raise ValueError(f"video_fps has {len(rates)} numbers, and there are {videos} videos")
    for rate in rates:
        if rate is not None and not is_rate(rate):
            raise ValueError(f"video_fps must be finite numbers above 0, got {rate!r}")
    return rates


@contextlib.contextmanager
def _open(item: Any, name: str, rate: float | None) -> Iterator[_Source]:
    """Open a file, or take frames as they are."""
    if not isinstance(item, str | os.PathLike):
        if len(item) == 0:
            raise ImageError(f"{name} has no frames")
        yield _Source(
            name, len(item), rate, lambda indices: load_frames([item[i] for i in indices], name)
        )
        return
    name = f"{name} ({os.fspath(item)})"
    # Headers may state no number of frames or a wrong one. What is counted is not decoded.
    with _opened(item, name) as (container, stream), _reading(name):
        total = sum(packet.size > 0 and not packet.is_discard for packet in container.demux(stream))
        rate = float(stream.average_rate) if stream.average_rate else None
    if total == 0:
        raise ImageError(f"{name} has no frames")
    with _opened(item, name) as (container, stream):
        stream.thread_type = "AUTO"
        yield _Source(
            name, total, rate, lambda indices: _decode(container, stream, indices, total, name)
        )


@contextlib.contextmanager
def _opened(
    path: str | os.PathLike[str], name: str
) -> Iterator[tuple["av.container.InputContainer", "av.VideoStream"]]:
    """A file and the first video in it; what goes wrong with it names it."""
    try:
        import av
    except ModuleNotFoundError as error:
        if error.name != "av":
            raise
        raise ImportError("video files need PyAV: pip install '.[video]' in the clone") from error
    options = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}
    with contextlib.ExitStack() as stack:
        with _reading(name):
            try:
                container = stack.enter_context(av.open(os.fspath(path), options=options))
            except ValueError:
                raise ImageError(f"it is no {_FORMAT_NAMES} file") from None
            if not container.streams.video:
                raise ImageError("it has no video in it")
            stream = container.streams.video[0]
            check_pixels(stream.height, stream.width)
        yield container, stream


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Have errors name the file; FFmpeg raises almost anything on damaged ones."""
    try:
        yield
    except Exception as error:
        raise ImageError(f"cannot read {name}: {reason(error)}") from None


def _decode(
    container: "av.container.InputContainer",
    stream: "av.VideoStream",
    indices: np.ndarray,
    total: int,
    name: str,
) -> Iterator[Image.Image]:
    """Frames of a file, upright; each is converted when it is asked for."""
    remaining = collections.deque(indices.tolist())
    decoded, size = 0, None
    with _reading(name):
        for frame in container.decode(stream):
            decoded += 1
            if remaining[0] != decoded - 1:
                continue
            check_pixels(frame.height, frame.width)  # the header's may be others
            size = size or (frame.width, frame.height)
            if (frame.width, frame.height) != size:
                raise ImageError(
                    f"its frames must have one size; (width, height) is {size}, then "
                    f"{(frame.width, frame.height)}"
                )
            upright = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
            image = Image.fromarray(np.ascontiguousarray(upright))
            while remaining and remaining[0] == decoded - 1:
                remaining.popleft()
                yield image
            if not remaining:
                return
        raise ImageError(f"only {decoded} of its {total} frames can be decoded")


def _sample(
    source: _Source, config: VideoConfig, fps: float | None, num_frames: int | None
) -> np.ndarray:
    """Indices of frames in ascending order, as Hugging Face's processors choose them."""
    total = source.total
    if num_frames is not None and num_frames > total:
        raise ImageError(f"{source.name} has {_frames(total)}, fewer than num_frames {num_frames}")
    if config.processor == "Qwen3VLVideoProcessor":
        if num_frames is None and fps is None:
            num_frames = min(max(total, config.min_frames), config.max_frames)
        elif num_frames is None:
            asked = int(total / (source.fps or _ASSUMED_FPS) * fps)
            num_frames = min(max(asked, config.min_frames), config.max_frames, total)
        return np.linspace(0, total - 1, num_frames).round().astype(np.int64)
    if num_frames is None and fps is None:
        return np.arange(total)
    step = config.temporal_patch_size
    if num_frames is not None:
        num_frames = round(num_frames / step) * step
    elif source.fps is None:
        raise ValueError(f"sampling {source.name} by fps needs its own: give video_fps")
    else:
        asked = max(total / source.fps * fps, config.min_frames)
        num_frames = math.floor(min(asked, config.max_frames, total) / step) * step
    if not 0 < num_frames <= total:
        raise ImageError(
            f"{source.name} has {_frames(total)}, of which {num_frames} would be sampled: only "
            f"multiples of temporal_patch_size {step} are"
        )
    # In fp32, as they are counted there; fp64 gives other frames where a product is nearly whole.
    return np.float32(np.arange(num_frames) * (total / num_frames)).astype(np.int64)


def _new_size(config: VideoConfig, frames: int, height: int, width: int) -> tuple[int, int]:
    """Height and width that so many frames of a clip are resized to."""
    factor, step = config.patch_size * config.merge_size, config.temporal_patch_size
    tokens = config.max_video_tokens * factor**2
    least = int(config.min_pixels * 1.05)
    limit = config.max_pixels
    if config.processor == "Qwen2VLVideoProcessor":
        if config.cap_pixels_per_frame:
            limit = max(min(limit, int(tokens * 0.9) * step // frames), least)
        return smart_resize(height, width, factor, config.min_pixels, limit)
    if frames < step:
        raise ImageError(f"it has {_frames(frames)}, fewer than temporal_patch_size {step}")
    if config.cap_pixels_per_frame:
        limit = max(min(tokens, limit // frames), least) * frames
    if height < factor or width < factor:
        enlarge = max(factor / height, factor / width)
        height, width = int(height * enlarge), int(width * enlarge)
    counted = {"num_frames": frames, "temporal_factor": step}
    return smart_resize(height, width, factor, config.min_pixels, limit, **counted)


def _frames(number: int) -> str:
    return f"{number} frame" + "s" * (number != 1)


def _of_patches(seconds: np.ndarray, temporal_patch: int) -> np.ndarray:
    """From the times of frames to those of temporal patches."""
    repeated = seconds[-1:].repeat(-len(seconds) % temporal_patch)
    by_patch = np.concatenate([seconds, repeated]).reshape(-1, temporal_patch)
    return (by_patch[:, 0] + by_patch[:, -1]) / 2
