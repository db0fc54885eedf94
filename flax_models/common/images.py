"""Images to patches, equal to Hugging Face's image processor of the Qwen-VL families."""

import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from flax_models.common.config import check_name
from flax_models.common.errors import ImageError
from flax_models.common.image_config import ImageConfig
from flax_models.common.resample import resize_bicubic

__all__ = ["ImageError", "preprocess", "smart_resize"]

_MAX_ASPECT_RATIO = 200
# Pillow's own limit for decompression bombs, but as an error instead of a warning.
_MAX_SOURCE_PIXELS = 89_478_485

# What photographs and drawings come in. Pillow reads more, some of it by starting other programs
# (EPS by Ghostscript): nothing that a stranger's file should set off.
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")

# Pillow's modes of 16-bit and 32-bit integers and of fp32.
_DEEP_MODES = ("I", "F")

# Patches that are looked up together, which stay in a cache.
_LOOKED_UP = 512

# From an EXIF orientation to upright; the values are those of the tag in TIFF 6.0.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

ImageLike = Image.Image | np.ndarray | str | os.PathLike[str] | bytes
Backend = Literal["torchvision", "pil"]
PATCH_DTYPES = ("float32", "bfloat16", "float16")


def preprocess(
    images: ImageLike | Sequence[ImageLike | Sequence[ImageLike]],
    config: ImageConfig | None = None,
    *,
    backend: Backend = "torchvision",
    dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """Resize, normalise and cut images and clips into patches.

    Equal in every bit to Hugging Face's Qwen2VLImageProcessor of the same backend, but for images
    in Pillow's mode RGBa, which no file opens in. A clip's limits are each frame's own;
    `preprocess_videos` has those of Hugging Face's processors of videos. What is transparent is
    laid over white; transformers 5.17 and older, and the function by which 5.23 loads files, show
    the colours beneath instead.

    Args:
        images: a list of images and clips, or a single one. An image is a PIL image of at most 8
            bits a channel, a path to one, the bytes of its file, or a uint8 array
            [height, width, 3]; a clip is a list of images of one size, its frames, or a uint8 array
            [frames, height, width, 3]. (The
            outermost list is never a clip: write [frames] for a single clip, also for those of an
            animation. Of its file only the first is taken, of a PIL image the one that it is at;
            `PIL.ImageSequence.all_frames` copies them all.) A clip's last frame is repeated
            until `temporal_patch_size` divides their number; an image is a clip of one frame.
            Images from files are turned upright by their EXIF orientation, as Hugging Face loads
            them.
        config: limits, sizes and normalisation; `ImageConfig.from_pretrained` reads those of a
            checkpoint. None: the defaults, which suit Qwen2-VL and Qwen2.5-VL.
        backend: whose arithmetic: "torchvision", Hugging Face's default where it is installed, as
            on a CPU; or "pil", Pillow's, which is faster. They differ in the last bit, and in
            resized images some pixels by a grey level; where Pillow 13 resizes columns before rows,
            beside sharp edges by ten and more. Neither needs torchvision; Pillow decodes for both.
        dtype: what pixel values are rounded to: "float32", which keeps them, or "bfloat16" or
            "float16", as a tower of that dtype would round them.

    Returns:
        pixel_values: [tokens, 3 x temporal_patch_size x patch_size^2] in `dtype`, a patch a row, in
            the order of channels, frames, rows, columns; rows in Hugging Face's order (see
            `layout`).
        grid_thw: int64 [images, 3], the patches of each image or clip along time, height, width.

    Raises:
        ImageError: no images; an unreadable file, one of a format other than AVIF, BMP, GIF, JPEG,
            JPEG 2000, MPO, PNG, PPM, TIFF and WebP; more than 89 million pixels; grey levels of
            more than 8 bits, of which Hugging Face makes white all from 255 up (of colours Pillow
            itself takes the upper 8); an array of another shape or dtype; frames of different
            sizes; sides whose ratio passes 200; an animation in the place of several of its frames.
        ValueError: another backend or dtype.
    """
    check_name("dtype", dtype, PATCH_DTYPES)
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be 'torchvision' or 'pil', got {backend!r}")
    config = config or ImageConfig()
    items = _as_items(images)
    if not items:
        raise ImageError("no images were given")
    check_animations(items)
    clips = []
    for number, item in enumerate(items):
        name = f"image {number}"
        frames = load_frames(item, name)
        clips.append(resize(frames, name, functools.partial(_new_size, config), backend))
    return as_patches(clips, config, backend, dtype)


def check_file(path: str | os.PathLike[str], config: ImageConfig) -> None:
    """Look at an image file's header alone, for what `preprocess` would refuse it for.

    Raises:
        ImageError: as of `preprocess`, but for damage behind the header.
    """
    try:
        with Image.open(path, formats=_readable_formats()) as opened:
            _check_header(opened)
            _new_size(config, opened.height, opened.width)
    except Exception as error:  # as decoders do, on damaged files
        raise ImageError(reason(error)) from None


def smart_resize(
    height: int,
    width: int,
    factor: int = 28,
    min_pixels: int = 56 * 56,
    max_pixels: int = 28 * 28 * 1280,
    *,
    num_frames: int = 1,
    temporal_factor: int = 1,
) -> tuple[int, int]:
    """Choose the size that an image is resized to, by the rule of Qwen2-VL.

    Sides become multiples of `factor` and the aspect ratio changes as little as possible. The area
    comes to lie between limits that are a factor of four or more apart; only where a side is a
    single `factor` long it may pass `max_pixels`.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        factor: pixels along a side of a merge unit.
        min_pixels: lower limit on the new area.
        max_pixels: upper limit on the new area.
        num_frames: above 1 the limits are Qwen3-VL's, on the areas of a clip's frames together.
        temporal_factor: frames count in multiples of it, to the nearest (halves to the even one).

    Returns:
        (height, width) in pixels.

    Raises:
        ImageError: a side below 1 pixel, or sides whose ratio passes 200.
    """
    if height < 1 or width < 1:
        raise ImageError(f"an image must have pixels, got {height} x {width} (height x width)")
    ratio = max(height, width) / min(height, width)
    if ratio > _MAX_ASPECT_RATIO:
        raise ImageError(
            f"sides of {height} x {width} pixels (height x width) have the ratio {ratio:.0f}; "
            f"at most {_MAX_ASPECT_RATIO} is supported"
        )
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    counted = round(num_frames / temporal_factor) * temporal_factor
    if counted * new_height * new_width > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _as_items(images: Any) -> list[Any]:
    """A list of images and clips, of what may be a single one."""
    if isinstance(images, Image.Image | str | os.PathLike | bytes | np.ndarray):
        return [images]
    if isinstance(images, list | tuple):
        return list(images)
    raise ImageError(f"expected an image, a clip or a list of them, got {_kind(images)}")


def check_animations(items: list[Any], kind: str = "image") -> None:
    """Refuse one object for several frames of an animation, as Pillow's iterator returns it.

    All would be of the frame that it is at. A still image may be repeated, and so may an animation
    at its first frame as several images, for which files such as photographs with a preview pass.
    """
    seen_in: dict[int, int] = {}
    for number, item in enumerate(items):
        for frame in item if isinstance(item, list | tuple) else [item]:
            if not isinstance(frame, Image.Image):
                continue
            before = seen_in.get(id(frame))
            if before is not None and (frame.tell() or (before == number and _is_animated(frame))):
                raise ImageError(
                    f"{kind} {number} repeats an animation, of which each is frame {frame.tell()}: "
                    f"pass copies of its frames, as PIL.ImageSequence.all_frames makes them"
                )
            seen_in[id(frame)] = number


def _is_animated(image: Image.Image) -> bool:
    try:
        return getattr(image, "is_animated", False)
    except Exception:  # as decoders do, on damaged and closed files
        return True


def resize(
    frames: Iterable[Image.Image],
    name: str,
    new_size: Callable[[int, int], tuple[int, int]],
    backend: Backend,
) -> list[np.ndarray]:
    """Frames of one size, each resized before the next is asked for: a clip's may fill memory.

    Args:
        frames: RGB, at least one.
        name: of their image or clip, for an error of `new_size`.
        new_size: from their height and width to those they are resized to.
        backend: as of `preprocess`.

    Returns:
        uint8 [3, height, width] each.
    """
    resized: list[np.ndarray] = []
    for frame in frames:
        if not resized:
            try:
                height, width = new_size(frame.height, frame.width)
            except ImageError as error:
                raise ImageError(f"{name}: {error}") from None
        if backend == "pil":
            frame = frame.resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(frame).transpose(2, 0, 1)
        resized.append(resize_bicubic(pixels, height, width))
    return resized


def _new_size(config: ImageConfig, height: int, width: int) -> tuple[int, int]:
    """Height and width that an image is resized to."""
    factor = config.patch_size * config.merge_size
    return smart_resize(height, width, factor, config.min_pixels, config.max_pixels)


def load_frames(item: Any, name: str) -> Iterator[Image.Image]:
    """RGB frames of one image or clip, all of one size, each loaded when it is asked for."""
    if isinstance(item, np.ndarray) and item.ndim == 4:
        item = list(item)
    if not isinstance(item, list | tuple):
        yield _load_frame(item, name)
        return
    if not item:
        raise ImageError(f"{name} is a clip without frames")
    size = None
    for i, frame in enumerate(item):
        loaded = _load_frame(frame, f"frame {i} of {name}")
        size = size or loaded.size
        if loaded.size != size:
            raise ImageError(
                f"frames of {name} must have one size; (width, height) of frame 0 is {size}, "
                f"of frame {i} {loaded.size}"
            )
        yield loaded


def _load_frame(frame: Any, name: str) -> Image.Image:
    if isinstance(frame, np.ndarray):
        return _from_array(frame, name)
    if isinstance(frame, str | os.PathLike):
        name = f"{name} ({os.fspath(frame)})"
    elif isinstance(frame, bytes):
        frame = io.BytesIO(frame)
    elif not isinstance(frame, Image.Image):
        raise ImageError(
            f"{name} must be a PIL image, a path, bytes or a NumPy array, got {_kind(frame)}"
        )
    try:
        if isinstance(frame, Image.Image):
            return _to_rgb(frame)
        with Image.open(frame, formats=_readable_formats()) as opened:
            return _to_rgb(opened, upright=True)
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise ImageError(f"cannot read {name}: {reason(error)}") from None


def reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # it names an object where there is no file
        return "cannot identify image file"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@functools.cache
def _readable_formats() -> tuple[str, ...]:
    """Those of _FORMATS that this Pillow was built with."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or array.size == 0:
        raise ImageError(
            f"{name} must be a uint8 array [height, width, 3] (or [frames, height, width, 3]), "
            f"got {array.dtype} {list(array.shape)}"
        )
    return Image.fromarray(array)


def _check_header(image: Image.Image) -> None:
    """Refuse an image that should not be decoded."""
    check_pixels(image.height, image.width)
    if image.mode.startswith(_DEEP_MODES):  # Pillow would cut the values off at 255
        raise ImageError(
            f"it has mode {image.mode}, more than 8 bits a channel: scale it to 0..255 first"
        )


def check_pixels(height: int, width: int) -> None:
    """Refuse what would take too much memory."""
    if height * width > _MAX_SOURCE_PIXELS:
        raise ImageError(f"it has {height * width:,} pixels, more than {_MAX_SOURCE_PIXELS:,}")


def _to_rgb(image: Image.Image, upright: bool = False) -> Image.Image:
    """Decode an image; `upright`: turned by its EXIF orientation."""
    _check_header(image)
    if upright:
        image = _turn_upright(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _turn_upright(image: Image.Image) -> Image.Image:
    """Turn a file's image by its EXIF orientation; Pillow's own function rewrites all of the EXIF.

    That fails on tags which say nothing of the pixels. An EXIF that cannot be read says nothing of
    the orientation either.
    """
    image.load()  # a TIFF file is turned by this already
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # as decoders do, on damaged files
        return image
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def as_patches(
    clips: Sequence[Sequence[np.ndarray]], config: ImageConfig, backend: Backend, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Normalise resized frames [3, height, width] of each clip and cut them into patches.

    Returns:
        pixel_values and grid_thw, as `preprocess` returns them.
    """
    patch, temporal_patch = config.patch_size, config.temporal_patch_size
    grids = []
    for clip in clips:
        height, width = clip[0].shape[1:]
        grids.append((-(-len(clip) // temporal_patch), height // patch, width // patch))
    grid_thw = np.array(grids, dtype=np.int64)
    ends = np.cumsum(grid_thw.prod(axis=1))
    together = 1 + (patch % 2 == 0)
    tables = _tables(config.image_mean, config.image_std, backend, dtype, together)
    patches = np.empty((ends[-1], 3, temporal_patch, patch**2 // together), tables.dtype)
    for clip, grid, part in zip(clips, grids, np.split(patches, ends[:-1]), strict=True):
        _cut_clip(clip, config, tables, part.reshape(grid[0], -1, *part.shape[1:]))
    return patches.view(dtype).reshape(len(patches), -1), grid_thw


def _cut_clip(
    clip: Sequence[np.ndarray], config: ImageConfig, tables: np.ndarray, patches: np.ndarray
) -> None:
    """Write frames [3, height, width] into [time, tokens, 3, temporal_patch, words of a patch]."""
    patch, merge = config.patch_size, config.merge_size
    height, width = (size // patch for size in clip[0].shape[1:])
    axes = (3, height // merge, merge, patch, width // merge, merge, patch)
    for number in range(len(patches) * config.temporal_patch_size):
        time, index = divmod(number, config.temporal_patch_size)
        place = patches[time, :, :, index]
        if number >= len(clip):  # the last frame is repeated
            place[...] = patches[time, :, :, index - 1]
            continue
        # By merge unit's row and column, row and column within it: bytes, which are soon moved.
        cut = np.ascontiguousarray(clip[number].reshape(axes).transpose(1, 4, 2, 5, 0, 3, 6))
        pixels = cut.reshape(-1, 3, patch**2).view(f"u{patch**2 // place.shape[-1]}")
        for start, channel in itertools.product(range(0, len(pixels), _LOOKED_UP), range(3)):
            rows = slice(start, start + _LOOKED_UP)
            # Nothing is out of range; NumPy need not look, as it would by default.
            place[rows, channel] = tables[channel].take(pixels[rows, channel], mode="clip")


@functools.lru_cache(maxsize=8)
def _tables(
    mean: tuple[float, ...], std: tuple[float, ...], backend: Backend, dtype: str, together: int
) -> np.ndarray:
    """What a channel's pixels are normalised to, some neighbours together.

    Returns:
        [3, 256**together]: by the integer that their bytes are, the one that their values are.
    """
    bytes_ = np.arange(256**together, dtype=f"u{together}").view(np.uint8).reshape(-1, together)
    values = _normalise(np.arange(256, dtype=np.uint8), mean, std, backend).astype(dtype)
    return values.take(bytes_, axis=1).view(f"u{together * values.itemsize}")[..., 0]


def _normalise(
    pixels: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...], backend: Backend
) -> np.ndarray:
    """Pixels [n] in each channel as fp32 [3, n], by Hugging Face's own steps.

    With Pillow values are scaled in fp64 and rounded to fp32, then shifted and divided in fp32;
    with torchvision, mean and deviation are scaled instead.
    """
    shift, scale = (np.float32(each)[:, None] for each in (mean, std))
    if backend == "pil":
        return ((pixels * (1 / 255)).astype(np.float32) - shift) / scale
    return (pixels.astype(np.float32) - shift * np.float32(255)) / (scale * np.float32(255))


def _kind(value: Any) -> str:
    return type(value).__name__
