"""A finder for Python's import, which changes modules before and after their code has run."""

from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional


class Change(NamedTuple):
    """What is done with a module that is imported."""

    before: Optional[Callable[[ModuleType], None]]
    after: Optional[Callable[[ModuleType], None]]


class Changing:
    """Finds the modules that are to be changed, where Python would; the caller puts it into ``sys.meta_path``."""

    def __init__(self, change_of: Callable[[str], Optional[Change]]) -> None:
        self._change_of = change_of

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
