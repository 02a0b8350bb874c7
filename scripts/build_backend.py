"""The build backend of pyproject.toml: setuptools, which also asks for ziglang's C compiler unless `CC` names one."""

import os
import runpy
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403

_BUILD = Path(__file__).resolve().parents[1] / "gluon_parallel/native/build.py"


def get_requires_for_build_wheel(config_settings=None):
    """What `pip wheel`, `pip install` and their like install before they build a wheel."""
    return [] if os.environ.get("CC") else [runpy.run_path(str(_BUILD))["ZIGLANG"]]


get_requires_for_build_editable = get_requires_for_build_wheel
