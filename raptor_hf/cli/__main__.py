"""`python -m raptor_hf.cli`: the command line without its installed entry point."""

import sys

from raptor_hf.cli import main

if __name__ == "__main__":
    sys.exit(main())
