"""The function of a user's file or module that a command line names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback

from ..errors import ConfigError

FORM = "path/to/file.py:function or package.module:function"


def call(name, *arguments):
    """What the function of ``path/to/file.py:function`` or ``package.module:function`` returns for these arguments.

    ConfigError: there is no such function, or it raises.
    """
    path, _, function = name.rpartition(":")
    is_file = path.endswith(".py") and os.path.exists(path)
    expected = f"expected {FORM}, a function that returns the net"
    unknown = ConfigError(f"--net is {name!r}; {expected}")
    if not path:
        raise unknown
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)) if is_file else os.getcwd())  # as Python does for them
    try:
        module = _load(path) if is_file else importlib.import_module(path)
        make = getattr(module, function, None)
        if not callable(make):
            raise ConfigError(f"--net is {name!r}: {path} has no function {function!r}; {expected}")
        return make(*arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if not is_file and isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}."):
            raise unknown from error
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(path)]
        where = f" in line {lines[-1]}" if lines else ""
        raise ConfigError(f"{name} raises {type(error).__name__}{where}: {first_line(error)}") from error
    finally:
        del sys.path[0]


def _load(path):
    spec = importlib.util.spec_from_file_location("named_on_the_command_line", path)
    assert spec is not None and spec.loader is not None  # there is such a .py file
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_line(error):
    """What an error says, in a line: MXNet's say it among others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "Check failed" in line]
    return (told or lines or [type(error).__name__])[0][:300]
