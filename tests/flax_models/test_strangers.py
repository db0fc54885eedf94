"""Checkpoints and images from strangers: a clear error or a right result, and nothing else."""

import json
import os
import pickle
import random
import resource
import struct
import zipfile
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from flax_models import (
    CheckpointError,
    ImageConfig,
    ImageError,
    VideoConfig,
    VisionConfig,
    preprocess,
    preprocess_videos,
    read_checkpoint,
)
from flax_models.common.checkpoint import expected_tensors
from tests.hostile import examples
from tests.tower_checkpoints import write_checkpoint
from tests.video_files import write_video

CONFIG = VisionConfig(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=8, out_hidden_size=8,
    fullatt_block_indexes=(),
)  # fmt: skip


@contextmanager
def little_memory(more):
    """Refuse this process more address space than it has, and `more` bytes."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint's directory, and the bytes of its files to damage."""
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIG)
    return directory, (directory / "model.safetensors").read_bytes()


def attempt(errors, function, *arguments, **options):
    """What the function returns; None after an error of these kinds, which must be one sentence."""
    try:
        return function(*arguments, **options)
    except errors as error:
        message = str(error)
    assert "\n" not in message
    assert 10 < len(message) < 1000
    return None


def read(directory):
    """Read a checkpoint as a stranger's; None after a clear error."""
    tensors = attempt(CheckpointError, read_checkpoint, CONFIG, directory)
    if tensors is None:
        return None
    shapes = expected_tensors(CONFIG)
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    assert all(tensor.dtype.itemsize in (2, 4) for tensor in tensors.values())
    return tensors


# ---- checkpoints ----


@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(1, 8))
@settings(max_examples=examples(1000))
def test_bit_flips_and_truncation(checkpoint, seed, kept, flips):
    directory, good = checkpoint
    draw = random.Random(seed)
    damaged = bytearray(good)
    header = 8 + int.from_bytes(good[:8], "little")
    for _ in range(flips):
        damaged[draw.randrange(header)] ^= 1 << draw.randrange(8)
    if seed % 3 == 0:
        damaged = damaged[: int(kept * len(good))]
    (directory / "model.safetensors").write_bytes(damaged)
    with little_memory(1 << 28):
        read(directory)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
offsets = st.integers(-1, 2**16) | st.integers(-(2**70), 2**70)
tensor_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "O", ""]),
        "shape": st.lists(offsets, max_size=4),
        "data_offsets": st.lists(offsets, max_size=3),
    }
)


@given(
    st.dictionaries(
        st.sampled_from([*expected_tensors(CONFIG), "__metadata__", "../x", ""]),
        tensor_entries | json_values,
        max_size=4,
    ),
    st.integers(0, 2**64 - 1) | st.none(),
)
@settings(max_examples=examples(500))
def test_hostile_headers(checkpoint, entries, length):
    directory, good = checkpoint
    real = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    header = json.dumps({**real, **entries}).encode()
    data = good[8 + int.from_bytes(good[:8], "little") :]
    length = len(header) if length is None else length
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + data)
    with little_memory(1 << 28):
        read(directory)


CONFIG_KEYS = (
    *("model_type", "depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size"),
    *("patch_size", "temporal_patch_size", "spatial_merge_size", "window_size", "in_channels"),
    *("fullatt_block_indexes", "hidden_act", "rope_parameters", "vision_config"),
)


@given(
    st.dictionaries(
        st.sampled_from(CONFIG_KEYS), json_values | st.integers(10**6, 10**40), max_size=3
    )
)
@settings(max_examples=examples(400))
def test_hostile_configurations(tmp_path_factory, changes):
    directory = tmp_path_factory.getbasetemp() / "configuration"
    write_checkpoint(directory, CONFIG)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with little_memory(1 << 28):
        config = attempt(ValueError, VisionConfig.from_pretrained, directory)
        if config is not None:
            assert len(expected_tensors(config)) == 6 + 12 * config.depth


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"a":' * 100_000, "cannot read .*config.json as JSON"),
        ("config.json", b"\xff\xfe", "cannot read .*config.json as JSON"),
        ("config.json", b'{"depth": ' + b"9" * 5000 + b"}", "cannot read .*config.json as JSON"),
        ("model.safetensors.index.json", b'{"weight_map":' * 50_000, "cannot read .*index.json"),
    ],
)
def test_json_that_exhausts_its_reader(tmp_path, name, content, message):
    write_checkpoint(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(VisionConfig.from_pretrained(tmp_path), tmp_path)


def test_json_of_endless_size_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no space
    with pytest.raises(CheckpointError, match=r"it has 1,099,511,627,776 bytes, more than"):
        VisionConfig.from_pretrained(tmp_path)


def test_pipes_and_devices_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config.json as JSON: it is no regular file"):
        VisionConfig.from_pretrained(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds neither model.safetensors nor"):
        read_checkpoint(CONFIG, tmp_path)


@pytest.mark.parametrize("depth", [1025, 10**9, pytest.param(10**400, id="10**400")])
def test_endless_towers_are_refused_before_their_tensors_are_named(tmp_path, depth):
    write_checkpoint(tmp_path, CONFIG)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"depth": depth}))
    with pytest.raises(
        ValueError, match=rf"config.json: depth must be at most 1,024, got {depth:,}$"
    ):
        VisionConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/dev/zero", "a/../b", ".", "..", "", "x\0y"]
)
def test_an_index_opens_no_file_outside_its_directory(tmp_path, name):
    directory = write_checkpoint(tmp_path / "checkpoint", CONFIG)
    (directory / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": dict.fromkeys(expected_tensors(CONFIG), name)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no file of its own directory"):
        read_checkpoint(CONFIG, directory)


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("code from a checkpoint was run",)


@pytest.mark.parametrize("packed", [False, True], ids=["pickle", "as torch.save packs it"])
def test_no_code_of_a_checkpoint_is_run(tmp_path, packed):
    write_checkpoint(tmp_path, CONFIG)
    content = pickle.dumps({"weight": Bomb()})
    if packed:
        file = BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", content)
        content = file.getvalue()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert read(tmp_path) is not None  # what is no safetensors file is not looked at
    (tmp_path / "model.safetensors").write_bytes(content)
    assert read(tmp_path) is None


# ---- images ----

SMALL = ImageConfig(max_pixels=56 * 56)
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


@pytest.fixture(scope="module")
def files():
    """The same drawing in every format."""
    drawing = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8))
    encoded = {}
    for name in FORMATS:
        file = BytesIO()
        drawing.save(file, name)
        encoded[name] = file.getvalue()
    return encoded


def load(path):
    """Preprocess a stranger's file; False after a clear error."""
    patches = attempt(ImageError, preprocess, path, config=SMALL)
    if patches is None:
        return False
    pixel_values, grid_thw = patches
    assert len(pixel_values) == grid_thw.prod() <= 16 * 5
    assert np.isfinite(pixel_values).all()
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(tmp_path, files, name):
    path = tmp_path / "drawing"
    path.write_bytes(files[name])
    assert load(path)


# Pillow warns of much that is odd in a file and reads on.
@pytest.mark.filterwarnings("ignore")
@given(st.sampled_from(FORMATS), st.integers(0, 2**32), st.integers(1, 8), st.floats(0.1, 1))
@settings(max_examples=examples(600))
def test_damaged_images(tmp_path_factory, files, name, seed, flips, kept):
    path = tmp_path_factory.getbasetemp() / "damaged"
    draw = random.Random(seed)
    damaged = bytearray(files[name])
    for _ in range(flips):  # most of them near the start, where the header is
        damaged[int(len(damaged) * draw.random() ** 6)] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged[: int(kept * len(damaged))] if seed % 3 == 0 else damaged)
    with little_memory(1 << 31):
        load(path)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """The same clip in several formats."""
    frames = np.random.default_rng(0).integers(0, 256, (4, 48, 64, 3), np.uint8)
    encoded = {}
    for name in ("avi", "mkv", "mp4", "ts"):
        path = tmp_path_factory.mktemp("clips") / f"clip.{name}"
        write_video(path, frames, codec="mpeg2video" if name == "ts" else "mpeg4")
        encoded[name] = path.read_bytes()
    return encoded


@given(st.integers(0, 3), st.integers(0, 2**32), st.integers(1, 8), st.floats(0.1, 1))
@settings(max_examples=examples(40))
def test_damaged_videos(tmp_path_factory, clips, name, seed, flips, kept):
    path = tmp_path_factory.getbasetemp() / "damaged.video"
    draw = random.Random(seed)
    damaged = bytearray([*clips.values()][name])
    for _ in range(flips):
        damaged[int(len(damaged) * draw.random() ** 3)] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged[: int(kept * len(damaged))] if seed % 3 == 0 else damaged)
    result = attempt(ImageError, preprocess_videos, path, VideoConfig(56 * 56, 56 * 56))
    if result is not None:
        pixel_values, grid_thw, (seconds,) = result
        assert len(pixel_values) == grid_thw.prod()
        assert np.isfinite(pixel_values).all()
        assert len(seconds) == grid_thw[0, 0]
        assert np.isfinite(seconds).all()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("name", "place", "pattern"),
    [("BMP", 18, "<ii"), ("GIF", 6, "<HH"), ("PPM", 3, None)],
)
def test_decompression_bombs_of_other_formats(tmp_path, files, name, place, pattern):
    path = tmp_path / "bomb"
    sides = b"60000 60000" if pattern is None else struct.pack(pattern, 60000, 60000)
    content = files[name]
    path.write_bytes(content[:place] + sides + content[place + len(sides) :])
    with little_memory(1 << 28):
        assert not load(path)


def test_an_image_that_exhausts_memory(tmp_path, monkeypatch):
    """By a stand-in: what a process has freed it may take again, whatever the limit."""

    def exhaust(*_):
        raise MemoryError

    Image.new("RGB", (80, 60)).save(tmp_path / "large.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", exhaust)
    with pytest.raises(ImageError, match=r"large.png\): MemoryError$"):
        preprocess(tmp_path / "large.png")


@pytest.mark.parametrize("program", ["%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 80\n", "\n"])
def test_no_other_program_is_started(tmp_path, monkeypatch, program):
    def fail(*arguments, **options):
        pytest.fail("a process was started")

    monkeypatch.setattr("subprocess.Popen", fail)
    monkeypatch.setattr("os.system", fail)
    path = tmp_path / "drawing.eps"
    path.write_text(program + "(/tmp) deletefile showpage\n%%EOF\n")
    with pytest.raises(ImageError, match="cannot identify image file"):
        preprocess(path)
