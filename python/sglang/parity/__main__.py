"""``python -m sglang.parity``."""

from sglang.parity.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
