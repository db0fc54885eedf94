"""The first stage: the same bits as `preprocess`, and a reason for each file that is refused."""

import os
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("pyarrow")

import pyarrow as pa

from flax_models import ImageConfig, ImageError, VideoConfig, preprocess, preprocess_videos
from flax_models.common.resample import resize_by_numpy
from flax_models.ray_data import patches as patches_module
from flax_models.ray_data.patches import Preprocessing, Report, add_patches
from tests.video_files import write_video

PREPROCESSING = Preprocessing(ImageConfig(), VideoConfig(), 2.0, "float32")


def stage(rows, **changed):
    reports = []

    class Noted(Report):
        def __call__(self, **numbers):
            reports.append(numbers)

    preprocessing = Preprocessing(**{**vars(PREPROCESSING), **changed})
    table = pa.Table.from_pylist(rows)
    tables = add_patches(table, "image", preprocessing, Noted())
    result = pa.concat_tables(tables).to_pylist()
    assert reports[0]["read"] == len(rows)
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_patches_are_those_of_preprocess(photographs, dtype):
    """By path, by content and as Hugging Face's data sets hold them, in the tower's dtype."""
    path = str(photographs / "00.jpg")
    content = (photographs / "00.jpg").read_bytes()
    pixel_values, grid_thw = preprocess(path)
    for image in (path, content, {"bytes": content, "path": "x"}, {"bytes": None, "path": path}):
        (row,) = stage([{"id": "a", "label": 3, "image": image}], dtype=dtype)
        assert row["patches"] == pixel_values.astype(dtype).tobytes()
        assert row["grid_thw"] == grid_thw[0].tolist()
        assert (row["id"], row["label"], row["error"], row["timestamps"]) == ("a", 3, None, None)


def test_videos_by_path_and_by_content(tmp_path):
    pytest.importorskip("av")
    path = tmp_path / "clip.mkv"
    write_video(path, np.random.default_rng(0).integers(0, 256, (20, 48, 64, 3), np.uint8))
    patches, grid_thw, (seconds,) = preprocess_videos(path, fps=2)
    for image in (str(path), path.read_bytes()):
        (row,) = stage([{"image": image}])
        assert row["patches"] == patches.tobytes()
        assert row["grid_thw"] == grid_thw[0].tolist()
        assert row["timestamps"] == seconds.tolist()


def bomb(path):
    """A PNG file of which only the header exists, of 10^10 pixels."""
    Image.new("L", (1, 1)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = (100_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    path.write_bytes(content)


def test_what_is_refused_has_its_reason_and_the_rest_goes_on(photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(patches_module, "_MOST_BYTES", 100_000)
    bad = tmp_path / "bad"
    bad.mkdir()
    good = photographs / "00.jpg"
    (bad / "cut.jpg").write_bytes(good.read_bytes()[:800])
    (bad / "text.png").write_text("not an image")
    (bad / "empty.jpg").touch()
    (bad / "large.jpg").write_bytes(bytes(100_001))
    (bad / "folder.jpg").mkdir()
    os.mkfifo(bad / "pipe.jpg")
    bomb(bad / "bomb.png")
    Image.new("RGB", (1, 300)).save(bad / "thin.png")
    reasons = {
        "cut.jpg": "truncated",
        "text.png": "^cannot identify image file$",
        "empty.jpg": "^cannot identify image file$",
        "large.jpg": "more than 100,000 bytes",
        "folder.jpg": "no regular file",
        "pipe.jpg": "no regular file",
        "bomb.png": "pixels",
        "thin.png": "^sides of 300 x 1 pixels .* have the ratio 300",
        "absent.jpg": "^No such file or directory$",
        "null\0.jpg": "null",
        "clip.mp4": "^No such file or directory$",
    }
    rows = stage([{"image": str(path)} for path in (good, *(bad / name for name in reasons), good)])
    assert [row["error"] for row in (rows[0], rows[-1])] == [None, None]
    for row, (name, reason) in zip(rows[1:-1], reasons.items(), strict=True):
        assert row["patches"] is row["grid_thw"] is None
        with pytest.raises(ImageError, match=reason):
            raise ImageError(row["error"])
        assert "image 0" not in row["error"], name
    assert stage([{"image": None}])[0]["error"] == "there is no image"


def test_a_file_that_takes_too_much_memory_is_refused(monkeypatch):
    def preprocess(*_, **__):
        raise MemoryError

    monkeypatch.setattr(patches_module, "preprocess", preprocess)
    assert stage([{"image": b"large"}])[0]["error"] == "out of memory"


def test_a_read_that_fails_is_tried_again(photographs, monkeypatch):
    """A bad moment of the storage costs nothing; one that lasts is a reason."""
    failures = iter([OSError(5, "Input/output error")] * 2)
    monkeypatch.setattr(patches_module.time, "sleep", lambda seconds: None)

    def flaky(*arguments):
        for failure in failures:
            raise failure
        return open(*arguments)

    monkeypatch.setattr(patches_module, "open", flaky, raising=False)
    rows = [{"image": str(photographs / "00.jpg")}]
    assert stage(rows)[0]["error"] is None
    failures = iter([OSError(5, "Input/output error")] * 9)
    assert stage(rows)[0]["error"] == "cannot be read: Input/output error"


def test_strict_names_what_it_stops_at(tmp_path):
    with pytest.raises(ImageError, match=r"^b: No such file or directory$"):
        stage([{"id": "b", "image": str(tmp_path / "absent.jpg")}], strict=True)
    with pytest.raises(ValueError, match="there is no column 'image', only id"):
        stage([{"id": "b"}])


def test_files_are_read_without_pytorch_too(photographs, monkeypatch):
    rows = [{"image": str(photographs / "00.jpg")}]
    expected = stage(rows)
    asked = []

    def import_module(name):
        asked.append(name)
        raise ImportError

    patches_module._load_pytorch.cache_clear()
    monkeypatch.setattr(patches_module.importlib, "import_module", import_module)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert stage(rows) == expected
    assert asked == ["torch"]
    patches_module._load_pytorch.cache_clear()


def test_memory_with_one_huge_file_among_small_ones():
    """Resizing takes little more than the pixels of 80 million: 240 MB, and what is around them."""
    pixels = np.zeros((3, 4450, 4500), np.uint8)  # a quarter of them, for time
    tracemalloc.start()
    resize_by_numpy(pixels, 980, 980)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.7 * pixels.nbytes
