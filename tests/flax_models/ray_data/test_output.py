"""The folder of results: shards whole or not at all, whose it is, what was finished."""

import errno
import json

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import pyarrow as pa
import pyarrow.parquet as pq

from flax_models.ray_data import read, shards
from flax_models.ray_data.output import Output, checkpoint_hash
from flax_models.ray_data.patches import Report
from flax_models.ray_data.shards import finished_ids, shard_rows, write_shard
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

SETTINGS = {"source": "/photographs", "dtype": "bfloat16", "fps": 2.0}


def results(ids, refused=(), dtype="bfloat16"):
    """Rows as the tower's stage returns them: id number i has i + 1 tokens."""
    rows = []
    for number, id_ in enumerate(ids):
        bad = id_ in refused
        values = np.full((number + 1, 4), number, dtype)
        row = {"grid_thw": [1, 2, 2], "shape": list(values.shape)}
        row |= {"embeddings": values.tobytes(), "deepstack": values.tobytes() * 3}
        row = dict.fromkeys(row) if bad else row
        rows.append({"id": id_, "error": "no image" if bad else None, **row})
    schema = [("id", pa.string()), ("error", pa.string()), ("grid_thw", pa.list_(pa.int64(), 3))]
    schema += [("shape", pa.list_(pa.int64(), 2)), ("embeddings", pa.large_binary())]
    return pa.Table.from_pylist(rows, pa.schema([*schema, ("deepstack", pa.large_binary())]))


def write(table, output):
    return write_shard(table, str(output.attempt), str(output.path), Report())


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_written_is_read_again(tmp_path, dtype):
    output = Output(tmp_path / "out", SETTINGS)
    with output.opened():
        assert write(results(["a", "b", "c"], {"b"}, dtype), output)["rows"].to_pylist() == [3]
        output.finish(3, {})
    rows = {row.pop("id"): row for row in read(tmp_path / "out")}
    assert rows.keys() == {"a", "c"}
    assert rows["c"]["embeddings"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(rows["c"]["embeddings"], np.full((3, 4), 2, dtype))
    np.testing.assert_array_equal(rows["c"]["deepstack"], np.full((3, 3, 4), 2, dtype))
    assert rows["a"]["grid_thw"].tolist() == [1, 2, 2]
    (refused,) = (tmp_path / "out").glob("refused-*")
    assert pq.read_table(refused).to_pylist() == [{"id": "b", "error": "no image"}]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["counts"], manifest["complete"]) == ({"encoded": 2, "refused": 1}, True)
    assert manifest["settings"] == SETTINGS
    assert manifest["versions"]["numpy"] == np.__version__
    assert [path.name for path in (tmp_path / "out").glob(".*")] == [".lock"]


def test_the_same_rows_written_twice_are_one_shard(tmp_path):
    output = Output(tmp_path / "out", SETTINGS)
    with output.opened():
        write(results(["a", "b"]), output)
        write(results(["b", "a"]), output)
        assert output.finish(2, {}) == {"encoded": 2, "refused": 0}


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    output = Output(tmp_path / "out", SETTINGS)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with output.opened():
        write(results(["a"]), output)
        monkeypatch.setattr(shards.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write(results(["b"]), output)
    assert len(names(tmp_path / "out")) == 2  # a's shard and the manifest
    monkeypatch.undo()
    output = Output(tmp_path / "out", SETTINGS)
    with output.opened():
        assert len(finished_ids(output.path)) == 1
        write(results(["b"]), output)
        assert output.finish(2, {}) == {"encoded": 2, "refused": 0}


def test_workers_of_a_driver_that_was_killed_come_too_late(tmp_path):
    """What they had not moved when the next run began never appears."""
    old = Output(tmp_path / "out", SETTINGS)
    with old.opened():
        write(results(["a"]), old)
    old.attempt.mkdir()  # as a driver that is killed leaves it
    new = Output(tmp_path / "out", SETTINGS)
    with new.opened():
        with pytest.raises(FileNotFoundError):
            write(results(["b"]), old)
        write(results(["b"]), new)
        assert new.finish(2, {}) == {"encoded": 2, "refused": 0}


def test_two_runs_at_once(tmp_path):
    first, second = (Output(tmp_path / "out", SETTINGS) for _ in range(2))
    with first.opened():
        with pytest.raises(ValueError, match="another process writes to"), second.opened():
            pass
        write(results(["a"]), first)  # and the first one's folder is still there
        first.finish(1, {})


def test_refuses_other_peoples_folders(tmp_path):
    with Output(tmp_path / "out", SETTINGS).opened():
        pass
    with pytest.raises(ValueError, match="run with another dtype: 'bfloat16', now 'float32'"):
        Output(tmp_path / "out", {**SETTINGS, "dtype": "float32"})
    with pytest.raises(ValueError, match="no such directory for --out"):
        Output(tmp_path / "no" / "out", SETTINGS)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--out is no directory"):
        Output(tmp_path / "file", SETTINGS)
    with pytest.raises(ValueError, match=r"holds something, but no manifest.json"):
        Output(tmp_path, SETTINGS)
    (tmp_path / "out" / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match=r"manifest.json cannot be read"):
        Output(tmp_path / "out", SETTINGS)


def test_ids_that_stand_twice_or_are_missing(tmp_path):
    output = Output(tmp_path / "out", SETTINGS)
    with output.opened():
        write(results(["a", "b"]), output)
        with pytest.raises(ValueError, match="has 2 of 3 ids: the source changed"):
            output.finish(3, {})
        write(results(["b", "c"]), output)
        with pytest.raises(ValueError, match="ids of the source are not unique"):
            output.finish(4, {})
    assert not json.loads((tmp_path / "out" / "manifest.json").read_text())["complete"]


def test_retry_forgets_what_was_refused(tmp_path):
    for retry, left in ((False, 2), (True, 1)):
        output = Output(tmp_path / "out", SETTINGS)
        with output.opened(retry):
            write(results(["a", "b"], {"b"}), output) if not retry else None
            assert len(finished_ids(output.path)) == left


def test_the_hash_of_a_checkpoint_follows_its_tower(tmp_path):
    config = SMALL_TOWERS["qwen2_5_omni"]
    tower = checkpoint_hash(write_checkpoint(tmp_path / "tower", config))
    whole = write_checkpoint(tmp_path / "whole", config, "thinker.visual.")
    assert checkpoint_hash(whole) == tower
    content = bytearray((whole / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (whole / "model.safetensors").write_bytes(content)
    assert checkpoint_hash(whole) != tower


def test_rows_of_a_shard():
    assert shard_rows(256 << 20) == shard_rows(1 << 40) == 1
    assert shard_rows(1 << 20) == 256
    assert shard_rows(4) == 10_000
