"""A C compiler for the tests of the C library: the one that CC names, or one of this machine, or ziglang's."""

import importlib.util
import os
import shlex
import shutil
from pathlib import Path

import pytest


def compiler(*names):
    """The command of the first of these compilers that is here, by default of any; the test is skipped if none is."""
    if os.environ.get("CC") and not names:
        return shlex.split(os.environ["CC"])
    found = next(filter(None, map(shutil.which, names or ("gcc", "clang", "cc"))), None)
    if found:
        return [found]
    ziglang = None if names and "ziglang" not in names else importlib.util.find_spec("ziglang")
    if ziglang is None:
        pytest.skip(f"no C compiler is here, of {' or '.join(names) or 'any kind'}")
    return [str(Path(ziglang.origin).with_name("zig")), "cc"]
