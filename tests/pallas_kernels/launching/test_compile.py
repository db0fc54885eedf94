"""Pallas kernels compiled by the Triton package, on any machine, as XLA is given them to launch."""

import importlib.util
import re
import sys
import types

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from pallas_kernels.launching import choose, triton_lowering
from pallas_kernels.launching import compile as compile_module
from pallas_kernels.launching.compile import compiling_by
from tests.kernel_contract import STREAM
from tests.pallas_kernels.compiling import assemble
from tests.pallas_kernels.launching.test_lowering import (
    HEADS,
    SEGMENTS,
    TOKENS,
    gradients,
    lower,
)
from tests.triton_kernels.compile_ahead import inspect_machine_code
from tests.triton_kernels.machine_code import first_operands, loop_spills

# What compiles soonest, where any kernel shows it.
SMALL = {"head_dim": 16, "max_seqlen": 16}
POINTERS = {"window_kernel": 7, "stream_kernel": 7, "rotate_kernel": 4}
# Bytes that a thread of attention spills at most. What a bound on registers sets aside waits in
# memory while the stream kernel's loop runs without it: by Triton 3.6 the most, at 72 columns.
SPILLS = {"qk": 0, "none": 56, "q": 112}


def test_what_is_launched(found):
    module = lower(max_seqlen=64)
    assert module.count("@__gpu$xla.gpu.ptx") == 1
    assert "xla.gpu.triton" not in module
    [kernel], [compiled] = found.kernels, found.compiled
    assert kernel.name == "window_kernel"
    assert kernel.grid == (SEGMENTS * HEADS, 1, 1)
    assert kernel.threads == 4 * 32
    assert ".maxnreg 128" in kernel.ptx
    assert ".version 8.0" in kernel.ptx
    for attribute in (
        'name = "window_kernel"',
        'kernel_type = "ptx"',
        f"grid_x = {SEGMENTS * HEADS} : i32, grid_y = 1 : i32, grid_z = 1 : i32",
        "block_x = 128 : i32, block_y = 1 : i32, block_z = 1 : i32",
        "shared_mem_bytes = 0 : i32",
        f"output_indices = [{POINTERS['window_kernel'] - 1} : i32]",
    ):
        assert attribute in module
    assert compiled.metadata.global_scratch_size == 0


def test_each_gradient_is_a_result_of_one_launch(found):
    module = lower(max_seqlen=64, packed=False, through=gradients)
    assert [kernel.name for kernel in found.kernels] == ["window_backward_kernel"]
    # Behind q, k, v, the result's gradient, cos, sin and cu_seqlens.
    assert "output_indices = [7 : i32, 8 : i32, 9 : i32]" in module


@pytest.mark.parametrize(
    ("capability", "version"),
    [("8.0", "8.0"), ("8.9", "8.0"), ("10.0", "8.7"), ("10.3", "8.8"), ("12.0", "8.7")],
)
def test_every_driver_that_knows_the_gpu_knows_the_ptx(found, monkeypatch, capability, version):
    """By NVIDIA's "PTX ISA Release Notes"; Triton's own assembler takes newer ones."""
    gpu = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(triton_lowering, "local_gpu", lambda: gpu)
    lower(**SMALL)
    [kernel] = found.kernels
    assert f".version {version}\n" in kernel.ptx


def test_shared_memory_is_declared_where_that_is_allowed(found):
    lower(max_seqlen=64)
    lower(head_dim=128, max_seqlen=STREAM, fuse="none", tokens=MANY_TOKENS)
    windows, _, stream = found.kernels
    size = found.compiled[0].metadata.shared
    assert 0 < size <= 48 * 1024
    assert f".shared .align 16 .b8 global_smem[{size}];" in windows.ptx
    assert ".extern" not in windows.ptx
    assert windows.shared_memory == 0
    assert ".extern .shared .align 16 .b8 global_smem[];" in stream.ptx
    assert stream.shared_memory == found.compiled[-1].metadata.shared > 48 * 1024


@pytest.mark.parametrize("fuse", ["qk", "none"])
def test_the_default_fits_gpus_with_the_least_shared_memory(found, monkeypatch, fuse):
    """99 KiB a program, of compute capability 8.6, 8.9 and 12.0, by CUDA's programming guide."""
    gpu = types.SimpleNamespace(compute_capability="8.6")
    monkeypatch.setattr(triton_lowering, "local_gpu", lambda: gpu)
    monkeypatch.setattr(choose, "gpu", lambda: None)
    lower(head_dim=256, max_seqlen=STREAM, fuse=fuse)
    assert found.kernels[-1].name == "stream_kernel"
    assert 0 < found.kernels[-1].shared_memory <= 99 * 1024


# So many that an H200's launch has tiles of 128 rows.
MANY_TOKENS = 9216


@pytest.mark.parametrize(
    ("head_dim", "max_seqlen", "fuse", "tokens"),
    [
        (72, 64, "qk", TOKENS),
        (80, 64, "qk", TOKENS),
        (72, STREAM, "none", MANY_TOKENS),
        (80, STREAM, "q", MANY_TOKENS),
    ],
)
def test_pointers_registers_and_spills(found, tmp_path, head_dim, max_seqlen, fuse, tokens):
    module = lower(head_dim, max_seqlen=max_seqlen, fuse=fuse, tokens=tokens)
    calls = re.findall(r"@__gpu\$xla\.gpu\.ptx\((.*?)\)", module)
    assert len(found.kernels) == len(calls) == (1 if fuse == "qk" else 2)
    for kernel, operands in zip(found.kernels, calls, strict=True):
        # Triton adds two for its scratch memory; the result is no operand.
        assert kernel.pointers == POINTERS[kernel.name] + 2
        assert len(operands.split(",")) == kernel.pointers - 1
        registers, stack, code = inspect_machine_code(assemble(kernel.ptx, tmp_path))
        programs = 2 if kernel.name == "stream_kernel" else 4
        assert registers * kernel.threads * programs <= 65536
        assert stack <= (0 if kernel.name == "rotate_kernel" else SPILLS[fuse])
        assert loop_spills(code) == 0


@pytest.mark.parametrize(("max_seqlen", "fuse"), [(64, "qk"), (STREAM, "none")])
def test_products_accumulate_in_tensor_cores(found, max_seqlen, fuse):
    lower(head_dim=80, max_seqlen=max_seqlen, fuse=fuse)
    ir = found.compiled[-1].asm["ttgir"]
    products = set(re.findall(r"warp_group_dot .* -> tensor<(\d+x\d+)xf32", ir))
    sums = set(re.findall(r"arith.addf .* : tensor<(\d+x\d+)xf32", ir))
    assert products
    assert not products & sums


@pytest.mark.parametrize(
    ("fuse", "tokens"),
    [("none", TOKENS), ("none", MANY_TOKENS), ("q", MANY_TOKENS), ("qk", TOKENS)],
)
def test_queries_are_multiplied_from_shared_memory(found, fuse, tokens):
    """As many products with Q as with probabilities, in either pass, the two that find what is
    subtracted, and, unless K is rotated there, in either pass the first that is ahead of the loop.
    """
    lower(head_dim=80, max_seqlen=STREAM, fuse=fuse, tokens=tokens)
    memory, registers = first_operands(found.compiled[-1].asm["ttgir"])
    assert registers == 8
    ahead = 0 if fuse == "qk" else 2
    assert memory == registers + 2 + ahead


def test_a_kernel_is_known_again(found):
    """Where a temporary file lay is in nothing that a cache of this or another process looks at."""
    for _ in range(2):
        triton_lowering.compile_ir.cache_clear()
        lower(**SMALL)
    first, second = found.compiled
    assert first.asm["ttir"] == second.asm["ttir"]
    assert first.asm["ptx"] == second.asm["ptx"]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "kept"),
    [
        (80, "bfloat16", True),
        (128, "float16", True),
        (136, "bfloat16", False),
        (80, "float32", False),
    ],
)
def test_values_are_kept_within_the_loop_over_segments(found, head_dim, dtype, kept):
    """As the twin's tl.range(disable_licm=True) says it: on the loops around another."""
    lower(head_dim, dtype=dtype, max_seqlen=STREAM, fuse="none")
    for kernel, ir, compiled in zip(found.kernels, found.irs, found.compiled, strict=True):
        marks = re.findall(r"^( *)\} \{llvm\.loop_annotation = ", ir, re.MULTILINE)
        loops = re.findall(r"^( *)(?:%.* = )?scf\.for ", ir, re.MULTILINE)
        expected = kept and kernel.name == "stream_kernel"
        outer = min(loops, key=len) if loops else None
        assert marks == (loops.count(outer) * [outer] if expected else [])
        assert ("llvm.licm.disable" in compiled.asm["llir"]) == expected


@pytest.mark.parametrize(
    ("module", "name"),
    [(triton_lowering, "compile_ir"), (triton_lowering.lowering, "lower_jaxpr_to_triton_module")],
    ids=["Triton's", "JAX's"],
)
def test_what_other_versions_refuse_is_left_to_xla(found, monkeypatch, module, name):
    function = getattr(module, name)

    def refuse_once(*_, **__):
        monkeypatch.setattr(module, name, function)
        raise TypeError("unexpected argument")

    monkeypatch.setattr(module, name, refuse_once)
    with pytest.warns(UserWarning, match=r"XLA compiles instead: TypeError\('unexpected arg"):
        lowered = lower(**SMALL)
    assert lowered.count("__gpu$xla.gpu.triton") == 1
    assert found.kernels == []


def test_xla_may_be_asked_for(found):
    with compiling_by("xla"):
        module = lower(max_seqlen=64)
    assert module.count("__gpu$xla.gpu.triton") == 1
    assert found.kernels == []


def test_the_default_needs_triton_a_gpu_and_the_internals(monkeypatch):
    def default(gpu, triton):
        monkeypatch.setattr(compile_module, "local_gpu", lambda: gpu)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton)
        return compile_module._default_compiler.__wrapped__()

    assert default(None, "a spec") == "xla"
    assert default("a GPU", None) == "xla"
    assert default("a GPU", "a spec") == "triton"
    monkeypatch.setitem(sys.modules, "pallas_kernels.launching.triton_lowering", None)
    assert default("a GPU", "a spec") == "xla"


def test_a_compiler_that_is_none():
    with (
        pytest.raises(ValueError, match=r"must be one of .*, got 'ptxas'"),
        compiling_by("ptxas"),
    ):
        pass
