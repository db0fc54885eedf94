"""The PyTorch side of the contract suites: NumPy in, NumPy out, on the GPU if there is one."""

import contextlib

import ml_dtypes
import numpy as np
import torch

import triton_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def to_torch(x):
    """A tensor on DEVICE; PyTorch takes no bfloat16 from NumPy, so it travels as integers."""
    x = np.array(x, order="C")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(x).to(DEVICE)


def to_numpy(x):
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def interpreted_nan():
    """Triton's interpreter computes in NumPy, which warns of a NaN that a GPU passes in silence."""
    return np.errstate(all="ignore")


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """torch.empty gives NaN, so that an element that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True)  # what makes PyTorch fill new memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def public_function(packed):
    if packed:
        return triton_kernels.fused_rope_attention_qkvpacked
    return triton_kernels.fused_rope_attention


class TorchAdapter:
    implementation: str
    package = triton_kernels
    array = staticmethod(to_torch)

    def attention(self, case, packed=False, **options):
        arguments = [to_torch(x) for x in (case.packed if packed else case.separate)]
        kernel = self.implementation == "triton"
        memory = unwritten_memory_is_nan() if kernel else contextlib.nullcontext()
        with memory, interpreted_nan():
            result = public_function(packed)(
                *arguments, implementation=self.implementation, **options
            )
        assert result.is_contiguous()
        return to_numpy(result)

    def check_cu_seqlens(self, cu_seqlens, *arguments):
        triton_kernels.check_cu_seqlens(to_torch(cu_seqlens), *arguments)
