"""What each part of `python -m compare` does: measure or check, and write the result file.

Every `run_*` takes the parsed options and returns the exit status. What takes long is written after
each workload, so that a run that is cut loses no more than that one. Frameworks are imported late:
what cannot run is refused first, and --help needs none of them.
"""

import itertools
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compare.common import environment, result_files
from compare.common.console import say
from compare.common.errors import InputError
from compare.common.result_files import Record
from compare.report.report import REPORT, read_readme, update_readme, write_report
from compare.workloads.embeddings import EMBEDDING_WORKLOADS
from compare.workloads.kernels import KERNEL_WORKLOADS, TRAINING_WORKLOADS, choose
from compare.workloads.scale import SCALE_WORKLOADS, Sizes
from compare.workloads.towers import (
    INTEGRATION_WORKLOADS,
    TOWER_WORKLOADS,
    TRAINED_TOWER_WORKLOADS,
    VLLM_WORKLOADS,
)

if TYPE_CHECKING:
    from compare.bench.ceilings import Ceilings
    from compare.bench.tune import Twin
    from compare.bench.tuning_cases import Case

AGREES, DISAGREES, BAD_INPUT = 0, 1, 2
TUNED_KERNELS = (
    *("window", "stream", "rotate"),
    *("window_backward", "stream_backward_q", "stream_backward_kv"),
)


def run_agreement(options: Namespace) -> int:
    """Hold kernels and towers against each other and against fp64."""
    path = _result_path("agreement", options)
    from compare.agreement.kernels import check_kernels
    from compare.agreement.towers import check_towers
    from compare.workloads import photographs

    photographs.photographs()  # refused now, where they are not installed, not after the kernels
    records = _written("agreement", path, [[*check_kernels(), *check_towers()]])
    outcomes = [record.passed for record in records if record.passed is not None]
    if failed := outcomes.count(False):
        say(f"Agreement FAILED: {failed} of {len(outcomes)} checks, marked in the tables.")
        return DISAGREES
    say(f"Agreement holds: {len(outcomes)} checks.")
    return AGREES


def run_kernels(options: Namespace) -> int:
    """Time the kernels, and the rotation as a pass of its own."""
    from compare.bench.rotation import ROTATION_WORKLOADS, bench_rotation

    chosen = choose(KERNEL_WORKLOADS | ROTATION_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.kernels import bench_kernels

    limits = ceilings.measure()
    kernels = bench_kernels([w for w in chosen if w.name in KERNEL_WORKLOADS], limits)
    rotations = bench_rotation([w for w in chosen if w.name in ROTATION_WORKLOADS], limits)
    return _keep(options, path, itertools.chain(kernels, rotations), limits)


def run_fusion(options: Namespace) -> int:
    """Time every way of fusing."""
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.fusion import measure_fusion

    limits = ceilings.measure()
    return _keep(options, path, measure_fusion(limits), limits)


def run_embeddings(options: Namespace) -> int:
    """Time rotated and added positions in every way, over heads of 64 to 16,384 columns."""
    workloads = choose(EMBEDDING_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.embeddings import bench_embeddings

    limits = ceilings.measure()
    return _keep(options, path, bench_embeddings(workloads, limits), limits)


def run_invariance(options: Namespace) -> int:
    """Time batch-invariant calls beside the usual ones."""
    chosen = choose(KERNEL_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.kernels import bench_kernels
    from compare.implementations.kernels import pallas, triton

    limits = ceilings.measure()
    ours = [twin(batch_invariant=which) for twin in (triton, pallas) for which in (False, True)]
    return _keep(options, path, bench_kernels(chosen, limits, ours), limits)


def run_training(options: Namespace) -> int:
    """Time the kernels forward and backward, and steps of fine-tuning the tower."""
    chosen = choose(TRAINING_WORKLOADS | TRAINED_TOWER_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.kernels import all_implementations, bench_kernels
    from compare.bench.towers import Reference, bench_towers
    from compare.implementations.kernels import with_gradient
    from compare.implementations.training import (
        exact_training,
        trained_towers,
        training_baseline,
    )

    limits = ceilings.measure()
    implementations = list(map(with_gradient, all_implementations()))
    kernels = [workload for workload in chosen if workload.name in TRAINING_WORKLOADS]
    measured = bench_kernels(kernels, limits, implementations)
    if towers := [workload for workload in chosen if workload.name in TRAINED_TOWER_WORKLOADS]:
        reference = Reference(exact_training, training_baseline())
        trained = bench_towers(towers, limits, trained_towers(), reference)
        measured = itertools.chain(measured, trained)
    return _keep(options, path, measured, limits)


def run_tune(options: Namespace) -> int:
    """Find the fastest launches, and put them into the packages where that is asked for."""
    path = _benchmark_path(options)
    from compare.bench.tune import TWINS
    from compare.bench.tuning_cases import tuning_cases

    twins = [TWINS[name] for name in options.package or TWINS]
    for twin in twins:  # refuse what cannot work before minutes of tuning
        twin.gpu()
        if options.write:
            result_files.check_writable(twin.launch.TABLE_FILE)
    cases = tuning_cases(tuple(options.kernel or TUNED_KERNELS))
    _written("tune", path, _tuned(twins, cases, options.write), update=options.update)
    return AGREES


def _tuned(twins: "Sequence[Twin]", cases: "Sequence[Case]", write: bool) -> Iterator[list[Record]]:
    """What was measured of each case; behind a package's last its table, which is of all."""
    from compare.bench.tune import renewed, tune

    for twin in twins:
        choices = []
        for choice in tune(twin, cases):
            choices.append(choice)
            yield choice.records
        if write:
            result_files.write_text(renewed(twin, choices).to_text(), twin.launch.TABLE_FILE)
            say(f"Wrote {twin.launch.TABLE_FILE}")


def run_towers(options: Namespace) -> int:
    """Time the towers and Hugging Face's."""
    workloads = choose(TOWER_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.towers import bench_towers

    limits = ceilings.measure()
    return _keep(options, path, bench_towers(workloads, limits), limits)


def run_integration(options: Namespace) -> int:
    """Time Hugging Face's tower with and without accelerate."""
    workloads = choose(INTEGRATION_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.towers import bench_towers
    from compare.implementations.towers import accelerated_towers, peer_towers

    limits = ceilings.measure()
    towers = [*accelerated_towers(), *peer_towers()]
    return _keep(options, path, bench_towers(workloads, limits, towers), limits)


def run_vllm(options: Namespace) -> int:
    """Time vLLM's towers with and without its plugin, beside ours and Hugging Face's."""
    workloads = choose(VLLM_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench import ceilings
    from compare.bench.towers import bench_towers
    from compare.implementations.towers import our_towers, peer_towers
    from compare.implementations.vllm import check_installed, vllm_towers

    check_installed()
    limits = ceilings.measure()
    in_torch, _ = our_towers()
    _, by_fa3 = peer_towers()  # vLLM attends by it too; `compare towers` has both
    towers = [*vllm_towers(), in_torch, by_fa3]
    # What counts here is calls in a row and kernels alone.
    measured = bench_towers(workloads, limits, towers, wall_seconds=1.0)
    return _keep(options, path, measured, limits)


def run_scale(options: Namespace) -> int:
    """Time the encoding of a folder of photographs."""
    workloads = choose(SCALE_WORKLOADS, options.workload)
    path = _benchmark_path(options)
    from compare.bench.scale import bench_scale

    sizes = Sizes(photographs=options.photographs)
    return _keep(options, path, bench_scale(workloads, sizes))


def run_stress(options: Namespace) -> int:
    """Put kernels and towers under stress."""
    path = _result_path("stress", options)
    from compare.stress.checks import CHECKS, SERVER, check_stress

    known = {check.name: check for check in CHECKS} | {SERVER: None}
    chosen = choose(known, options.check, "check")
    checked = check_stress(
        options.seconds,
        checks=[check for check in chosen if check],
        towers=None if None in chosen else [],
        # Most of a check's time on a GPU goes into compiling.
        processes=environment.cores() if environment.has_gpu() else 1,
    )
    records = _written("stress", path, ([record] for record in checked), update=bool(options.check))
    if failed := sum(not record.passed for record in records):
        say(f"Stress found something in {failed} of {len(records)} checks: see the table.")
        return DISAGREES
    cases = sum(record.details["cases"] for record in records)
    say(f"Stress found nothing: {cases} cases of kernels and calls of towers.")
    return AGREES


def run_report(options: Namespace) -> int:
    """Write the report, and renew a README's results where one is named."""
    directory = options.results or result_files.DEFAULT_DIRECTORY
    for page in options.readme:
        read_readme(page)  # what cannot be renewed is refused before anything is written
    out = write_report(directory, options.out or directory / REPORT)
    say(f"Wrote {out}")
    for page in options.readme:
        update_readme(page, directory, out)
        say(f"Renewed the results in {page}")
    return AGREES


def run_everything(options: Namespace) -> int:
    """All that a newcomer wants to see: the main parts on a GPU, else agreement on small shapes."""
    if not environment.has_gpu():
        status = run_agreement(options)
        say(
            "No CUDA GPU here: the kernels ran in their interpreters, on small shapes. A GPU would "
            "add agreement at real size, timings beside the peers', and the report."
        )
        return status
    directory = options.results or result_files.DEFAULT_DIRECTORY
    statuses = set()
    for part in ("agreement", "kernels", "towers", "integration", "report"):
        # A process of its own: peak memory counts from zero, and no part can spoil the next.
        command = [sys.executable, "-m", "compare", part, "--results", str(directory)]
        code = subprocess.run(command, check=False).returncode
        # A part that was killed has a status of its own kind, which is no agreement either.
        statuses.add(code if code in (AGREES, BAD_INPUT) else DISAGREES)
    # What another part could not do must not hide that something is wrong.
    return DISAGREES if DISAGREES in statuses else max(statuses)


def _keep(
    options: Namespace,
    path: Path | None,
    measured: Iterable[list[Record]],
    ceilings: "Ceilings | None" = None,
) -> int:
    """Write what is timed; what fails of ours, or is wrong, fails the part. A peer has no time."""
    records = _written(options.part, path, measured, ceilings, options.update)
    failed = [
        f"{r.implementation} on {r.workload}" for r in records if r.ours and r.passed is False
    ]
    if failed:
        say(f"Ours failed, or its error breaks its rule: {', '.join(dict.fromkeys(failed))}.")
        return DISAGREES
    return AGREES


def _written(
    part: str,
    path: Path | None,
    measured: Iterable[list[Record]],
    ceilings: "Ceilings | None" = None,
    update: bool = False,
) -> list[Record]:
    """All records of a run, which its result file has as soon as each workload's are measured."""
    if path is None:
        return list(itertools.chain.from_iterable(measured))
    new = result_files.collect(part, (), ceilings and ceilings.to_json())
    before = result_files.read(path) if update and path.exists() else new
    records = []
    for of_workload in measured:
        records += of_workload
        new = new.with_records(of_workload)
        result_files.write(before.updated(new), path)
    say(f"Wrote {path}")
    return records


def _benchmark_path(options: Namespace) -> Path | None:
    """Where a benchmark's results go.

    Those of some workloads alone do not take the place of a whole run's, unless a place is named
    or they are put among the others.
    """
    if not environment.has_gpu():
        raise InputError(f"{options.part} measures on a CUDA GPU, and this machine has none")
    if not options.workload or options.json or options.results or options.update:
        path = _result_path(options.part, options)
        if options.update and path is not None and path.exists():
            result_files.read(path).updated(result_files.collect(options.part))  # or refused
        return path
    _check_pytorch()
    say(
        "Results of some workloads alone are not kept, unless --json, --results or --update says "
        "where."
    )
    return None


def _result_path(part: str, options: Namespace) -> Path | None:
    """The place that is named, or else the default one; what cannot work is refused here.

    None where results are not kept: those of interpreters, unless a place is named.
    """
    path, directory = options.json, options.results
    if environment.has_gpu():
        _check_pytorch()
        directory = directory or result_files.DEFAULT_DIRECTORY
    if path is None and directory is not None:
        path = result_files.default_path(part, environment.device_name(), directory)
    if path is not None:
        result_files.check_writable(path)
    return path


def _check_pytorch() -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f"there is a CUDA GPU here, but PyTorch {torch.__version__} does not see it: install "
            "PyTorch with CUDA, or hide the GPU by CUDA_VISIBLE_DEVICES= to compare on the CPU"
        )
