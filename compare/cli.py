"""The command line: `python -m compare`, its parts, their options and exit statuses."""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from compare import commands
from compare.common import environment
from compare.common.errors import InputError, UnavailableError
from compare.workloads.scale import Sizes
from flax_models.arguments import positive

_COMPARED = ("torch", "triton", "jax", "flax", "transformers")

_DESCRIPTION = (
    "Hold the Pallas and the Triton kernel, and the towers built on them, against each other, "
    "against fp64 and against Hugging Face, and time them. Without a part: agreement, kernels, "
    "towers, integration and report on a GPU; without one, agreement on small shapes."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; default sys.argv's.

    Returns:
        The exit status: 0; 1 when something is wrong (agreement fails, stress finds something, what
        is timed of ours fails or its error breaks its rule); 2 for bad input, after one sentence on
        stderr.
    """
    environment.configure()
    for stream in (sys.stdout, sys.stderr):
        # A dash that the terminal's encoding lacks must not end a run before its results are kept.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        options = _parser().parse_args(arguments)
        return options.run(options)
    except (InputError, UnavailableError) as error:
        sentence = str(error)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _COMPARED:
            raise
        sentence = f"{error.name} is not installed: pip install '.[compare]' in the clone"
    print(f"compare: {sentence}", file=sys.stderr)
    return commands.BAD_INPUT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists what there is)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m compare", description=_DESCRIPTION)
    parser.set_defaults(
        run=commands.run_everything, part=None, results=None, json=None, workload=None, update=False
    )
    _add_results(parser)
    subparsers = parser.add_subparsers(title="parts", metavar="PART", parser_class=_Parser)
    add = partial(_add_part, subparsers)
    add("agreement", commands.run_agreement, "do kernels and towers agree?")
    kernels = add("kernels", commands.run_kernels, "time the kernels and their peers")
    add("fusion", commands.run_fusion, "time every way of fusing, over segment lengths")
    embeddings = add(
        "embeddings",
        commands.run_embeddings,
        "time rotated and added positions in every way, over heads of 64 to 16,384 columns",
    )
    invariance = add(
        "invariance", commands.run_invariance, "time batch-invariant calls beside the usual ones"
    )
    training = add("training", commands.run_training, "time kernels and towers in training")
    tune = add("tune", commands.run_tune, "find the fastest launches for this GPU")
    tune.add_argument("--write", action="store_true", help="put them into the kernel packages")
    for flag, choices in (
        ("--package", ("triton", "pallas")),
        ("--kernel", commands.TUNED_KERNELS),
    ):
        tune.add_argument(
            flag, action="append", choices=choices, help="this one only; may be given several times"
        )
    towers = add("towers", commands.run_towers, "time the towers and Hugging Face's")
    integration = add(
        "integration",
        commands.run_integration,
        "time Hugging Face's tower with and without accelerate",
    )
    vllm = add(
        "vllm", commands.run_vllm, "time vLLM's towers with and without its plugin (needs vLLM)"
    )
    scale = add("scale", commands.run_scale, "time the encoding of a folder of photographs")
    scale.add_argument(
        "--photographs",
        type=positive,
        default=Sizes.photographs,
        metavar="N",
        help="so many in the folder (default: %(default)s)",
    )
    timed = (kernels, embeddings, invariance, training, towers, integration, vllm, scale)
    for part in timed:
        part.add_argument(
            "--workload",
            action="append",
            metavar="NAME",
            help="measure on this workload only, or on those that match a pattern such as "
            "'windows-*'; may be given several times. Without --json or --results nothing is kept "
            "then, so that the file of a whole run stays",
        )
    for part in (*timed, tune):
        part.add_argument(
            "--update",
            action="store_true",
            help="leave what the result file holds of other workloads; it has to be of this GPU, "
            "driver and packages. So a run goes on that was cut",
        )
    stress = add("stress", commands.run_stress, "put kernels and towers under stress")
    subparsers.choices["trust"] = stress  # its name in earlier versions; no help lists it
    stress.add_argument(
        "--seconds",
        type=_positive,
        default=120.0,
        metavar="N",
        help="most time for the calls of each tower from many threads (default: %(default)g)",
    )
    stress.add_argument(
        "--check",
        action="append",
        metavar="NAME",
        help="this one only, or those that match a pattern; may be given several times. Those that "
        "the result file holds of others stay",
    )
    report = subparsers.add_parser("report", help="tables and charts from the result files")
    report.set_defaults(run=commands.run_report)
    _add_results(report)
    report.add_argument("--out", type=Path, metavar="FILE", help="default: report.md in DIR")
    report.add_argument(
        "--readme",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="also renew the tables of these files",
    )
    return parser


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results",
        type=Path,
        default=argparse.SUPPRESS,  # or a part's default would take the place of what stood before
        metavar="DIR",
        help="where results go and reports find them (default: compare/results)",
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _add_part(
    subparsers: argparse._SubParsersAction,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
) -> argparse.ArgumentParser:
    part = subparsers.add_parser(name, help=help_text, description=help_text)
    part.set_defaults(run=run, part=name)
    _add_results(part)
    part.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"result file (default, on a GPU or with --results: <device>/{name}.json there)",
    )
    return part
