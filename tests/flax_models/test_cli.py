"""`python -m flax_models`: what it writes, and what it says to bad input."""

import io
import json
import os
import resource
import runpy
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

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
from flax_models.__main__ import _WRITERS, main
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint
from tests.video_files import write_video

CONFIG = SMALL_TOWERS["head_dim_16"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIG)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three images of different sizes, two of them with the same name."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    paths = []
    for name, height, width in (("a.png", 60, 150), ("b.png", 112, 84), ("more/a.png", 70, 70)):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        paths.append(path)
    return paths


@pytest.fixture
def run(checkpoint, images, tmp_path, capsys):
    """Run the command line; returns the exit status, standard output and standard error."""

    def run(*options, out="out.npz", images=images, checkpoint=checkpoint):
        arguments = [*images, "--checkpoint", checkpoint, "--out", tmp_path / out, *options]
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse's own errors
            status = exit_.code
        return status, *capsys.readouterr()

    return run


def read(path):
    if path.suffix == ".npz":
        with np.load(path) as file:
            arrays = dict(file)
        return arrays, arrays.pop("images").tolist()
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, json.loads(file.metadata()["images"])


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


def test_refuses_videos(run, images, tmp_path, monkeypatch):
    """Before the checkpoint's weights are read."""
    pytest.importorskip("av")
    video = tmp_path / "clip.mp4"
    assert refused(run(images=[video]), tmp_path, "no such video file")
    video.write_bytes(b"no video")
    assert refused(run(images=[images[0], video]), tmp_path, "it is no AVI, Matroska")
    monkeypatch.setitem(sys.modules, "av", None)
    assert refused(run(images=[video]), tmp_path, "video files need PyAV")


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


def refused(result, tmp_path, *words):
    """One sentence on standard error that has the words; exit status 2; nothing written."""
    status, stdout, stderr = result
    assert status == 2
    assert stdout == ""
    assert all(word in stderr for word in words), stderr
    assert "Traceback" not in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.glob("*out*"))
    return True


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
