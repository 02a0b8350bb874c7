"""What a function that replaces one of MXNet's keeps of it: name, documentation, signature, and place for pickle."""

import functools
import inspect
import types
from typing import Any, Callable


def stands_for(original: Any, owner: Any, name: str) -> Callable[[Any], Any]:
    """A decorator for the function that replaces `original`, the attribute `name` of a module or class of MXNet.

    Pickle finds a function by its module and name, so these are the replaced attribute's: MXNet defines many functions
    in another module than the one that its users know, where the original stays.

    Example:
        >>> import textwrap
        >>> @stands_for(textwrap.dedent, textwrap, "dedent")
        ... def ours(*args, **kwargs):
        ...     return "ours"
        >>> ours.__module__, ours.__name__, str(inspect.signature(ours))
        ('textwrap', 'dedent', '(text)')
    """

    def decorate(function: Any) -> Any:
        if function is original:  # it has replaced it before
            return function
        functools.update_wrapper(function, original)
        if isinstance(owner, types.ModuleType):
            function.__module__, function.__qualname__ = owner.__name__, name
        else:
            function.__module__, function.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        return function

    return decorate


def named_arguments(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, whichever of them were given by position."""
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return named
