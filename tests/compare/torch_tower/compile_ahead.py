"""Compile the blocks' kernels for an H200 that need not be there; prints one JSON object a kernel.

A process of its own, as tests/triton_kernels/compile_ahead.py is:

    python -m tests.compare.torch_tower.compile_ahead
"""

import json
import re
import sys
from collections import Counter
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from compare.torch_tower import gated, summed_norm
from compare.torch_tower.gated_product import in_one_kernel
from flax_models.common.weights import Biases
from tests.triton_kernels.compile_ahead import inspect_machine_code, recording, source
from tests.triton_kernels.machine_code import loop_spills
from tests.triton_kernels.wgmma_descriptors import high_word_sums
from triton_kernels.integrations import mlp

TOKENS, HIDDEN, WIDTH = 2304, 1280, 3456  # Qwen2.5-VL 7B's, one image of 672 px


def aligned_operands(dtype: torch.dtype) -> None:
    """What the MLP of an accelerated model launches, whose width is misaligned."""
    x, down = torch.empty(TOKENS, HIDDEN, dtype=dtype), torch.empty(HIDDEN, 3420, dtype=dtype)
    layer = torch.empty(3420, HIDDEN, dtype=dtype), torch.empty(3420, dtype=dtype)
    with mock.patch.object(mlp, "runs_kernel", return_value=True):
        mlp._aligned_operands(x, *layer, *layer, down)


def main() -> None:
    """Compile what layers launch, with a gated activation in the product and by itself."""
    for dtype in (torch.bfloat16, torch.float16):
        residual = torch.empty(TOKENS, HIDDEN, dtype=dtype)
        weight = torch.empty(2 * WIDTH, HIDDEN, dtype=dtype)
        both = torch.empty(2 * WIDTH, dtype=dtype)
        biases = Biases(torch.empty(HIDDEN, dtype=dtype), both, both)
        with recording() as recorded:
            in_one_kernel(residual, weight, biases, 1e-6)
            gated._kernel(1e-6, torch.empty(TOKENS, 2 * WIDTH, dtype=dtype), residual, *biases)
            summed_norm._kernel(residual, residual, biases.residual, biases.residual, 1e-6)
            aligned_operands(dtype)
        for kernel, arguments, options in recorded:
            compiled = triton.compile(
                source(kernel, arguments), target=GPUTarget("cuda", 90, 32), options=options
            )
            registers, stack, sass = inspect_machine_code(compiled.asm["cubin"])
            record = {
                "kernel": kernel.__name__,
                "dtype": str(dtype),
                "shared": compiled.metadata.shared,
                "registers": registers,
                "stack": stack,
                "loop_spills": loop_spills(sass),
                "products": Counter(re.findall(r"HGMMA\.(\d+x\d+x\d+)", sass)),
                "broken_descriptors": high_word_sums(sass)[1],
            }
            sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
