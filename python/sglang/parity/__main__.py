"""``python -m sglang.parity``."""

from __future__ import annotations

import sys

from sglang.parity.cli import main

if __name__ == "__main__":
    sys.exit(main())
