"""Result files in the report's order: workloads by family, ours first, peers by speed."""

from collections.abc import Sequence
from typing import Any

from compare.common.result_files import Results
from compare.workloads.towers import TOWERS

KERNELS = ("triton", "pallas")
# vLLM's own, and with the plugin: alone, and beside each of its settings.
VLLM, VLLM_WITH_OURS = "vLLM", "vLLM with ours"
OURS = (
    *(*KERNELS, "pallas by XLA", "torch", "flax", "accelerated", "accelerated, compiled"),
    *(VLLM_WITH_OURS, f"{VLLM_WITH_OURS}, CUDA graphs"),
)

# Of a kind of times, a part's by and large: the unit and its microseconds.
_KERNELS, _TOWERS = ("µs", 1.0), ("ms", 1e3)
UNITS = {
    "kernels": _KERNELS,
    "invariance": _KERNELS,
    "training": _KERNELS,
    "tower training": _TOWERS,
    "towers": _TOWERS,
    "integration": _TOWERS,
    "vllm": _TOWERS,
}

RecordDict = dict[str, Any]
Column = dict[str, RecordDict]  # a workload's records that have a timing, by implementation


def family(workload: str) -> str:
    """What a workload's name says before its size: "windows" of "windows-448"."""
    # A family's name may hold a dash itself, as "qwen3-tower" does.
    known = (name for name in TOWERS if workload.startswith(f"{name}-"))
    return next(known, workload.partition("-")[0])


def kind(results: Results, workloads: Sequence[str]) -> str:
    """What kind of times a family's are, a key of UNITS: training has kernels' and towers'."""
    of_towers = results.part == "training" and family(workloads[0]) in TOWERS
    return "tower training" if of_towers else results.part


def size(workload: str) -> str:
    """What tells a workload from others of its family: "video-16x448" of "tower-video-16x448"."""
    return workload.removeprefix(family(workload)).removeprefix("-")


def families(results: Results) -> dict[str, list[str]]:
    """Workloads by family, both in the order of measurement."""
    found: dict[str, list[str]] = {}
    for workload in dict.fromkeys(record["workload"] for record in results.records):
        found.setdefault(family(workload), []).append(workload)
    return found


def layer_families(results: Results) -> dict[str, list[RecordDict]]:
    """Records of towers that were compared layer by layer, by family."""
    found: dict[str, list[RecordDict]] = {}
    for record in results.records:
        found.setdefault(family(record["workload"]), []).append(record)
    return {
        name: records
        for name, records in found.items()
        if name in TOWERS and any(record.get("layer") is not None for record in records)
    }


def timed(results: Results, workload: str) -> Column:
    """The workload's records that have a timing, by implementation."""
    return {r["implementation"]: r for r in results.of(workload) if r["median_us"] is not None}


def ranking(results: Results, workloads: Sequence[str]) -> list[str]:
    """Implementations with a timing: ours, then peers by speed on the last workload they ran."""
    records = {name: r for workload in workloads for name, r in timed(results, workload).items()}
    peers = [name for name in records if name not in OURS]
    ours = [name for name in OURS if name in records]
    return ours + sorted(peers, key=lambda name: records[name]["median_us"])
