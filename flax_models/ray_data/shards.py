"""Where results are kept: Parquet files that are there whole or not at all."""

import hashlib
import math
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from flax_models.common.layout import OUTPUTS
from flax_models.ray_data.patches import Report

# Bytes of results that a shard is made to hold, and rows at most.
_SHARD_BYTES, _SHARD_ROWS = 256 << 20, 10_000

RESULTS, REFUSED = "part-*.parquet", "refused-*.parquet"


def shard_rows(row_bytes: int) -> int:
    """How many rows a shard has, given the most bytes that one of an image takes."""
    return min(max(_SHARD_BYTES // row_bytes, 1), _SHARD_ROWS)


def write_shard(table: pa.Table, attempt: str, out: str, report: Report) -> pa.Table:
    """Write the results among some rows to one file, those that were refused to another.

    A file's name follows from its ids: written twice, as after a worker's death, it is one file.
    It is written in the folder of this attempt and moved when it is on the disk. Whoever takes OUT
    over removes that folder first, so that nothing of an older attempt can appear later.

    Args:
        table: rows with "id", "error" and what the tower's stage added.
        attempt: a folder beside the shards.
        out: the folder of the shards.
        report: told of "written" rows and "bytes", and the "writing" seconds.

    Returns:
        How many "rows" were written, one row.
    """
    start = time.perf_counter()
    refused = table["error"].is_valid()
    parts = (
        ("part", table.filter(table["error"].is_null()).drop_columns(["error"])),
        ("refused", table.filter(refused).select(["id", "error"])),
    )
    written = 0
    for kind, part in parts:
        if part.num_rows:
            part = part.sort_by("id")
            ids = digests(part["id"].to_pylist())
            name = f"{kind}-{hashlib.sha256(ids.tobytes()).hexdigest()[:16]}.parquet"
            written += _write(part, Path(attempt, name), Path(out, name))
    report(written=table.num_rows, bytes=written, writing=time.perf_counter() - start)
    return pa.table({"rows": [table.num_rows]})


def _write(table: pa.Table, unfinished: Path, final: Path) -> int:
    """Write, wait for the disk, move; returns the file's bytes."""
    statistics = [name for name in ("id",) if name in table.column_names]
    # A name of its own: a worker that passes for dead may be at the same.
    unfinished = unfinished.with_name(f"{uuid.uuid4().hex}-{unfinished.name}")
    with unfinished.open("xb") as file:
        # What a tower computes hardly compresses, and each value is there once.
        pq.write_table(
            table, file, compression="none", use_dictionary=False, write_statistics=statistics
        )
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    os.replace(unfinished, final)
    return size


def digests(ids: Sequence[str]) -> np.ndarray:
    """16 bytes of each id, as a hundred million of those fit into memory."""
    each = [hashlib.blake2b(id_.encode(), digest_size=16).digest() for id_ in ids]
    return np.array(each, dtype="S16")


def finished_ids(out: Path) -> np.ndarray:
    """Digests of the ids in all shards, sorted.

    Raises:
        OSError: a shard that cannot be read.
    """
    parts = [np.empty(0, "S16")]
    for pattern in (RESULTS, REFUSED):
        for path in sorted(out.glob(pattern)):
            parts.append(digests(pq.read_table(path, columns=["id"])["id"].to_pylist()))
    return np.sort(np.concatenate(parts))


def drop_finished(table: pa.Table, finished: ray.ObjectRef) -> pa.Table:
    """Leave out the rows whose ids are among sorted digests, which a node's workers share."""
    known = ray.get(finished)
    if len(known) == 0 or table.num_rows == 0:
        return table
    ids = digests(table["id"].to_pylist())
    place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return table.filter(pa.array(known[place] != ids))


def count(out: Path) -> dict[str, int]:
    """How many results and refused files there are, from the shards' ends alone."""
    return {
        name: sum(pq.read_metadata(path).num_rows for path in out.glob(pattern))
        for name, pattern in (("encoded", RESULTS), ("refused", REFUSED))
    }


def read(directory: str | os.PathLike[str]) -> Iterator[dict]:
    """Read what `python -m flax_models encode` wrote, a shard in memory at a time.

    Yields:
        For each id a dict of its columns, arrays as NumPy's: "grid_thw" int64 [3], "embeddings"
        [tokens, out_hidden_size] (or "patches", or "pooled" [hidden_size] fp32), with DeepStack
        "deepstack" [features, tokens, out_hidden_size]; of a video "timestamps" fp64.
    """
    for path in sorted(Path(directory).glob(RESULTS)):
        yield from rows(pq.read_table(path))


def rows(table: pa.Table) -> Iterator[dict]:
    """The rows of a table as `encode` returns them, arrays as `read` says; None stays."""
    for number in range(table.num_rows):
        values = {name: table[name][number] for name in table.column_names}
        shape = values.pop("shape", None)
        row = {}
        for name, value in values.items():
            if not value.is_valid:
                row[name] = None
            elif shape is not None and name in (*OUTPUTS, "deepstack"):
                row[name] = _array(value, values, shape.as_py())
            elif isinstance(value, pa.ListScalar | pa.FixedSizeListScalar):
                row[name] = value.values.to_numpy(zero_copy_only=False)
            else:
                row[name] = value.as_py()
        yield row


def _array(value: pa.Scalar, values: dict[str, pa.Scalar], shape: list[int]) -> np.ndarray:
    """An array of the bytes that it was stored as; how many a number has tells its dtype."""
    output = next(values[name] for name in OUTPUTS if name in values)
    dtype = {2: "bfloat16", 4: "float32"}[output.as_buffer().size // math.prod(shape)]
    array = np.frombuffer(value.as_buffer(), dtype)
    return array.reshape(shape if value is output else (-1, *shape))
