"""What a run would do and how long it may take, by a sample that this process encodes."""

import dataclasses
import datetime
import time
from dataclasses import dataclass

import numpy as np

from flax_models.common.buckets import choose_bucket
from flax_models.common.config import VisionConfig
from flax_models.common.errors import ImageError
from flax_models.common.layout import output_rows
from flax_models.ray_data.calls import call_buckets, plan_calls
from flax_models.ray_data.patches import Preprocessing
from flax_models.ray_data.sources import Source
from flax_models.ray_data.towers import Load

# Files that are looked at, and calls that are timed behind one that compiles.
_SAMPLE, _TIMED = 64, 3


@dataclass(frozen=True)
class Estimate:
    """What the sample says, of which a part was refused.

    Attributes:
        sample: files that were looked at.
        refused: those of them that would be.
        patches: of an image, the mean.
        padding: the share of patches that are padding.
        reading: seconds that a core needs for a file.
        calling: seconds that a tower needs for an image.
        stored: bytes that are kept of an image.
    """

    sample: int
    refused: int
    patches: float
    padding: float
    reading: float
    calling: float
    stored: float


def estimate(
    source: Source,
    checkpoint: str,
    load: Load,
    preprocessing: Preprocessing,
    *,
    output: str,
    store_bytes: int,
    batch_tokens: int,
) -> Estimate:
    """Preprocess some files and encode a call of them.

    Args:
        source: where they come from.
        checkpoint: the tower's.
        load: what loads it.
        preprocessing: how files become patches.
        output: what is computed.
        store_bytes: those of a number that is kept.
        batch_tokens: patches of a call.

    Raises:
        ValueError: all of the sample is refused.
    """
    config = VisionConfig.from_pretrained(checkpoint)
    preprocessing = dataclasses.replace(preprocessing, strict=False)
    files = source.sample(_SAMPLE)
    start = time.perf_counter()
    readable = []
    for file in files:
        try:
            readable.append(preprocessing(file)[:2])
        except ImageError as error:
            reason = error
    reading = (time.perf_counter() - start) / len(files)
    if not readable:
        raise ValueError(f"all of a sample of {len(files)} would be refused, the last: {reason}")
    grids = np.array([grid for _, grid in readable])
    tokens = grids.prod(axis=1)
    calls = plan_calls(tokens.tolist(), batch_tokens)
    buckets = call_buckets(config, batch_tokens)
    padded = sum(choose_bucket(config, grids[call], buckets).tokens for call in calls)
    first = calls[0]
    values = np.concatenate([readable[image][0] for image in first])
    encode = load(checkpoint, preprocessing.dtype, buckets)
    encode(values, grids[first], output)
    start = time.perf_counter()
    for _ in range(_TIMED):
        rows, *features = encode(values, grids[first], output)
    calling = (time.perf_counter() - start) / _TIMED / tokens[first].sum() * tokens.mean()
    number_bytes = 4 if output == "pooled" else store_bytes
    kept = output_rows(config, grids, output).mean() * rows.shape[1] * (1 + len(features))
    return Estimate(
        sample=len(files),
        refused=len(files) - len(readable),
        patches=float(tokens.mean()),
        padding=1 - float(tokens.sum()) / padded,
        reading=reading,
        calling=float(calling),
        stored=float(kept) * number_bytes,
    )


def describe(found: Estimate, left: int | None, towers: int, cores: int) -> str:
    """An estimate in lines for a person, of so many files that are left; None: nobody knows."""
    longest = max(found.reading / cores, found.calling / towers)
    lines = [
        f"a sample of {found.sample}: {found.refused} would be refused; an image has "
        f"{found.patches:,.0f} patches, of which calls are padded by {found.padding:.0%}",
        f"reading takes a core {found.reading * 1e3:,.1f} ms, encoding a tower "
        f"{found.calling * 1e3:,.1f} ms a file: {1 / longest:,.1f} a second with "
        f"{towers} {'towers' if towers > 1 else 'tower'} and {cores} cores, limited by "
        f"{'reading' if longest > found.calling / towers else 'the towers'}",
        f"{found.stored:,.0f} bytes are kept of one",
    ]
    if left is not None:
        seconds = datetime.timedelta(seconds=round(left * longest))
        lines.append(f"all {left:,}: about {seconds}, {left * found.stored / 1e9:,.1f} GB")
    return "\n".join(lines)
