"""The function of a user's file that a command line names."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback

from ..errors import ConfigError


def call(name, *arguments, what="the net"):
    """What the function of ``path/to/file.py:function`` returns.

    Args:
        name: path and function.
        arguments: for the function.
        what: whom the errors name.

    Raises:
        ConfigError: there is no such function, or it raises.
    """
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("named_on_the_command_line", path) if path.endswith(".py") else None
    if spec is None or spec.loader is None or not os.path.exists(path):
        raise ConfigError(f"{what} is {name!r}; expected path/to/file.py:function, and the file must exist")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as if Python had started the file
    try:
        spec.loader.exec_module(module)
        make = getattr(module, function, None)
        if not callable(make):
            raise ConfigError(
                f"{what} is {name!r}: {path} has no function {function!r}; expected path/to/file.py:function"
            )
        return make(*arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(path)]
        where = f" in line {lines[-1]}" if lines else ""
        raise ConfigError(f"{name} raises {type(error).__name__}{where}: {first_line(error)}") from error
    finally:
        del sys.path[0]


def first_line(error):
    """What an error says, in a line: MXNet's say it among others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "Check failed" in line]
    return (told or lines or [type(error).__name__])[0][:300]
