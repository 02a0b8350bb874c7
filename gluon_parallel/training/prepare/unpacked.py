"""Tuple that ``gp.prepare`` and ``gp.survive`` return; taken for its first value, its error says how to unpack it."""

from typing import Any


class Unpacked(tuple):
    """A training and its loaders, in the order given."""

    __slots__ = ()
    call, first = "gp.prepare", "training"  # what has returned it, and a name for its first part

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy, pickle and others look for
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(self._advice(f"which has no {name!r}"))

    def _advice(self, fault: str) -> str:
        num = len(self) - 1
        names = ", ".join([self.first, *(f"loader{number}" for number in range(1, num + 1))])
        return (
            f"{self.call} was given {num} loader{'s' * (num != 1)}, and has returned a tuple of {len(self)} "
            f"value{'s' * (num > 0)}, the {self.first} and then the loaders, {fault}: "
            f"write {names}{',' * (num == 0)} = {self.call}(...)"
        )


class UnpackedStep(Unpacked):
    """A step, which a script calls, and its loaders."""

    __slots__ = ()
    call, first = "gp.survive", "step"

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise TypeError(self._advice("which cannot be called"))
