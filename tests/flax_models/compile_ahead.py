"""The kernels of the tower's program for an H200, where there need not be one.

A program of its own, because settings have to stand before JAX starts:

    python -m tests.flax_models.compile_ahead
"""

import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from tests.pallas_kernels.compile_ahead import assemble, compile_for_gpu, forget_this_machine

# With a late norm, and a result that is larger than the residual stream; without either; with
# DeepStack, which reads what the next block overwrites, and has two results.
TOWERS = ("qwen2_5_vl_72b", "qwen2_vl_7b", "qwen3_vl_8b")
DEPTHS = (2, 3)  # in Qwen2.5-VL the first attends over frames, the others over windows
SIDES = (32, 64)  # of one image in patches: 448 and 896 px

_NO_KERNELS = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


def main() -> None:
    """Compile each tower in each depth for each image and print a line of JSON: its kernels by
    kind, what else lies in the memory of its results, and what Mosaic's kernels spill.
    """
    forget_this_machine()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={directory} --xla_dump_hlo_as_text"
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": directory}
        for name, side, depth in itertools.product(TOWERS, SIDES, DEPTHS):
            kernels = count_kernels(tower_program(name, side, depth))
            [memory] = Path(directory).glob("*.jit_of_values.*gpu*-buffer-assignment.txt")
            record = {"kernels": kernels, "beside results": beside_result(memory.read_text())}
            record["spilled"] = [assemble(ptx)["spilled"] for ptx in mosaic_kernels(directory)]
            sys.stdout.write(json.dumps(record) + "\n")
            memory.unlink()


def tower_program(name: str, side: int, depth: int) -> str:
    """The optimized program of a tower of real width."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from flax_models import VisionConfig, VisionTower, choose_bucket, gated_product, plan_layout
    from flax_models.compiled import COMPILER_OPTIONS, taking_values
    from flax_models.packed import small_places
    from flax_models.tower import _encode
    from pallas_kernels.launching.compile import compiling_by

    config = getattr(VisionConfig, name)()
    config = replace(
        config,
        depth=depth,
        fullatt_block_indexes=(0,) if config.window_size else config.fullatt_block_indexes,
        deepstack_visual_indexes=(0,) if config.deepstack_visual_indexes else (),
    )
    tower = nnx.eval_shape(lambda: VisionTower(config, jnp.bfloat16, implementation="kernel"))
    grid = np.array([(1, side, side)])
    layout = plan_layout(config, grid, choose_bucket(config, grid))
    patches = jax.ShapeDtypeStruct((len(layout.window_order), config.patch_dim), jnp.float32)
    values, structure = jax.tree.flatten(tower)
    places = small_places(values)
    length, small = sum(place.length for place in places), {place.index for place in places}
    packed = jax.ShapeDtypeStruct((length,), jnp.float32)
    others = [value for index, value in enumerate(values) if index not in small]
    run = jax.jit(taking_values(_encode, structure, places), compiler_options=COMPILER_OPTIONS)
    enough = len(layout.window_order) >= gated_product._FEWEST_TOKENS
    one_kernel = gated_product.HAVE_MOSAIC and enough  # as where there is an H200
    faster = mock.patch.object(gated_product, "_is_faster", return_value=one_kernel)
    with compiling_by("xla"), faster:  # the Triton package leaves nothing to look at
        program = compile_for_gpu(run, others, packed, patches, jax.tree.map(jnp.asarray, layout))
    return program.as_text()


def mosaic_kernels(directory: str) -> list[Path]:
    return sorted(Path(directory).glob("gated_product_kernel*.ptx"))


def count_kernels(program: str) -> Counter[str]:
    """What the program launches: products, sums in products, our kernels, fusions and the rest."""
    kinds: Counter[str] = Counter()
    for line in program[program.index("\nENTRY") :].splitlines():
        operation = re.search(r" = (?:\(.*?\)|\S+) ([a-z-]+)\(", line)
        if not operation or operation[1] in _NO_KERNELS:
            continue
        if "__cublas$lt$matmul" in line:
            if '"beta":1' not in line:
                kinds["product"] += 1
            elif "output_to_operand_aliasing={{0}: (2, {})}" in line:
                kinds["product and sum in place"] += 1
            else:
                kinds["product and sum"] += 1
        elif "__gpu$xla.gpu.triton" in line or "mosaic_gpu_v2" in line:
            kinds["ours"] += 1
        else:
            kinds[operation[1]] += 1
    return kinds


def beside_result(memory: str) -> list[str]:
    """The arrays that share memory with one that is returned, the largest of which that is."""
    others = []
    pattern = r"^allocation .*maybe-live-out:\n((?: .*\n)*)"
    for allocation in re.findall(pattern, memory, re.MULTILINE):
        values = re.findall(r"value: <\d+ (.*?) @\d+> \(size=(\d+)", allocation)
        *smaller, _ = sorted(values, key=lambda value: int(value[1]))
        others += [name for name, _ in smaller]
    return others


if __name__ == "__main__":
    main()
