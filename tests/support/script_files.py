"""The repository's scripts as modules, a data set on which they train in no time, and runs that draw nothing."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import gluon_parallel as gp

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name):
    """The module of a script, such as ``train_lenet`` or ``studies/sync_async``."""
    path = SCRIPTS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their own module up
    sys.path.insert(0, str(path.parent))  # for what lies beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def draw_only_for(request, monkeypatch):
    """Only a test that asks for the fixture `pictures` has them drawn, which takes longer than a small training."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(gp.pictures, "write", lambda make_figure, path, dpi: None)
        monkeypatch.setattr("gluon_parallel.pipeline.profile.Profile.draw", lambda profile, path: None)


def load_few_digits(monkeypatch):
    """Every data set is the first 100 digits, so that an epoch takes no time."""
    whole = gp.datasets.load("digits")

    def part_of(part, number):
        return gp.datasets.Part(part.images[:number], part.labels[:number])

    few = dataclasses.replace(whole, train=part_of(whole.train, 100), test=part_of(whole.test, 30))
    monkeypatch.setattr(gp.datasets, "load", lambda *_arguments, **_options: few)
