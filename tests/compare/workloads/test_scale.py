import pytest
from PIL import Image

pytest.importorskip("sklearn")

from compare.workloads.scale import write_photographs

PIXELS = (4_000, 30_000)


def test_photographs_are_many_sizes_and_the_same_every_time(tmp_path):
    files = write_photographs(tmp_path / "twelve", 12, PIXELS)
    assert sorted((tmp_path / "twelve").iterdir()) == files
    areas = []
    for path in files:
        with Image.open(path, formats=["JPEG"]) as image:
            areas.append(image.width * image.height)
    assert 0.95 * PIXELS[0] < min(areas) < 15_000 < max(areas) < 1.05 * PIXELS[1]
    contents = [path.read_bytes() for path in files]
    assert len(set(contents)) == 12
    fewer = write_photographs(tmp_path / "three", 3, PIXELS)
    assert [path.read_bytes() for path in fewer] == contents[:3]
    other = write_photographs(tmp_path / "other", 1, PIXELS, seed=1)
    assert other[0].read_bytes() != contents[0]
