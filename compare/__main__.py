"""`python -m compare`: agreement, benchmarks and reports."""

import sys

from compare.cli import main

if __name__ == "__main__":
    sys.exit(main())
