"""The second stage by itself: what it does with a block of rows, and which towers it knows."""

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("pyarrow")

import pyarrow as pa

from flax_models import ImageConfig, ImageError, VideoConfig, preprocess
from flax_models.ray_data import rows as rows_of
from flax_models.ray_data.patches import Preprocessing, Report, add_patches
from flax_models.ray_data.towers import TowerStage, find_loader
from tests.flax_models.ray_data.conftest import CONFIG, ids_of
from tests.flax_models.ray_data.stand_in import means
from tests.kernel_cases import relative_rms
from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

STAND_IN = "tests.flax_models.ray_data.stand_in:load"


class Counted(Report):
    def __init__(self):
        self.numbers = []

    def __call__(self, **numbers):
        self.numbers.append(numbers)


@pytest.fixture
def block(photographs):
    names = [*ids_of(photographs)[:4], "absent.jpg"]
    images = [str(photographs / name) for name in names]
    table = pa.table({"id": names, "label": range(5), "image": images})
    preprocessing = Preprocessing(ImageConfig(), VideoConfig(), 2.0, "float32")
    return pa.concat_tables(add_patches(table, "image", preprocessing, Report()))


def stage(checkpoint, framework=STAND_IN, **changed):
    settings = {"dtype": "float32", "output": "embeddings", "store": "float32", "budget": 100}
    settings |= {"strict": False, "report": Counted(), **changed}
    return TowerStage(framework, str(checkpoint), **settings)


def by_id(tables):
    return {row["id"]: row for table in tables for row in table.to_pylist()}


def test_rows_keep_what_is_theirs(checkpoint, block):
    tower = stage(checkpoint)
    rows = by_id(tower(block))
    assert rows["absent.jpg"]["embeddings"] is rows["absent.jpg"]["shape"] is None
    for given in block.to_pylist()[:4]:
        row = rows[given["id"]]
        patches = np.frombuffer(given["patches"], np.float32).reshape(-1, CONFIG.patch_dim)
        expected = means(CONFIG, patches)
        assert (row["label"], row["error"]) == (given["label"], None)
        assert row["embeddings"] == expected.tobytes()
        assert row["shape"] == list(expected.shape)
    sums = {}
    for numbers in tower.report.numbers:
        sums |= {name: sums.get(name, 0) + number for name, number in numbers.items()}
    tokens = [np.prod(row["grid_thw"]) for row in block.to_pylist()[:4]]
    assert (sums["images"], sums["refused"], sums["patches"]) == (4, 1, sum(tokens))
    assert sums["calls"] < 4
    assert sums["padding"] > 0 < sums["busy"]


def test_an_image_that_comes_out_infinite_is_refused_alone(checkpoint, block):
    tower = stage(checkpoint, budget=10_000)
    encode = tower.encode

    def with_infinity(pixel_values, grid_thw, output):
        (rows,) = encode(pixel_values, grid_thw, output)
        rows[-1, -1] = np.inf  # of the call's last image
        return [rows]

    tower.encode = with_infinity
    errors = [row["error"] for row in by_id(tower(block)).values()]
    assert errors.count("its embeddings hold infinities or NaN in float32") == 1
    assert errors.count(None) == 3
    tower.strict = True
    with pytest.raises(ImageError, match=r"jpg: its embeddings hold infinities"):
        list(tower(block))


def test_an_image_that_no_memory_is_enough_for_is_refused(checkpoint, block):
    """Where it is a call alone; of several the run's settings are wrong."""
    for budget, refused in ((1, True), (10_000, False)):
        tower = stage(checkpoint, budget=budget)

        def without_memory(*_):
            raise MemoryError("a call needs more")

        tower.encode = without_memory
        if refused:
            errors = [row["error"] for row in by_id(tower(block)).values()]
            assert errors.count("a call needs more") == 4
        else:
            with pytest.raises(MemoryError, match="a call needs more"):
                list(tower(block))


def test_features_of_deepstack_stand_beside_the_embeddings(photographs, tmp_path):
    """Of a tower in Flax, in bf16: a call's rows go to their images, as close as a call with each
    alone sums its products, a fiftieth of the root mean square.
    """
    pytest.importorskip("flax")
    checkpoint = write_checkpoint(tmp_path / "qwen3", SMALL_TOWERS["qwen3_omni_moe"])
    images = ImageConfig.from_pretrained(checkpoint)
    paths = [str(photographs / name) for name in ids_of(photographs)[:3]]
    table = pa.table({"id": paths, "image": paths})
    preprocessing = Preprocessing(images, VideoConfig(), 2.0, "bfloat16")
    block = pa.concat_tables(add_patches(table, "image", preprocessing, Report()))
    tower = stage(checkpoint, framework="flax", dtype="bfloat16", store="bfloat16", budget=10_000)
    tables = list(tower(block))
    assert sum(numbers.get("calls", 0) for numbers in tower.report.numbers) == 1
    found = {row["id"]: row for table in tables for row in rows_of(table)}
    for path in paths:
        alone, *features = tower.encode(*preprocess(path, images), "embeddings")
        for ours, expected in (
            (found[path]["embeddings"], alone),
            (found[path]["deepstack"], np.stack(features)),
        ):
            assert ours.dtype == expected.dtype == "bfloat16"
            assert ours.shape == expected.shape
            assert relative_rms(np.float32(ours), np.float32(expected)) < 2e-2


def test_frameworks():
    assert find_loader(STAND_IN).__module__.endswith("stand_in")
    with pytest.raises(ValueError, match="framework must be flax, torch or MODULE:FUNCTION"):
        find_loader("keras")
    with pytest.raises(ValueError, match=r"there is no load in no\.such"):
        find_loader("no.such:load")
    with pytest.raises(ValueError, match="there is no absent in tests"):
        find_loader("tests.flax_models.ray_data.stand_in:absent")
