"""`python -m flax_models`: embeddings of image and video files by a checkpoint's vision tower."""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.numpy import save

import flax_models
from flax_models import ImageConfig, ImageError, VideoConfig, preprocess, preprocess_videos
from flax_models.arguments import positive, rate
from flax_models.common.images import check_file
from flax_models.common.layout import OUTPUTS, output_rows
from flax_models.common.videos import VIDEO_SUFFIXES, check_video_file

_DESCRIPTION = """\
Compute what a vision tower of Qwen's makes of image and video files: of Qwen2-VL, Qwen2.5-VL,
Qwen3-VL, Qwen3.5, Qwen2.5-Omni or Qwen3-Omni. Videos are files that end in
{suffixes}; they need PyAV.

FILE gets, for file number i of the command line, what --output asks for, fp32:

"embeddings_<i>", as the language model would receive them, [tokens, out_hidden_size], row after row
of the image's merged patches (28 x 28 pixels, from Qwen3 on 32 x 32), and with DeepStack (Qwen3-VL,
Qwen3-Omni) also "deepstack_<i>", [features, tokens, out_hidden_size];
"patches_<i>", the encoder's own features before they are merged, [patches, hidden_size], row after
row of patches;
"pooled_<i>", the mean of those, [1, hidden_size];
and of a video "timestamps_<i>", fp64 [temporal patches], in seconds.

And "grid_thw", int64 [files, 3], each file's temporal patches, rows and columns of patches; and the
files' names: in .npz as the array "images", in .safetensors as the JSON list "images" of the
metadata. FILE appears only when it is complete.

`python -m flax_models encode` is for data sets of any size.
""".format(suffixes=", ".join(VIDEO_SUFFIXES))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None: those of the process.

    Returns:
        The exit status: 0, or 2 after one sentence on standard error about what is wrong.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # FILE's name may hold what it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["encode"]:
        return _encode_data_set(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check_output(options.out)
        preprocessing = _Preprocessing.of(options)
        _check_files(options.images, preprocessing)
        tower = flax_models.load_vision_tower(
            options.checkpoint, options.dtype, device=options.device
        )
        arrays = _encode_files(tower, preprocessing, options)
        _write(options.out, arrays, [str(path) for path in options.images])
        rows = sum(len(rows) for name, rows in arrays.items() if name.startswith(options.output))
        files = _counted(options.images)
        print(f"wrote {rows:,} {_nouns(options.output)} of {files} to {options.out}", flush=True)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        return _refuse(parser.prog, str(error) or "out of memory")
    except RuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):  # XLA: a device's memory is used up
            raise
        return _refuse(parser.prog, str(error).splitlines()[0])
    return 0


def _encode_data_set(arguments: list[str]) -> int:
    """The command that Ray is needed for."""
    try:
        from flax_models.ray_data.command import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("ray", "pyarrow"):
            raise
        needed = "Ray Data: pip install '.[ray]' in the clone"
        return _refuse("python -m flax_models encode", f"this command needs {needed}")
    return main(arguments)


def _refuse(program: str, sentence: str) -> int:
    print(f"{program}: error: {sentence}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flax_models",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "images", nargs="+", type=Path, metavar="SOURCE", help="an image or video file"
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="a checkpoint in Hugging Face's format: a whole vision-language model or its tower",
    )
    parser.add_argument(
        "--out", required=True, type=_output_path, metavar="FILE", help=".safetensors or .npz"
    )
    parser.add_argument(
        "--output",
        default="embeddings",
        choices=OUTPUTS,
        help="what to compute (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="what the tower computes in; images that pass the range of float16 are refused "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="a platform such as cuda or cpu (default: JAX's choice)"
    )
    for flag, effect in (("--min-pixels", "enlarge smaller"), ("--max-pixels", "shrink larger")):
        parser.add_argument(
            flag,
            type=positive,
            metavar="N",
            help=f"{effect} images (default: what the checkpoint says, else its family)",
        )
    parser.add_argument(
        "--fps",
        type=rate,
        default=2.0,
        metavar="N",
        help="frames to take of each second of a video (default: %(default)g)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        default=16384,
        metavar="N",
        help="encode images together up to so many patches, which bounds the memory that a call "
        "takes (default: %(default)s)",
    )
    return parser


def _output_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _WRITERS:
        raise argparse.ArgumentTypeError(f"{text} must end in {' or '.join(_WRITERS)}")
    return path


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_SUFFIXES


def _counted(paths: Sequence[Path]) -> str:
    """How many images and videos there are, in words."""
    videos = sum(map(_is_video, paths))
    counts = {"image": len(paths) - videos, "video": videos}
    return " and ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n)


@dataclass(frozen=True)
class _Preprocessing:
    """How files become patches; `videos` is None where there are none."""

    images: ImageConfig
    videos: VideoConfig | None
    fps: float

    @classmethod
    def of(cls, options: argparse.Namespace) -> "_Preprocessing":
        """The checkpoint's settings with the limits of the command line."""
        limits = {"min_pixels": options.min_pixels, "max_pixels": options.max_pixels}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        images = dataclasses.replace(ImageConfig.from_pretrained(options.checkpoint), **given)
        videos = None
        if any(map(_is_video, options.images)):
            videos = VideoConfig.from_pretrained(options.checkpoint)
        return cls(images, videos, options.fps)

    def check(self, path: Path) -> None:
        """Look at a file's header."""
        with _reading(path):
            if _is_video(path):
                check_video_file(path, self.videos)
            else:
                check_file(path, self.images)

    def __call__(self, path: Path) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]:
        """Pixel values, grid_thw and the timestamps, which an image has none of."""
        with _reading(path):
            if _is_video(path):
                return preprocess_videos(path, self.videos, fps=self.fps)
            return *preprocess(path, self.images), [None]


def _check_files(paths: Sequence[Path], preprocessing: _Preprocessing) -> None:
    """Find now what would otherwise come to light after minutes of work."""
    for path in paths:
        noun = "a video" if _is_video(path) else "an image"
        if not path.exists():
            raise ImageError(f"no such {noun.split()[1]} file: {path}")
        if not path.is_file():
            kind = "directory" if path.is_dir() else "pipe or device"
            raise ImageError(f"expected {noun} file, got a {kind}: {path}")
    for path in paths:
        preprocessing.check(path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Have errors name the file, which `preprocess` may see as "image 0" alone."""
    try:
        with warnings.catch_warnings():  # what Pillow warns of is an error here
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None


def _check_output(out: Path) -> None:
    """Find now that the result could not be written."""
    if not out.parent.is_dir():
        raise ValueError(f"no such directory for --out: {out.parent}")
    if out.is_dir():
        raise ValueError(f"--out is a directory: {out}")
    try:
        _unfinished(out).touch()
        _unfinished(out).unlink()
    except OSError as error:
        raise ValueError(f"cannot write --out {out}: {error.strerror}") from None


def _encode_files(
    tower: "flax_models.VisionTower", preprocessing: _Preprocessing, options: argparse.Namespace
) -> dict[str, np.ndarray]:
    """Encode every image and video: the arrays to be written by their names."""
    output = options.output
    bar = TextColumn("encoding files"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    console.quiet = not console.is_terminal  # before 14.3 rich ends a line of a disabled bar too
    outputs: list[np.ndarray] = []
    deepstack: list[np.ndarray] = []
    grids = []
    timestamps: list[np.ndarray | None] = []
    with Progress(*bar, console=console, disable=console.quiet) as progress:
        task = progress.add_task("", total=len(options.images))
        for pixel_values, grid_thw, seconds in _batches(preprocessing, options):
            result = tower(pixel_values, grid_thw, output=output)
            if bad := tower.non_finite_images(result, grid_thw, output=output):
                raise _not_finite(options.images[len(outputs) + bad[0]], tower, output)
            rows, features = result if isinstance(result, tuple) else (result, ())
            ends = np.cumsum(output_rows(tower.config, grid_thw, output))
            outputs += np.split(np.asarray(rows, np.float32), ends[:-1])
            if features:
                stacked = np.stack([np.asarray(feature, np.float32) for feature in features])
                deepstack += np.split(stacked, ends[:-1], axis=1)
            grids.append(grid_thw)
            timestamps += seconds
            progress.advance(task, len(grid_thw))
    return {
        **{f"{output}_{number}": rows for number, rows in enumerate(outputs)},
        **{f"deepstack_{number}": features for number, features in enumerate(deepstack)},
        **{f"timestamps_{i}": times for i, times in enumerate(timestamps) if times is not None},
        "grid_thw": np.concatenate(grids),
    }


def _nouns(output: str) -> str:
    return "means" if output == "pooled" else output


def _not_finite(path: Path, tower: "flax_models.VisionTower", output: str) -> ImageError:
    advice = "; --dtype bfloat16 has the range of fp32" if tower.dtype == np.float16 else ""
    return ImageError(
        f"{path}: its {_nouns(output)} hold infinities or NaN in {tower.dtype}{advice}"
    )


def _batches(
    preprocessing: _Preprocessing, options: argparse.Namespace
) -> Iterator[tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]]:
    """Preprocess the files and gather neighbours; yield what each call takes, and timestamps."""
    batch: list[tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]] = []
    tokens = 0
    for path in options.images:
        file = preprocessing(path)
        if batch and tokens + len(file[0]) > options.batch_tokens:
            yield _concatenate(batch)
            batch, tokens = [], 0
        batch.append(file)
        tokens += len(file[0])
    yield _concatenate(batch)


def _concatenate(
    batch: list[tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]],
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]:
    pixel_values, grid_thw, timestamps = zip(*batch, strict=True)
    seconds = list(itertools.chain.from_iterable(timestamps))
    return np.concatenate(pixel_values), np.concatenate(grid_thw), seconds


def _write(out: Path, arrays: dict[str, np.ndarray], names: list[str]) -> None:
    """Write the file beside its place first: nobody ever finds half a file there.

    A symbolic link stays one: its target is written.
    """
    unfinished = _unfinished(out)
    try:
        _WRITERS[out.suffix](unfinished, arrays, names)
        os.replace(unfinished, os.path.realpath(out))
    finally:
        unfinished.unlink(missing_ok=True)


def _unfinished(out: Path) -> Path:
    target = Path(os.path.realpath(out))
    return target.with_name(f".{target.name}.{os.getpid()}.unfinished")


def _write_safetensors(path: Path, arrays: dict[str, np.ndarray], names: list[str]) -> None:
    # Of a part of an array, such as an image's rows, safetensors would write the wrong memory.
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with path.open("xb") as file:  # given a path, safetensors makes a file only its owner can read
        file.write(save(whole, metadata={"images": json.dumps(names)}))


def _write_npz(path: Path, arrays: dict[str, np.ndarray], names: list[str]) -> None:
    with path.open("xb") as file:  # given a path, NumPy would append its own suffix
        np.savez(file, **arrays, images=np.array(names))


_WRITERS = {".safetensors": _write_safetensors, ".npz": _write_npz}


def keep_compilations() -> None:
    """Have JAX keep compiled programs in the user's cache directory, for processes to come.

    To be called before JAX is imported. A directory that the user has named stays; one that cannot
    be written to is done without.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        directory = caches / "fused-rope-attention" / "jax"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no such place, or a user without a home
        return
    if os.access(directory, os.W_OK):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)


if __name__ == "__main__":
    keep_compilations()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as shells report it
