"""How fast is a folder of photographs encoded, beside the tower alone and what others have?"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from compare.agreement.metrics import relative_rms_error, tower_verdict
from compare.common import environment
from compare.common.console import number, print_missing, print_table, progress, say
from compare.common.errors import UnavailableError
from compare.common.result_files import Record
from compare.implementations import encoders, huggingface
from compare.implementations.encoders import Encoded, Encoder, Job
from compare.workloads import photographs
from compare.workloads.scale import STAGES, ScaleWorkload, Sizes, write_photographs

_AIM = 0.9  # of what the tower reaches alone
_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
_CORES = environment.cores()


def bench_scale(
    workloads: Sequence[ScaleWorkload],
    sizes: Sizes | None = None,
    measured: Sequence[Encoder] | None = None,
) -> Iterator[list[Record]]:
    """Encode a folder of photographs in every way on every workload; print the tables.

    JAX's programs are compiled once for all of them, if the user keeps none.

    Args:
        workloads: our frameworks and numbers of GPUs.
        sizes: of the folder and what is made of it; default those of Qwen2.5-VL's tower.
        measured: what to measure beside the baseline, Hugging Face's loop; default those of the
            workload's framework.

    Yields:
        For each workload a record for each way; `median_us` is a photograph's share of the run's
        time, of which there is one sample.

    Raises:
        UnavailableError: photographs or Hugging Face's tower are not installed.
    """
    sizes = sizes or Sizes()
    photographs.photographs()
    huggingface.vision_classes(sizes.config.model_type)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        say(f"Writing {sizes.photographs:,} photographs and a random checkpoint")
        files = write_photographs(scratch / "photographs", sizes.photographs, sizes.pixels)
        job = Job(files, scratch / "checkpoint", scratch, min(workloads[0].gpus, 1), sizes)
        encoders.write_checkpoint(job)
        exact = encoders.exact(job)
        programs = os.environ.get(_PROGRAMS, str(scratch / "programs"))
        for workload in workloads:
            (scratch / workload.name).mkdir()
            job = replace(job, scratch=scratch / workload.name, gpus=workload.gpus)
            ways = encoders.encoders(workload.framework) if measured is None else measured
            with mock.patch.dict(os.environ, {_PROGRAMS: programs}):
                measured_here = _measure(workload, job, ways, exact)
            _print(workload, measured_here)
            yield measured_here


def _measure(
    workload: ScaleWorkload, job: Job, measured: Sequence[Encoder], exact: dict[bool, np.ndarray]
) -> list[Record]:
    """Every way on one workload; a failure is a record with the reason."""
    baseline = encoders.baseline()
    records: list[Record] = []
    done: dict[str, Encoded] = {}
    limit = None
    for encoder in progress([baseline, *measured], workload.name):
        details = {"gpus": workload.gpus, "photographs": len(job.files), "cores": _CORES}
        blank = Record(
            workload.name,
            encoder.name,
            framework=encoder.framework,
            dtype="bfloat16",
            ours=encoder.ours,
            details=details,
        )
        try:
            if workload.gpus > environment.gpu_count():
                raise UnavailableError(f"there are fewer GPUs here: {environment.gpu_count()}")
            found = encoder.run(job)
            error = relative_rms_error(
                torch.tensor(found.vectors), torch.tensor(exact[encoder.ours])
            )
            limit = error if encoder.name == baseline.name else limit
            if limit is None:
                raise UnavailableError("not timed: no bf16 baseline to judge it by")
            # A mean's error is what does not average away, and varies more than that of all rows.
            verdict = tower_verdict(error, limit, ours=False)
            if verdict.passed:
                done[encoder.name] = found
                record = blank.judged(
                    verdict,
                    median_us=found.seconds / found.images * 1e6,
                    compile_s=found.compile_s,
                    peak_memory_mib=found.peak_memory_mib,
                    details=details | _told(found, done.get(encoder.alone or "")),
                )
            else:
                record = blank.judged(verdict, note="not timed: the error breaks its rule")
        except Exception as failure:  # what the others do still counts
            record = blank.failed(failure)
        records.append(record)
        rate = record.details.get("images_per_s")
        say(f"{encoder.name}: {number(rate)} images/s")
    return records


def _told(found: Encoded, alone: Encoded | None) -> dict[str, object]:
    """What is written of it, and beside what its tower reaches alone."""
    rate = found.images / found.seconds
    told = {"images_per_s": rate, "patches_per_s": found.patches / found.seconds}
    if found.padding is not None:
        told["padding"] = found.padding / (found.patches + found.padding)
    if found.busy is not None:
        told["busy"] = found.busy
    stages = found.stages
    if alone is not None:
        told["share_of_alone"] = found.patches / found.seconds * alone.seconds / alone.patches
    if alone is not None and found.reading is not None:
        # The tower's own are those that it has alone; reading is divided as it is there.
        decode, patches = (alone.stages[stage] for stage in ("decode", "patches"))
        decoding = found.reading * decode / (decode + patches)
        reading = {"decode": decoding, "patches": found.reading - decoding}
        stages = alone.stages | reading | found.stages
        on_cores = found.reading + found.stages["writing"]
        wanted = alone.patches / alone.seconds * found.images / found.patches  # images a second
        told |= {"reading_ms": found.reading * 1e3, "cores_wanted": _AIM * wanted * on_cores}
    return told | {"stages_ms": {stage: stages[stage] * 1e3 for stage in STAGES if stage in stages}}


def _print(workload: ScaleWorkload, records: Sequence[Record]) -> None:
    timed = [record.details | {"": record} for record in records if record.median_us is not None]
    columns = ("images/s", "patches/s", "of alone", "padding", "busy", *STAGES, "rel. RMS")
    print_table(
        f"{workload.name}: {records[0].details['photographs']:,} photographs, "
        f"{_CORES} cores; stages in ms a photograph",
        ("", *columns),
        [
            [
                told[""].implementation,
                number(told["images_per_s"]),
                f"{told['patches_per_s']:,.0f}",
                *(_percent(told.get(name)) for name in ("share_of_alone", "padding", "busy")),
                *(number(told["stages_ms"].get(stage)) for stage in STAGES),
                number(told[""].relative_rms_error),
            ]
            for told in timed
        ],
    )
    for told in timed:
        if "cores_wanted" in told:
            say(
                f"  {told[''].implementation}: {_AIM:.0%} of its tower alone would take "
                f"{number(told['cores_wanted'])} cores, of which a photograph takes one "
                f"{number(told['reading_ms'])} ms"
            )
    print_missing(records)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
