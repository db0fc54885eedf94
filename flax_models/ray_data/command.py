"""`python -m flax_models encode`: a data set's images and videos into Parquet shards."""

import argparse
import contextlib
import logging
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import DataContext

from flax_models.arguments import positive, rate
from flax_models.common.config import VisionConfig
from flax_models.common.image_config import ImageConfig
from flax_models.common.layout import OUTPUTS
from flax_models.ray_data import dry_run, shards
from flax_models.ray_data.output import Output, checkpoint_hash
from flax_models.ray_data.patches import Preprocessing
from flax_models.ray_data.pipeline import encode, placement, stored_dtype
from flax_models.ray_data.progress import Progress
from flax_models.ray_data.sources import Source, find_source
from flax_models.ray_data.towers import FRAMEWORKS, Load, find_loader

_DESCRIPTION = """\
Encode a folder's images and videos, those of a list of paths, of Parquet, Lance or WebDataset, on
all GPUs of this machine or of a Ray cluster. Killed at any moment, the same command goes on where
it stopped.

DIR gets part-*.parquet with a row for each image ("id", "grid_thw", what --output asks for and its
"shape", "timestamps" of videos), refused-*.parquet with each file that was refused and why, and
manifest.json. `flax_models.ray_data.read(DIR)` reads them.
"""

# Options that are arguments of `Preprocessing.of`, and others of `encode`.
_PREPROCESSING = ("dtype", "fps", "min_pixels", "max_pixels", "strict")
_TOWER = ("output", "store", "framework", "gpus", "towers", "decoders", "batch_tokens")

# What went wrong in a worker, of which Ray passes on the text alone.
_SAID = re.compile(
    r"^(?:\w+\.)*(?:ImageError|CheckpointError|ValueError|OSError|FileNotFoundError|ImportError|"
    r"PermissionError|MemoryError|OutOfMemoryError|JaxRuntimeError|ReadError|ArrowInvalid): (.+)$",
    re.MULTILINE,
)
_DEATHS = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.RayActorError,
)

# Seconds in which a cluster has to answer.
_PATIENCE = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name and "encode"; None: those of the process.

    Returns:
        The exit status: 0, or 2 after one sentence on standard error about what is wrong.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except ray.exceptions.RayError as error:  # which may be a ValueError as well
        said = _SAID.search(str(error))
        if said is None and not isinstance(error, _DEATHS):
            raise
        sentence = said[1] if said else f"workers died again and again: {error}"
    except (ValueError, OSError, ImportError, MemoryError) as error:
        sentence = str(error) or "out of memory"
    print(f"{parser.prog}: error: {sentence.splitlines()[0]}", file=sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    load = find_loader(options.framework)
    given = {name: getattr(options, name) for name in _PREPROCESSING}
    preprocessing = Preprocessing.of(options.checkpoint, **given)
    options.store = options.store or stored_dtype(options.dtype)
    options.shard_rows = options.shard_rows or _shard_rows(options, preprocessing.images)
    output = Output(options.out, _settings(options))
    source = find_source(options.source, options.column, options.id_column)
    with _ray(options.address):
        towers, _ = placement(options.gpus, options.towers)
        if options.dry_run:
            _estimate(options, output, source, preprocessing, load, towers)
            return 0
        with output.opened(options.retry):
            counts = _encode(options, output, source, towers)
    files = f"{counts['encoded']:,} images and videos"
    print(f"encoded {files}, refused {counts['refused']:,}: {options.out}", flush=True)
    return 0


def _encode(
    options: argparse.Namespace, output: Output, source: Source, towers: int
) -> dict[str, int]:
    """Encode what is not finished, and write it; returns the counts of the manifest."""
    finished = shards.finished_ids(output.path)
    total = None if source.total is None else source.total - len(finished)
    with Progress(total, towers, options.every) as progress:
        unfinished = source.dataset().map_batches(
            shards.drop_finished,
            fn_kwargs={"finished": ray.put(finished)},
            batch_format="pyarrow",
            batch_size=None,
        )
        keywords = {name: getattr(options, name) for name in (*_PREPROCESSING, *_TOWER)}
        results = encode(unfinished, options.checkpoint, **keywords, report=progress.report)
        folders = {"attempt": str(output.attempt), "out": str(output.path)}
        written = results.map_batches(
            shards.write_shard,
            fn_kwargs={**folders, "report": progress.report},
            batch_format="pyarrow",
            batch_size=options.shard_rows,
            num_cpus=0.25,
        )
        for _ in written.iter_batches(batch_size=None, batch_format="pyarrow"):
            pass  # the shards are written, and only numbers come here
        numbers = progress.numbers()
    return output.finish(source.total, dict(numbers))


def _estimate(
    options: argparse.Namespace,
    output: Output,
    source: Source,
    preprocessing: Preprocessing,
    load: Load,
    towers: int,
) -> None:
    """Say what would be done."""
    finished = shards.finished_ids(output.path)
    left = None if source.total is None else source.total - len(finished)
    print(f"{source.name}, of which {len(finished):,} are finished", flush=True)
    found = dry_run.estimate(
        source,
        str(options.checkpoint),
        load,
        preprocessing,
        output=options.output,
        store_bytes=np.dtype(options.store).itemsize,
        batch_tokens=options.batch_tokens,
    )
    cores = options.decoders or int(ray.cluster_resources()["CPU"])
    print(dry_run.describe(found, left, towers, cores), flush=True)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """All that the results depend on."""
    names = (*_PREPROCESSING, "output", "store", "framework", "column", "id_column")
    given = {name: getattr(options, name) for name in names if name != "strict"}
    return {
        "source": str(options.source.absolute()),
        "checkpoint": checkpoint_hash(options.checkpoint),
        **given,
    }


def _shard_rows(options: argparse.Namespace, images: ImageConfig) -> int:
    """How many of the largest images fit into a shard."""
    config = VisionConfig.from_pretrained(options.checkpoint)
    if options.output == "pooled":
        return shards.shard_rows(4 * config.hidden_size)
    tokens = images.max_pixels // images.patch_size**2
    size = config.hidden_size * tokens
    if options.output == "embeddings":
        kinds = 1 + len(config.deepstack_visual_indexes)
        size = kinds * config.out_hidden_size * tokens // config.merge_unit
    return shards.shard_rows(max(size, 1) * np.dtype(options.store).itemsize)


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Ray on this machine or a cluster; that of a program which has started it stays.

    Raises:
        ValueError: the cluster does not answer.
    """
    DataContext.get_current().enable_progress_bars = False  # there is a line of our own
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(include_dashboard=False, **quiet)
    else:
        _check_answer(address)
        try:
            ray.init(address, **quiet)
        except (ConnectionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"no Ray cluster at {address}: {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_answer(address: str) -> None:
    """Ask whether anybody listens; Ray would ask for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # "auto"
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"no Ray cluster at {address}: {reason}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flax_models encode",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a folder, an image or video, a text file of paths, Parquet, Lance or WebDataset tars",
    )
    add("--checkpoint", required=True, type=Path, metavar="DIR", help="in Hugging Face's format")
    add("--out", required=True, type=Path, metavar="DIR", help="new, or of the same command")
    add("--column", metavar="NAME", help="of a table: bytes or paths of images (default: image)")
    add("--id-column", metavar="NAME", help="of a table: what names them (default: their paths)")
    add("--output", default="embeddings", choices=OUTPUTS, help="what to compute (%(default)s)")
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="what the tower computes in (%(default)s)",
    )
    add(
        "--store",
        choices=("bfloat16", "float32"),
        help="what is kept of embeddings and patches (default: --dtype, of float16 float32)",
    )
    add(
        "--framework",
        default="flax",
        metavar="NAME",
        help=f"{', '.join(FRAMEWORKS)}, or MODULE:FUNCTION that loads a tower (%(default)s)",
    )
    add("--gpus", type=_count, metavar="N", help="a tower on each (default: all there are)")
    add("--towers", type=positive, default=1, metavar="N", help="on the CPU, where there is no GPU")
    add("--decoders", type=positive, metavar="N", help="processes that read (default: all cores)")
    add("--address", metavar="HOST:PORT", help="of a Ray cluster (default: this machine alone)")
    add("--batch-tokens", type=positive, default=20480, metavar="N", help="patches of a call")
    add("--min-pixels", type=positive, metavar="N", help="enlarge smaller images")
    add("--max-pixels", type=positive, metavar="N", help="shrink larger images")
    add("--fps", type=rate, default=2.0, metavar="N", help="frames to take of a video's second")
    add("--shard-rows", type=positive, metavar="N", help="images of a shard (default: 256 MiB)")
    add("--strict", action="store_true", help="stop at the first file that is refused")
    add("--retry", action="store_true", help="try again what an earlier run refused")
    add("--dry-run", action="store_true", help="say what would be done, by a sample; write nothing")
    add("--every", type=rate, default=30.0, metavar="S", help="seconds between lines of progress")
    return parser


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)
