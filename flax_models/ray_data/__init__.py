"""Towers over data sets of any size, on Ray Data: `pip install '.[ray]'` in the clone.

Ray reads, schedules, moves blocks and starts again what died. Here is what it does not know:

- `patches`: the first stage, files to patches, in a pool of processes;
- `towers`: the second, an actor for each GPU, which divides its block into `calls` by patches;
- `pipeline`: the two as a function of a data set, `encode`;
- `command`: `python -m flax_models encode`, with its `sources`, the `output` folder, its `shards`,
  `progress` and the `dry_run`; and `flax_tower`, what loads one.
"""

from typing import Any

_HOMES = {"encode": "pipeline", "read": "shards", "rows": "shards"}
__all__ = ["encode", "read", "rows"]


def __getattr__(name: str) -> Any:
    """Import Ray and PyArrow when a name is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("ray", "pyarrow"):
            raise
        raise ImportError(
            f"flax_models.ray_data.{name} needs Ray Data: pip install '.[ray]' in the clone"
        ) from error
    return getattr(home, name)
