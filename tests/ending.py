"""A run of the tests that ends, red and with a name, also where one of its processes dies or hangs.

By itself pytest-xdist puts another worker in a dead one's place, has it run the same test again,
and may then wait for it for ever. Here the first worker that dies ends the run. One that hangs is
made to die: faulthandler's clock needs no Python, so that it ends native code too, whoever holds
the interpreter's lock. The process that waits for the workers has a clock of its own.
"""

import faulthandler
import os
import signal
import sys

import pytest

_EXAMPLES = int(os.environ.get("EXAMPLES", "1"))  # as in hostile.py, which imports much
# Of a test's setup, its call or its teardown; and of a whole run.
TEST_SECONDS = int(os.environ.get("TEST_SECONDS", 600 * _EXAMPLES))
RUN_SECONDS = int(os.environ.get("RUN_SECONDS", 3600 * _EXAMPLES))
# Of all that follows on a run's last test: xdist kills workers 10 s after it told them to end.
ENDING_SECONDS = 60

_stderr = pytest.StashKey[int]()
_dead = pytest.StashKey[str]()
_running: set[str] = set()
_wrapper = pytest.hookimpl(wrapper=True, tryfirst=True)


def pytest_configure(config):
    """Keep the standard error that is not captured: what is captured is lost with the process."""
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno())


def _die_after(seconds, config):
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_stderr])


def _bounded(config):
    _die_after(TEST_SECONDS, config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@_wrapper
def pytest_collection(session):
    """What is imported may hang too."""
    return (yield from _bounded(session.config))


def _phase(item):
    """Each by itself: where one fails, pytest stops the clock."""
    return (yield from _bounded(item.config))


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _wrapper(_phase)


def pytest_runtest_logstart(nodeid):
    _running.add(nodeid)


def pytest_runtest_logfinish(nodeid):
    _running.discard(nodeid)


@_wrapper
def pytest_runtestloop(session):
    """Bound the run where workers have the tests, and then what it takes to end them."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        return (yield)

    def end(*_):
        pytest.exit(f"{RUN_SECONDS} s have passed, running: {sorted(_running)}", returncode=1)

    signal.signal(signal.SIGALRM, end)
    signal.alarm(RUN_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        _die_after(ENDING_SECONDS, session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Note a dead worker; what it ran, xdist says next."""
    if error:
        node.config.stash[_dead] = f"worker {node.gateway.id} died: {error}"


@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_handlecrashitem(report, sched):
    """End the run with the test that a worker died of among the failed ones."""
    sched.config.hook.pytest_runtest_logreport(report=report)
    pytest.exit(report.longrepr, returncode=1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """End the run in place of starting another worker: the dead one ran no test."""
    if dead := node.config.stash.get(_dead, None):
        pytest.exit(f"{dead}, between tests", returncode=1)
