"""Interpreters of kernels: without what Triton's does over and over, with sums in any order alike.

At every call of a device function Triton's patches the language anew, which is patched already for
as long as the launch runs: two fifths of the time of these kernels.
"""

import functools
import importlib.util
import os

import numpy as np


def matmul_in_fp64(a, b, dtype=None):
    """`np.matmul` whose bits do not depend on where in its tile a row is.

    Interpreters multiply by NumPy's BLAS. OpenBLAS's kernels for AMD's CPUs and Haswell sum in an
    order that does depend on it, those for Intel's AVX-512 do not. Sums in fp64, rounded, are the
    same in any order here.
    """
    product = a.astype(np.float64) @ b.astype(np.float64)
    return product.astype(dtype or np.result_type(a, b))


def speed_up() -> None:
    """Have a launch patch each module of the language once; nothing where none is interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_once(function):
        modules = {value for value in function.__globals__.values() if value in (tl, tl.core)}
        if modules <= patched:
            return None  # only the launch itself, which is the first to patch, wants a scope
        scope = patch(function)
        patched.update(modules)
        return scope

    @functools.wraps(launch)
    def launch_once(*arguments, **keywords):
        patched.clear()
        try:
            return launch(*arguments, **keywords)
        finally:
            patched.clear()  # also for a launch of another thread, whose patches this one took back

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_once
