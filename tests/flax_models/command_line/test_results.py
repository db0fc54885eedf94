"""`python -m flax_models`: what it writes."""

import io
import json
import os
import resource
import runpy
import sys

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

import flax_models
from flax_models import (
    ImageConfig,
    VideoConfig,
    load_vision_tower,
    preprocess,
    preprocess_videos,
)
from flax_models.__main__ import _WRITERS
from tests.flax_models.command_line.conftest import read
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint
from tests.video_files import write_video


@pytest.mark.parametrize("out", ["out.npz", "out.safetensors"])
def test_deepstack_features_are_written_beside_the_embeddings(run, images, tmp_path, out):
    checkpoint = write_checkpoint(tmp_path / "qwen3", SMALL_TOWERS["qwen3_vl"])
    settings = {"size": {"shortest_edge": 64 * 64, "longest_edge": 96 * 160}}
    settings |= {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(settings))
    assert run("--dtype", "float32", checkpoint=checkpoint, out=out)[::2] == (0, "")
    arrays, _ = read(tmp_path / out)
    pixel_values, grid_thw = preprocess(images, ImageConfig.from_pretrained(checkpoint))
    embeddings, features = load_vision_tower(checkpoint, "float32")(pixel_values, grid_thw)
    np.testing.assert_array_equal(arrays.pop("grid_thw"), grid_thw)
    assert set(arrays) == {f"{what}_{i}" for what in ("embeddings", "deepstack") for i in range(3)}
    for what, axis, expected in (("embeddings", 0, embeddings), ("deepstack", 1, features)):
        ours = np.concatenate([arrays[f"{what}_{i}"] for i in range(3)], axis=axis)
        np.testing.assert_array_equal(ours, np.asarray(expected))


@pytest.mark.parametrize("out", ["out.npz", "out.safetensors"])
def test_embeddings_are_the_towers(run, checkpoint, images, tmp_path, out):
    status, stdout, stderr = run("--dtype", "float32", out=out)
    assert (status, stderr) == (0, "")
    arrays, names = read(tmp_path / out)
    pixel_values, grid_thw = preprocess(images)
    expected = np.asarray(load_vision_tower(checkpoint, "float32")(pixel_values, grid_thw))
    assert f"wrote {len(expected)} embeddings of 3 images" in stdout
    assert names == [str(path) for path in images]
    np.testing.assert_array_equal(arrays.pop("grid_thw"), grid_thw)
    assert arrays.keys() == {"embeddings_0", "embeddings_1", "embeddings_2"}
    assert all(array.dtype == np.float32 for array in arrays.values())
    ours = np.concatenate([arrays[f"embeddings_{number}"] for number in range(3)])
    np.testing.assert_array_equal(ours, expected)
    assert os.listdir(tmp_path) == [out]


@pytest.mark.parametrize("out", ["out.npz", "out.safetensors"])
def test_videos_beside_images(run, images, tmp_path, out):
    """By the checkpoint's own limits, at a rate that is chosen, with timestamps."""
    checkpoint = write_checkpoint(tmp_path / "qwen3", SMALL_TOWERS["qwen3_5"])
    settings = {"size": {"shortest_edge": 64 * 64, "longest_edge": 96 * 160}}
    (checkpoint / "video_preprocessor_config.json").write_text(json.dumps(settings))
    video = tmp_path / "clip.MKV"
    write_video(video, np.random.default_rng(0).integers(0, 256, (20, 48, 64, 3), np.uint8))
    options = "--dtype", "float32", "--fps", "5"
    status, stdout, stderr = run(
        *options, images=[images[0], video], checkpoint=checkpoint, out=out
    )
    assert (status, stderr) == (0, "")
    assert "embeddings of 1 image and 1 video to" in stdout
    arrays, names = read(tmp_path / out)
    assert names == [str(images[0]), str(video)]
    config = VideoConfig.from_pretrained(checkpoint)
    assert config.max_pixels == 96 * 160
    pixel_values, grid_thw, (seconds,) = preprocess_videos(video, config, fps=5)
    assert grid_thw[0, 0] == 5
    np.testing.assert_array_equal(arrays["grid_thw"][1:], grid_thw)
    np.testing.assert_array_equal(arrays["timestamps_1"], seconds)
    expected = load_vision_tower(checkpoint, "float32")(pixel_values, grid_thw)
    np.testing.assert_allclose(arrays["embeddings_1"], np.asarray(expected), atol=1e-5)
    assert set(arrays) == {"embeddings_0", "embeddings_1", "timestamps_1", "grid_thw"}


@pytest.mark.parametrize("output", ["patches", "pooled"])
def test_other_outputs(run, checkpoint, images, tmp_path, output):
    status, stdout, stderr = run("--dtype", "float32", "--output", output)
    assert (status, stderr) == (0, "")
    arrays, _ = read(tmp_path / "out.npz")
    pixel_values, grid_thw = preprocess(images)
    tower = load_vision_tower(checkpoint, "float32")
    expected = np.asarray(tower(pixel_values, grid_thw, output=output))
    np.testing.assert_array_equal(arrays.pop("grid_thw"), grid_thw)
    counts = grid_thw.prod(axis=1) if output == "patches" else [1, 1, 1]
    assert [len(arrays[f"{output}_{number}"]) for number in range(3)] == list(counts)
    ours = np.concatenate([arrays.pop(f"{output}_{number}") for number in range(3)])
    np.testing.assert_array_equal(ours, expected)
    assert not arrays
    what = "means" if output == "pooled" else output
    assert f"wrote {len(expected)} {what} of 3 images" in stdout


def test_without_standard_error(run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)  # as where a shell closed it: 2>&-
    assert run()[0] == 0
    assert len(read(tmp_path / "out.npz")[1]) == 3


def test_what_cannot_be_printed_is_no_traceback(run, tmp_path, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError("no space left on device")  # as of > /dev/full

    monkeypatch.setattr("sys.stdout", Full())
    status, _, stderr = run()
    assert (status, stderr) == (2, "python -m flax_models: error: no space left on device\n")


@pytest.mark.parametrize("name", ["写真.npz", "caf\udce9.npz"], ids=ascii)
def test_names_that_the_terminal_cannot_show(run, tmp_path, monkeypatch, name):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert run(out=name)[0] == 0
    sys.stdout.flush()
    assert shown.getvalue().endswith(name.encode("ascii", "backslashreplace") + b"\n")
    assert (tmp_path / name).is_file()


def test_batches_change_nothing_but_the_number_of_calls(run, tmp_path, monkeypatch):
    calls, call = [], flax_models.VisionTower.__call__

    def counted(tower, pixel_values, grid_thw, **options):
        calls.append(len(grid_thw))
        return call(tower, pixel_values, grid_thw, **options)

    monkeypatch.setattr(flax_models.VisionTower, "__call__", counted)
    run("--dtype", "float32", out="together.npz")
    run("--dtype", "float32", "--batch-tokens", "1", out="alone.npz")
    assert calls == [3, 1, 1, 1]
    together, alone = read(tmp_path / "together.npz")[0], read(tmp_path / "alone.npz")[0]
    assert together.keys() == alone.keys()
    for name, array in together.items():
        np.testing.assert_allclose(alone[name], array, rtol=1e-4, atol=1e-4)
    # As many neighbours as fit, to the token: the first two and the last two, or all.
    tokens = together["grid_thw"].prod(axis=1)
    for limit in (tokens[:2].sum(), tokens[:2].sum() - 1, tokens.sum() - 1, tokens.sum()):
        calls.clear()
        run("--dtype", "float32", "--batch-tokens", str(limit))
        expected, held = [], limit + 1
        for image in tokens:
            if held + image > limit:
                expected, held = [*expected, 0], 0
            expected[-1] += 1
            held += image
        assert calls == expected, limit


def test_pixel_limits(run, tmp_path):
    assert run("--min-pixels", str(112 * 112), "--max-pixels", str(140 * 140))[0] == 0
    pixels = read(tmp_path / "out.npz")[0]["grid_thw"].prod(axis=1) * 14 * 14
    assert (pixels >= 112 * 112).all()
    assert (pixels <= 140 * 140).all()


def test_an_older_file_is_replaced_only_by_a_complete_one(run, images, tmp_path):
    (tmp_path / "out.npz").write_bytes(b"older")
    bad = tmp_path / "bad.png"
    bad.write_bytes(images[0].read_bytes()[:200])
    assert run("--batch-tokens", "1", images=[*images, bad])[0] == 2
    assert (tmp_path / "out.npz").read_bytes() == b"older"
    assert run()[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["bad.png", "out.npz"]
    assert read(tmp_path / "out.npz")[1] == [str(path) for path in images]


def test_a_symbolic_link_stays_one(run, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out.npz").symlink_to("disk/real")
    for _ in range(2):  # without its target, and over an older one
        assert run()[0] == 0
        assert (tmp_path / "out.npz").is_symlink()
        assert len(read(tmp_path / "out.npz")[1]) == 3
    assert os.listdir(tmp_path / "disk") == ["real"]


@pytest.mark.parametrize("out", ["out.npz", "out.safetensors"])
def test_a_full_disk_leaves_no_part_of_a_file(run, tmp_path, out):
    (tmp_path / out).write_bytes(b"older")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        status, stdout, stderr = run(out=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (status, stdout) == (2, "")
    assert "File too large" in stderr
    assert os.listdir(tmp_path) == [out]
    assert (tmp_path / out).read_bytes() == b"older"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_no_part_of_a_file(run, tmp_path, monkeypatch, interruption):
    def interrupt(path, arrays, names):
        path.write_bytes(b"half a fi")
        raise interruption

    monkeypatch.setitem(_WRITERS, ".npz", interrupt)
    with pytest.raises(interruption):
        run()
    assert os.listdir(tmp_path) == []


def test_control_c_is_no_traceback(checkpoint, images, tmp_path, monkeypatch, capsys):
    def load(*_, **__):
        raise KeyboardInterrupt

    arguments = [*images, "--checkpoint", checkpoint, "--out", tmp_path / "out.npz"]
    monkeypatch.setattr("sys.argv", ["flax_models", *map(str, arguments)])
    monkeypatch.setattr("flax_models.load_vision_tower", load)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^130$"):
        runpy.run_path(flax_models.__path__[0] + "/__main__.py", run_name="__main__")
    assert capsys.readouterr().err == "interrupted\n"


def test_nothing_is_written_beside_the_output(run, images, checkpoint, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    folders = [*{path.parent for path in images}, checkpoint, elsewhere]
    before = {folder: sorted(os.listdir(folder)) for folder in folders}
    assert run()[0] == 0
    assert {folder: sorted(os.listdir(folder)) for folder in folders} == before
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out.npz"]
