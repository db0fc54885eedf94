"""Imports run one way: between packages, between the rooms of `compare`, and in no circle.

Read from the source, so that imports within functions count as well.
"""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("compare", "flax_models", "pallas_kernels", "triton_kernels")

# A module imports its own room, and those further down.
ROOMS = (
    *("__main__", "cli", "commands", "report", "stress", "bench", "agreement"),
    *("implementations", "workloads", "torch_tower", "common"),
)

# What nothing within a package, or a part of one, imports.
FORBIDDEN = {
    "pallas_kernels": {"torch", "triton_kernels", "flax_models", "compare"},
    "triton_kernels": {"jax", "jaxlib", "flax", "pallas_kernels", "flax_models", "compare"},
    "flax_models": {"torch", "triton_kernels", "compare"},
    "flax_models.common": {"jax", "jaxlib", "flax", "pallas_kernels"},
}


@cache
def modules():
    """The path of every module, by its name."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


@cache
def imported(module):
    """What a module imports: ours as modules, others as they are named."""
    names = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            within = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
            # A name of the package itself, beside modules of it, needs what the package holds.
            names |= within if len(within) == len(node.names) else within | {node.module}
    return names


def is_of(module, package):
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_package_knows_those_above_it_or_the_other_framework(package):
    found = {
        (module, name)
        for module in modules()
        if is_of(module, package)
        for name in imported(module)
        if name.partition(".")[0] in FORBIDDEN[package]
    }
    assert found == set()


def test_the_rooms_of_compare_are_those_that_are_known():
    rooms = {module.split(".")[1] for module in modules() if module.startswith("compare.")}
    assert rooms == set(ROOMS)


def test_the_rooms_of_compare_import_downwards():
    upwards = {
        (module, name)
        for module in modules()
        if module.startswith("compare.")
        for name in imported(module)
        if name.startswith("compare.")
        and ROOMS.index(name.split(".")[1]) < ROOMS.index(module.split(".")[1])
    }
    assert upwards == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package):
    graph = {module: imported(module) & modules().keys() for module in modules()}
    of_package = {module: names for module, names in graph.items() if is_of(module, package)}
    try:
        TopologicalSorter(of_package).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")
