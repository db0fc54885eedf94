import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from compare.common import environment, result_files
from compare.common.errors import InputError
from compare.common.result_files import Record


def measured():
    record = Record("windows-448", "triton", median_us=7.0, relative_rms_error=2e-3)
    return result_files.collect("kernels", [record], {"copy_bytes_per_s": 4e12})


def with_records(records):
    return (
        '{"device": "x", "driver": null, "versions": {}, "date": "2026-11-21T00:00:00+00:00", '
        f'"records": {records}}}'
    )


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "kernels.json"
    written = measured()
    result_files.write(written, path)
    assert result_files.read(path) == written
    content = json.loads(path.read_text())
    assert content.keys() >= {"device", "driver", "versions", "date", "records", "part"}
    assert content["versions"]["python"]
    assert content["ceilings"] == {"copy_bytes_per_s": 4e12}


def test_an_update_takes_the_place_of_what_it_renews_and_keeps_the_note():
    names = ("windows-448", "frames-448", "windows-672")
    first = replace(result_files.collect("kernels", map(Record, names, names)), note="Alone.")
    renewed = [Record("frames-448", "triton"), Record("frames-448", "pallas"), Record("new", "x")]
    both = first.updated(result_files.collect("kernels", renewed))
    found = [(record["workload"], record["implementation"]) for record in both.records]
    of_frames = [("frames-448", "triton"), ("frames-448", "pallas")]
    assert found == [(names[0], names[0]), *of_frames, (names[2], names[2]), ("new", "x")]
    assert both.note == "Alone."


def test_required_fields_are_always_written_and_others_where_they_speak():
    record = Record("w", "pallas", note="not installed", details={"bit_equal_share": 1.0})
    assert record.to_json() == {
        "workload": "w",
        "implementation": "pallas",
        "median_us": None,
        "floor_us": None,
        "relative_rms_error": None,
        "note": "not installed",
        "bit_equal_share": 1.0,
    }


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_what_json_cannot_hold_is_missing(tmp_path, error):
    record = Record("w", "triton", relative_rms_error=error, passed=False)
    result_files.write(result_files.collect("agreement", [record]), tmp_path / "a.json")
    assert result_files.read(tmp_path / "a.json").records[0]["relative_rms_error"] is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "kernels.json"
    result_files.write(measured(), path)
    before = path.read_text()
    broken = result_files.collect("kernels", [Record("w", "x", details={"bad": object()})])
    with pytest.raises(TypeError):
        result_files.write(broken, path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["kernels.json"]


RECORD = (
    '[{"workload": "w", "implementation": "triton", "median_us": null, "floor_us": null, '
    '"relative_rms_error": null}]'
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read results from"),
        ("{", "cannot read results from"),
        ("[]", "is no result file: it holds no JSON object"),
        ('{"device": "x", "records": []}', "it lacks a valid driver, versions, date"),
        (with_records("[]").replace("{}", '["torch"]'), "it lacks a valid versions"),
        (with_records("{}"), "is no result file: it lacks a valid records"),
        (with_records('[{"workload": "w"}]'), "a record lacks a valid implementation, median_us"),
        (with_records("[1]"), "is no result file: a record lacks a valid workload"),
        (with_records(RECORD.replace("null", '"fast"', 1)), "a record lacks a valid median_us$"),
        (with_records(RECORD.replace("}", ', "row_us": "fast"}')), "lacks a valid row_us$"),
        (with_records(RECORD.replace("}", ', "layer": 1.5}')), "lacks a valid layer$"),
    ],
)
def test_unreadable_files(tmp_path, content, message):
    path = tmp_path / "kernels.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        result_files.read(path)


@pytest.mark.parametrize(
    ("part", "lacking"),
    [
        ("fusion", "fuse, head_dim, rotary_dim, segment_length, auto"),
        ("stress", "tried, cases, findings"),
        ("trust", "tried, cases, findings"),
    ],
)
def test_a_file_of_another_version_is_named_before_a_report_fails_on_it(tmp_path, part, lacking):
    path = tmp_path / f"{part}.json"
    path.write_text(with_records(RECORD))
    with pytest.raises(InputError, match=rf"{part}\.json is no result .* lacks a valid {lacking}"):
        result_files.read(path)


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    # The last has room for its own name, but not for that of the unfinished file beside it.
    for name in (".", "/", "file/kernels.json", "pipe", 300 * "x", 250 * "x"):
        with pytest.raises(InputError, match="cannot write results to"):
            result_files.check_writable(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


def test_a_disk_without_room_is_one_sentence(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match=r"cannot write .*kernels\.json: No space left on device"):
        result_files.write(measured(), tmp_path / "kernels.json")


def test_a_library_without_a_package_is_told_by_its_content(monkeypatch, tmp_path):
    library = tmp_path / "fa3.so"
    monkeypatch.setenv(environment.FA3_LIBRARY, str(library))
    assert "FA3" not in environment.versions()
    library.write_bytes(b"abc")
    assert environment.versions()["FA3"] == "fa3.so (sha256 ba7816bf8f01)"


def test_default_path_names_the_device(tmp_path):
    path = result_files.default_path("kernels", "NVIDIA H200", tmp_path)
    assert path == tmp_path / "nvidia-h200" / "kernels.json"
