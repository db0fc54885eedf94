"""The comparison needs both frameworks; where PyTorch is missing there is nothing to test here."""

import importlib.util

from compare.environment import configure

configure()  # as the command line does, before any test imports a framework

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
