"""The page's examples, run as they stand behind its command."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")
pytest.importorskip("jax")
pytest.importorskip("flax")

from flax_models.__main__ import main
from tests.flax_models.ray_data.conftest import CONFIG, ids_of
from tests.tower_checkpoints import write_checkpoint


class FlatIndex:
    """Stands in for FAISS where that is not installed: an index that compares with all."""

    def __init__(self, size):
        self.vectors = np.empty((0, size), np.float32)

    def add(self, vectors):
        self.vectors = np.concatenate([self.vectors, vectors])

    def search(self, queries, number):
        products = queries @ self.vectors.T
        nearest = np.argsort(-products, axis=1)[:, :number]
        return np.take_along_axis(products, nearest, axis=1), nearest


def normalize(vectors):
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)


STAND_IN = SimpleNamespace(IndexFlatIP=FlatIndex, normalize_L2=normalize)
PAGE = Path(__file__).parents[3] / "flax_models" / "ray_data" / "README.md"


@pytest.mark.long
def test_from_a_folder_to_nearest_neighbours(cluster, photographs, tmp_path, monkeypatch, capsys):
    text = PAGE.read_text("utf-8")
    (command,) = re.findall(r"^python -m flax_models (encode .*)$", text, re.MULTILINE)
    if importlib.util.find_spec("faiss") is None:
        monkeypatch.setitem(sys.modules, "faiss", STAND_IN)
    search, pipeline = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    directory = "path/to/Qwen2.5-VL-7B-Instruct"
    write_checkpoint(tmp_path / directory, CONFIG)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command.replace("DIR", directory))) == 0
    Path("photo.jpg").write_bytes((photographs / "02.jpg").read_bytes())
    names = {}
    exec(search, names)
    found = [names["rows"][number]["id"] for number in names["neighbours"][0]]
    assert found[0] == "02.jpg"
    assert names["similarities"][0, 0] > 0.999
    assert set(found) < set(ids_of(photographs))
    capsys.readouterr()
    exec(pipeline, {})
    assert re.fullmatch(r"cat \(\d+, 48\)\n", capsys.readouterr().out)
