"""What is attached to single objects of other libraries, such as a plan to a trainer; it keeps nothing alive."""

from __future__ import annotations

import operator
from typing import Any, Callable, Generic, TypeVar

T = TypeVar("T")


class _Value:
    """What copies and pickles of its object do not have: they have None in its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple:
        return type(None), ()


class Attached(Generic[T]):
    """Values of one kind, each attached to an object of MXNet or of another library.

    A value may refer to its object: both go together, since the object alone has the value. A ``WeakKeyDictionary``
    would keep an object to which its value refers.

    Args:
        kind: a name for the values that no other kind has.
        is_copied: whether copies and pickles of an object have its value.

    Attributes:
        read: returns an object's value, AttributeError if it has none; steps use it, since it calls no Python code.

    Example:
        >>> import mxnet as mx
        >>> plans, layer = Attached("example"), mx.gluon.nn.Dense(1)
        >>> plans.set(layer, ["a plan of", layer])[0], plans.of(layer)[0]
        ('a plan of', 'a plan of')
        >>> plans.pop(layer)[0], plans.of(layer)
        ('a plan of', None)
    """

    def __init__(self, kind: str, is_copied: bool = False) -> None:
        self._attribute, self._is_copied = f"_gluon_parallel_{kind}", is_copied
        self.read: Callable[[Any], T] = operator.attrgetter(
            self._attribute if is_copied else f"{self._attribute}.value"
        )

    def of(self, owner: Any) -> T | None:
        """The object's value; None if it has none."""
        try:
            return self.read(owner)
        except AttributeError:
            return None

    def set(self, owner: Any, value: T) -> T:
        """Attach the value, in the place of the object's last one; returns it."""
        vars(owner)[self._attribute] = value if self._is_copied else _Value(value)
        return value

    def pop(self, owner: Any) -> T | None:
        """Take the object's value away, and return it; None if it has none."""
        value = self.of(owner)
        vars(owner).pop(self._attribute, None)
        return value


def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Have this one object call `function` in the place of its method, without itself as the first argument."""
    vars(owner)[name] = function
