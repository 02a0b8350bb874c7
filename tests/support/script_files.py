"""The repository's scripts as modules, a data set on which they train in no time, and runs that draw nothing."""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx

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


def final(folder):
    """The last checkpoint of a run."""
    return gp.archive.read(gp.Run(Path(folder)).checkpoints()[-1])


def rows(folder, but=("samples_per_second", "seconds")):
    """What every epoch of a run says of the training, without how long it took."""
    told = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in but} for row in told if "step" not in row]


def interrupt_at(call, monkeypatch, owner, *names):
    """Send this process an interrupt at so many calls of the functions of `owner` with these names."""
    calls = []

    def interrupting(original):
        def function(*arguments, **options):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGINT)
            return original(*arguments, **options)

        return function

    for name in names:
        monkeypatch.setattr(owner, name, interrupting(getattr(owner, name)))


def rates_of(monkeypatch):
    """A list of the learning rates that trainers are given from now on."""
    rates, set_rate = [], mx.gluon.Trainer.set_learning_rate
    monkeypatch.setattr(mx.gluon.Trainer, "set_learning_rate", lambda self, lr: rates.append(lr) or set_rate(self, lr))
    return rates


def assert_same_run(whole, parts):
    """Two runs ended with the same bits and told the same of every epoch; returns their last checkpoints' facts."""
    one, two = final(whole), final(parts)
    assert one.arrays.keys() == two.arrays.keys()
    for key, array in one.arrays.items():
        np.testing.assert_array_equal(array, two.arrays[key], err_msg=key)
    assert rows(whole) == rows(parts)
    return one.facts, two.facts


def assert_refused(code, capsys, message):
    """A script ended with code 2 and one line that says why."""
    err = capsys.readouterr().err
    assert code == 2 and re.match(f"error: .*{message}", err) and err.count("\n") == 1, err
