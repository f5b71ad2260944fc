"""`python -m anabranch`: the same as `anabranch`."""

import sys

from anabranch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
