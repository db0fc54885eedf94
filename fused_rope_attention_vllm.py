"""Where vLLM enters, by the entry point group vllm.general_plugins.

A module of its own, as only one package of the name triton_kernels is imported in a process: it may
be Triton's own, and this says so.
"""

import importlib
import logging
import sys


def register() -> None:
    """`triton_kernels.integrations.vllm.register`, or a line in the log why it can't be had."""
    try:
        plugin = importlib.import_module("triton_kernels.integrations.vllm")
    except Exception as error:  # vLLM would not start
        package, reason = sys.modules.get("triton_kernels"), f"{type(error).__name__}: {error}"
        if package is not None and not hasattr(package, "fused_rope_attention"):
            reason = (
                f"another package of the name triton_kernels is imported, from {package.__file__}, "
                "which has to go or to come later on the path (integrations/vllm.md)"
            )
        logging.getLogger("vllm.fused_rope_attention").error(
            "Fused RoPE attention: off, as %s", reason
        )
    else:
        plugin.register()
