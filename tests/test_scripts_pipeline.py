"""The pipeline script trains, stops and continues as it says, with the numbers of one device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from script_files import (
    assert_refused,
    assert_same_run,
    draw_only_for,
    interrupt_at,
    load,
    load_few_digits,
    rows,
)  # fmt: skip

import gluon_parallel as gp

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs" / "pipeline"


SCRIPT = load("train_pipeline")


@pytest.fixture(autouse=True)
def _few_images_and_a_folder_of_its_own(request, tmp_path, monkeypatch):
    """The data set is the first 100 digits, so that an epoch takes no time."""
    monkeypatch.chdir(tmp_path)
    draw_only_for(request, monkeypatch)
    load_few_digits(monkeypatch)


def run(*argv):
    argv = ["--config", str(CONFIGS / "smoke.yaml"), "--batch_size", "16", *argv]
    return gp.start(SCRIPT.main, SCRIPT.Config, SCRIPT.DEFAULT, argv)


def test_the_script_prints_the_cut_a_table_the_profile_and_where_its_files_are(pictures, capsys):
    assert run() == 0
    out = capsys.readouterr().out
    assert "[cpu(0), cpu(1)]" in out and "test acc" in out
    assert re.search(r"^ +0 +\d+ +\S+ +\d+%", out, re.M) and re.search(r"^ +1 +\d+ +\S+ +\d+%", out, re.M)
    assert "2 stages, 4 micro-batches, order 1f1b" in out
    paths = re.findall(r"^(?:checkpoint|curves|schedule): +(.+)$", out, re.M)
    assert len(paths) == 3 and all(Path(path).stat().st_size > 1000 for path in paths)


@pytest.mark.parametrize("accumulate", [1, 4])  # of 6 steps per epoch
def test_a_run_that_is_interrupted_and_resumed_ends_with_the_same_bits(accumulate, monkeypatch, capsys):
    added = ["--accumulate", str(accumulate)]
    assert run("--output", "whole", *added) == 0
    interrupt_at(9, monkeypatch, gp.Pipeline, "step")
    assert run("--output", "parts", *added) == 130
    assert f"stopped in epoch 2, after step {max(3, accumulate)}; " in capsys.readouterr().err
    assert run("--output", "parts", "--resume") == 0
    whole, parts = assert_same_run("whole/1", "parts/1")
    assert whole == parts


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stages", "3"], r"--stages 3: 2 devices .* no multiple"),
        (["--num_micro_batches", "5"], r"--batch_size 16 is no multiple of 5"),
        (["--order", "fifo"], r"--order is 'fifo', wanted 1f1b or gpipe"),
        (["--precision", "float16"], r"no float16 matrix product on CPUs"),
        (["--balance", "memory"], r"--balance is 'memory', wanted time or bytes"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_in_one_message(argv, message, capsys):
    assert_refused(run(*argv), capsys, message)


@pytest.mark.slow
def test_the_default_config_reaches_95_percent_on_the_digits():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, SCRIPT.__file__, "--devices", "cpu:2", "--output", "out"]
    subprocess.run(words, env=environment, check=True, timeout=1500)
    assert rows("out/1")[-1]["test_accuracy"] >= 0.95
