"""Errors that the person at the command line can put right, and any error in one line."""


class InputError(ValueError):
    """Bad input or a machine that cannot do what was asked: one sentence, exit status 2."""


class UnavailableError(RuntimeError):
    """An implementation that cannot run here; the message is the reason that the report gives."""


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an error's text, for a table cell: at most so many characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, UnavailableError | InputError) and lines:
        text = lines[0]
    return text if len(text) <= limit else text[: limit - 1] + "…"
