"""Runs of small tests of their own, in which a worker dies or hangs: they end, red, with its test.

No process of such a run is left. The seconds are for machines that have much else to do.
"""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
# Each worker says who it is: whether it is still there is asked of the system.
CONFTEST = """
    import os
    from pathlib import Path

    if "PYTEST_XDIST_WORKER" in os.environ:
        Path(__file__).with_name(f"{os.getpid()}.pid").touch()
"""
DIES = """
    import os, signal

    def test_one(): pass

    def test_two(): os.kill(os.getpid(), signal.SIGSEGV)
"""
DIES_EARLY = """
    import os, signal

    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        os.kill(os.getpid(), signal.SIGKILL)

    def test_one(): pass
"""
# As native code that keeps the interpreter's lock.
HANGS = """
    import ctypes

    def test_stuck(): ctypes.PyDLL(None).sleep(600)
"""
WAITS = """
    import time

    def test_long(): time.sleep(600)
"""
# The files of each run, and its bounds.
RUNS = {
    "dies": ([DIES, WAITS], {}),
    "dies early": ([DIES_EARLY], {}),
    "hangs": ([HANGS], {"TEST_SECONDS": "10"}),
    "takes too long": ([WAITS], {"RUN_SECONDS": "25"}),
}


def start(folder, files, limits):
    """Have two workers run the files."""
    for name, content in zip(("conftest", "test_a", "test_b"), [CONFTEST, *files], strict=False):
        (folder / f"{name}.py").write_text(textwrap.dedent(content))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | limits
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.ending"]
    return subprocess.Popen(
        [*command, "-n2", "--dist=loadscope", f"--rootdir={folder}", "-c", os.devnull, folder],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """All runs, at once, as most of their time is waiting."""
    folders = {name: tmp_path_factory.mktemp("run") for name in RUNS}
    runs = {name: start(folders[name], *RUNS[name]) for name in RUNS}
    yield {name: (runs[name], folders[name]) for name in RUNS}
    for run in runs.values():
        run.kill()


def ended(run, folder):
    """What was said, and what beside it, when all processes are gone."""
    said, beside = run.communicate(timeout=120)
    assert run.returncode == 1, said + beside
    workers = [int(file.stem) for file in folder.glob("*.pid")]
    assert len(workers) >= 2
    deadline = time.monotonic() + 20
    while any(map(is_there, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return said, beside


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_dies(started):
    said, _ = ended(*started["dies"])
    assert re.search(r"FAILED test_a.py::test_two - worker 'gw\d' crashed while running", said)
    assert "replacing" not in said  # it would run the same test again


def test_a_worker_that_dies_before_any_test(started):
    said, _ = ended(*started["dies early"])
    assert "worker gw1 died" in said


def test_a_worker_that_hangs_in_native_code(started):
    said, beside = ended(*started["hangs"])
    assert "FAILED test_a.py::test_stuck - worker" in said
    assert "in test_stuck" in beside


def test_a_run_that_takes_too_long(started):
    said, _ = ended(*started["takes too long"])
    assert "25 s have passed, running: ['test_a.py::test_long']" in said
