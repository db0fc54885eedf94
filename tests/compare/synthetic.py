"""Result files with made-up numbers, for tests of the report. They are written to tmp_path only."""

from dataclasses import replace
from pathlib import Path

from compare.common import result_files
from compare.common.result_files import Record, Results

DEVICE = "Imaginary GPU"
SIDES = (448, 672, 896, 1344)
CEILINGS = {
    "copy_bytes_per_s": 4e12,
    "large_copy_bytes_per_s": 4.2e12,
    "matrix_flops_per_s": 8e14,
}
# Microseconds at 448 px, which grow with the pixels.
KERNELS = {
    "triton": ("torch", 5.0),
    "pallas": ("jax", 5.5),
    "torch.compile rope + FA2 varlen": ("torch", 14.0),
    "in-place rope + FA2 varlen": ("torch", 13.0),
    "XLA rope + cuDNN (jax.nn)": ("jax", 17.0),
}
TOWERS = {
    "Hugging Face SDPA": ("torch", 31e3),
    "torch": ("torch", 3.1e3),
    "flax": ("jax", 3.3e3),
    "Hugging Face FA2 varlen": ("torch", 17e3),
}
INTEGRATION = {
    "Hugging Face SDPA": ("torch", 31e3),
    "accelerated": ("torch", 6e3),
    "accelerated, compiled": ("torch", 5e3),
    "Hugging Face FA2 varlen": ("torch", 17e3),
}
MISSING = "in-place rope + FA3 varlen"


def write_all(directory: Path) -> None:
    """The files of all parts of one device."""
    for part, records in {
        "agreement": agreement_records(),
        "stress": stress_records(),
        "kernels": timing_records(("windows", "frames"), KERNELS),
        "fusion": fusion_records(),
        "towers": timing_records(("tower", "qwen3-tower"), TOWERS),
        "integration": timing_records(("integration",), INTEGRATION),
    }.items():
        made_up = as_results(part, records)
        result_files.write(made_up, result_files.default_path(part, DEVICE, directory))


def as_results(part: str, records: list[Record]) -> Results:
    ceilings = None if part in ("agreement", "stress") else CEILINGS
    return replace(result_files.collect(part, records, ceilings), device=DEVICE)


def timing_records(families, implementations) -> list[Record]:
    records = []
    for family in families:
        for side in SIDES:
            growth = (side / 448) ** 2
            blank = Record(f"{family}-{side}", "", floor_us=2.5 * growth, dtype="bfloat16")
            for name, (framework, median_us) in implementations.items():
                time = median_us * growth
                records.append(
                    replace(
                        blank,
                        implementation=name,
                        framework=framework,
                        median_us=time,
                        spread_us=0.02 * time,
                        row_us=0.8 * time if implementations is not KERNELS else None,
                        profiler_us=0.9 * time,
                        share_of_floor=blank.floor_us / time,
                        compile_s=1.0 if implementations is not KERNELS else None,
                        peak_memory_mib=2000.0 if implementations is not KERNELS else None,
                        relative_rms_error=2.7e-3,
                        passed=True,
                    )
                )
            records.append(replace(blank, implementation=MISSING, note="not installed"))
    return records


def fusion_records() -> list[Record]:
    return [
        Record(
            f"segments-{length}",
            name,
            median_us=time,
            relative_rms_error=2.7e-3,
            head_dim=head_dim,
            fuse=fuse,
            details={
                "segment_length": length,
                "rotary_dim": head_dim,
                "auto": "qk" if length <= 128 else "none",
            },
        )
        for name in ("triton", "pallas")
        for head_dim in (64, 80)
        for length in (64, 128, 1024)
        for fuse, time in {
            "qk": 30 + length / 4,
            "q": 75 + length / 16,
            "none": 60 + length / 16,
        }.items()
    ]


def agreement_records() -> list[Record]:
    def kernel(name):
        return Record("windows-448", name, relative_rms_error=2.7e-3, dtype="bfloat16", passed=True)

    records = [kernel("triton"), kernel("pallas"), kernel("pallas against triton")]
    for tower, depth in {"tower": 32, "qwen3-tower": 27}.items():
        for name, error in {"Hugging Face SDPA": 4e-3, "torch": 3.9e-3, "flax": 3.8e-3}.items():
            for layer in [*range(depth), None]:
                passed = depth if layer is None else layer
                records.append(
                    Record(
                        f"{tower}-photographs",
                        name,
                        relative_rms_error=error * (1 + passed) ** 0.3,
                        layer=layer,
                        passed=None if name.startswith("Hugging") else True,
                    )
                )
    return records


def stress_records() -> list[Record]:
    """One check of both kernels, the second of which fails."""

    def record(name, findings):
        details = {"tried": "any cu_seqlens", "cases": 6000, "findings": findings}
        note = "row 3 is NaN" if findings else None
        return Record("hostile", name, passed=not findings, note=note, details=details)

    return [record("triton", 0), record("pallas", 2)]
