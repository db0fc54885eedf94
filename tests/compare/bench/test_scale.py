"""The benchmark of a folder's encoding, with stand-ins for everything that encodes."""

import itertools
import os

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from compare.bench import scale
from compare.common import environment, result_files
from compare.common.errors import UnavailableError
from compare.implementations import encoders
from compare.implementations.encoders import Encoded, Encoder
from compare.report import report
from compare.workloads.scale import SCALE_WORKLOADS, ScaleWorkload, Sizes
from tests.compare.small_towers import CONFIG
from tests.compare.synthetic import as_results

EXACT = np.ones((2, 4), np.float32)
ALONE = {"decode": 0.01, "patches": 0.03, "upload": 0.002, "tower": 0.006}
ONE, TWO = "photographs-torch-1-gpu", "photographs-torch-2-gpus"
WORKLOADS = [ScaleWorkload(ONE, "torch", 1), ScaleWorkload(TWO, "torch", 2)]


def encoder(name, encoded, **options):
    def run(job):
        if isinstance(encoded, Exception):
            raise encoded
        assert job.scratch.is_dir()
        assert "JAX_COMPILATION_CACHE_DIR" in os.environ
        assert len(job.files) == 3
        return encoded(job) if callable(encoded) else encoded

    return Encoder(name, "torch", run, **options)


def off_by(error, sign=1):
    """Vectors with such an error."""
    return EXACT * (1 + sign * error)


def command(job):
    rate = 80.0 * (1.9 if job.gpus == 2 else 1.0)
    return Encoded(
        images=800,
        patches=80_000,
        seconds=800 / rate,
        vectors=off_by(0.01, -1),
        stages={"writing": 0.001},
        padding=20_000,
        compile_s=9.0,
        busy=0.75,
        reading=0.06,
    )


MEASURED = [
    encoder(
        "torch tower alone",
        lambda job: Encoded(100, 10_000, 1.0 / job.gpus, off_by(0.014), ALONE, padding=0),
        ours=True,
    ),
    encoder("torch", command, ours=True, alone="torch tower alone"),
    encoder("wrong", Encoded(100, 10_000, 1.0, off_by(0.016)), ours=True),
    encoder("broken", RuntimeError("no room"), ours=True),
    encoder("absent", UnavailableError("not for this machine")),
]


@pytest.fixture
def records(monkeypatch):
    loop = Encoded(10, 1000, 1.0, off_by(0.01), dict.fromkeys(ALONE, 0.025), padding=0)
    monkeypatch.setattr(encoders, "baseline", lambda: encoder("Hugging Face loop", loop))
    monkeypatch.setattr(encoders, "write_checkpoint", lambda job: None)
    monkeypatch.setattr(encoders, "exact", lambda job: {True: EXACT, False: EXACT})

    def bench(gpus):
        monkeypatch.setattr(environment, "gpu_count", lambda: gpus)
        sizes = Sizes(photographs=3, pixels=(4_000, 9_000), config=CONFIG)
        found = scale.bench_scale(WORKLOADS, sizes, MEASURED)
        records = itertools.chain.from_iterable(found)
        return {(record.workload, record.implementation): record for record in records}

    return bench


def test_workloads_are_both_frameworks_on_one_and_two_gpus():
    assert {(w.framework, w.gpus) for w in SCALE_WORKLOADS.values()} == {
        *(("flax", 1), ("torch", 1)),
        *(("flax", 2), ("torch", 2)),
    }
    for workload in SCALE_WORKLOADS.values():
        names = [encoder.name for encoder in encoders.encoders(workload.framework)]
        assert names[:2] == [f"{workload.framework} tower alone", workload.framework]


def test_every_way_gets_its_rates_or_a_reason(records, capsys):
    found = records(gpus=2)
    assert len(found) == 2 * 6
    ours = found[ONE, "torch"]
    assert (ours.median_us, ours.compile_s, ours.passed) == (12_500, 9.0, True)
    told = ours.details
    assert (told["gpus"], told["photographs"]) == (1, 3)
    assert (told["images_per_s"], told["patches_per_s"]) == (80, 8000)
    assert (told["padding"], told["busy"]) == (0.2, 0.75)
    assert told["share_of_alone"] == pytest.approx(0.8)
    # 90 photographs a second, of which each takes cores 61 ms.
    assert told["cores_wanted"] == pytest.approx(0.9 * 100 * 0.061)
    stages = {"decode": 15, "patches": 45, "upload": 2, "tower": 6, "writing": 1}
    assert told["stages_ms"] == pytest.approx(stages)
    assert list(told["stages_ms"]) == list(stages)
    # On two GPUs beside what both their towers reach.
    assert found[TWO, "torch"].details["share_of_alone"] == pytest.approx(0.76)
    assert found[ONE, "torch tower alone"].passed
    for name, passed, note in (
        ("wrong", False, "not timed: the error breaks its rule"),
        ("broken", False, "RuntimeError: no room"),
        ("absent", None, "not for this machine"),
    ):
        record = found[ONE, name]
        assert (record.median_us, record.passed, record.note) == (None, passed, note)
    printed = capsys.readouterr().out
    assert "torch: 90% of its tower alone would take 5.49 cores" in printed
    assert "no time for broken: RuntimeError: no room" in printed


def test_without_a_baseline_nothing_is_timed(records, monkeypatch):
    failing = encoder("Hugging Face loop", ImportError("no transformers"))
    monkeypatch.setattr(encoders, "baseline", lambda: failing)
    assert {record.median_us for record in records(gpus=2).values()} == {None}


def test_more_gpus_than_there_are_fail_nothing(records):
    found = records(gpus=1)
    assert found[ONE, "torch"].median_us
    assert not any(found[TWO, name].median_us for name in ("torch", "broken"))
    missing = found[TWO, "torch"]
    assert (missing.passed, missing.note) == (None, "there are fewer GPUs here: 1")


def test_the_report_has_a_row_for_each_measurement(records, tmp_path):
    path = tmp_path / "scale.json"
    result_files.write(as_results("scale", list(records(gpus=2).values())), path)
    text = report.device_report(tmp_path, {"scale": result_files.read(path)})
    cores = scale._CORES
    shares = "75.0% | 20.0% | 60"
    for line in (
        "## A folder of photographs",
        f"| torch-1-gpu: **torch** | 3 | 80 | 8,000 | – | 80.0% | {shares} | 5.49 of {cores} "
        "| 1.00e-02 |",
        f"| torch-2-gpus: **torch** | 3 | 152 | 15,200 | 1.90x | 76.0% | {shares} | 11 of {cores} "
        "| 1.00e-02 |",
        "| torch-2-gpus: Hugging Face loop | 3 | 10 | 1,000 | 1.00x | – | – | 0.0% | – | – "
        "| 1.00e-02 |",
        "| torch-1-gpu: **torch** | 15 (22%) | 45 (65%) | 2 (3%) | 6 (9%) | 1 (1%) |",
        "| torch-1-gpu: Hugging Face loop | 25 (25%) | 25 (25%) | 25 (25%) | 25 (25%) | – |",
        "- broken: RuntimeError: no room",
    ):
        assert line in text.splitlines()
