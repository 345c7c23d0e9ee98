"""The trained demo model and its drafters, shipped inside the package."""

from __future__ import annotations

from pathlib import Path

BUNDLED_NAMES = ("demo", "demo-dflash", "demo-dspark")


def bundled_directory(name: str) -> Path:
    """Directory of the bundled checkpoint ``name``.

    Raises:
        KeyError: ``name`` is not a bundled checkpoint.
        FileNotFoundError: the installation lacks the checkpoint's files.
    """
    if name not in BUNDLED_NAMES:
        raise KeyError(f"{name!r} is not bundled; bundled are {', '.join(BUNDLED_NAMES)}")
    directory = Path(__file__).resolve().parent / name
    if not directory.is_dir():
        raise FileNotFoundError(
            f"bundled checkpoint {name!r} is missing from this installation ({directory}); "
            "reinstall the package, or train it with examples/demo_model"
        )
    return directory


def resolve_model_path(name: str) -> str:
    """Map ``demo``, ``demo-dflash``, ``demo-dspark`` to their directories; leave the rest as is."""
    return str(bundled_directory(name)) if name in BUNDLED_NAMES else name
