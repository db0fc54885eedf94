"""The page's examples, run as they stand behind its command."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("faiss")

from flax_models.__main__ import main
from tests.flax_models.ray_data.conftest import CONFIG, ids_of
from tests.tower_checkpoints import write_checkpoint

PAGE = Path(__file__).parents[3] / "flax_models" / "ray_data" / "README.md"


def test_from_a_folder_to_nearest_neighbours(cluster, photographs, tmp_path, monkeypatch, capsys):
    text = PAGE.read_text("utf-8")
    (command,) = re.findall(r"^python -m flax_models (encode .*)$", text, re.MULTILINE)
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
