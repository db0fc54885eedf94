"""`python -m compare`: agreement, benchmarks and reports."""

import contextlib
import os
import signal
import sys
import threading

from compare.cli import main


def interrupt_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Have an interrupt come once more where Python drops exceptions, as in callbacks of JAX."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        main_thread = threading.main_thread().ident
        threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


if __name__ == "__main__":
    sys.unraisablehook = interrupt_again
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        print("compare: interrupted", file=sys.stderr, flush=True)
        # As shells report it. An end like others might crash, with the frameworks' threads at work.
        os._exit(130)
