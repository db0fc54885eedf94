"""vLLM's copy of Triton's own triton_kernels, beside ours."""

import importlib
from pathlib import Path

import pytest
import vllm

import triton_kernels


def test_vllms_copy_is_found_and_hides_nothing_of_ours():
    copy = Path(vllm.__file__).parent / "third_party" / "triton_kernels"
    if not copy.is_dir():
        pytest.skip(f"vLLM {vllm.__version__} brings no copy along, as its builds for CPUs do not")
    ours, theirs = (
        {path.stem for path in folder.iterdir() if not path.stem.startswith("__")}
        for folder in (Path(triton_kernels.__file__).parent, copy)
    )
    assert ours.isdisjoint(theirs)
    assert importlib.import_module("triton_kernels.tensor").__file__ == str(copy / "tensor.py")
