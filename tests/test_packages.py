"""What a wheel holds: every module, and beside them what is read or looked for."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
TOP_LEVEL = {package.partition(".")[0] for package in SETUPTOOLS["packages"]}


def test_every_folder_of_modules_is_a_listed_package():
    folders = {path.parent for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py")}
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert sorted(found) == sorted(SETUPTOOLS["packages"])


def test_tables_are_package_data():
    for package in ("pallas_kernels", "triton_kernels"):
        assert (ROOT / package / "launching" / "launches.json").is_file()
        assert "launches.json" in SETUPTOOLS["package-data"][f"{package}.launching"]


def test_type_checkers_are_told_of_the_types():
    assert "py.typed" in SETUPTOOLS["package-data"]["*"]
    for package in TOP_LEVEL:
        assert (ROOT / package / "py.typed").read_bytes() == b""
