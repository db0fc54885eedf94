"""Stress for kernels and towers: every check, how many cases it went through, what came out."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from compare.common.console import print_table, progress
from compare.common.environment import has_gpu
from compare.common.errors import one_line
from compare.common.processes import in_a_process
from compare.common.result_files import Record
from compare.implementations import huggingface
from compare.implementations.towers import TowerImplementation, free_memory, our_towers
from compare.stress import inputs, kernels, server
from compare.stress.inputs import Sizes
from compare.stress.kernels import Findings
from compare.stress.launched import WARP_SPECIALIZED, WIDE, kernels_here
from compare.stress.server import Traffic
from compare.stress.subjects import SUBJECTS, Subject
from compare.workloads.towers import SMALL_TOWERS
from flax_models import VisionConfig

# The 7B tower's sizes, a few layers of it: a server's life is about calls, not about depth.
SERVER_CONFIG = VisionConfig(depth=4, out_hidden_size=256, fullatt_block_indexes=(3,))
SERVER = "server"
_SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the GPU, with other processes


@dataclass(frozen=True)
class Check:
    """One kind of stress.

    Attributes:
        name: as in result files.
        tried: in words, for the report.
        run: goes through the cases of one kernel.
        gradients: whether it is of those too, whose kernels are to be reached then.
        without: the kernels that its calls never ask for.
    """

    name: str
    tried: str
    run: Callable[[Subject, Sizes], Findings]
    gradients: bool = False
    without: tuple[str, ...] = ()


CHECKS = (
    Check(
        "hostile",
        "cu_seqlens of any int32 content, guards around every tensor (triton)",
        kernels.hostile,
    ),
    Check("poison", "NaN and infinity in one segment or in padding", kernels.poison),
    Check(
        "huge",
        "{0.far_tokens:,} tokens x {0.far_heads} x 80 packed and of heads of 640, a segment of "
        "{0.long_segment:,} tokens, {0.segments:,} segments, one token, none",
        kernels.huge,
    ),
    Check("determinism", "{0.runs} runs of each call, bit by bit", kernels.determinism),
    Check("place", "a segment moved about among others, bit by bit", kernels.place),
    Check(
        "invariance",
        "batch-invariant: a segment alone and in calls of other sizes and bounds, bit by bit",
        kernels.invariance,
        without=(WARP_SPECIALIZED, WIDE),
    ),
    Check(
        "numerics",
        "logits of 1e4, equal rows, one dominant key, values near fp16's largest",
        kernels.numerics,
    ),
    Check(
        "gradients",
        "cu_seqlens of any int32 content, NaN in one segment, bit by bit",
        kernels.gradients,
        gradients=True,
    ),
)


def check_stress(
    seconds: float,
    *,
    checks: Sequence[Check] = CHECKS,
    subjects: Sequence[Subject] = SUBJECTS,
    towers: Sequence[TowerImplementation] | None = None,
    processes: int = 1,
) -> Iterator[Record]:
    """Put kernels and towers under stress and print the table.

    Args:
        seconds: after which no more calls are made of a tower, however many are left.
        checks: of the kernels.
        subjects: the kernels.
        towers: default our two.
        processes: so many, of which each check of a kernel has one to itself; with 1 there is no
            other than this.

    Yields:
        A record for each check of each framework's kernels, and of each tower; `note` holds its
        first finding, `details` the number of `cases` and of `findings` and, of kernels, by
        `kernels` how many cases reached which. One that none reached is a finding.
    """
    sizes = inputs.ON_GPU if has_gpu() else inputs.ON_CPU
    pairs = [(check, subject) for check in checks for subject in subjects]
    records = []
    for record in _of_kernels(pairs, sizes, processes):
        records.append(record)
        yield record
    traffic, config = server.ON_CPU, SMALL_TOWERS["tower"]
    if has_gpu():
        traffic, config = server.ON_GPU, SERVER_CONFIG
    for tower in our_towers() if towers is None else towers:
        records.append(_server_record(tower, config, traffic, seconds))
        yield records[-1]
        free_memory()
    _print(records)


def _of_kernels(
    pairs: Sequence[tuple[Check, Subject]], sizes: Sizes, processes: int
) -> Iterator[Record]:
    if processes == 1:
        for pair in progress(pairs, "kernels"):
            yield run_check(*pair, sizes)
        return
    with ThreadPoolExecutor(processes) as pool:
        running = [pool.submit(_run_in_a_process, *pair, sizes) for pair in pairs]
        for record in progress(running, "kernels"):
            yield record.result()


def _run_in_a_process(check: Check, subject: Subject, sizes: Sizes) -> Record:
    """`run_check` in one of its own, which a kernel may break or end without harm to others."""
    try:
        return in_a_process(run_check, check, subject, sizes, variables=_SHARING)
    except BrokenProcessPool as error:
        return outcome(check.name, subject.name, check.tried.format(sizes), 0, [one_line(error)])


def run_check(check: Check, subject: Subject, sizes: Sizes) -> Record:
    cases, findings = 0, []
    reached = {name: 0 for name in kernels_here(check.gradients) if name not in check.without}
    try:
        with np.errstate(all="ignore"):  # NaN and infinity are meant, Triton's interpreter is NumPy
            for finding in check.run(subject, sizes):
                cases += 1
                findings += [finding] if finding else []
                for kernel in subject.launched:
                    reached[kernel] = reached.get(kernel, 0) + 1
    except Exception as error:  # a kernel that fails is a finding: the others still count
        findings.append(one_line(error))
    findings += [f"no case reached the kernel {name}" for name, n in reached.items() if n == 0]
    tried = check.tried.format(sizes)
    return outcome(check.name, subject.name, tried, cases, findings, kernels=reached)


def _server_record(
    implementation: TowerImplementation, config: VisionConfig, traffic: Traffic, seconds: float
) -> Record:
    tried = f"calls of {traffic.requests} random sizes from {traffic.threads} threads"
    try:
        with tempfile.TemporaryDirectory() as directory:
            huggingface.random_checkpoint(directory, config)
            tower = implementation.load(directory)
        life = server.live(tower, config, traffic, seconds)
    except Exception as error:  # a tower that fails is a finding: the other still counts
        return outcome(SERVER, implementation.name, tried, 0, [one_line(error)])
    growth = {"host_growth_mib": life.host_growth_mib, "device_growth_mib": life.device_growth_mib}
    return outcome(SERVER, implementation.name, tried, life.calls, life.findings, **growth)


def outcome(
    check: str, name: str, tried: str, cases: int, findings: Sequence[str], **details: Any
) -> Record:
    if not cases and not findings:
        findings = ["no case was tried"]
    return Record(
        check,
        name,
        passed=not findings,
        note=findings[0] if findings else None,
        details={"tried": tried, "cases": cases, "findings": len(findings), **details},
    )


def _print(records: Iterable[Record]) -> None:
    """One row for each check of each kernel and tower."""
    rows = []
    for record in records:
        outcome = "nothing wrong"
        if not record.passed:
            outcome = f"FAILED {record.details['findings']} times, first: {record.note}"
        kernels = record.details.get("kernels", {})
        reached = ", ".join(f"{kernel} {cases}" for kernel, cases in kernels.items())
        cases = f"{record.details['cases']}"
        rows.append((record.workload, record.implementation, cases, reached, outcome))
    print_table("Stress", ("check", "of", "cases", "that reached", "what came out"), rows)
