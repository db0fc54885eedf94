"""The command line: `python -m compare`, its parts, their options and exit statuses."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from compare import environment, results
from compare.console import say
from compare.errors import InputError, UnavailableError

AGREES, DISAGREES, BAD_INPUT = 0, 1, 2
_KERNELS = ("window", "stream", "rotate")
_COMPARED = ("torch", "triton", "jax", "flax", "transformers")

_DESCRIPTION = (
    "Hold the Pallas and the Triton kernel, and the towers built on them, against each other, "
    "against fp64 and against Hugging Face, and time them. Without a part: all of them on a GPU; "
    "without one, agreement on small shapes."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; default sys.argv's.

    Returns:
        The exit status: 0; 1 when agreement fails or stress finds something; 2 for bad input, after
        one sentence on stderr.
    """
    environment.configure()
    try:
        options = _parser().parse_args(arguments)
        return options.run(options)
    except (InputError, UnavailableError) as error:
        sentence = str(error)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _COMPARED:
            raise
        sentence = f"{error.name} is not installed: pip install 'fused-rope-attention[compare]'"
    print(f"compare: {sentence}", file=sys.stderr)
    return BAD_INPUT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists what there is)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m compare", description=_DESCRIPTION)
    parser.set_defaults(run=_run_everything, part=None)
    parser.add_argument(
        "--results",
        type=Path,
        default=None,
        metavar="DIR",
        help="where results go and reports find them (default: compare/results)",
    )
    parts = parser.add_subparsers(title="parts", metavar="PART", parser_class=_Parser)
    _add_part(parts, "agreement", _run_agreement, "do kernels and towers agree?")
    kernels = _add_part(parts, "kernels", _run_kernels, "time the kernels and their peers")
    _add_part(parts, "fusion", _run_fusion, "time every way of fusing, over segment lengths")
    tune = _add_part(parts, "tune", _run_tune, "find the fastest launches for this GPU")
    tune.add_argument("--write", action="store_true", help="put them into the kernel packages")
    for flag, choices in (("--package", ("triton", "pallas")), ("--kernel", _KERNELS)):
        tune.add_argument(
            flag, action="append", choices=choices, help="this one only; may be given several times"
        )
    towers = _add_part(parts, "towers", _run_towers, "time the towers and Hugging Face's")
    integration = _add_part(
        parts,
        "integration",
        _run_integration,
        "time Hugging Face's tower with and without accelerate",
    )
    for part in (kernels, towers, integration):
        part.add_argument(
            "--workload",
            action="append",
            metavar="NAME",
            help="measure on this workload only; may be given several times",
        )
    trust = _add_part(parts, "trust", _run_trust, "put kernels and towers under stress")
    trust.add_argument(
        "--seconds",
        type=_positive,
        default=120.0,
        metavar="N",
        help="most time for the calls of each tower's server (default: %(default)g)",
    )
    report = parts.add_parser("report", help="tables and charts from the result files")
    report.set_defaults(run=_run_report)
    report.add_argument("--results", type=Path, default=results.DEFAULT_DIRECTORY, metavar="DIR")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: report.md in DIR")
    report.add_argument(
        "--readme", type=Path, metavar="FILE", help="also renew the results block of this file"
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _add_part(
    parts: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
) -> argparse.ArgumentParser:
    part = parts.add_parser(name, help=help_text, description=help_text)
    part.set_defaults(run=run, part=name)
    part.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"result file (on a GPU, default: {name}.json under compare/results/<device>)",
    )
    return part


def _run_agreement(options: argparse.Namespace) -> int:
    return _agreement(options.json or _default_path("agreement"))


def _agreement(path: Path | None) -> int:
    if path is not None:
        results.check_writable(path)
    if environment.has_gpu():
        _check_pytorch()
    from compare.agreement import check_kernels
    from compare.tower_agreement import check_towers

    records = [*check_kernels(), *check_towers()]
    _save(results.collect("agreement", records), path)
    failed = [record for record in records if record.passed is False]
    if failed:
        say(f"Agreement FAILED: {len(failed)} of {len(records)} checks, marked in the tables.")
        return DISAGREES
    say(f"Agreement holds: {len(records)} checks.")
    return AGREES


def _run_kernels(options: argparse.Namespace) -> int:
    from compare.rotation import ROTATION_WORKLOADS, bench_rotation
    from compare.workloads import KERNEL_WORKLOADS, choose

    chosen = choose(KERNEL_WORKLOADS | ROTATION_WORKLOADS, options.workload)
    path = _prepare_benchmark("kernels", options.json)
    from compare.kernel_bench import bench_kernels

    records, ceilings = bench_kernels([w for w in chosen if w.name in KERNEL_WORKLOADS])
    rotations = [w for w in chosen if w.name in ROTATION_WORKLOADS]
    records += bench_rotation(rotations, ceilings)
    _save(results.collect("kernels", records, ceilings.to_json()), path)
    return AGREES


def _run_fusion(options: argparse.Namespace) -> int:
    path = _prepare_benchmark("fusion", options.json)
    from compare.fusion import measure_fusion

    records, ceilings = measure_fusion()
    _save(results.collect("fusion", records, ceilings.to_json()), path)
    return AGREES


def _run_tune(options: argparse.Namespace) -> int:
    path = _prepare_benchmark("tune", options.json)
    from compare.tune import TWINS, tune
    from compare.tuning_cases import tuning_cases

    cases = tuning_cases(tuple(options.kernel or _KERNELS))
    records = []
    for name in options.package or TWINS:
        table, choices = tune(TWINS[name], cases)
        records += [record for choice in choices for record in choice.records]
        if options.write:
            file = TWINS[name].launch.TABLE_FILE
            results.write_text(table.to_text(), file)
            say(f"Wrote {file}")
    _save(results.collect("tune", records), path)
    return AGREES


def _run_towers(options: argparse.Namespace) -> int:
    from compare.tower_workloads import TOWER_WORKLOADS
    from compare.workloads import choose

    workloads = choose(TOWER_WORKLOADS, options.workload)
    path = _prepare_benchmark("towers", options.json)
    from compare.tower_bench import bench_towers

    records, ceilings = bench_towers(workloads)
    _save(results.collect("towers", records, ceilings.to_json()), path)
    return AGREES


def _run_integration(options: argparse.Namespace) -> int:
    from compare.tower_workloads import INTEGRATION_WORKLOADS
    from compare.workloads import choose

    workloads = choose(INTEGRATION_WORKLOADS, options.workload)
    path = _prepare_benchmark("integration", options.json)
    from compare.integration import bench_integration

    records, ceilings = bench_integration(workloads)
    _save(results.collect("integration", records, ceilings.to_json()), path)
    return AGREES


def _run_trust(options: argparse.Namespace) -> int:
    path = options.json or _default_path("trust")
    if path is not None:
        results.check_writable(path)
    if environment.has_gpu():
        _check_pytorch()
    from compare.trust import check_trust

    records = check_trust(options.seconds)
    _save(results.collect("trust", records), path)
    failed = [record for record in records if not record.passed]
    if failed:
        say(f"Stress found something in {len(failed)} of {len(records)} checks: see the table.")
        return DISAGREES
    say(f"Stress found nothing: {sum(record.details['cases'] for record in records)} cases.")
    return AGREES


def _run_report(options: argparse.Namespace) -> int:
    from compare.report import update_readme, write_report

    out = write_report(options.results, options.out or options.results / "report.md")
    say(f"Wrote {out}")
    if options.readme is not None:
        update_readme(options.readme, options.results)
        say(f"Renewed the results in {options.readme}")
    return AGREES


def _run_everything(options: argparse.Namespace) -> int:
    if not environment.has_gpu():
        path = options.results and results.default_path("agreement", "CPU", options.results)
        status = _agreement(path)
        say(
            "No CUDA GPU here: the kernels ran in their interpreters, on small shapes. A GPU would "
            "add agreement at real size, timings beside the peers', and the report."
        )
        return status
    directory = options.results or results.DEFAULT_DIRECTORY
    status = AGREES
    for part in ("agreement", "kernels", "towers", "integration"):
        path = results.default_path(part, environment.device_name(), directory)
        # A process of its own: peak memory counts from zero, and no part can spoil the next.
        command = [sys.executable, "-m", "compare", part, "--json", str(path)]
        code = subprocess.run(command, check=False).returncode
        # A part that was killed has a status of its own kind, which is no agreement either.
        status = max(status, code if code in (AGREES, BAD_INPUT) else DISAGREES)
    say(f"Wrote {_report(directory)}")
    return status


def _report(directory: Path) -> Path:
    from compare.report import write_report

    return write_report(directory, directory / "report.md")


def _default_path(part: str) -> Path | None:
    """Results of a GPU are kept; those of interpreters are not, unless a file is named."""
    if not environment.has_gpu():
        return None
    return results.default_path(part, environment.device_name())


def _prepare_benchmark(part: str, path: Path | None) -> Path:
    """Refuse what cannot work before anything is measured."""
    if not environment.has_gpu():
        raise InputError(f"{part} measures on a CUDA GPU, and this machine has none")
    _check_pytorch()
    path = path or results.default_path(part, environment.device_name())
    results.check_writable(path)
    return path


def _check_pytorch() -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f"there is a CUDA GPU here, but PyTorch {torch.__version__} does not see it: install "
            "PyTorch with CUDA, or hide the GPU by CUDA_VISIBLE_DEVICES= to compare on the CPU"
        )


def _save(measured: results.Results, path: Path | None) -> None:
    if path is not None:
        results.write(measured, path)
        say(f"Wrote {path}")
