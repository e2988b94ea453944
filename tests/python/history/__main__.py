"""Check histories: python -m tests.python.history FILE..."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .checker import Checker

SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--parts", type=int, help="passes over the files; more need less memory")
    arguments = parser.parse_args()
    checker = Checker(arguments.files, arguments.parts)
    print(checker.summary())
    for violation in checker.violations[:SHOWN]:
        print(violation)
    print(f"{len(checker.violations)} violations")
    return 1 if checker.violations else 0


if __name__ == "__main__":
    sys.exit(main())
