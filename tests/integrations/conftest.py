"""Where a library is missing, there is nothing of its integration to test."""

import importlib.util

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "transformers")):
    collect_ignore_glob = ["test_*.py"]
