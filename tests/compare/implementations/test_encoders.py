"""Ways to encode a folder, on a small tower and photographs of a few patches."""

import contextlib
import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import pyarrow as pa
import pyarrow.parquet as pq

from compare.implementations import encoders
from compare.implementations.encoders import Job
from compare.workloads.scale import Sizes, write_photographs
from flax_models.ray_data.command import _parser
from tests.compare.small_towers import CONFIG

SIZES = Sizes(
    photographs=4,
    pixels=(4_000, 20_000),
    sample=3,
    checked=2,
    batch_tokens=200,
    seconds=0.0,
    config=CONFIG,
)


@pytest.fixture(scope="module", autouse=True)
def in_this_process():
    """Where this suite's towers are loaded anyway."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "on_each_gpu", lambda _, function, *given: [function(*given)])
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory, in_this_process):
    scratch = tmp_path_factory.mktemp("scale")
    files = write_photographs(scratch / "photographs", SIZES.photographs, SIZES.pixels)
    made = Job(files, scratch / "checkpoint", scratch, 0, SIZES)
    encoders.write_checkpoint(made)
    return made


@pytest.fixture(scope="module")
def exact(job):
    return encoders.exact(job)


def relative_rms(ours, exact):
    assert ours.shape == exact.shape == (SIZES.checked, CONFIG.hidden_size)
    return np.sqrt(np.mean((ours - exact) ** 2) / np.mean(exact**2))


@pytest.mark.parametrize(
    "encoder",
    [encoders.baseline(), encoders.encoders("flax")[0], encoders.encoders("torch")[0]],
    ids=lambda encoder: encoder.name,
)
def test_the_vectors_of_the_first_photographs(job, exact, encoder):
    """And not of another: those differ by more than the limit."""
    found = encoder.run(job)
    assert relative_rms(found.vectors, exact[encoder.ours]) < 1e-2
    assert relative_rms(exact[True][::-1], exact[True]) > 2e-2
    assert found.images == SIZES.sample
    assert found.patches % 4 == 0
    assert found.stages.keys() == {"decode", "patches", "upload", "tower"}
    assert found.seconds > 0
    assert (found.padding == 0) == (not encoder.ours)


def test_the_command_gets_what_it_takes_and_its_manifest_is_read(job, monkeypatch):
    counted = {
        **{"images": 4, "patches": 1000, "padding": 24, "seconds": 5.0, "busy": 4.0},
        **{"reading": 2.0, "read": 4, "writing": 0.2, "written": 4},
    }
    asked = []

    def run(command, **_):
        assert command[1:4] == ["-m", "flax_models", "encode"]
        given = _parser().parse_args(command[4:])
        asked.append(given)
        given.out.mkdir()
        (given.out / "manifest.json").write_text(json.dumps({"last_run": counted}))
        ids = [path.name for path in reversed(job.files)]
        pooled = pa.array([[float(id_[:6])] * 3 for id_ in ids], pa.list_(pa.float32(), 3))
        pq.write_table(pa.table({"id": ids, "pooled": pooled}), given.out / "part-0.parquet")
        return _ended(0)

    monkeypatch.setattr(subprocess, "Popen", run)
    found = encoders.encoders("torch")[1].run(job)
    warm_up, whole = asked
    assert warm_up.source.read_text().splitlines() == list(map(str, job.files))
    assert whole.source == job.files[0].parent
    assert {(g.framework, g.output, g.gpus, g.batch_tokens) for g in asked} == {
        ("torch", "pooled", 0, SIZES.batch_tokens)
    }
    np.testing.assert_array_equal(found.vectors, [[0] * 3, [1] * 3])
    assert (found.images, found.patches, found.padding, found.seconds) == (4, 1000, 24, 5.0)
    assert (found.busy, found.reading) == (0.8, 0.5)
    assert found.stages == {"writing": pytest.approx(0.05)}


def test_a_command_that_fails_says_why_and_how_far_it_was(job, monkeypatch, capsys):
    said = ["2 of 4 images, 1.0 images/s\n", "encode: error: no room\n"]
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: _ended(2, said))
    with pytest.raises(RuntimeError, match="encode: error: no room"):
        encoders.encoders("flax")[1].run(job)
    assert "  2 of 4 images, 1.0 images/s\n" in capsys.readouterr().out


def _ended(returncode, said=()):
    """What `subprocess.Popen` gives of a process that has ended."""
    return contextlib.nullcontext(SimpleNamespace(returncode=returncode, stderr=said))


def test_several_gpus_rates_are_summed(job, monkeypatch):
    one = encoders.Encoded(10, 1000, 2.0, np.zeros((2, 3)), padding=7)
    other = encoders.Encoded(30, 3000, 2.0, np.zeros((2, 3)), padding=8)
    monkeypatch.setattr(encoders, "on_each_gpu", lambda *_: [one, other])
    found = encoders.baseline().run(job)
    assert (found.images, found.patches, found.padding) == (40, 4000, 15)
    assert found.images / found.seconds == pytest.approx(10 / 2 + 30 / 2)
