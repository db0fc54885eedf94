"""How fast are the towers, ours and Hugging Face's, at real size on the named workloads?"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compare.agreement.metrics import relative_rms_error, tower_verdict
from compare.bench.ceilings import Ceilings
from compare.bench.jax_profiler import try_profile
from compare.bench.timing import WALL_SECONDS, time_row, time_wall
from compare.common.console import number, print_missing, print_table, progress, say
from compare.common.result_files import Record
from compare.implementations import huggingface
from compare.implementations.towers import (
    Directory,
    Tower,
    TowerImplementation,
    exact_tower,
    free_memory,
    hugging_face_sdpa,
    library_frame_towers,
    our_towers,
    peer_towers,
)
from compare.workloads import photographs
from compare.workloads.photographs import Inputs
from compare.workloads.towers import TowerWorkload
from flax_models import VisionConfig

_WARM_UP = 3
_PROFILED_CALLS = 5  # of ours; of a peer, whose call may be 100,000 kernels, one
_NAMED_KERNELS = 12  # the longest of a call, written to the result file by name


@dataclass(frozen=True)
class Reference:
    """What the towers of a run are judged by.

    Attributes:
        exact: the tower that errors are measured against, in fp32.
        baseline: Hugging Face's own, whose error the tower rule allows ours.
    """

    exact: Callable[[Directory], AbstractContextManager[Tower]] = exact_tower
    baseline: TowerImplementation = field(default_factory=hugging_face_sdpa)


def bench_towers(
    workloads: Sequence[TowerWorkload],
    ceilings: Ceilings,
    towers: Sequence[TowerImplementation] | None = None,
    reference: Reference | None = None,
    wall_seconds: float = WALL_SECONDS,
) -> Iterator[list[Record]]:
    """Measure every tower on every workload; print the tables.

    Each tower is loaded alone, so that its peak memory is its own. Of a workload of several steps
    losses are recorded in place of a time. They are held to the towers' rule: ours follow those of
    Hugging Face's fp32 tower no worse than its bf16 tower does.

    Args:
        workloads: what to measure on.
        ceilings: of the same run.
        towers: what to measure beside Hugging Face's own, the baseline; default our two, also with
            libraries' attention over frames, and their peers.
        reference: what they are judged by; default Hugging Face's towers that encode.
        wall_seconds: how long single calls are timed.

    Yields:
        For each family, and each workload of several steps, a record for each tower on each
        workload: a tower is loaded once for all of them.

    Raises:
        UnavailableError: photographs or Hugging Face's tower of a family are not installed.
    """
    configs = list(dict.fromkeys(workload.config for workload in workloads))
    photographs.photographs()
    for config in configs:
        huggingface.vision_classes(config.model_type)
    if towers is None:
        towers = [*our_towers(), *library_frame_towers(), *peer_towers()]
    alike: dict[tuple[VisionConfig, str], list[TowerWorkload]] = {}
    for workload in workloads:
        # After many steps a tower is another one: nothing else is measured on it.
        apart = workload.name if workload.steps else ""
        alike.setdefault((workload.config, apart), []).append(workload)
    reference = reference or Reference()
    for (config, _), of_config in alike.items():
        yield _bench_config(config, of_config, towers, reference, ceilings, wall_seconds)


def _bench_config(
    config: VisionConfig,
    workloads: Sequence[TowerWorkload],
    towers: Sequence[TowerImplementation],
    reference: Reference,
    ceilings: Ceilings,
    wall_seconds: float,
) -> list[Record]:
    """Every implementation of one family's tower on its workloads."""
    # From small to large, because JAX's peak memory only ever grows.
    workloads = sorted(workloads, key=lambda workload: workload.tokens)
    baseline = reference.baseline
    try:
        inputs = {workload.name: photographs.workload_input(workload) for workload in workloads}
        with tempfile.TemporaryDirectory() as directory:
            say(
                f"Writing a random {config.model_type} checkpoint of {config.depth} layers, "
                "then its fp32 embeddings"
            )
            huggingface.random_checkpoint(directory, config)
            with reference.exact(directory) as tower:
                # Kept on the host: the peak memory of a tower is to be its own.
                exact = {w.name: _result(tower, w, inputs[w.name]).cpu() for w in workloads}
            del tower
            run = _Run(directory, workloads, inputs, exact, wall_seconds)
            records = run.measure(baseline, limits=None)
            limits = {r.workload: r.relative_rms_error for r in records if r.relative_rms_error}
            for implementation in progress(towers, "towers"):
                records += run.measure(implementation, limits)
    except Exception as error:  # nothing to judge by: keep what is measured of other families
        blanks = [blank for each in (baseline, *towers) for blank in _blanks(each, workloads)]
        records = [blank.failed(error) for blank in blanks]
    by_workload = {
        workload.name: (
            workload,
            ceilings.tower_floor_us(workload.bytes_moved, workload.matrix_flops),
        )
        for workload in workloads
    }
    records = [_with_rates(record, *by_workload[record.workload]) for record in records]
    for workload in workloads:
        show = _print_losses if workload.steps else _print
        show(workload, [record for record in records if record.workload == workload.name])
    return records


def _blanks(
    implementation: TowerImplementation, workloads: Sequence[TowerWorkload]
) -> list[Record]:
    """Records without any number, of the workloads that the tower is timed on."""
    named = implementation.workloads
    return [
        Record(workload.name, implementation.name, dtype="bfloat16", ours=implementation.ours)
        for workload in workloads
        if named is None or workload.name in named
    ]


@dataclass(frozen=True)
class _Run:
    """What every tower of a run is measured on."""

    directory: Directory
    workloads: Sequence[TowerWorkload]
    inputs: dict[str, Inputs]
    exact: dict[str, torch.Tensor]
    wall_seconds: float

    def measure(
        self, implementation: TowerImplementation, limits: dict[str, float] | None
    ) -> list[Record]:
        """One tower on its workloads; a failure is a record with the reason.

        Args:
            implementation: the tower, loaded here.
            limits: the baseline's error on each workload; None for the baseline itself.
        """
        blanks = _blanks(implementation, self.workloads)
        if not blanks:
            return []
        try:
            free_memory()  # of the tower before
            tower = implementation.load(self.directory)
        except Exception as error:
            return [blank.failed(error) for blank in blanks]
        records = []
        by_name = {workload.name: workload for workload in self.workloads}
        for blank in blanks:
            record = replace(blank, framework=tower.framework)
            workload, inputs = by_name[record.workload], self.inputs[record.workload]
            exact = self.exact[record.workload]
            try:
                if workload.steps:
                    result = _result(tower, workload, inputs)
                    losses = {"losses": result.tolist(), "fp32_losses": exact.tolist()}
                    timed = replace(record, details=losses)
                else:
                    timed, result = _time(tower, record, inputs, self.wall_seconds)
                error = relative_rms_error(result, exact.to(result.device))
                baseline = error if limits is None else limits.get(record.workload)
                judged = _judged(timed, error, baseline, implementation.ours)
                if judged.median_us is not None:
                    judged = _profiled(tower, judged, inputs)
                records.append(judged)
            except Exception as error:
                records.append(record.failed(error))
        times = ", ".join(f"{r.workload} {_ms(r.median_us)}" for r in records)
        say(f"{implementation.name}, ms: {times}")
        return records


def _result(tower: Tower, workload: TowerWorkload, inputs: Inputs) -> torch.Tensor:
    """What the tower is judged by: a call's result, or the losses of the workload's steps."""
    arguments = tower.put(*inputs)
    if workload.steps:
        return tower.losses(*arguments, workload.steps)
    return tower.tensor(tower.encode(*arguments))


def _time(
    tower: Tower, record: Record, inputs: Inputs, wall_seconds: float
) -> tuple[Record, torch.Tensor]:
    """Time whole calls; returns the record and the embeddings of the last timed call."""
    arguments = tower.put(*inputs)
    tower.reset_peak_memory()
    embeddings = None

    def call() -> Any:
        nonlocal embeddings
        embeddings = tower.encode(*arguments)
        return embeddings

    start = time.perf_counter()
    tower.wait(call())
    compile_s = time.perf_counter() - start
    for _ in range(_WARM_UP):
        tower.wait(call())
    timing = time_wall(call, tower.wait, wall_seconds)
    timed = replace(
        record,
        median_us=timing.median_us,
        spread_us=timing.spread_us,
        compile_s=compile_s,
        peak_memory_mib=tower.peak_memory_mib(),
        # Last: the peak is to be a single call's.
        row_us=time_row(call, tower.wait, timing.median_us).median_us,
    )
    return timed, tower.tensor(embeddings)


def _profiled(tower: Tower, record: Record, inputs: Inputs) -> Record:
    """The record with the time of a call's kernels, as far as the profiler can see, and of ours
    with what it goes to.
    """
    arguments = tower.put(*inputs)
    calls = _PROFILED_CALLS if record.ours else 1

    def run() -> None:
        for _ in range(calls):
            tower.wait(tower.encode(*arguments))

    seen = try_profile(run, calls)
    if seen is None:
        return record
    groups = seen.by_group()
    record = replace(
        record, profiler_us=sum(groups.values()), kernels_per_call=seen.kernels_per_call
    )
    if not record.ours:
        return record
    kernels = dict(list(seen.by_kernel().items())[:_NAMED_KERNELS])
    details = record.details | {"groups_us": groups, "kernels_us": kernels}
    return replace(record, details=details)


def _judged(record: Record, error: float, baseline: float | None, ours: bool) -> Record:
    """The record with its error, and without its timing where that breaks the rule."""
    if baseline is None:
        untimed = replace(record, relative_rms_error=error)
        return _untimed(untimed, "no bf16 baseline to judge it by")
    verdict = tower_verdict(error, baseline, ours)
    record = record.judged(verdict)
    return record if verdict.passed else _untimed(record, "the error breaks its rule")


def _untimed(record: Record, reason: str) -> Record:
    note = f"not timed: {reason}"
    return replace(record, median_us=None, spread_us=None, row_us=None, note=note)


def _with_rates(record: Record, workload: TowerWorkload, floor_us: float) -> Record:
    """The record beside its floor, with what it encodes in a second."""
    record = record.beside_floor(floor_us)
    if record.row_us is None:
        return record
    seconds = record.row_us / 1e6
    rates = {"tokens_per_s": workload.tokens / seconds}
    if workload.frames:
        rates["frames_per_s"] = workload.frames / seconds
    return replace(record, details=record.details | rates)


def _ms(microseconds: float | None, digits: int = 3) -> str:
    return number(None if microseconds is None else microseconds / 1e3, digits)


def _print_losses(workload: TowerWorkload, records: Sequence[Record]) -> None:
    found = [record for record in records if "losses" in record.details]
    print_table(
        f"{workload.name}: {workload.steps} steps on {workload.tokens} tokens",
        ("tower", "first loss", "last", "of fp32", "rel. RMS", "at most"),
        [
            [
                record.implementation,
                number(record.details["losses"][0], 5),
                number(record.details["losses"][-1], 5),
                number(record.details["fp32_losses"][-1], 5),
                number(record.relative_rms_error),
                number(record.error_limit),
            ]
            for record in found
        ],
    )
    print_missing(record for record in records if record.note)


def _print(workload: TowerWorkload, records: Sequence[Record]) -> None:
    timed = [record for record in records if record.median_us is not None]
    print_table(
        f"{workload.name}: {workload.tokens} tokens, floor {_ms(records[0].floor_us)} ms",
        (
            *("tower", "ms", "spread", "x floor", "ms in a row", "x floor", "tokens/s"),
            *("first call s", "peak MiB", "rel. RMS"),
        ),
        [
            [
                record.implementation,
                _ms(record.median_us),
                _ms(record.spread_us, 2),
                number((record.median_us or 0) / (record.floor_us or 1)),
                _ms(record.row_us),
                number((record.row_us or 0) / (record.floor_us or 1)),
                f"{record.details['tokens_per_s']:,.0f}",
                number(record.compile_s),
                number(record.peak_memory_mib, 5),
                number(record.relative_rms_error),
            ]
            for record in sorted(timed, key=lambda r: r.median_us or 0)
        ],
    )
    profiled = [record for record in timed if "groups_us" in record.details]
    if profiled:
        print_table(
            f"{workload.name}: where the time goes, ms a call",
            ("tower", *profiled[0].details["groups_us"], "between kernels"),
            [
                [
                    record.implementation,
                    *(_ms(group, 2) for group in record.details["groups_us"].values()),
                    _ms((record.median_us or 0) - (record.profiler_us or 0), 2),
                ]
                for record in profiled
            ],
        )
    print_missing(records)
