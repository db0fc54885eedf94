"""What the command line prints: tables, progress and single lines, on one console."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from compare.common.result_files import Record

Item = TypeVar("Item")

# Without a terminal rich assumes 80 columns and cuts tables; a log file has room.
_LOG_WIDTH = 160
_UNBROKEN = 24  # characters of a cell that stay on one line: of any number, not of any reason


def console() -> Console:
    """A console on standard output."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=_LOG_WIDTH)


def say(text: str) -> None:
    """Print one line; square brackets stay as they are."""
    console().print(text, markup=False, highlight=False, soft_wrap=True)


def progress(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Go through items with a progress bar on standard error; in a log, with one line."""
    bar = Console(stderr=True)
    bar.quiet = not bar.is_terminal  # before 14.3 rich ends a line even where the bar is disabled
    if bar.quiet:
        say(f"{description}: {len(items)} steps")
    yield from track(items, description, console=bar, transient=True, disable=bar.quiet)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, the first column left and the others right aligned.

    Columns that do not fit beside each other are split over several tables, each with the first
    column; rich would cut the numbers. All is plain text.
    """
    say(title)  # not as the table's title, which would be wrapped to its width
    out = console()
    names, *others = (list(column) for column in zip(columns, *rows, strict=True))
    shown = [names]
    for column in others:
        if len(shown) > 1 and _least_width([*shown, column]) > out.width:
            out.print(_table(shown), markup=False)
            shown = [names]
        shown.append(column)
    out.print(_table(shown), markup=False)


def _table(columns: Sequence[Sequence[str]]) -> Table:
    """A table of columns, each of which begins with its heading."""
    table = Table()
    for index, (heading, *_) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=index == 0)
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*row)
    return table


def _least_width(columns: Sequence[Sequence[str]]) -> int:
    names, *others = ([len(cell) for cell in column] for column in columns)
    cells = max(names) + sum(min(max(lengths), _UNBROKEN) for lengths in others)
    return cells + 3 * len(columns) + 1  # a bar and two spaces for each column, and a last bar


def print_missing(
    records: Iterable[Record], name: Callable[[Record], str] = lambda record: record.implementation
) -> None:
    """One line for each reason why records have no time, with the names of those records."""
    names: dict[str, list[str]] = {}
    for record in records:
        if record.median_us is None:
            names.setdefault(record.note or "", []).append(name(record))
    for reason, without in names.items():
        say(f"  no time for {', '.join(without)}: {reason}")


def number(value: float | None, digits: int = 3) -> str:
    """A number to some significant digits; a dash where there is none."""
    if value is None or value != value:
        return "–"
    if value != 0 and abs(value) < 0.1:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text
