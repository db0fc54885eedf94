"""Launching kernels: through Pallas' Triton backend, and on Hopper GPUs through Mosaic."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.kernels.tiles import Ref
from pallas_kernels.launching.choose import BLOCK, COLUMN_UNIT, head_split, rows_of
from pallas_kernels.launching.compile import compiler_params
from pallas_kernels.launching.table import Launch
from pallas_kernels.sharding import vary_as, varying_axes


def run(
    kernel: functools.partial,
    programs: int,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    launch: Launch,
    interpret: bool,
    operands: tuple[Any, ...],
) -> jax.Array:
    """`run_all` of a kernel that has one result."""
    [written] = run_all(kernel, programs, [(shape, dtype)], launch, interpret, operands)
    return written


def run_all(
    kernel: functools.partial,
    programs: int,
    results: Sequence[tuple[tuple[int, ...], DTypeLike]],
    launch: Launch,
    interpret: bool,
    operands: tuple[Any, ...],
    disable_licm: bool = False,
    written: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:
    """Run a kernel on its operands, through Pallas' Triton backend.

    Args:
        kernel: takes references to the operands and to the results.
        programs: of a one-dimensional grid.
        results: shape and dtype of each.
        launch: warps, stages, registers; block sizes are the kernel's to know.
        interpret: in Pallas' interpreter.
        operands: arrays, and pytrees of them.
        disable_licm: see `TritonParams`.
        written: what is written to, of the last results, where the kernel does not write all of
            them.
    """
    read, count = len(operands), len(written)
    first = len(jax.tree.leaves(operands))
    aliases = {first + i: len(results) - count + i for i in range(count)}
    operands = (*operands, *written)

    def body(*refs: jax.Array) -> None:
        kernel(*refs[:read], *refs[read + count :])  # what is left out is the memory of the last

    # Under shard_map the results vary over the mesh axes that any operand varies over.
    varying = varying_axes(*jax.tree.leaves(operands))
    manual_axis_type = jax.sharding.ManualAxisType(varying=varying)
    struct = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=manual_axis_type)
    call = pl.pallas_call(
        body if written else kernel,
        grid=(programs,),
        out_shape=tuple(struct(*result) for result in results),
        input_output_aliases=aliases,
        compiler_params=compiler_params(launch, disable_licm),
        interpret=interpret,
        name=kernel.func.__name__,
    )
    with jax.enable_x64(False):  # numbers of rows are 32-bit
        return call(*operands)


def run_hopper_stream(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens: jax.Array,
    heads: int,
    parts: tuple[int, int, int],
    scale_log2: float,
    max_seqlen: int,
    keeps_lse: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Attention by the warp-specialized kernel, of arrays that `choose.tiles_fit` names.

    Args:
        q, k: [rows_of(tokens), parts, row], as rotate_kernel writes them, whatever the rows past
            the last token hold; may be the same.
        v: [tokens, parts, heads, head_dim], bf16 or fp16; copied where tokens are not by eights.
        cu_seqlens: [segments + 1] int32.
        heads: of q.
        parts: which of them q, k and v are.
        scale_log2: scale times log2(e).
        max_seqlen: what most segments' length is guessed to be.
        keeps_lse: whether log-sum-exps are written, for a backward pass.
        interpret: in Pallas' interpreter.

    Returns:
        [tokens, heads, head_dim] and, if they are kept, the log-sum-exp of each row
        [heads, tokens], in powers of two.
    """
    # Here, as not every version of JAX has it.
    from jax.experimental.pallas import mosaic_gpu as mosaic

    from pallas_kernels.kernels.hopper_softmax import uses_ping_pong
    from pallas_kernels.kernels.hopper_stream import hopper_stream_kernel
    from pallas_kernels.kernels.hopper_tiles import GROUPS, KEYS, ROWS, STAGES

    tokens, _, k_heads, head_dim = v.shape
    rows = rows_of(tokens)
    if rows > tokens:
        q_part, k_part, v_part = parts
        v, parts = jnp.pad(v[:, v_part], ((0, rows - tokens), (0, 0), (0, 0))), (q_part, k_part, 0)
    main_and_tail = head_split(head_dim)
    split = [columns for columns in main_and_tail if columns > 0]
    copies = len(split)
    ping_pong = mosaic.Barrier(num_arrivals=1, num_barriers=GROUPS)
    width = pl.cdiv(head_dim, COLUMN_UNIT) * COLUMN_UNIT
    # Mosaic lays out a tile of columns by sixteens by eight rows, which have to divide the tokens.
    piece = head_dim if rows == tokens else COLUMN_UNIT // 2
    shared = functools.partial(mosaic.SMEM, dtype=v.dtype)
    kernel = functools.partial(
        hopper_stream_kernel,
        parts=parts, scale_log2=scale_log2, max_seqlen=max_seqlen, heads=heads, k_heads=k_heads,
        head_dim=head_dim,
        # Under shard_map, JAX maps no warps over arrays that vary over axes of a mesh.
        by_one_warp=not varying_axes(q, k, v, cu_seqlens),
    )  # fmt: skip
    # Under shard_map the result varies over the mesh axes that any operand varies over, which the
    # backend is not told of.
    vary = vary_as(q, k, v, cu_seqlens)
    programs = pl.cdiv(tokens, BLOCK) * heads
    results = [jax.ShapeDtypeStruct((tokens, heads * head_dim), v.dtype)]
    if keeps_lse:
        results.append(jax.ShapeDtypeStruct((programs * BLOCK,), jnp.float32))

    def body(q: Ref, k: Ref, v: Ref, cu_seqlens: Ref, *others: Ref) -> None:
        out, *lse = others[: len(results)]
        kernel(q, k, v, cu_seqlens, out, lse[0] if lse else None, *others[len(results) :])

    call = mosaic.kernel(
        body,
        out_type=tuple(results),
        scratch_types=(
            tuple(shared((GROUPS, ROWS, columns)) for columns in split),
            tuple(shared((STAGES, KEYS, columns)) for columns in split),
            (shared((STAGES, KEYS, width)),),
            shared((GROUPS, head_dim // piece, ROWS, piece)),
            mosaic.SMEM((GROUPS, ROWS), jnp.int32),
            mosaic.SMEM((GROUPS, ROWS), jnp.float32) if keeps_lse else None,
            mosaic.Barrier(num_arrivals=copies, num_barriers=GROUPS),
            mosaic.Barrier(num_arrivals=copies, num_barriers=STAGES),
            mosaic.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            mosaic.Barrier(num_arrivals=1, num_barriers=STAGES),
            mosaic.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            mosaic.Barrier(num_arrivals=GROUPS),
            mosaic.Barrier(num_arrivals=copies + 1, num_barriers=GROUPS),
            ping_pong if uses_ping_pong(*main_and_tail) else None,
            # The interpreter multiplies by nothing but shared memory.
            shared((GROUPS, ROWS, KEYS)) if interpret else None,
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        # Exponentials by one instruction each.
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=mosaic.InterpretGPUParams() if interpret else None,
        kernel_name=kernel.func.__name__,
    )
    with jax.enable_x64(False):  # numbers of rows are 32-bit
        q, k, v = (x.reshape(rows, -1) for x in (q, k, v))  # which moves nothing
        out, *lse = call(q, k, v, cu_seqlens)
        lse = [x.reshape(heads, -1)[:, :tokens] for x in lse]
        return tuple(map(vary, (out.reshape(tokens, heads, head_dim), *lse)))
