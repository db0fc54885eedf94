"""Where vLLM enters, by the entry point group vllm.general_plugins.

A module of its own, as only one package of the name triton_kernels is imported in a process:
Triton's own may be the one, and this says so.
"""

import importlib
import logging


def register() -> None:
    """`triton_kernels.integrations.vllm.register`, or a line in the log why it can't be found."""
    package = importlib.import_module("triton_kernels")
    if hasattr(package, "fused_rope_attention"):
        importlib.import_module("triton_kernels.integrations.vllm").register()
        return
    logging.getLogger("vllm.fused_rope_attention").error(
        "Fused RoPE attention: off, as another package of the name triton_kernels is imported, "
        "from %s, which has to go or to come later on the path: see integrations/vllm.md",
        *package.__path__,
    )
