"""A profile and the program around it: its files, warnings and errors, and what other programs do meanwhile."""

import argparse
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from profiling_nets import DEVICES, LOSS, batch, net_of, profiled, trainer_of

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.commands import profile as command
from gluon_parallel.commands.cli import main as run
from gluon_parallel.commands.profiling import observers
from mxnet import gluon


@pytest.fixture
def parallel():
    net = net_of()
    return gp.DataParallel(net, LOSS, trainer_of(net))


def test_after_the_recorded_steps_the_loop_goes_on_and_nothing_is_watched(tmp_path, capsys, parallel):
    originals = [vars(owner)[name] for owner, name in ((gp.DataParallel, "step"), (gluon.Trainer, "step"))]
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(np.ones((64, 1, 12, 12), "float32"), np.zeros(64)), 8)
    with gp.profile(tmp_path, steps=2, skip=1) as profile:
        for x, y in data:
            parallel(x, y)  # by its second name
            if profile.analysis is not None:
                assert not hasattr(gp.DataParallel.step, "__wrapped__")
    assert len(profile._reads) == 1 + 3  # of the iterator and the batches
    assert capsys.readouterr().out.startswith(str(profile))
    assert mx.profiler.dumps() == ""  # it adds up nothing; with that on, MXNet joins no operators of a symbol
    assert [vars(owner)[name] for owner, name in ((gp.DataParallel, "step"), (gluon.Trainer, "step"))] == originals
    assert {path.name for path in tmp_path.iterdir()} == {"profile.html", "profile.json"}


def test_a_loop_that_ends_early_or_by_sys_exit_is_profiled_as_far_as_it_went(tmp_path, capsys, parallel):
    assert profiled(tmp_path, lambda: parallel.step(*batch()), num=3, steps=9).analysis.num_steps == 2
    assert profiled(tmp_path, lambda: parallel.step(*batch()), num=2, skip=3).analysis is None
    assert "nothing was profiled: 3 steps are skipped, and the loop made 2" in capsys.readouterr().err
    with pytest.raises(SystemExit), gp.profile(tmp_path, skip=1) as profile:
        for _ in range(3):
            parallel.step(*batch())
        sys.exit(0)
    assert profile.analysis.num_steps == 2


def test_processes_without_a_store_write_files_of_their_own(tmp_path, monkeypatch, parallel):
    def written():
        before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        profiled(tmp_path, lambda: parallel.step(*batch()))
        return sorted(path.name for path in tmp_path.iterdir() if before.get(path) != path.stat().st_mtime_ns)

    assert written() == written() == ["profile.html", "profile.json"]  # one after the other, the newest stays
    with gp.profile(tmp_path, steps=1, skip=1):
        parallel.step(*batch())
        (tmp_path / "profile.html").write_text("of a process that was started beside this one")
        os.utime(tmp_path / "profile.html", ns=(time.time_ns(), time.time_ns()))  # the kernel's clock may lag behind
        parallel.step(*batch())
    assert (tmp_path / f"profile-{os.getpid()}.html").exists() and (tmp_path / f"profile-{os.getpid()}.json").exists()
    assert (tmp_path / "profile.html").read_text().startswith("of a process")
    monkeypatch.setenv("GLUON_PARALLEL_NUM_WORKERS", "2")
    monkeypatch.setenv("GLUON_PARALLEL_RANK", "1")
    assert written() == ["rank-1.html", "rank-1.json"]


def test_processes_that_this_one_starts_are_no_other_programs():
    code = "import time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\ninput()"
    begin, own = observers.processor_seconds(), time.process_time()

    def of_others():
        return observers.processor_seconds() - begin - (time.process_time() - own)

    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        one.stdout.readline()
        assert 0.5 < of_others() < 2
        one.communicate("\n")
    assert 0.5 < of_others() < 2  # once it has ended


def test_what_is_idle_is_not_known_in_a_container_with_a_limit(monkeypatch):
    assert observers.idle_seconds() >= 0
    monkeypatch.setattr(observers, "cpu_limit", lambda: 0.5)
    assert math.isnan(observers.idle_seconds())


def test_an_error_in_the_loop_passes_and_another_profile_can_follow(tmp_path, parallel):
    with pytest.raises(ZeroDivisionError), gp.profile(tmp_path, steps=3, skip=1):
        for _ in range(2):
            parallel.step(*batch())
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    assert profiled(tmp_path, lambda: parallel.step(*batch())).analysis.num_steps == 3


def test_a_warning_names_the_line_of_the_program_with_and_without_a_profile(tmp_path):
    stages = gluon.nn.HybridSequential()
    stages.add(gluon.nn.Dense(8, in_units=3), gluon.nn.BatchNorm(in_channels=8), gluon.nn.Dense(1, in_units=8))

    def lines():
        net = net_of(gluon.nn.BatchNorm(in_channels=4))
        stages.initialize(force_reinit=True)
        pipe = gp.Pipeline(stages, DEVICES, num_micro_batches=2)
        arguments = gluon.loss.L2Loss(), trainer_of(pipe), mx.nd.ones((4, 3)), mx.nd.ones((4, 1))
        with pytest.warns(gp.errors.StatisticsPerDevice) as caught:
            gp.DataParallel(net, LOSS, trainer_of(net)).step(*batch())
            gp.DataParallel(net, LOSS, trainer_of(net))(*batch())
            pipe.step(*arguments)
        return [
            (one.filename, one.lineno - lines.__code__.co_firstlineno)
            for one in caught
            if one.category is gp.errors.StatisticsPerDevice
        ]

    expected = [(__file__, number) for number in (6, 7, 8)]
    assert lines() == expected
    with gp.profile(tmp_path):
        assert lines() == expected


def test_two_profiles_at_once_and_senseless_numbers_are_refused(tmp_path):
    with gp.profile(tmp_path), pytest.raises(RuntimeError, match="under way already"), gp.profile(tmp_path):
        pass
    for options in ({"steps": 0}, {"steps": 2.5}, {"skip": "1"}):
        with pytest.raises(ValueError, match="both are whole numbers of at least 1"):
            gp.profile(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(gp.errors.OutputUnavailable, match="cannot be written"), gp.profile(tmp_path / "file" / "below"):
        pass


def test_a_device_that_mxnets_profiler_has_no_place_for_is_refused(tmp_path):
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(500)])
    parallel = gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"))
    with pytest.raises(gp.errors.DeviceUnavailable, match=r"an operator of cpu\(500\)"), gp.profile(tmp_path, skip=1):
        parallel.step(mx.nd.ones((4, 3)), mx.nd.ones((4, 1)))


def test_the_command_refuses_senseless_numbers_and_files_before_the_script_runs(capsys, tmp_path):
    before = dict(os.environ)
    assert run(["profile", "--skip", "0", "train.py"]) == 2
    assert capsys.readouterr().err == "gluon-parallel profile: steps=20, skip=0; both are whole numbers of at least 1\n"
    assert run(["profile", "--folder", str(tmp_path), "missing.py"]) == 2
    assert "'missing.py' cannot be read" in capsys.readouterr().err
    assert dict(os.environ) == before
    (tmp_path / "file").write_text("")
    assert run(["profile", "--folder", str(tmp_path / "file"), "script.py"]) == 2
    assert f"--folder {tmp_path / 'file'} cannot be written to: File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--fast"], ["run", "train.py", "--fast"]),
        (["run", "-m", "package.train"], ["run", "-m", "package.train"]),
        (["launch", "-n", "2", "train.py"], ["launch", "-n", "2", "train.py"]),
    ],
)
def test_the_command_profiles_what_run_and_launch_start(words, expected, tmp_path, monkeypatch):
    parser, ran = argparse.ArgumentParser(), []
    command.configure(parser)
    monkeypatch.setattr(command.cli, "main", ran.append)
    command.main(parser.parse_args(["--folder", str(tmp_path), *words]))
    assert ran == [expected]
