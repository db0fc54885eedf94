"""What is printed where there is little room, or an encoding with few characters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from compare.common import console
from compare.common.console import print_table

ROOT = Path(__file__).parents[3]
REASON = "FAILED since " + "a reason has many words " * 8
COLUMNS = ("implementation", "µs", "spread", "of floor", "profiler µs", "kernels", "rel. RMS")
ROWS = [
    ("torch.compile rope + FA2 varlen", *(f"{10 * n}.25" for n in range(1, 6)), "2.71e-03"),
    ("triton", REASON, *("1884.5",) * 4, "2.68e-03"),
]


@pytest.mark.parametrize(("width", "tables"), [(60, 4), (80, 3), (100, 2), (160, 1)])
def test_no_number_is_cut_where_a_terminal_is_narrow(monkeypatch, capsys, width, tables):
    monkeypatch.setattr(console, "console", lambda: Console(width=width))
    print_table("times", COLUMNS, ROWS)
    text = capsys.readouterr().out
    assert all(len(line) <= width for line in text.splitlines())
    words = text.split()
    for cells in (COLUMNS, *ROWS):
        for cell in cells:
            assert set(cell.split()) <= set(words)
    assert text.count("implementation") == text.count("varlen") == tables


def test_a_table_without_rows(capsys):
    print_table("nothing", ("a", "b"), [])
    assert "a" in capsys.readouterr().out


def test_an_encoding_without_the_dash_does_not_end_a_run(tmp_path):
    code = (
        "import sys\n"
        "from compare import cli, commands\n"
        "from compare.common.console import number, say\n"
        "commands.run_report = lambda _: say(f'no time: {number(None)}') or 0\n"
        "sys.exit(cli.main(['report']))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"no time: ?\n"), done.stderr
