"""The kernels of the tower's program for an H200, where there need not be one.

A program of its own, because settings have to stand before JAX starts:

    python -m tests.flax_models.compile_ahead
"""

import json
import re
import sys
from collections import Counter
from dataclasses import replace

import numpy as np

from tests.pallas_kernels.compile_ahead import compile_for_gpu, forget_this_machine

DEPTHS = (2, 3)  # the first attends over frames, the others over windows
GRID = np.array([(1, 32, 32)])  # an image of 448 px

_NO_KERNELS = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


def main() -> None:
    """Compile a tower of each depth and print a line of JSON: how many kernels of which kind."""
    forget_this_machine()
    for depth in DEPTHS:
        sys.stdout.write(json.dumps(count_kernels(tower_program(depth))) + "\n")


def tower_program(depth: int) -> str:
    """The optimized program of a tower of real width."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from flax_models import VisionConfig, VisionTower, choose_bucket, encode, plan_layout
    from flax_models.compiled import COMPILER_OPTIONS
    from pallas_kernels.compile import compiling_by

    config = replace(VisionConfig.qwen2_5_vl_7b(), depth=depth, fullatt_block_indexes=(0,))
    tower = nnx.eval_shape(lambda: VisionTower(config, jnp.bfloat16, implementation="triton"))
    layout = plan_layout(config, GRID, choose_bucket(config, GRID))
    patches = jax.ShapeDtypeStruct((len(layout.window_order), config.patch_dim), jnp.float32)
    run = jax.jit(encode, compiler_options=COMPILER_OPTIONS)
    with compiling_by("xla"):
        program = compile_for_gpu(run, tower, patches, jax.tree.map(jnp.asarray, layout))
    return program.as_text()


def count_kernels(program: str) -> Counter[str]:
    """What the program launches: products, sums in products, attention, fusions and the rest."""
    kinds: Counter[str] = Counter()
    for line in program[program.index("\nENTRY") :].splitlines():
        operation = re.search(r" = (?:\(.*?\)|\S+) ([a-z-]+)\(", line)
        if not operation or operation[1] in _NO_KERNELS:
            continue
        if "__cublas$lt$matmul" in line:
            kinds["product and sum" if '"beta":1' in line else "product"] += 1
        elif "__gpu$xla.gpu.triton" in line:
            kinds["attention"] += 1
        else:
            kinds[operation[1]] += 1
    return kinds


if __name__ == "__main__":
    main()
