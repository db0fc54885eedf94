"""Triton's interpreter without what it does over and over.

At every call of a device function it patches the language anew, which is patched already for as
long as the launch runs: two fifths of the time of these kernels.
"""

import functools
import importlib.util
import os


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
