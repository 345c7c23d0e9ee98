"""`python -m sglang.cli`."""

import sys

from sglang.cli.main import main

sys.exit(main())
