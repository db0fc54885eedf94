"""A process in which JAX has no Pallas Triton backend; prints what came of it as JSON.

python -m tests.pallas_kernels.without_triton
"""

import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import compare.cli  # noqa: F401  it imports all that a command needs
import pallas_kernels
from flax_models import load_vision_tower
from pallas_kernels.launching.devices import local_gpu
from tests.kernel_cases import make_case
from tests.tower_checkpoints import SMALL_TOWERS, random_patches, write_checkpoint

GRID = [(1, 12, 16)]


def call(lengths: tuple[int, ...], implementation: str, **case: int) -> np.ndarray:
    arrays = map(jnp.asarray, make_case(lengths, **case).packed)
    result = attention(lengths, implementation)(*arrays)
    return np.asarray(result, np.float32)


def lowered(lengths: tuple[int, ...], **case: int) -> str:
    arrays = map(jnp.asarray, make_case(lengths, **case).packed)
    return jax.jit(attention(lengths, "auto")).lower(*arrays).as_text()


def attention(lengths: tuple[int, ...], implementation: str) -> Callable[..., jax.Array]:
    return functools.partial(
        pallas_kernels.fused_rope_attention_qkvpacked,
        max_seqlen=max(lengths),
        implementation=implementation,
    )


def main() -> None:
    found = {"gpu": local_gpu() and local_gpu().compute_capability}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cases = {"window": ((64, 30), {}), "long": ((2048,), {"heads": 16})}
        for name, (lengths, case) in cases.items():
            ours, expected = (call(lengths, way, **case) for way in ("auto", "reference"))
            found[name] = float(np.abs(ours - expected).max())
            found[f"{name} by Mosaic"] = lowered(lengths, **case).count("mosaic_gpu_v2")
        try:
            call((64, 30), "kernel")
        except NotImplementedError as error:
            found["refused"] = str(error)
        for family in ("head_dim_80", "qwen3_vl"):
            with tempfile.TemporaryDirectory() as directory:
                config = SMALL_TOWERS[family]
                tower = load_vision_tower(
                    write_checkpoint(Path(directory, "tower"), config), "float32"
                )
                result = jax.tree.leaves(tower(random_patches(config, GRID), GRID))
                found[family] = float(np.abs(np.asarray(result[0])).mean())
    own = [str(warning.message) for warning in caught if "no Pallas Triton" in str(warning.message)]
    print(json.dumps(found | {"warnings": own}))


if __name__ == "__main__":
    main()
