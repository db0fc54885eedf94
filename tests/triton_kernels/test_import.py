"""What importing triton_kernels needs and brings with it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_brings_no_jax():
    result = run_python(
        "import sys, triton_kernels\n"
        "print([m for m in ('jax', 'pallas_kernels', 'flax', 'flax_models', 'compare')"
        " if m in sys.modules])"
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_says_which_extra_is_missing(missing):
    result = run_python(f"import sys; sys.modules['{missing}'] = None; import triton_kernels")
    assert result.returncode == 1
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: triton_kernels needs PyTorch and Triton")
    assert "pip install '.[torch]' in the clone" in last_line


@pytest.mark.parametrize(
    "name",
    [
        "check_cu_seqlens",
        "fused_rope_attention",
        "fused_rope_attention_qkvpacked",
        "rope_attention_reference",
    ],
)
def test_public_names_are_documented(name):
    import triton_kernels

    assert name in triton_kernels.__all__
    assert getattr(triton_kernels, name).__doc__
