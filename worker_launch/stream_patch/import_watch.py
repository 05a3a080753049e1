"""[io] Run a function when, and only if, a module gets imported.

vLLM loads general plugins in every process: API server, engine, workers. Importing the serving
code there to patch it would cost the engine and each worker seconds of start time for classes they
never use, and process names or parents do not tell API servers apart reliably. So the patch waits
at the import system: whoever imports the module gets it patched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` now if ``name`` is loaded, else right after its import.

    A second callback for a name replaces the first. An exception of the callback becomes the
    import's exception.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    watcher = next((finder for finder in sys.meta_path if isinstance(finder, _Watcher)), None)
    if watcher is None:
        watcher = _Watcher()
        sys.meta_path.insert(0, watcher)
    watcher.callbacks[name] = callback


class _Watcher(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callback = self.callbacks.get(fullname)
        if callback is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CallingLoader(spec.loader, callback)
                return spec
        return None


class _CallingLoader(importlib.abc.Loader):
    """The real loader, and a call after it has run the module."""

    def __init__(self, loader: Any, callback: Callback) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)

    def __getattr__(self, name: str) -> Any:
        # get_source, get_data and the like: inspect, tracebacks and runpy ask the loader for them.
        return getattr(self._loader, name)
