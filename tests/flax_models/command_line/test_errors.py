"""`python -m flax_models`: what it says to bad input."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

pytest.importorskip("jax")
pytest.importorskip("flax")

import flax_models
from tests.flax_models.command_line.conftest import CONFIG, read, refused
from tests.tower_checkpoints import write_checkpoint


def test_refuses_videos(run, images, tmp_path, monkeypatch):
    """Before the checkpoint's weights are read."""
    pytest.importorskip("av")
    video = tmp_path / "clip.mp4"
    assert refused(run(images=[video]), tmp_path, "no such video file")
    video.write_bytes(b"no video")
    assert refused(run(images=[images[0], video]), tmp_path, "it is no AVI, Matroska")
    monkeypatch.setitem(sys.modules, "av", None)
    assert refused(run(images=[video]), tmp_path, "video files need PyAV")


def test_missing_image(run, tmp_path):
    missing = tmp_path / "missing.png"
    assert refused(run(images=[missing]), tmp_path, "no such image file", "missing.png")


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n"])
def test_unreadable_image(run, images, tmp_path, content):
    bad = tmp_path / "bad.png"
    bad.write_bytes(content)
    assert refused(run(images=[images[0], bad]), tmp_path, "bad.png")


def test_a_directory_in_place_of_an_image(run, images, tmp_path):
    assert refused(run(images=[images[0].parent]), tmp_path, "got a directory")


def test_a_pipe_in_place_of_an_image(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refused(run(images=[tmp_path / "pipe"]), tmp_path, "got a pipe or device")


def test_a_decompression_bomb(run, tmp_path):
    Image.new("1", (9500, 9500)).save(tmp_path / "bomb.png")
    assert refused(run(images=[tmp_path / "bomb.png"]), tmp_path, "it has 90,250,000 pixels")


def test_image_of_an_absurd_shape(run, tmp_path):
    Image.new("RGB", (2010, 10)).save(tmp_path / "ribbon.png")
    assert refused(run(images=[tmp_path / "ribbon.png"]), tmp_path, "ribbon.png", "200")


def test_what_headers_tell_is_found_before_the_checkpoint_is_read(
    run, images, tmp_path, monkeypatch
):
    monkeypatch.setattr(flax_models, "load_vision_tower", None, raising=False)
    Image.new("I;16", (60, 60)).save(tmp_path / "deep.png")
    outcome = run(images=[*images, tmp_path / "deep.png"])
    assert refused(outcome, tmp_path, "deep.png: it has mode I", "more than 8 bits")
    assert refused(run("--max-pixels", "100"), tmp_path, "min_pixels", "above max_pixels")


def test_a_file_that_is_damaged_behind_its_header(run, images, tmp_path):
    content = images[0].read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    assert refused(run(images=[tmp_path / "cut.png"]), tmp_path, "cut.png: cannot read image 0")


def test_missing_checkpoint(run, tmp_path):
    assert refused(run(checkpoint=tmp_path / "nowhere"), tmp_path, "nowhere")


def test_truncated_checkpoint(run, checkpoint, tmp_path):
    cut = write_checkpoint(tmp_path / "cut", CONFIG)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert refused(run(checkpoint=cut), tmp_path, "model.safetensors", "truncated")


def test_unknown_model_type(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "clip"}')
    assert refused(run(checkpoint=other), tmp_path, "'clip'", "qwen2_5_vl")


@pytest.fixture
def beyond_fp16(tmp_path):
    """A checkpoint whose residual stream grows to 1.6e5 in one channel."""
    directory = write_checkpoint(tmp_path / "beyond", CONFIG)
    tensors = load_file(directory / "model.safetensors")
    for block in range(CONFIG.depth):
        tensors[f"blocks.{block}.mlp.down_proj.bias"][5] = 4e4
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_images_that_pass_the_range_of_fp16(run, images, beyond_fp16, tmp_path):
    result = run("--dtype", "float16", checkpoint=beyond_fp16)
    refused(result, tmp_path, f"{images[0]}: its embeddings hold infinities or NaN in float16")
    assert "--dtype bfloat16" in result[2]
    assert run("--dtype", "bfloat16", checkpoint=beyond_fp16)[0] == 0
    arrays, _ = read(tmp_path / "out.npz")
    assert all(np.isfinite(rows).all() for rows in arrays.values())


@pytest.mark.parametrize("batch_tokens", ["1", "16384"])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_image_that_is_not_finite_is_named(
    run, images, tmp_path, monkeypatch, batch_tokens, wrong
):
    """Whatever made it so, and in whichever call."""
    call, columns = flax_models.VisionTower.__call__, []

    def poisoned(tower, pixel_values, grid_thw, **options):
        rows = np.array(call(tower, pixel_values, grid_thw, **options))
        ends = np.cumsum(grid_thw.prod(axis=1)) // 4
        for number, end in enumerate(ends, start=len(columns)):
            rows[end - 1, 0] = np.nan if number == wrong else 0
        columns.extend(ends)
        return rows

    monkeypatch.setattr("flax_models.VisionTower.__call__", poisoned)
    result = run("--batch-tokens", batch_tokens)
    refused(result, tmp_path, f"{images[wrong]}: its embeddings hold infinities or NaN in bfloat16")


def test_weights_that_are_not_finite(run, beyond_fp16, tmp_path):
    tensors = load_file(beyond_fp16 / "model.safetensors")
    tensors["blocks.0.norm1.weight"][0] = np.inf
    save_file(tensors, beyond_fp16 / "model.safetensors")
    assert refused(run(checkpoint=beyond_fp16), tmp_path, "'blocks.0.norm1.weight' in ")


def test_device_that_is_not_there(run, tmp_path):
    assert refused(run("--device", "tpu"), tmp_path, "'tpu'")


@pytest.mark.parametrize("options", [(), ("--device", "cpu")])
@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize cuda"), AssertionError()])
def test_jax_without_any_device(run, tmp_path, monkeypatch, error, options):
    def devices(platform=None):
        raise error

    monkeypatch.setattr("jax.devices", devices)
    assert refused(run(*options), tmp_path, "JAX finds no device", str(error))


def test_a_call_that_does_not_fit(run, tmp_path, monkeypatch):
    monkeypatch.setattr("flax_models.common.memory._CHECKED_TOKENS", 0)
    monkeypatch.setattr("flax_models.tower.free_memory", lambda _: 1)
    refused(run(), tmp_path, "needs about", "are free")


@pytest.mark.parametrize("busy", ["load_vision_tower", "VisionTower.__call__"])
def test_a_device_whose_memory_is_used_up(run, tmp_path, monkeypatch, busy):
    import jax

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n--"
        )

    monkeypatch.setattr(f"flax_models.{busy}", fail)
    assert refused(run(), tmp_path, "Out of memory allocating 9 bytes.")


def test_missing_output_directory(run, tmp_path):
    assert refused(run(out="nowhere/out.npz"), tmp_path, "nowhere")


def test_a_checkpoint_without_permission(run, checkpoint, tmp_path, monkeypatch):
    """As it looks to a user who is not root, whom nothing is refused."""
    allowed, closed = os.access, checkpoint / "model.safetensors"
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and allowed(path, mode))
    assert refused(run(), tmp_path, "no permission to read", str(closed))


@pytest.mark.parametrize("out", ["/proc/out.npz", "n" * 246 + ".npz"])
def test_an_output_that_cannot_be_written_is_refused_first(run, tmp_path, monkeypatch, out):
    monkeypatch.setattr("flax_models.load_vision_tower", lambda *_, **__: pytest.fail("too late"))
    assert refused(run(out=out), tmp_path, "cannot write --out", out)


def test_output_that_is_a_directory(run, tmp_path):
    (tmp_path / "folder.npz").mkdir()
    assert refused(run(out="folder.npz"), tmp_path, "folder.npz")


@pytest.mark.parametrize(
    ("options", "out", "words"),
    [
        ((), "out.csv", "must end in .safetensors or .npz"),
        (("--batch-tokens", "0"), "out.npz", "expected a positive integer, got '0'"),
        (("--fps", "0"), "out.npz", "expected a number above 0, got '0'"),
        (("--fps", "fast"), "out.npz", "expected a number above 0, got 'fast'"),
        (("--dtype", "int8"), "out.npz", "invalid choice: 'int8'"),
    ],
)
def test_wrong_options(run, tmp_path, options, out, words):
    status, _, stderr = run(*options, out=out)
    assert status == 2
    assert words in stderr
    assert os.listdir(tmp_path) == []


def test_help_and_errors_as_a_program(checkpoint, tmp_path):
    def program(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "flax_models", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        )

    shown = program("--help")
    assert shown.returncode == 0
    assert "embeddings_<i>" in shown.stdout
    missing = tmp_path / "missing.png"
    wrong = program(missing, "--checkpoint", checkpoint, "--out", tmp_path / "out.npz")
    assert wrong.returncode == 2
    assert wrong.stderr == f"python -m flax_models: error: no such image file: {missing}\n"
