"""`python -m megascale`: the same as the `megascale` command."""

import sys

from megascale.cli.main import main

sys.exit(main())
