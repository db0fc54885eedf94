"""Result files in the report's order: workloads by family, ours first, peers by speed."""

from collections.abc import Sequence
from typing import Any

from compare.common.result_files import Results
from compare.workloads.towers import TOWERS

KERNELS = ("triton", "pallas")
OURS = (*KERNELS, "pallas by XLA", "torch", "flax", "accelerated", "accelerated, compiled")

RecordDict = dict[str, Any]


def family(workload: str) -> str:
    """What a workload's name says before its size: "windows" of "windows-448"."""
    return _split(workload)[0]


def size(workload: str) -> str:
    """What tells a workload from others of its family: "video-16x448" of "tower-video-16x448"."""
    return _split(workload)[1]


def families(results: Results) -> dict[str, list[str]]:
    """Workloads by family, both in the order of measurement."""
    found: dict[str, list[str]] = {}
    for record in results.records:
        of_family = found.setdefault(family(record["workload"]), [])
        if record["workload"] not in of_family:
            of_family.append(record["workload"])
    return found


def layer_families(results: Results) -> dict[str, list[RecordDict]]:
    """Records of towers that were compared layer by layer, by family."""
    found: dict[str, list[RecordDict]] = {}
    for record in results.records:
        if family(record["workload"]) in TOWERS:
            found.setdefault(family(record["workload"]), []).append(record)
    return {
        name: records
        for name, records in found.items()
        if any(record.get("layer") is not None for record in records)
    }


def timed(results: Results, workload: str) -> dict[str, RecordDict]:
    """The workload's records that have a timing, by implementation."""
    return {r["implementation"]: r for r in results.of(workload) if r["median_us"] is not None}


def ranking(results: Results, workloads: Sequence[str]) -> list[str]:
    """Implementations with a timing: ours, then peers by speed on the last workload they ran."""
    speed: dict[str, float] = {}
    for workload in workloads:
        for name, record in timed(results, workload).items():
            speed[name] = record["median_us"]
    return sorted(speed, key=lambda name: (_order(name), speed[name]))


def _split(workload: str) -> tuple[str, str]:
    # A family's name may hold a dash itself, as "qwen3-tower" does.
    known = next((name for name in TOWERS if workload.startswith(f"{name}-")), None)
    name = known or workload.partition("-")[0]
    return name, workload.removeprefix(name).removeprefix("-")


def _order(name: str) -> int:
    return OURS.index(name) if name in OURS else len(OURS)
