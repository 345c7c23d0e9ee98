"""Exit 0 if this interpreter has a torch that the engine works with (2.11 or newer)."""

from __future__ import annotations

import importlib.metadata


def main() -> int:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return 1
    major, minor = version.split(".")[:2]
    return 0 if (int(major), int(minor)) >= (2, 11) else 1


if __name__ == "__main__":
    raise SystemExit(main())
