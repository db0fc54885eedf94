"""Pallas kernels compiled by the Triton package, on any machine, and handed to jaxlib's launcher.

What launches them is in JAX's CUDA plugin, for which a stand-in notes what it is given.
"""

import importlib.util
import re
import sys
import types

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from pallas_kernels import compile as compile_module
from pallas_kernels import launch, triton_lowering
from pallas_kernels.compile import compiling_by
from pallas_kernels.launch_table import Gpu
from tests.kernel_contract import STREAM
from tests.pallas_kernels.test_lowering import HEADS, SEGMENTS, TOKENS, lower
from tests.triton_kernels.compile_ahead import inspect_machine_code
from tests.triton_kernels.machine_code import first_operands, loop_spills

POINTERS = {"window_kernel": 7, "stream_kernel": 7, "rotate_kernel": 4}
# Bytes a thread spills at most. What a bound on registers sets aside waits in memory while the
# stream kernel's loop runs without it; Triton 3.7's assembler sets two registers aside in rotation.
SPILLS = {"window_kernel": 0, "stream_kernel": 64, "rotate_kernel": 8}


@pytest.fixture
def launcher(monkeypatch):
    """The kernels that jaxlib's launcher got, compiled with an H200's launches."""

    class Launcher(types.SimpleNamespace):
        kernels, calls, compiled = [], [], []

        def TritonKernel(self, *arguments):
            self.kernels.append(arguments)
            return arguments

        def TritonKernelCall(self, *arguments):
            self.calls.append(arguments)
            return types.SimpleNamespace(to_proto=lambda name, metadata: name.encode())

        def create_array_parameter(self, zeroed, alignment):
            return zeroed, alignment

    found = Launcher()
    compile_ir = triton_lowering.compile_ir

    def noting(*arguments):
        found.compiled.append(compile_ir(*arguments))
        return found.compiled[-1]

    noting.cache_clear = compile_ir.cache_clear
    monkeypatch.setattr(triton_lowering, "gpu_triton", found)
    monkeypatch.setattr(triton_lowering, "compile_ir", noting)
    monkeypatch.setattr(launch, "gpu", lambda: Gpu("NVIDIA H200", "9.0"))
    with compiling_by("triton"):
        yield found


def test_what_is_launched(launcher):
    module = lower(max_seqlen=64)
    assert module.count("@triton_kernel_call_ffi") == 1
    assert "xla.gpu.triton" not in module
    [(name, warps, ctas, shared, ptx, _, capability)] = launcher.kernels
    assert (name, warps, ctas, capability) == ("window_kernel", 4, 1, 90)
    assert 0 < shared <= 48 * 1024  # more, and jaxlib too would have the driver take L1 away
    assert ".maxnreg 128" in ptx
    [(_, *grid, parameters)] = launcher.calls
    assert grid == [SEGMENTS * HEADS, 1, 1]
    assert parameters == [(0, 16)] * POINTERS[name]


# So many that an H200's launch has tiles of 128 rows, where the tail's product is ahead.
MANY_TOKENS = 9216


@pytest.mark.parametrize("head_dim", [72, 80])
@pytest.mark.parametrize(
    ("max_seqlen", "fuse", "tokens"),
    [
        (64, "qk", TOKENS),
        (STREAM, "none", TOKENS),
        (STREAM, "none", MANY_TOKENS),
        (STREAM, "q", MANY_TOKENS),
    ],
)
def test_pointers_registers_and_spills(launcher, head_dim, max_seqlen, fuse, tokens):
    lower(head_dim, max_seqlen=max_seqlen, fuse=fuse, tokens=tokens)
    assert len(launcher.kernels) == (1 if fuse == "qk" else 2)
    for (name, warps, _, _, ptx, _, _), compiled in zip(
        launcher.kernels, launcher.compiled, strict=True
    ):
        # jaxlib adds two for Triton's scratch memory.
        entry = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)[1]
        assert entry.count(".param") == POINTERS[name] + 2
        registers, stack, code = inspect_machine_code(compiled.asm["cubin"])
        assert registers * warps * 32 * (2 if name == "stream_kernel" else 4) <= 65536
        assert stack <= SPILLS[name]
        assert loop_spills(code) == 0


@pytest.mark.parametrize(("max_seqlen", "fuse"), [(64, "qk"), (STREAM, "none")])
def test_products_accumulate_in_tensor_cores(launcher, max_seqlen, fuse):
    lower(head_dim=80, max_seqlen=max_seqlen, fuse=fuse)
    ir = launcher.compiled[-1].asm["ttgir"]
    products = set(re.findall(r"warp_group_dot .* -> tensor<(\d+x\d+)xf32", ir))
    sums = set(re.findall(r"arith.addf .* : tensor<(\d+x\d+)xf32", ir))
    assert products
    assert not products & sums


@pytest.mark.parametrize(
    ("fuse", "tokens", "ahead"),
    [("none", TOKENS, 0), ("none", MANY_TOKENS, 1), ("q", MANY_TOKENS, 1), ("qk", TOKENS, 0)],
)
def test_queries_are_multiplied_from_shared_memory(launcher, fuse, tokens, ahead):
    """As many products with Q as with probabilities, and the first that is ahead of the loop."""
    lower(head_dim=80, max_seqlen=STREAM, fuse=fuse, tokens=tokens)
    memory, registers = first_operands(launcher.compiled[-1].asm["ttgir"])
    assert memory == registers + ahead == 4 + ahead


def test_a_kernel_is_known_again(launcher):
    """Where a temporary file lay is in nothing that a cache of this or another process looks at."""
    for _ in range(2):
        triton_lowering.compile_ir.cache_clear()
        lower(max_seqlen=64)
    first, second = launcher.compiled
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
def test_values_are_kept_within_the_loop_over_segments(launcher, head_dim, dtype, kept):
    """As the twin's tl.range(disable_licm=True) says it: on one loop, that around another."""
    lower(head_dim, dtype=dtype, max_seqlen=STREAM, fuse="none")
    for (name, _, _, _, _, ir, _), compiled in zip(
        launcher.kernels, launcher.compiled, strict=True
    ):
        marks = re.findall(r"^( *)\} \{llvm\.loop_annotation = ", ir, re.MULTILINE)
        loops = re.findall(r"^( *)(?:%.* = )?scf\.for ", ir, re.MULTILINE)
        expected = kept and name == "stream_kernel"
        assert marks == ([min(loops, key=len)] if expected else [])
        assert ("llvm.licm.disable" in compiled.asm["llir"]) == expected


@pytest.mark.parametrize(
    ("module", "name"),
    [(triton_lowering, "compile_ir"), (triton_lowering.lowering, "lower_jaxpr_to_triton_module")],
    ids=["Triton's", "JAX's"],
)
def test_what_other_versions_refuse_is_left_to_xla(launcher, monkeypatch, module, name):
    function = getattr(module, name)

    def refuse_once(*_, **__):
        monkeypatch.setattr(module, name, function)
        raise TypeError("unexpected argument")

    monkeypatch.setattr(module, name, refuse_once)
    with pytest.warns(UserWarning, match=r"XLA compiles instead: TypeError\('unexpected arg"):
        lowered = lower(max_seqlen=64)
    assert lowered.count("__gpu$xla.gpu.triton") == 1
    assert launcher.kernels == []


def test_xla_may_be_asked_for(launcher):
    with compiling_by("xla"):
        module = lower(max_seqlen=64)
    assert module.count("__gpu$xla.gpu.triton") == 1
    assert launcher.kernels == []


def test_the_default_needs_triton_a_launcher_and_the_internals(monkeypatch):
    def default(launchable, triton):
        monkeypatch.setattr(triton_lowering, "can_launch", lambda: launchable)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton)
        return compile_module._default_compiler.__wrapped__()

    assert default(False, "a spec") == "xla"
    assert default(True, None) == "xla"
    assert default(True, "a spec") == "triton"
    monkeypatch.delattr("pallas_kernels.triton_lowering")
    monkeypatch.setitem(sys.modules, "pallas_kernels.triton_lowering", None)
    assert default(True, "a spec") == "xla"


def test_a_compiler_that_is_none():
    with (
        pytest.raises(ValueError, match=r"must be one of .*, got 'ptxas'"),
        compiling_by("ptxas"),
    ):
        pass
