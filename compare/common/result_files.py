"""Result files: what was measured, on what, with which versions, written whole or not at all.

A file is a JSON object with `part`, `device`, `driver`, `versions`, `date`, `ceilings` and a list
`records`, one for each implementation of each workload, with the `date` that it was measured. The
file's own is its newest record's. Somebody may add a `note` by hand: what
else has to be known of the run; reports show it.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from compare.common import environment
from compare.common.errors import InputError, UnavailableError, one_line

DEFAULT_DIRECTORY = Path(__file__).parents[1] / "results"
_REQUIRED = {"device": str, "driver": str | None, "versions": dict, "date": str, "records": list}
_ALWAYS_WRITTEN = ("workload", "implementation", "median_us", "floor_us", "relative_rms_error")
# What reports read besides from every record of a part.
_WAY = {"fuse": str, "head_dim": int, "rotary_dim": int, "segment_length": int, "auto": str | None}
_STRESS = {"tried": str, "cases": int, "findings": int, "passed": bool}
_SCALE = {"gpus": int, "photographs": int, "cores": int}
_OF_PART = {
    "fusion": _WAY,
    "scale": _SCALE,
    "stress": _STRESS,
    "trust": _STRESS,
}  # trust: formerly


@dataclass(frozen=True)
class Verdict:
    """An error beside the limit that it was held to; where it counts, the largest one beside its.

    `error` is relative, `absolute_error` that of a single element.
    """

    error: float
    limit: float
    absolute_error: float | None = None
    absolute_limit: float = math.inf

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        largest = self.absolute_error
        return self.error <= self.limit and (largest is None or largest <= self.absolute_limit)


@dataclass(frozen=True)
class Record:
    """One implementation on one workload. Fields that do not apply are None and are not written.

    Attributes:
        median_us: microseconds a call, None where there is no timing; `note` then says why, or
            `details` hold losses instead.
        spread_us: 90th minus 10th percentile of the same samples: of whole calls, but of kernels in
            PyTorch of means over some milliseconds.
        row_us: microseconds a call of calls in a row, of which only the last is waited for.
        floor_us: the least time that the measured ceilings allow.
        share_of_floor: floor_us / median_us.
        relative_rms_error: of the very output that was timed.
        error_limit: what the error was held to.
        profiler_us: device time of the call's kernels by the profiler that times both frameworks.
        kernels_per_call: kernels and copies that the profiler saw in one call.
        compile_s: the first call, compilation included.
        peak_memory_mib: most device memory in use, weights included.
        layer: the record's layer in a tower, from 0.
        ours: whether what was timed is ours, where a wrong result or none is a failure.
        details: further values, written beside the others.
    """

    workload: str
    implementation: str
    median_us: float | None = None
    floor_us: float | None = None
    relative_rms_error: float | None = None
    framework: str | None = None
    dtype: str | None = None
    head_dim: int | None = None
    heads: int | None = None
    fuse: str | None = None
    spread_us: float | None = None
    row_us: float | None = None
    share_of_floor: float | None = None
    profiler_us: float | None = None
    kernels_per_call: float | None = None
    compile_s: float | None = None
    peak_memory_mib: float | None = None
    layer: int | None = None
    error_limit: float | None = None
    ours: bool | None = None
    passed: bool | None = None
    note: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def beside_floor(self, floor_us: float) -> "Record":
        """The record with its floor, and with its share of it where there is a timing."""
        share = floor_us / self.median_us if self.median_us else None
        return replace(self, floor_us=floor_us, share_of_floor=share)

    def judged(self, verdict: Verdict, **changes: Any) -> "Record":
        """The record with its error, what that was held to and what came of it."""
        record = replace(
            self,
            relative_rms_error=verdict.error,
            error_limit=verdict.limit,
            passed=verdict.passed,
            **changes,
        )
        if verdict.absolute_error is None:
            return record
        return replace(record, details=record.details | {"max_abs_error": verdict.absolute_error})

    def failed(self, error: BaseException) -> "Record":
        """The record with the reason why it has no numbers.

        Ours has not passed then, unless the error says that it cannot run here.
        """
        missing = isinstance(error, ImportError)
        excused = missing or isinstance(error, UnavailableError)
        note = f"not installed: {one_line(error)}" if missing else one_line(error)
        return replace(self, passed=False if self.ours and not excused else None, note=note)

    def to_json(self) -> dict[str, Any]:
        """The record as it is written: required fields always, others where they say something."""
        values = {name: _finite(value) for name, value in asdict(self).items()}
        details = {name: _finite(value) for name, value in values.pop("details").items()}
        return {k: v for k, v in values.items() if v is not None or k in _ALWAYS_WRITTEN} | details


_FIELDS = {
    name: kind | int if kind == float | None else kind  # JSON has one kind of number
    for name, kind in get_type_hints(Record).items()
    if name != "details"  # are written beside the others
}


@dataclass(frozen=True)
class Results:
    """The content of one result file."""

    part: str
    device: str
    driver: str | None
    versions: dict[str, str]
    date: str
    records: list[dict[str, Any]]
    ceilings: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def of(self, workload: str) -> list[dict[str, Any]]:
        """The workload's records, in the order of measurement."""
        return [record for record in self.records if record["workload"] == workload]

    @property
    def dates(self) -> str:
        """The day of the measurements, or the first and the last."""
        days = sorted({record.get("date", self.date)[:10] for record in self.records})
        return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else self.date[:10]

    def with_records(self, records: Iterable[Record]) -> "Results":
        """These and what was measured now."""
        now = _now()
        dated = [record.to_json() | {"date": now} for record in records]
        return replace(self, date=now, records=[*self.records, *dated])

    def updated(self, new: "Results") -> "Results":
        """These with the records of another run in the place of those of the same workloads, and
        with their note.

        In tuning of the same classes of shapes, in the same framework.

        Raises:
            InputError: another GPU, driver or package measured them.
        """
        for name in ("part", "device", "driver", "versions"):
            before, now = getattr(self, name), getattr(new, name)
            if before != now:
                raise InputError(f"cannot update results of another {name}: {before}, now {now}")
        renewed: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for record in new.records:
            renewed.setdefault(_measured_together(record), []).append(record)
        measured, records = set(renewed), []
        for record in self.records:
            if (together := _measured_together(record)) in measured:
                records += renewed.pop(together, [])
            else:
                records.append({"date": self.date} | record)  # earlier versions dated the file
        records += itertools.chain.from_iterable(renewed.values())
        return replace(new, records=records, note=self.note)


def _measured_together(record: dict[str, Any]) -> tuple[str, ...]:
    """What a record shares with those that were measured with it."""
    if "class" in record:
        return record["class"], record["implementation"]
    return (record["workload"],)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such a number is missing."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def collect(
    part: str, records: Iterable[Record] = (), ceilings: dict[str, float] | None = None
) -> Results:
    """Put this machine's name, driver, versions and the time beside what was measured."""
    results = Results(
        part=part,
        device=environment.device_name(),
        driver=environment.driver_version(),
        versions=environment.versions(),
        date=_now(),
        records=[],
        ceilings=ceilings or {},
    )
    return results.with_records(records)


def default_path(part: str, device: str, directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Where a part's results belong: for "NVIDIA H200" <directory>/nvidia-h200/<part>.json."""
    return directory / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") / f"{part}.json"


def check_writable(path: Path) -> None:
    """Make sure that a file can be written before hours are spent on its content.

    Raises:
        InputError: its directory cannot be made or written, its name is too long, or the path is a
            directory or device.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What is written is moved there, and would take a device's place.
        if path.exists() and not path.is_file():
            raise InputError(f"cannot write results to {path}: it is no regular file")
        _unfinished(path).touch()
        _unfinished(path).unlink()
    except OSError as error:
        raise InputError(f"cannot write results to {path}: {error.strerror}") from None


def write(results: Results, path: Path) -> None:
    """Write a result file in one step: a reader sees the old file or the new one, never half.

    Raises:
        InputError: the place cannot be written.
    """
    check_writable(path)
    write_text(json.dumps(asdict(results), indent=1, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file in one step.

    Raises:
        InputError: the place cannot be written, or there is no room left.
    """
    unfinished = _unfinished(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.unfinished")


def read(path: Path) -> Results:
    """Read a result file.

    Raises:
        InputError: no such file, not JSON, or not a result file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read results from {path}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is no result file: it holds no JSON object")
    if missing := _missing(content, _REQUIRED):
        raise InputError(f"{path} is no result file: it lacks a valid {missing}")
    known = {name: content[name] for name in Results.__dataclass_fields__ if name in content}
    found = Results(**({"part": path.stem} | known))
    wanted = {name: _FIELDS[name] for name in _ALWAYS_WRITTEN} | _OF_PART.get(found.part, {})
    for record in found.records:
        stated = {name: record.get(name) for name in _FIELDS} if isinstance(record, dict) else {}
        if missing := _missing(record, wanted) or _missing(stated, _FIELDS):
            raise InputError(f"{path} is no result file: a record lacks a valid {missing}")
    return found


def _missing(value: Any, wanted: dict[str, Any]) -> str:
    """Names of fields that an object does not have, or of another type; empty where it has all."""
    has = value if isinstance(value, dict) else {}
    return ", ".join(
        name for name, kind in wanted.items() if not isinstance(has.get(name, ...), kind)
    )
