"""Small photographs, a checkpoint and one small Ray for what is tested here."""

import os
import secrets

import numpy as np
import pytest
from PIL import Image

from tests.tower_checkpoints import SMALL_TOWERS, write_checkpoint

CONFIG = SMALL_TOWERS["head_dim_16"]


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "checkpoint", CONFIG)


@pytest.fixture
def photographs(tmp_path):
    """A folder of 20 images of different sizes, in a folder of a folder too."""
    folder = tmp_path / "photographs"
    rng = np.random.default_rng(0)
    for number in range(20):
        path = folder / ("", "more/deep/")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (56 + 14 * (number % 5), 140 - 7 * number, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    (folder / "notes.md").write_text("no image")
    return folder


def ids_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Ray with two cores that the tests of this process share; its address.

    And with a GPU, which Ray takes our word for: what it asks of a call on GPUs is asked here.
    """
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray writes one into the user's home
    context = ray.init(
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
    )
    yield context.address_info["address"]
    ray.shutdown()
