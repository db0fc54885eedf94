"""The first stage: images and videos become patches, in a pool of processes beside the towers."""

import contextlib
import dataclasses
import functools
import importlib
import os
import pickle
import re
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
import pyarrow as pa
from PIL import Image

from flax_models.common.errors import ImageError
from flax_models.common.image_config import ImageConfig
from flax_models.common.images import preprocess
from flax_models.common.video_config import VideoConfig
from flax_models.common.videos import VIDEO_SUFFIXES, preprocess_videos

# A larger image file is read no further: whatever it holds, one worker's memory is not for it.
_MOST_BYTES = 1 << 29

# Attempts to read a file, and seconds before the second: storage that is shared has bad moments.
_ATTEMPTS, _PAUSE = 3, 0.2

# What the tower's stage takes, beside the columns of the source.
COLUMNS = pa.schema(
    [
        ("patches", pa.large_binary()),
        ("grid_thw", pa.list_(pa.int64(), 3)),
        ("timestamps", pa.list_(pa.float64())),
        ("error", pa.string()),
    ]
)


class Report:
    """What the stages tell of their work; this one tells nobody, `progress.Reporter` the driver."""

    def __call__(self, **numbers: float) -> None:
        """Add to what was done: see `Progress.numbers`."""

    def attempt(self, rows: str) -> int:
        """How often these rows were begun, this time included."""
        return 1


@dataclass(frozen=True)
class Preprocessing:
    """How files become patches.

    Attributes:
        images, videos: the checkpoint's, or with limits of the caller's own.
        fps: frames that are taken of each second of a video.
        dtype: the tower's, in which patches travel: it would round them to that itself.
        strict: raise for what is refused.
    """

    images: ImageConfig
    videos: VideoConfig
    fps: float
    dtype: str
    strict: bool = False

    @classmethod
    def of(
        cls,
        checkpoint: str | os.PathLike[str],
        *,
        dtype: str,
        fps: float,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        strict: bool = False,
    ) -> "Preprocessing":
        """The checkpoint's settings, with limits for images in their place if they are given.

        Raises:
            CheckpointError, ValueError: as of `ImageConfig.from_pretrained`.
        """
        limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        images = dataclasses.replace(ImageConfig.from_pretrained(checkpoint), **given)
        return cls(images, VideoConfig.from_pretrained(checkpoint), fps, dtype, strict)

    def __call__(self, item: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Patches, grid [3] and timestamps, None of an image, of one file.

        Args:
            item: its path, or its content as bytes.

        Raises:
            ImageError: why it is refused.
            ImportError: it is a video, and PyAV is not installed.
        """
        if isinstance(item, dict):  # as Hugging Face's data sets hold images
            item = item["path"] if item.get("bytes") is None else item["bytes"]
        if item is None:
            raise ImageError("there is no image")
        with warnings.catch_warnings():  # what Pillow warns of is an error here
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if isinstance(item, str) and Path(item).suffix.lower() in VIDEO_SUFFIXES:
                _check_kind(item)
                return self._video(item)
            content = _read(item) if isinstance(item, str) else item
            if _is_video(content):
                with tempfile.NamedTemporaryFile() as file:  # PyAV may seek in it
                    file.write(content)
                    file.flush()
                    return self._video(file.name)
            pixel_values, grid_thw = preprocess(content, self.images, dtype=self.dtype)
        return pixel_values, grid_thw[0], None

    def _video(self, path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        options = {"fps": self.fps, "dtype": self.dtype}
        pixel_values, grid_thw, timestamps = preprocess_videos(path, self.videos, **options)
        return pixel_values, grid_thw[0], timestamps[0]


def add_patches(
    table: pa.Table, image: str, preprocessing: Preprocessing, report: Report
) -> Iterator[pa.Table]:
    """Put the patches of each row's image in its place; a file that is refused gets its reason.

    Rows that are begun again, as the process died over them, have each file read in a process of
    its own, whose death is a reason too.

    Args:
        table: any rows.
        image: the column of paths, or of files' content.
        preprocessing: how.
        report: told of "read" files and the "reading" seconds that they took, and asked by the
            first row's "id" whether it was begun before.

    Yields:
        Tables of one row: Ray cuts blocks of any number of patches from them.

    Raises:
        ImageError: as of `preprocessing`, if that is strict; named by the row's "id" if it has one.
        ValueError: there is no such column.
    """
    check_column(table.column_names, image)
    _load_pytorch()
    rest = table.drop_columns([image])
    seconds = 0.0
    named = "id" in rest.column_names
    again = named and table.num_rows > 0 and report.attempt(rest["id"][0].as_py()) > 1
    read = functools.partial(_read_apart, preprocessing) if again else preprocessing
    for row, item in enumerate(table[image]):
        start = time.perf_counter()
        patches = grid_thw = timestamps = error = None
        try:
            patches, grid_thw, timestamps = read(item.as_py())
        except (ValueError, MemoryError) as refused:  # the one also of a video without a rate
            error = _reason(refused)
            if preprocessing.strict:
                name = rest["id"][row].as_py() if named else f"row {row}"
                raise ImageError(f"{name}: {error}") from None
        # A buffer instead of bytes: it is not copied.
        buffer = None if patches is None else pa.py_buffer(patches.view(np.uint8).reshape(-1))
        values = (buffer, grid_thw, timestamps, error)
        columns = [_one(value, field.type) for value, field in zip(values, COLUMNS, strict=True)]
        added = rest.slice(row, 1)
        for field, column in zip(COLUMNS, columns, strict=True):
            added = added.append_column(field, column)
        seconds += time.perf_counter() - start
        yield added
    report(read=table.num_rows, reading=seconds)


@functools.cache
def _load_pytorch() -> None:
    """Load it where it is installed, as `resize_bicubic` is much faster beside it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")


def check_column(names: Sequence[str], image: str) -> None:
    """Refuse a column that is not there."""
    if image not in names:
        raise ValueError(f"there is no column {image!r}, only {', '.join(names) or 'none'}")


def _one(value: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(value, pa.Buffer):
        offsets = pa.py_buffer(np.array([0, value.size], np.int64))
        return pa.Array.from_buffers(kind, 1, [None, offsets, value])
    return pa.array([value], kind)


def _read_apart(preprocessing: Preprocessing, item: Any) -> tuple:
    """Call it in another process.

    Raises:
        ValueError, MemoryError: as it does, and if the process dies.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import answer; answer()"],
        input=pickle.dumps((preprocessing, item)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode:
        raise ImageError(f"the process that read it ended with status {done.returncode}")
    result = pickle.loads(done.stdout)
    if isinstance(result, Exception):
        raise result
    return result


def answer() -> None:
    """What the other process does."""
    preprocessing, item = pickle.load(sys.stdin.buffer)
    try:
        result = preprocessing(item)
    except (ValueError, MemoryError) as error:
        result = error
    pickle.dump(result, sys.stdout.buffer)


def _read(path: str) -> bytes:
    """A file's content; what fails is tried again, but for what no second attempt changes."""
    _check_kind(path)
    for attempt in range(_ATTEMPTS):
        try:
            with open(path, "rb") as file:
                content = file.read(_MOST_BYTES + 1)
        except OSError as error:
            if attempt == _ATTEMPTS - 1 or isinstance(error, PermissionError):
                raise ImageError(f"cannot be read: {error.strerror}") from None
            time.sleep(_PAUSE * 10**attempt)
        else:
            if len(content) > _MOST_BYTES:
                raise ImageError(f"it has more than {_MOST_BYTES:,} bytes")
            return content
    raise AssertionError


def _check_kind(path: str) -> None:
    """Refuse what is no file: a pipe would be waited for."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise ImageError(getattr(error, "strerror", None) or str(error)) from None
    if not stat.S_ISREG(mode):
        raise ImageError("it is no regular file")


def _is_video(content: bytes) -> bool:
    """Whether these are the first bytes of a container of videos, and of no image."""
    if content[4:8] == b"ftyp":
        return content[8:11] not in (b"avi", b"hei", b"mif", b"msf")  # AVIF and its like
    return content[:4] == b"\x1aE\xdf\xa3" or (content[:4] == b"RIFF" and content[8:12] == b"AVI ")


def _reason(error: Exception) -> str:
    """Without the number and the file that it had in a list of one."""
    reason = str(error) or "out of memory"
    return re.sub(r"^(cannot read )?(image|video) 0( \([^)]*\))?:? ", "", reason)
