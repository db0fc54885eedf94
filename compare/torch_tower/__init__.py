"""The vision tower in PyTorch, the twin of the one in `flax_models`, with the same file names.

`tower` holds it, of the layers in `blocks`, their `attention` (over whole frames also by a library
of `varlen`), the `gated` activation and `gated_product`, and of `pooling` over an image; `graphs`
records passes, `inputs` and `device` bring patches to where they are encoded; `export` fixes a
layout for `torch.export` and ONNX; `ray_data` is what `flax_models.ray_data` loads by its name.
What is NumPy alone is `flax_models.common`'s.

PyTorch is imported when the tower is first asked for: other rooms take single modules of this one.
"""

import importlib
from typing import Any

_HOMES = {
    "load_vision_tower": "tower",
    "save_vision_tower": "tower",
    "FixedLayoutTower": "export",
}
__all__ = ["FixedLayoutTower", "load_vision_tower", "save_vision_tower"]


def __getattr__(name: str) -> Any:
    """Import the tower when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
