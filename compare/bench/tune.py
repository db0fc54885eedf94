"""Tuning: a kernel package's table of launches made anew on this machine's GPU."""

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from compare.bench.kernel_timing import QUICK, measure_all
from compare.bench.tuning_cases import Case
from compare.common.console import number, print_missing, print_table, progress
from compare.common.result_files import Record
from compare.implementations.kernels import (
    KernelCall,
    KernelImplementation,
    jax_step,
    our_attention,
    require_jax_gpu,
)
from compare.implementations.warm_up import draw_inputs, warm_up
from compare.workloads.kernels import KernelWorkload

# What is in the table stays unless another launch is faster by more than this: tuning twice gives
# the same table.
_TIE = 1.02


@dataclass(frozen=True)
class Twin:
    """A kernel package whose table is made.

    Attributes:
        name: of its implementation, "triton" or "pallas".
        package: to import.
        framework: whose arrays it takes.
    """

    name: str
    package: str
    framework: str

    @property
    def launch(self) -> ModuleType:
        """The package's launching/choose.py."""
        return importlib.import_module(f"{self.package}.launching.choose")

    @property
    def launch_table(self) -> ModuleType:
        """The package's launching/table.py, whose Table, Row, Shape and Launch it reads."""
        return importlib.import_module(f"{self.package}.launching.table")

    def gpu(self) -> Any:
        """The GPU as the package names it, a Gpu.

        Raises:
            UnavailableError: the framework does not use it.
        """
        if self.framework == "torch":
            return self.launch.gpu(0)
        require_jax_gpu()
        return self.launch.gpu()

    @property
    def bounds_registers(self) -> bool:
        """Whether what compiles the kernels takes a bound on registers: XLA does not."""
        if self.framework == "torch":
            return True
        from pallas_kernels.launching.compile import compiler

        return compiler() == "triton"


TWINS = {
    "triton": Twin("triton", "triton_kernels", "torch"),
    "pallas": Twin("pallas", "pallas_kernels", "jax"),
}


@dataclass(frozen=True)
class Choice:
    """What tuning a class of shapes found: launches as the package's own Launch, and times."""

    case: Case
    old: Any
    old_us: float | None
    new: Any
    new_us: float | None
    records: list[Record]


def tune(twin: Twin, cases: Sequence[Case]) -> Iterator[Choice]:
    """Try every candidate of every case, beside what the table has; print old against new.

    Yields what was measured of each case.

    Raises:
        UnavailableError: the framework does not use the GPU.
    """
    gpu, table = twin.gpu(), twin.launch_table.Table.read(twin.launch.TABLE_FILE)
    launches = [_launches(twin, case, table, gpu) for case in cases]
    jobs = [
        (candidate(twin, case, table.with_rows(gpu, [row_for(twin, case, launch)])), case.workload)
        for case, tried in zip(cases, launches, strict=True)
        for launch in tried
    ]
    inputs = draw_inputs([case.workload for case in cases])
    compiled = iter(warm_up(jobs, f"compiling {twin.name}"))
    choices = []
    described = progress(list(zip(cases, launches, inputs, strict=True)), f"tuning {twin.name}")
    for case, tried, drawn in described:
        ready = [next(compiled) for _ in tried]
        kernel = f"{case.kernel}_kernel"
        records = measure_all(ready, case.workload, drawn, QUICK, kernel=kernel)
        choices.append(_choose(case, tried, records))
        yield choices[-1]
    _print(twin, choices)


def _launches(twin: Twin, case: Case, table: Any, gpu: Any) -> list[Any]:
    """What the table has for the case's workload, and then the candidates."""
    module, workload = twin.launch_table, case.workload
    rows = workload.tokens * workload.heads
    shape = module.Shape(case.kernel, "half", workload.head_dim, workload.longest, rows)
    bounded = twin.bounds_registers
    candidates = [fields for fields in case.candidates if bounded or "maxnreg" not in fields]
    tried = [table.find(gpu, shape), *(module.Launch(**fields) for fields in candidates)]
    return list(dict.fromkeys(tried))


def row_for(twin: Twin, case: Case, launch: Any) -> Any:
    conditions = case.max_head_dim, case.max_length, case.max_rows
    return twin.launch_table.Row(case.kernel, launch, "half", *conditions)


def renewed(twin: Twin, choices: Sequence[Choice]) -> Any:
    """The package's Table with the launches chosen in all of `tune`.

    They take the place of all rows that served the same shapes.
    """
    gpu, table = twin.gpu(), twin.launch_table.Table.read(twin.launch.TABLE_FILE)
    tuned = {choice.case.kernel for choice in choices}
    widest = max(choice.case.max_head_dim for choice in choices)
    old = table.devices[gpu.name].rows if gpu.name in table.devices else ()
    kept = [r for r in old if r.kernel not in tuned or (r.max_head_dim or widest + 1) > widest]
    rows = [row_for(twin, choice.case, choice.new) for choice in choices]
    return table.with_rows(gpu, [*kept, *rows])


def candidate(twin: Twin, case: Case, table: Any) -> KernelImplementation:
    """An implementation that takes its launches from a table of its own."""
    return KernelImplementation(
        twin.name, twin.framework, partial(_prepare, twin, case, table), ours=True
    )


def _prepare(twin: Twin, case: Case, table: Any, workload: KernelWorkload) -> KernelCall:
    attend = our_attention(twin.package, workload.longest, fuse=case.fuse)
    if workload.gradients:
        attend = jax_step(attend) if twin.framework == "jax" else _gradient_in_torch(workload)

    def call(*arguments: Any) -> Any:
        # Nothing else is tuned than the table's kernels.
        with twin.launch.launching_by(table, warp_specialized=False):
            return attend(*arguments)

    if twin.framework == "torch":
        return call
    import jax

    return jax.jit(call)


def _gradient_in_torch(workload: KernelWorkload) -> KernelCall:
    """Of the operator itself: autograd calls it in another thread, which has no table of ours."""
    import torch

    import triton_kernels  # noqa: F401  has the operator

    options = workload.longest, workload.head_dim**-0.5, "kernel", [True, False, False]

    def gradient(qkv: Any, cos: Any, sin: Any, cu_seqlens: Any, grad: Any) -> Any:
        operator = torch.ops.fused_rope_attention.backward
        return operator(grad, [qkv, cos, sin], cu_seqlens, [], *options)[0]

    return gradient


def _choose(case: Case, tried: Sequence[Any], records: Sequence[Record]) -> Choice:
    """The fastest launch whose error holds.

    The table's own, which was tried first, stays where it is nearly as fast or none has a time.
    """
    times = [r.median_us if r.median_us is not None else math.inf for r in records]
    best = min(range(len(times)), key=times.__getitem__)
    new = 0 if times[0] <= _TIE * times[best] else best
    described = [
        replace(
            record,
            fuse=case.fuse,
            details={"class": str(case), "chosen": index == new} | launch._asdict(),
        )
        for index, (launch, record) in enumerate(zip(tried, records, strict=True))
    ]
    times_us = [record.median_us for record in records]
    return Choice(case, tried[0], times_us[0], tried[new], times_us[new], described)


def _print(twin: Twin, choices: Sequence[Choice]) -> None:
    names = choices[0].old._fields
    print_table(
        f"Launches of {twin.name}: {', '.join(names)}",
        ("class", "in the table", "us", "fastest", "us", "gain"),
        [
            [
                str(choice.case),
                _told(choice.old),
                number(choice.old_us),
                _told(choice.new) if choice.new != choice.old else "the same",
                number(choice.new_us),
                _gain(choice),
            ]
            for choice in choices
        ],
    )
    print_missing(
        (record for choice in choices for record in choice.records),
        lambda r: f"{r.details['class']} ({_told([r.details[name] for name in names])})",
    )


def _gain(choice: Choice) -> str:
    if choice.new == choice.old or not (choice.old_us and choice.new_us):
        return ""
    return f"{choice.old_us / choice.new_us:.2f} x"


def _told(launch: Sequence[int]) -> str:
    return ", ".join(map(str, launch))
