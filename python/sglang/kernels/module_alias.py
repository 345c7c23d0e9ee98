"""One module object under two names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AliasLoader(Loader):
    """Hands out the module that already goes by another name."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._true_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._true_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put the alias's spec on the module; its own one goes back.
        module.__spec__ = self._true_spec
        module.__loader__ = self._true_spec.loader if self._true_spec else None


class _AliasFinder(MetaPathFinder):
    def __init__(self, alias: str, target: str) -> None:
        self.alias = alias
        self._target = target

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != self.alias:
            return None
        true_name = f"{self._target}.{name}"
        if importlib.util.find_spec(true_name) is None:
            return None
        return ModuleSpec(fullname, _AliasLoader(true_name))


def alias_package(alias: str, target: str) -> None:
    """Make `alias.x` the same module object as `target.x` for every module x of package `target`."""
    if not any(isinstance(f, _AliasFinder) and f.alias == alias for f in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder(alias, target))
