"""`python -m zeroshard` is the command `zeroshard`."""

import sys

from zeroshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
