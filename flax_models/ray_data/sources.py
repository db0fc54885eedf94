"""Where images and videos come from: folders, lists, Parquet, Lance, WebDataset."""

import functools
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import ray
from PIL import Image

from flax_models.common.videos import VIDEO_SUFFIXES
from flax_models.ray_data.shards import digests

# Paths that a task reads: many, as the last block of each is not full; fewer where there are few,
# for all processes to have something to do.
_LEAST_PATHS, _MOST_PATHS, _TASKS = 16, 256, 64


@dataclass(frozen=True)
class Source:
    """Something that images can be read from.

    Attributes:
        name: what is told of it.
        total: how many images and videos there are; None where counting would be reading all.
        dataset: from nothing to rows of "id" and "image"; Ray has to be there.
        sample: from a number to so many images, as `Preprocessing` takes them, spread over all
            where that is cheap.
    """

    name: str
    total: int | None
    dataset: Callable[[], ray.data.Dataset]
    sample: Callable[[int], list]


def find_source(path: Path, column: str | None = None, id_column: str | None = None) -> Source:
    """Find out what a path leads to, and look as far as can be without Ray.

    Args:
        path: a folder, which is searched, with links to files but not to folders followed; a text
            file, a path in each line; a Parquet file or folder of them; a Lance data set; or
            WebDataset's tars, one or a folder of them.
        column: of Parquet or Lance, the images': bytes or paths.
        id_column: of those, which names them; None: the column of paths.

    Raises:
        ValueError: there is nothing, nothing that can be read, no such column, or ids that are not
            unique.
        ImportError: Lance is not installed.
    """
    if not path.exists():
        raise ValueError(f"no such file or folder: {path}")
    try:
        files = [path] if path.is_file() else list(_walk(path))
        if path.suffix.lower() == ".lance":
            return _table(path, _lance(path), column, id_column)
        images = [file for file in files if file.suffix.lower() in _suffixes()]
        tables = [file for file in files if file.suffix.lower() == ".parquet"]
        tars = [file for file in files if file.suffix.lower() == ".tar"]
        if tables and not images:
            return _table(path, _parquet(path, tables), column, id_column)
        if column or id_column:
            raise ValueError(f"{path} is no table, and has no columns")
        if tars and not images:
            return _tars(path, tars)
        if path.is_file() and not images:
            return _paths(path, _listed(path))
        return _paths(path, _found(path if path.is_dir() else path.parent, images))
    except (OSError, UnicodeDecodeError, tarfile.TarError, pa.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


@functools.cache
def _suffixes() -> frozenset[str]:
    """Of images and videos."""
    return frozenset({*Image.registered_extensions(), *VIDEO_SUFFIXES})


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for directory, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        yield from (Path(directory, name) for name in sorted(names))


def _found(folder: Path, files: list[Path]) -> dict[str, str]:
    """Paths of images and videos by their ids: the way to them from the folder."""
    return {_text(file.relative_to(folder)): _text(file.absolute()) for file in files}


def _listed(path: Path) -> dict[str, str]:
    """Paths by lines of a text file; what stands there twice is one image."""
    lines = path.read_text("utf-8").splitlines()
    return {line: os.path.abspath(line) for line in lines if line.strip()}


def _text(path: Path) -> str:
    """A path as UTF-8; one that is not is found under this name by nobody, and refused."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _paths(path: Path, paths: dict[str, str]) -> Source:
    if not paths:
        raise ValueError(f"there are no images or videos in {path}")
    table = pa.table({"id": list(paths), "image": list(paths.values())})

    def dataset() -> ray.data.Dataset:
        rows = min(max(len(paths) // _TASKS, _LEAST_PATHS), _MOST_PATHS)
        starts = range(0, len(paths), rows)
        return ray.data.from_arrow([table.slice(start, rows) for start in starts])

    def sample(number: int) -> list:
        places = np.linspace(0, len(paths) - 1, min(number, len(paths))).astype(int)
        return table["image"].take(places).to_pylist()

    return Source(f"{len(paths):,} files of {path}", len(paths), dataset, sample)


# What PyArrow takes for a data set, and from columns to Ray's.
_Table = tuple[Any, Callable[[list[str]], ray.data.Dataset]]


def _parquet(path: Path, files: list[Path]) -> _Table:
    data = pyarrow.dataset.dataset([str(file) for file in files], format="parquet")
    # A single path: of several, Ray's threads stumble over each other's imports.
    name = str(path.absolute())
    return data, lambda columns: ray.data.read_parquet(name).select_columns(columns)


def _lance(path: Path) -> _Table:
    try:
        import lance
    except ModuleNotFoundError:
        raise ImportError("Lance data sets need pylance: pip install pylance") from None
    uri = str(path.absolute())
    return lance.dataset(uri), lambda columns: ray.data.read_lance(uri, columns=columns)


def _table(path: Path, table: _Table, column: str | None, id_column: str | None) -> Source:
    """Rows of Parquet or Lance."""
    data, read = table
    column = column or "image"
    names = data.schema.names
    for name in filter(None, (column, id_column)):
        if name not in names:
            raise ValueError(f"{path} has no column {name!r}, only {', '.join(names)}")
    field = data.schema.field(column).type
    holds_paths = pa.types.is_string(field) or pa.types.is_large_string(field)
    _check_type(path, column, field, holds_paths)
    if id_column is None and not holds_paths:
        raise ValueError(f"column {column!r} of {path} holds no paths: give an --id-column")
    ids = id_column or column
    total = _check_ids(path, ids, data)
    if not total:
        raise ValueError(f"there are no images or videos in {path}")

    def rename(rows: pa.Table) -> pa.Table:
        return pa.table({"id": rows[ids].cast(pa.string()), "image": rows[column]})

    def dataset() -> ray.data.Dataset:
        rows = read(list({column, ids}))
        return rows.map_batches(rename, batch_format="pyarrow", batch_size=None)

    def sample(number: int) -> list:
        return data.head(number, columns=[column])[column].to_pylist()

    return Source(f"{total:,} rows of {path}", total, dataset, sample)


def _check_type(path: Path, column: str, field: pa.DataType, holds_paths: bool) -> None:
    holds_bytes = pa.types.is_binary(field) or pa.types.is_large_binary(field)
    if pa.types.is_struct(field):
        holds_bytes = {"bytes", "path"} <= {field.field(i).name for i in range(field.num_fields)}
    if not (holds_paths or holds_bytes):
        raise ValueError(f"column {column!r} of {path} holds {field}, neither bytes nor paths")


def _check_ids(path: Path, column: str, data: Any) -> int:
    """Refuse ids that are not unique, reading them alone; returns how many there are."""
    found = []
    for batch in data.to_batches(columns=[column]):
        if batch[column].null_count:
            raise ValueError(f"column {column!r} of {path} has rows without a value")
        found.append(digests(batch[column].cast(pa.string()).to_pylist()))
    ids = np.concatenate([np.empty(0, "S16"), *found])
    if len(np.unique(ids)) < len(ids):
        raise ValueError(f"column {column!r} of {path} holds a value twice: ids have to be unique")
    return len(ids)


def _tars(path: Path, files: list[Path]) -> Source:
    """Samples of WebDataset's tars: of each the first member that is an image or a video."""
    folder = path.absolute() if path.is_dir() else path.absolute().parent

    def is_image(name: str) -> bool:
        return "." + name.lower().rpartition(".")[2] in _suffixes()

    def rename(rows: pa.Table) -> pa.Table:
        here = [rows[name].to_pylist() for name in rows.column_names if is_image(name)]
        images = [
            next((value for value in values if value is not None), None)
            for values in zip(*here, strict=True)
        ] or [None] * rows.num_rows
        keys = zip(rows["path"].to_pylist(), rows["__key__"].to_pylist(), strict=True)
        ids = [f"{os.path.relpath(tar, folder)}/{key}" for tar, key in keys]
        return pa.table({"id": ids, "image": pa.array(images, pa.large_binary())})

    def dataset() -> ray.data.Dataset:
        names = [str(file.absolute()) for file in files]
        rows = ray.data.read_webdataset(names, decoder=None, include_paths=True)
        return rows.map_batches(rename, batch_format="pyarrow", batch_size=None)

    def sample(number: int) -> list:
        with tarfile.open(files[0]) as tar:
            members = (member for member in tar if is_image(member.name) and member.isfile())
            return [tar.extractfile(m).read() for m in itertools.islice(members, number)]

    if not sample(1):
        raise ValueError(f"there are no images or videos in {files[0]}")
    return Source(f"{len(files):,} tars of {path}", None, dataset, sample)
