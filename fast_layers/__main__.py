"""`python -m fast_layers`: see `fast_layers.cli`."""

import sys

from fast_layers.cli import main

if __name__ == "__main__":
    sys.exit(main())
