"""Is this environment ours alone?

The distribution `sglang-lossless` provides the import name `sglang`, and so does stock SGLang.
Installed together, the files of one overwrite those of the other, and which engine runs is chance.
"""

from __future__ import annotations

import importlib.metadata

OWN_DISTRIBUTION = "sglang-lossless"
STOCK_DISTRIBUTION = "sglang"


class InstallationError(RuntimeError):
    """This engine shares its environment with a package that it replaces."""


def stock_version() -> str | None:
    """Version of stock SGLang in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version(STOCK_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse_stock_sglang() -> None:
    """Raise an InstallationError with the way out if stock SGLang is installed beside this engine."""
    version = stock_version()
    if version is not None:
        raise InstallationError(
            f"{OWN_DISTRIBUTION} replaces stock SGLang and cannot share an environment with it, but "
            f"{STOCK_DISTRIBUTION} {version} is installed here too. Uninstall both (pip uninstall "
            f"{STOCK_DISTRIBUTION} {OWN_DISTRIBUTION}) and install the one you want, or use a new "
            "virtual environment."
        )
