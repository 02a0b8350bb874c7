"""scripts/gpu_check.py refuses a machine without a usable GPU, and reports all that it ran."""

import runpy
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from gpu_stubs import NO_CARD, build_driver, needs_gcc

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"


def dry_run(**environment):
    command = [sys.executable, str(SCRIPT), "--dry-run"]
    return subprocess.run(command, env=environment or None, capture_output=True, text=True, timeout=200)


def test_without_a_driver_it_says_what_is_missing():
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    done = dry_run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no GPU that MXNet's wheels can use. There is no NVIDIA driver here" in done.stderr
    assert done.stderr.count("\n") == 1


@needs_gcc
@pytest.mark.parametrize(
    ("answers", "words"), [({"status": NO_CARD}, "gives no GPU"), ({"capability": 90}, "mxnet:24.06-py3")]
)
def test_without_a_usable_card_it_says_why(answers, words, tmp_path):
    done = dry_run(**build_driver(tmp_path, **answers))
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr


@needs_gcc
def test_with_a_card_it_names_it_and_every_command(tmp_path):
    done = dry_run(**build_driver(tmp_path))
    first, *commands = done.stdout.splitlines()
    assert done.returncode == 0 and first == "gpu(0), Stub 9000, compute capability 8.6"
    scripts = [word for line in commands for word in line.split() if word.endswith(".py")]
    assert len(scripts) > 4 and all((SCRIPT.parents[1] / script).exists() for script in scripts)
    assert sum("--devices gpu:1" in line for line in commands) == 4


def test_the_report_has_what_every_command_printed_and_how_it_ended(tmp_path, monkeypatch, capsys):
    path = tmp_path / "report.txt"
    module = runpy.run_path(str(SCRIPT))
    plan = {
        "good": [sys.executable, "-c", "print('all is well')"],
        "bad": [sys.executable, "-c", "import sys; sys.exit('no such thing')"],
        "late": [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(1000)"],
        "absent": ["a-command-of-nobody"],
    }

    class Timer(threading.Timer):
        """Its time is over as soon as the late command has begun, however long a busy machine takes for that."""

        def run(self):
            while not self.finished.wait(0.05):
                if self.interval == 3 and "\nbegun\n" in path.read_text():
                    self.function()
                    break

    main = module["main"]
    monkeypatch.setitem(main.__globals__, "threading", types.SimpleNamespace(Timer=Timer))
    monkeypatch.setitem(main.__globals__, "look", lambda: (["gpu(0), Stub"], []))
    monkeypatch.setitem(main.__globals__, "steps", lambda num: plan)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--report", str(path), "--seconds", "3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    text = path.read_text()
    assert text in capsys.readouterr().out
    assert "gpu(0), Stub" in text and "all is well\n" in text and "no such thing\n" in text and "begun\n" in text
    summary = text.partition("==== summary\n")[2].splitlines()
    assert [line.partition(",")[0] for line in summary] == [
        "good: ok", "bad: FAILED with status 1", "late: FAILED with status -15",
        "absent: not run: No such file or directory",
    ]  # fmt: skip
