"""`python -m compare`: agreement, benchmarks and reports."""

import sys

from compare.cli import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("compare: interrupted", file=sys.stderr)
        sys.exit(130)  # as shells report it
