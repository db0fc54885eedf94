"""The folder of a run's results: whose it is, what was finished, the manifest."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flax_models.common.checkpoint import read_checkpoint
from flax_models.common.config import VisionConfig
from flax_models.ray_data import shards

MANIFEST = "manifest.json"
_LOCK, _ATTEMPT = ".lock", ".attempt-"
_FORMAT = 1
_PACKAGES = (
    *("fused-rope-attention", "numpy", "pillow", "av", "pyarrow", "ray"),
    *("jax", "flax", "torch", "triton"),
)


class Output:
    """A folder that belongs to one run of certain settings, and to those that go on with it.

    Attributes:
        path: the folder.
        settings: all that the results depend on.
        attempt: the folder within it in which unfinished files of this process lie.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Look whether the folder can be used; nothing is written.

        Raises:
            ValueError: it can't be: it holds something else, or was made with other settings.
        """
        self.path, self.settings = path.absolute(), json.loads(json.dumps(settings))
        self.attempt: Path | None = None
        if not path.parent.is_dir():
            raise ValueError(f"no such directory for --out: {path.parent}")
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out is no directory: {path}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"cannot write --out {path}: Permission denied")
        if path.exists():
            self._check_manifest()

    def _check_manifest(self) -> None:
        manifest = self.path / MANIFEST
        if not manifest.exists():
            if any(entry.name != _LOCK for entry in self.path.iterdir()):
                raise ValueError(f"--out {self.path} holds something, but no {MANIFEST}")
            return
        try:
            before = json.loads(manifest.read_text("utf-8"))["settings"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{manifest} cannot be read: choose another --out") from None
        for name in sorted({*before, *self.settings}):
            if before.get(name) != self.settings.get(name):
                raise ValueError(
                    f"--out {self.path} is of a run with another {name}: "
                    f"{before.get(name)!r}, now {self.settings.get(name)!r}"
                )

    @contextlib.contextmanager
    def opened(self, retry: bool = False) -> Iterator[None]:
        """Take the folder over from whoever had it, and let it go with nothing unfinished in it.

        Args:
            retry: forget which files were refused.

        Raises:
            ValueError: another process is at it.
        """
        self.path.mkdir(exist_ok=True)
        with (self.path / _LOCK).open("w") as lock:  # let go also where this process is killed
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"another process writes to --out {self.path}") from None
            self._take_over(retry)
            try:
                yield
            finally:
                shutil.rmtree(self.attempt, ignore_errors=True)

    def _take_over(self, retry: bool) -> None:
        # Workers of a driver that was killed may outlive it for a moment. They move files out of
        # their own attempt's folder, which is gone, at once, before the shards are listed.
        self.attempt = self.path / f"{_ATTEMPT}{uuid.uuid4().hex}"
        self.attempt.mkdir()
        for stale in self.path.glob(f"{_ATTEMPT}*"):
            if stale != self.attempt:
                stale.rename(self.attempt / stale.name)
        if retry:
            for path in self.path.glob(shards.REFUSED):
                path.unlink()
        self._write_manifest(complete=False)

    def finish(self, total: int | None, last_run: dict[str, float]) -> dict[str, int]:
        """Look whether every id is there once, and write the manifest.

        Args:
            total: how many ids there are; None: nobody knows.
            last_run: what this run counted.

        Returns:
            The counts of "encoded" and "refused".

        Raises:
            ValueError: an id stands twice, as the source's ids are not unique; or some are missing,
                as it changed.
        """
        ids = shards.finished_ids(self.path)
        if len(np.unique(ids)) < len(ids):
            raise ValueError(f"ids of the source are not unique: some stand in {self.path} twice")
        if total is not None and len(ids) < total:
            raise ValueError(
                f"{self.path} has {len(ids):,} of {total:,} ids: the source changed meanwhile"
            )
        return self._write_manifest(complete=True, last_run=last_run)

    def _write_manifest(self, *, complete: bool, **more: Any) -> dict[str, int]:
        """Write it whole or not at all; returns its counts."""
        counts = shards.count(self.path)
        manifest = {
            "format": _FORMAT,
            "complete": complete,
            "counts": counts,
            "settings": self.settings,
            "versions": _versions(),
            **more,
        }
        unfinished = self.attempt / MANIFEST
        unfinished.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        os.replace(unfinished, self.path / MANIFEST)
        return counts


def checkpoint_hash(checkpoint: Path) -> str:
    """SHA-256 of all that a tower is built from: its configuration and tensors.

    Raises:
        CheckpointError, ValueError: the checkpoint can't be used.
    """
    config = VisionConfig.from_pretrained(checkpoint)
    found = hashlib.sha256(repr(config).encode())
    for name, tensor in sorted(read_checkpoint(config, checkpoint, progress=False).items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        found.update(memoryview(tensor.reshape(-1).view("uint8")))
    return found.hexdigest()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
