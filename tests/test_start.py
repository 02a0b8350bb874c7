"""A script ends with one sentence and an exit code, whatever went wrong."""

import os
import signal

import pytest

import gluon_parallel as gp
from gluon_parallel.training.config import TrainingConfig
from gluon_parallel.training.start import start


@pytest.fixture
def default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "task"
    folder.mkdir(parents=True)
    path = folder / "small.yaml"
    path.write_text("dataset: digits\ndevices: cpu:2\nepochs: 2\nbatch_size: 4\nlr: 0.1\n")
    return path


def nothing(config, run):
    loop = gp.Loop(run=run)
    next(loop.epochs(config.epochs))
    loop.end_epoch()


def test_a_run_lies_under_its_task_and_its_config_and_keeps_the_config(tmp_path, default):
    assert start(nothing, TrainingConfig, default, ["--lr", "0.25"]) == 0
    assert "lr: 0.25" in (tmp_path / "runs" / "task" / "small" / "1" / "config.yaml").read_text()
    assert start(nothing, TrainingConfig, default, ["--output", "elsewhere"]) == 0
    assert (tmp_path / "elsewhere" / "1" / "epoch-0001.npz").exists()


def test_a_resumed_run_has_the_config_it_began_with_and_the_new_flags(default, tmp_path):
    seen = []

    def main(config, run):
        nothing(config, run)
        seen.append((config.lr, config.seed, config.epochs, run.rows[-1]["epoch"], run.folder.name))

    assert start(main, TrainingConfig, default, ["--lr", "0.25", "--seed", "3"]) == 0
    assert start(main, TrainingConfig, default, []) == 0
    assert start(main, TrainingConfig, default, ["--resume", "runs/task/small/1", "--epochs", "9"]) == 0
    assert start(main, TrainingConfig, default, ["--resume"]) == 0
    assert seen == [(0.25, 3, 2, 1, "1"), (0.1, 0, 2, 1, "2"), (0.25, 3, 9, 2, "1"), (0.1, 0, 2, 2, "2")]


def raises(error):
    def main(config, run):
        raise error

    return main


def test_other_processes_are_told_the_error_rather_than_a_status(default, monkeypatch):
    told = []
    monkeypatch.setattr(gp.kvstore, "leave_because", told.append)
    assert start(raises(gp.errors.DeviceUnavailable("no gpu(7)")), TrainingConfig, default, []) == 2
    assert told == ["DeviceUnavailable: no gpu(7)"]


def interrupted(config, run):
    loop = gp.Loop(run=run)
    for _ in loop.epochs(1):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("main", "argv", "code", "message"),
    [
        (nothing, ["--epochs", "x"], 2, "error: --epochs is 'x', wanted a whole number above 0"),
        (nothing, ["--resume"], 2, "error: --resume: there is no run with a checkpoint in runs/task/small"),
        (nothing, ["--output", "/dev/null/x"], 2, "error: the output folder /dev/null/x cannot be written"),
        (raises(gp.errors.DeviceUnavailable("no gpu(7)")), [], 2, "error: no gpu(7)"),
        (raises(KeyboardInterrupt()), [], 130, "stopped at once"),
        (interrupted, [], 130, "stopped after epoch 1; runs/task/small/1/epoch-0001.npz has everything"),
    ],
)
def test_what_a_caller_can_act_on_ends_with_one_sentence_and_an_exit_code(default, capsys, main, argv, code, message):
    assert start(main, TrainingConfig, default, argv) == code
    told = capsys.readouterr().err.strip().splitlines()
    assert message in told[-1] and "Traceback" not in "".join(told)


def test_a_fault_of_the_program_keeps_its_traceback(default):
    with pytest.raises(ZeroDivisionError):
        start(raises(ZeroDivisionError()), TrainingConfig, default, [])
