"""Compile the kernels for GPUs that need not be there; prints one JSON object a compiled kernel.

A process of its own: with TRITON_INTERPRET=1, as the other tests have it on a CPU, nothing can be
compiled. What is compiled is what the operators launch: the launches are recorded, not written
down here a second time.

    python -m tests.triton_kernels.compile_ahead            what every run of the tests compiles
    python -m tests.triton_kernels.compile_ahead --every    every variant, on every architecture
    python -m tests.triton_kernels.compile_ahead --write    the same, into the table of this Triton

Registers and spills are ptxas', which comes with Triton: the table holds them for each version.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from tests.triton_kernels.machine_code import (
    chained_products,
    first_operands,
    late_loads,
    loop_spills,
    narrow_stores,
    product_loops,
    serial_loops,
)
from tests.triton_kernels.wgmma_descriptors import high_word_sums
from triton_kernels.kernels.rotate import rotate_kernel
from triton_kernels.launching import backward as backward_module
from triton_kernels.launching import choose as launch_module
from triton_kernels.launching import fast_path
from triton_kernels.launching.rotate_in_order import rotate_in_order
from triton_kernels.launching.table import Gpu

TOKENS, HEADS, SEGMENTS = 9216, 16, 144
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}


# Whose launches are compiled, by compute capability; others take the default's.
GPUS = {90: Gpu("NVIDIA H200", "9.0")}


@dataclass(frozen=True)
class Variant:
    """A call of the operator, and the compute capability that it is compiled for."""

    arch: int
    head_dim: int = 80
    dtype: str = "bfloat16"
    max_seqlen: int = 64
    fuse: str = "auto"
    rotary_dim: int | None = None
    offset: int = 0  # elements by which q, k and v miss their alignment
    k_heads: int | None = None  # K and V of so many, which are not packed with Q then
    norms: str = ""  # of which of q and k, as letters
    embed: str = "rope"

    def __str__(self) -> str:
        parts = [f"sm_{self.arch}", str(self.head_dim), self.dtype, f"max {self.max_seqlen}"]
        parts += [self.fuse] if self.fuse != "auto" else []
        parts += [f"rotary {self.rotary_dim}"] if self.rotary_dim else []
        parts += ["unaligned"] if self.offset else []
        parts += [f"{self.k_heads} key heads"] if self.k_heads else []
        parts += [f"norms of {self.norms}"] if self.norms else []
        parts += [self.embed] if self.embed != "rope" else []
        return ", ".join(parts)


STREAM = 9216
ARCHITECTURES = (80, 90, 100)
TABLE = Path(__file__).with_name("resources.json")


def every_variant(arch: int) -> list[Variant]:
    """Every kernel, dtype, width of a head, tile and way of fusing, though not all their mixes."""
    return [
        *usual_variants(arch),
        Variant(arch, head_dim=128),
        Variant(arch, head_dim=64, max_seqlen=STREAM, norms="qk"),
        Variant(arch, head_dim=96),
        Variant(arch, head_dim=72, max_seqlen=STREAM),
        Variant(arch, max_seqlen=16, rotary_dim=40),
        Variant(arch, head_dim=120, rotary_dim=90),
        Variant(arch, head_dim=256),
        Variant(arch, dtype="float32", max_seqlen=STREAM),
        Variant(arch, max_seqlen=STREAM, embed="positions"),
        Variant(arch, head_dim=512, dtype="float32", max_seqlen=STREAM),
        Variant(arch, head_dim=64, max_seqlen=STREAM),
        Variant(arch, head_dim=96, max_seqlen=STREAM),
        Variant(arch, dtype="float16", max_seqlen=128),
        Variant(arch, dtype="float16", max_seqlen=STREAM),
        Variant(arch, dtype="float32", max_seqlen=16),
        Variant(arch, max_seqlen=32),
        Variant(arch, rotary_dim=20),
        Variant(arch, head_dim=128, max_seqlen=128),
        Variant(arch, head_dim=192, max_seqlen=128),
        Variant(arch, head_dim=256, max_seqlen=STREAM),
        Variant(arch, head_dim=256, dtype="float32", max_seqlen=32),
        Variant(arch, head_dim=256, offset=1),
        # Of more registers than there are, as 120 columns: without a bound ptxas may leave 32.
        Variant(arch, head_dim=168, dtype="float16", max_seqlen=512, fuse="qk", rotary_dim=42),
        Variant(arch, head_dim=208, dtype="float32", max_seqlen=STREAM, fuse="qk"),
        Variant(arch, head_dim=2048, dtype="float32", max_seqlen=16, embed="positions"),
        Variant(arch, head_dim=2048, max_seqlen=32, embed="sinusoidal"),
        Variant(arch, head_dim=520, dtype="float32", max_seqlen=STREAM, fuse="qk"),
        Variant(arch, head_dim=520, dtype="float16", max_seqlen=STREAM, fuse="qk"),
        Variant(arch, head_dim=512, offset=1, fuse="qk"),
    ]


def usual_variants(arch: int) -> list[Variant]:
    """The towers' and the other widths of a head, one call of each other kind.

    In whole images, whose kernels take long to compile: a tail, and none.
    """
    return [
        *(Variant(arch, head_dim=head_dim) for head_dim in (64, 72, 80)),
        *(Variant(arch, head_dim=head_dim, max_seqlen=STREAM) for head_dim in (80, 128)),
        Variant(arch, max_seqlen=128),
        Variant(arch, rotary_dim=70),  # half of it is odd
        Variant(arch, dtype="float16"),
        Variant(arch, dtype="float32", max_seqlen=32),
        Variant(arch, max_seqlen=STREAM, fuse="q"),
        Variant(arch, max_seqlen=STREAM, fuse="qk"),
        Variant(arch, offset=1),
        Variant(arch, k_heads=8, norms="qk"),
        Variant(arch, max_seqlen=STREAM, fuse="q", k_heads=8, norms="qk"),
        Variant(arch, embed="sinusoidal"),
        Variant(arch, embed="positions"),
        Variant(arch, head_dim=512, dtype="float32"),
        Variant(arch, head_dim=512),
        Variant(arch, head_dim=512, max_seqlen=STREAM),
    ]


def both_kernels(arch: int, head_dim: int = 80) -> list[Variant]:
    """What a tower calls, in windows and in whole images."""
    return [Variant(arch), Variant(arch, head_dim=head_dim, max_seqlen=STREAM)]


EVERY = [variant for arch in ARCHITECTURES for variant in every_variant(arch)]
# Of images without a tail the kernels that sm_90 has for itself, and sm_100's of all.
USUAL = [*both_kernels(80), *usual_variants(90), *both_kernels(100, 128)]
# Whose results are compiled in every run with log-sum-exps, and not without them; of others it is
# the other way.
KEEPING_LSE = Variant(90, head_dim=128, max_seqlen=STREAM)


def table_key(record: dict) -> str:
    """A record's name in the table."""
    kept = " with log-sum-exps" if record["keeps_lse"] else ""
    first = " of partial logits" if record["is_first"] else ""
    return f"{record['kernel']}{kept}{first}: {record['variant']}"


def table_entry(record: dict) -> dict[str, int]:
    """What the table holds: registers a thread, shared bytes a program, bytes a thread spills."""
    return {name: record[name] for name in ("registers", "shared", "stack")}


def write_table(records: list[dict]) -> None:
    """Renew this Triton's part of the table."""
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    table[triton.__version__] = {table_key(record): table_entry(record) for record in records}
    lines = []
    for version, entries in sorted(table.items()):
        rows = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries)
        )
        lines.append(f"{json.dumps(version)}: {{\n{rows}\n }}")
    TABLE.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


@contextmanager
def recording() -> Iterator[list[tuple[JITFunction, tuple, dict]]]:
    """What is launched meanwhile, kernels with their arguments, instead of launching it."""
    recorded = []

    def record(kernel, *arguments, grid, warmup, **options):
        recorded.append((kernel, arguments, options))

    with mock.patch.object(JITFunction, "run", record):
        yield recorded


def launches(variant: Variant) -> list[tuple[JITFunction, tuple, dict]]:
    """What the operator would launch: kernels with their arguments."""
    dtype = getattr(torch, variant.dtype)
    is_wide = launch_module.is_wide(variant.head_dim)
    # Of wide heads one, in one segment, so that programs share it.
    heads, segments = (1, 1) if is_wide else (HEADS, SEGMENTS)
    size = TOKENS * 3 * heads * variant.head_dim
    qkv = torch.empty(size + variant.offset, dtype=dtype)[variant.offset :]
    qkv = qkv.view(TOKENS, 3, heads, variant.head_dim)
    angles = torch.empty(TOKENS, (variant.rotary_dim or variant.head_dim) // 2)
    if variant.embed == "positions":
        angles = torch.zeros(TOKENS, dtype=torch.int32)
    cu_seqlens = torch.zeros(segments + 1, dtype=torch.int32)
    tensors, bound, scale = (qkv, angles, angles), variant.max_seqlen, 0.1
    arguments = *tensors, cu_seqlens, bound, scale, variant.fuse, "kernel", False
    weight = torch.empty(variant.head_dim, dtype=dtype)
    norms = [weight if name in variant.norms else None for name in "qk"]
    operator = torch.ops.fused_rope_attention.qkvpacked
    if variant.k_heads:
        few = qkv[:, 1:, : variant.k_heads].unbind(1)
        operator, arguments = (
            torch.ops.fused_rope_attention.varlen,
            (qkv[:, 0], *few, *arguments[1:]),
        )
    fast_path.plans.clear()  # another GPU's, which none knows of here
    with (
        recording() as recorded,
        mock.patch.object(launch_module, "gpu", return_value=GPUS.get(variant.arch)),
        mock.patch("triton_kernels.attend.INTERPRETED", True),  # it shall not mind the missing GPU
    ):
        operator(*arguments, *norms, embed=variant.embed)
        rotations = sum(x[0] is rotate_kernel for x in recorded)
        if recorded[-1][0].is_gluon():
            # The stream kernel, whose place is taken here, serves images of other sizes.
            with launch_module.launching_by(launch_module._PACKAGED, warp_specialized=False):
                operator(*arguments, *norms, embed=variant.embed)
        # Whose gradients take no other kernel, or none.
        further = variant.k_heads or variant.norms or variant.embed != "rope" or is_wide
        if variant.fuse == "auto" and not further:
            grad, needed = torch.empty_like(qkv[:, 0]), [True, False, False]
            kept = []
            if backward_module.needs_lse(dtype, variant.head_dim, bound):
                kept = torch.ops.fused_rope_attention.qkvpacked_with_lse(*arguments)
            options = cu_seqlens, kept, bound, scale, "kernel", needed
            torch.ops.fused_rope_attention.backward(grad, [*tensors], *options)
            if recorded[-1][0].is_gluon():
                with launch_module.launching_by(launch_module._PACKAGED, warp_specialized=False):
                    torch.ops.fused_rope_attention.backward(grad, [*tensors], *options)
        if variant.max_seqlen == STREAM and variant.fuse == "auto" and not further:
            qk = qkv.view(TOKENS, 3 * HEADS, variant.head_dim)[:, : 2 * HEADS]
            rotate_in_order(qk, qk, angles, angles)
    again = [i for i, x in enumerate(recorded) if x[0] is rotate_kernel][rotations:]
    return [x for i, x in enumerate(recorded) if i not in again]


def keeps_lse(kernel: JITFunction, arguments: tuple) -> bool:
    """Whether a launch writes the log-sum-exps that a backward pass needs."""
    named = dict(zip(kernel.arg_names, arguments, strict=True))
    return "backward" not in kernel.__name__ and named.get("lse_ptr") is not None


def is_first(kernel: JITFunction, arguments: tuple) -> bool:
    """Whether a launch writes logits by some columns of wide heads, which another one adds up."""
    return dict(zip(kernel.arg_names, arguments, strict=True)).get("IS_FIRST", False)


def tile_type(x) -> str:
    """How a signature names a descriptor of Triton or of Gluon, which knows shared memory."""
    block = ", ".join(map(str, x.block_shape))
    layout = f",{x.layout!r}" if hasattr(x, "layout") else ""
    return f"tensordesc<{POINTERS[x.base.dtype][1:]}[{block}]{layout}>"


def source(kernel: JITFunction, arguments: tuple) -> ASTSource:
    """The kernel specialized as a launch does it: on alignment, and on integers that are 1."""
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, x) in enumerate(zip(kernel.params, arguments, strict=True)):
        name = parameter.name
        specialize = not (parameter.is_constexpr or parameter.do_not_specialize)
        is_one = specialize and isinstance(x, int) and x == 1
        if parameter.is_constexpr or is_one or x is None:
            signature[name], constants[name] = "constexpr", x
            continue
        if hasattr(x, "block_shape"):
            signature[name] = tile_type(x)
            continue
        if isinstance(x, torch.Tensor):
            signature[name], divisible = POINTERS[x.dtype], x.data_ptr() % 16 == 0
        elif isinstance(x, float):
            signature[name], divisible = "fp32", False
        else:
            signature[name], divisible = "i32", x % 16 == 0
        if specialize and divisible and not parameter.do_not_specialize_on_alignment:
            attributes[(i,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def shows_the_same(variant: Variant, kernel: JITFunction, arguments: tuple) -> bool:
    """Whether what every run compiles besides shows what is to be seen of a launch."""
    if variant != KEEPING_LSE:
        return keeps_lse(kernel, arguments)
    is_twin = kernel.__name__.startswith("stream")  # of 80 columns here, of as many on sm_100
    is_result = kernel.__name__ == "hopper_stream_kernel"
    return is_twin or (is_result and not keeps_lse(kernel, arguments))


def compile_variant(variant: Variant, every: bool = True) -> list[dict]:
    """Compile all kernels of one call and say what they take of a multiprocessor.

    every: also those that differ from another by the log-sum-exps alone that they keep, and those
    that serve other images than the variant's.
    """
    records = []
    for kernel, arguments, options in launches(variant):
        if not every and shows_the_same(variant, kernel, arguments):
            continue
        compiled = triton.compile(
            source(kernel, arguments), target=GPUTarget("cuda", variant.arch, 32), options=options
        )
        registers, stack, sass = inspect_machine_code(compiled.asm["cubin"])
        descriptors, broken = high_word_sums(sass)
        records.append(
            {
                "variant": str(variant),
                "arch": variant.arch,
                "kernel": kernel.__name__,
                "keeps_lse": keeps_lse(kernel, arguments),
                "is_first": is_first(kernel, arguments),
                "shared": compiled.metadata.shared,
                "registers": registers,
                "maxnreg": options.get("maxnreg"),
                "stack": stack,
                "product_loops": len(list(product_loops(sass))),
                "loop_spills": loop_spills(sass),
                "serial_loops": serial_loops(sass),
                "late_loads": late_loads(sass),
                "narrow_stores": narrow_stores(sass),
                "chained_products": chained_products(compiled.asm.get("ttir", "")),
                "first_operands": first_operands(compiled.asm["ttgir"]),
                "descriptors": len(descriptors),
                "broken_descriptors": broken,
                "starts_early": options["launch_pdl"],
                # The instructions of griddepcontrol.wait and griddepcontrol.launch_dependents.
                "waits": "ACQBULK" in sass,
                "lets_next_start": "PREEXIT" in sass,
            }
        )
    return records


def inspect_machine_code(cubin: bytes) -> tuple[int, int, str]:
    """Registers a thread, bytes of stack (spills are kept there) and the disassembly."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = (
            [tools / "cuobjdump", "-res-usage", file.name],
            [tools / "nvdisasm", "-c", file.name],
        )
        usage, sass = (
            subprocess.run(command, capture_output=True, text=True, check=True)
            for command in commands
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    return int(found[1]), int(found[2]), sass.stdout


def main() -> None:
    """Compile, two variants at a time, and print or write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", action="store_true", help="also what no test looks at")
    parser.add_argument("--write", action="store_true", help="keep what it takes in resources.json")
    options = parser.parse_args()
    every = options.every or options.write
    variants = EVERY if every else USUAL
    written = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for records in pool.map(compile_variant, variants, repeat(every)):
            written += records
            for record in records:
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
    if options.write:
        write_table(written)


if __name__ == "__main__":
    main()
