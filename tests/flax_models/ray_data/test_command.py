"""`python -m flax_models encode` end to end on two CPU processes: results, deaths, bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import pyarrow.parquet as pq
import ray

from flax_models import ImageConfig, VideoConfig, preprocess
from flax_models.__main__ import main
from flax_models.ray_data import encode, read, rows
from flax_models.ray_data.patches import add_patches
from flax_models.ray_data.progress import Progress, describe
from flax_models.ray_data.towers import find_loader
from tests.flax_models.ray_data.conftest import CONFIG, ids_of
from tests.flax_models.ray_data.stand_in import Poisonable, means
from tests.kernel_cases import relative_rms
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

STAND_IN = "tests.flax_models.ray_data.stand_in:load"


def arguments(photographs, checkpoint, out, *options):
    given = ["encode", photographs, "--checkpoint", checkpoint, "--out", out, *options]
    if "--framework" not in options:
        given += ["--framework", STAND_IN]
    given += ["--dtype", "float32", "--shard-rows", 2, "--every", 600]  # no line of progress
    return [str(argument) for argument in given]


@pytest.fixture
def run(cluster, photographs, checkpoint, tmp_path, capsys):
    """Run the command line; returns the exit status, standard output and standard error."""

    def run(*options, source=photographs, checkpoint=checkpoint):
        try:
            status = main(arguments(source, checkpoint, tmp_path / "out", *options))
        except SystemExit as exit_:  # argparse's own errors
            status = exit_.code
        return status, *capsys.readouterr()

    return run


def written(out):
    """Ids of all shards, each as often as it stands there."""
    return sorted(
        id_
        for kind in ("part", "refused")
        for path in out.glob(f"{kind}-*.parquet")
        for id_ in pq.read_table(path)["id"].to_pylist()
    )


def manifest(out):
    return json.loads((out / "manifest.json").read_text())


@pytest.mark.long
def test_the_values_of_one_image_at_a_time(run, photographs, tmp_path):
    status, stdout, stderr = run("--gpus", "0", "--towers", "2")
    assert (status, stderr) == (0, "")
    assert stdout == f"encoded 20 images and videos, refused 0: {tmp_path / 'out'}\n"
    found = {row["id"]: row for row in read(tmp_path / "out")}
    assert sorted(found) == ids_of(photographs)
    for name, row in found.items():
        pixel_values, grid_thw = preprocess(photographs / name)
        np.testing.assert_array_equal(row["grid_thw"], grid_thw[0])
        np.testing.assert_array_equal(row["embeddings"], means(CONFIG, pixel_values))
    counted = manifest(tmp_path / "out")
    assert counted["complete"]
    assert counted["last_run"]["images"] == counted["last_run"]["read"] == 20
    # On a busy machine the first may have encoded all before the second has its weights.
    assert counted["last_run"]["loaded"] in (1, 2)
    status, _, stderr = run("--max-pixels", "9000")
    assert status == 2
    assert "is of a run with another max_pixels: None, now 9000" in stderr


@pytest.mark.long
def test_a_tower_in_pytorch(cluster, photographs, tmp_path):
    """With DeepStack, in bf16, as a function of a data set whose other columns stay.

    An image's values are those of a call with it alone, but for how products of another size are
    summed: bf16's last bits, a fiftieth of the root mean square at most. (Flax's is the page's, and
    has its stage by itself.)
    """
    pytest.importorskip("torch")
    checkpoint = write_checkpoint(tmp_path / "qwen3", SMALL_TOWERS["qwen3_omni_moe"])
    names = ids_of(photographs)[:6]
    items = [{"name": name, "picture": str(photographs / name)} for name in names]
    dataset = ray.data.from_items([*items, {"name": "bad", "picture": "absent.jpg"}])
    result = encode(dataset, checkpoint, "picture", framework="torch", towers=1)
    found = {}
    for table in result.iter_batches(batch_size=None, batch_format="pyarrow"):
        found |= {row.pop("name"): row for row in rows(table)}
    assert found.pop("bad")["error"] == "No such file or directory"
    assert sorted(found) == names
    tower = find_loader("torch")(str(checkpoint), "bfloat16", (1024,))
    images = ImageConfig.from_pretrained(checkpoint)
    for name, row in found.items():
        pixel_values, grid_thw = preprocess(photographs / name, images)
        embeddings, *features = tower(pixel_values, grid_thw, "embeddings")
        for ours, alone in (
            (row["embeddings"], embeddings),
            (row["deepstack"], np.stack(features)),
        ):
            assert ours.dtype == alone.dtype == "bfloat16"
            assert relative_rms(np.float32(ours), np.float32(alone)) < 2e-2


@pytest.mark.long
def test_killed_the_same_command_goes_on(run, cluster, photographs, checkpoint, tmp_path):
    """SIGKILL of the driver as some shards are there; an image that can't be read is refused once.

    Shards that were there stay, byte for byte.
    """
    (photographs / "bad.jpg").write_text("no image")
    (checkpoint / "slow").touch()
    out = tmp_path / "out"
    options = ("--batch-tokens", "200", "--decoders", "1")
    command = arguments(photographs, checkpoint, out, "--address", cluster, *options)
    driver = subprocess.Popen(
        [sys.executable, "-m", "flax_models", *command],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    deadline = time.monotonic() + 60
    while not (before := list(out.glob("part-*.parquet"))):
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    status, _, stderr = run(*options)  # while the first still runs
    assert (status, "another process writes to" in stderr) == (2, True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = {path.name: path.read_bytes() for path in out.glob("part-*.parquet")}
    finished = written(out)
    assert 0 < len(finished) < 21
    assert not manifest(out)["complete"]
    (checkpoint / "slow").unlink()
    status, stdout, stderr = run(*options)
    assert (status, stderr) == (0, "")
    assert "encoded 20 images and videos, refused 1" in stdout
    assert written(out) == ids_of(photographs)
    assert {name: (out / name).read_bytes() for name in before} == before
    assert manifest(out)["last_run"]["read"] <= 21 - len(finished)
    assert run(*options)[1] == stdout  # once more: there is nothing left to do
    assert not list(out.glob(".attempt-*"))


def test_a_file_that_kills_its_process_is_refused(cluster, photographs):
    """And those that were beside it are read."""
    poisonable = Poisonable(ImageConfig(), VideoConfig(), 2.0, "float32")
    contents = {name: (photographs / name).read_bytes() for name in ids_of(photographs)[:2]}
    contents |= {"bad": b"no image", "poison": b"poison"}
    items = [{"id": name, "image": content} for name, content in contents.items()]
    with Progress(4, 1) as progress:
        kwargs = {"image": "image", "preprocessing": poisonable, "report": progress.report}
        dataset = ray.data.from_items(items, override_num_blocks=1)
        result = dataset.map_batches(add_patches, fn_kwargs=kwargs, batch_format="pyarrow")
        found = {row["id"]: row for row in result.take_all()}
    for name in ids_of(photographs)[:2]:
        assert found[name]["patches"] == preprocess(contents[name])[0].tobytes()
    assert found["bad"]["error"] == "cannot identify image file"
    assert found["poison"]["error"] == "the process that read it ended with status -9"


@pytest.mark.long
def test_what_is_refused_stops_a_strict_run_or_is_tried_again(
    run, photographs, checkpoint, tmp_path
):
    """And a tower that dies costs nothing but time."""
    output = "--output", "embeddings"
    (photographs / "bad.jpg").write_text("no image")
    status, stdout, stderr = run("--strict", *output)
    assert (status, stdout) == (2, "")
    assert stderr.endswith("error: bad.jpg: cannot identify image file\n")
    (checkpoint / "fatal").touch()
    status, stdout, stderr = run("--gpus", "0", "--towers", "2", *output)
    assert status == 0
    assert "encoded 20 images and videos, refused 1" in stdout
    assert not (checkpoint / "fatal").exists()
    assert written(tmp_path / "out") == ids_of(photographs)
    (photographs / "bad.jpg").write_bytes((photographs / "00.jpg").read_bytes())
    assert "encoded 21 images and videos, refused 0" in run("--retry", *output)[1]


def test_dry_run(run, photographs, tmp_path):
    status, stdout, stderr = run("--dry-run")
    assert (status, stderr) == (0, "")
    assert stdout.startswith(f"20 files of {photographs}, of which 0 are finished\n")
    for words in ("0 would be refused", "patches", "cores, limited by", "all 20: about 0:00:0"):
        assert words in stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "3"], "3 GPUs were asked for, and Ray sees 1"),
        (["--gpus", "-1"], "expected a positive integer, got '-1'"),
        (["--framework", "keras"], "framework must be flax, torch or MODULE:FUNCTION, got 'keras'"),
        (["--framework", "no.such:load"], "there is no load in no.such"),
        (["--min-pixels", "900000000"], "min_pixels 900,000,000 is above max_pixels"),
        (["--column", "image"], "is no table, and has no columns"),
        (["--batch-tokens", "0"], "expected a positive integer, got '0'"),
        (["--output", "nothing"], "invalid choice"),
    ],
)
def test_bad_input(run, tmp_path, options, message):
    status, stdout, stderr = run(*options)
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


def test_more_bad_input(run, photographs, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for source, message in (("empty", "no images or videos in"), ("absent", "no such file")):
        status, _, stderr = run(source=tmp_path / source)
        assert (status, message in stderr) == (2, True)
    status, _, stderr = run(checkpoint=tmp_path / "empty")
    assert (status, "config.json" in stderr) == (2, True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    status, _, stderr = run("--address", "127.0.0.1:9")
    assert (status, stderr.count("\n")) == (2, 1)
    assert "no Ray cluster at 127.0.0.1:9: Connection refused" in stderr
    assert not (tmp_path / "out").exists()


def test_a_line_of_progress():
    numbers = dict.fromkeys(("images", "refused", "patches", "busy", "read"), 0)
    assert describe(numbers | {"seconds": 0, "read": 7}, 9, 1) == "7 files read, towers are loaded"
    numbers |= {"images": 1990, "refused": 10, "patches": 5e6, "busy": 36, "seconds": 20}
    assert describe(numbers, 5000, 2) == (
        "2,000 of 5,000 images, 99.5 images/s, 250,000 patches/s, towers busy 90%, 10 refused, "
        "0:00:30 left"
    )
    assert describe(numbers, None, 2).startswith("2,000 images, 99.5 images/s")
