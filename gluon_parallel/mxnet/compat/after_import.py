"""A finder for Python's import, which changes modules before and after their code has run."""

import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional


class Change(NamedTuple):
    """What is done with a module that is imported."""

    before: Optional[Callable[[ModuleType], None]]
    after: Optional[Callable[[ModuleType], None]]


def change_imports(changes: Mapping[str, Change]) -> None:
    """Make these changes when modules are imported, or now, if a module is there already.

    Args:
        changes: by the module's name; ``package.*`` is a package with all of its modules.
    """
    if any(isinstance(finder, Changing) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Changing(changes))
    for name, change in changes.items():
        if name in sys.modules and change.after is not None:
            change.after(sys.modules[name])


class Changing:
    """Finds the modules that are to be changed, where Python would, once it is in ``sys.meta_path``."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def _change_of(self, name: str) -> Optional[Change]:
        return self._changes.get(name) or self._changes.get(f"{name.partition('.')[0]}.*")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Python's own answer, with a loader that makes the change; None for modules that are left alone."""
        change = self._change_of(name)
        spec = PathFinder.find_spec(name, path, target) if change is not None else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            assert change is not None
            if change.before is not None:
                change.before(module)
            run(module)
            if change.after is not None:
                change.after(module)

        loader.exec_module = exec_module
        return spec
