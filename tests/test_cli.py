"""`python -m gluon_parallel run` is `python`, with an `import mxnet` that works."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gluon_parallel as gp
from gluon_parallel.commands import cli, doctor
from gluon_parallel.errors import ConfigError


def start(*command, cwd, **environment):
    """Run a command of this Python in `cwd`; the finished process, with its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path):
    """A function that writes a script into a folder of its own."""

    def write(text, name="script.py"):
        folder = tmp_path / "scripts"
        folder.mkdir(exist_ok=True)
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return path

    return write


def run(script, *arguments, cwd, **environment):
    return start("-m", "gluon_parallel", "run", script, *arguments, cwd=cwd, **environment)


def test_the_version_is_said_without_mxnet(tmp_path):
    code = "import sys; sys.argv = ['gluon-parallel', '--version']; sys.modules['mxnet'] = None; import gluon_parallel"
    done = start("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"gluon-parallel {gp.__version__}\n", "")


def test_a_script_imports_mxnet_itself_and_pickles_what_it_defines_also_at_its_very_end(script, tmp_path):
    path = script(
        """
        import atexit, pickle
        import mxnet as mx

        class Thing:
            def __init__(self, value):
                self.value = value

        def show():
            print(pickle.loads(pickle.dumps(Thing(7))).value)

        print(mx.nd.ones((2, 3)).sum().asscalar())
        show()
        atexit.register(show)
        """
    )
    done = run(path, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6.0\n7\n7\n", "")


@pytest.mark.parametrize(("method", "is_module"), [("fork", False), ("spawn", True)])
def test_processes_that_a_script_or_a_module_starts_import_mxnet_too(script, tmp_path, method, is_module):
    path = script(
        """
        import multiprocessing, sys
        import mxnet as mx

        class Question:
            def __init__(self, number):
                self.number = number

        def answer(question):
            return question.number * int(mx.__version__[0]) + len(sys.argv)

        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                print(pool.map(answer, [Question(20), Question(41)]))
        """
    )
    words = ["-m", "scripts.script"] if is_module else [path]
    done = run(*words, method, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[22, 43]\n"), done.stderr


@pytest.fixture
def run_here(monkeypatch):
    """A function that runs the command in this process, which afterwards is again what it was."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return lambda path, *arguments: cli.main(["run", str(path), *arguments])


def test_a_script_that_ends_gives_status_0_and_its_coding_cookie_is_obeyed(script, run_here, capsys):
    text = "# -*- coding: latin-1 -*-\nimport sys; print(sys.argv[1:], len('\xe4'), ascii('\xe4'))"
    assert run_here(script(text.encode("latin-1")), "--flag", "7") == 0
    assert capsys.readouterr().out == "['--flag', '7'] 1 '\\xe4'\n"


@pytest.mark.parametrize(
    ("ending", "error", "message"),
    [
        ("import sys; sys.exit(3)", SystemExit, "3"),
        ("raise SystemExit('enough')", SystemExit, "enough"),
        ("raise ValueError('mine')", ValueError, "mine"),
        ("from gluon_parallel.errors import ConfigError; raise ConfigError('mine')", ConfigError, "mine"),
        ("x = (", SyntaxError, "script.py"),
        ("raise KeyboardInterrupt('mine')", KeyboardInterrupt, "mine"),
    ],
)
def test_what_a_script_raises_passes_through(script, run_here, ending, error, message):
    with pytest.raises(error, match=message):
        run_here(script(ending))


def test_the_installed_command_is_the_same_door(script, tmp_path):
    command = Path(sys.executable).with_name("gluon-parallel")
    if not command.exists():
        pytest.skip(f"{command} is not there: gluon_parallel runs from its folder, it is not installed")
    path = script("import sys, mxnet; print(sys.argv[1:], sys.path[0])")
    done = subprocess.run([command, "run", path, "--flag"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"['--flag'] {path.parent}\n"), done.stderr


def test_an_unknown_option_shows_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--pots", "3"])
    assert ended.value.code == 2
    assert "usage: gluon-parallel doctor [-h] [--json]" in (said := capsys.readouterr().err)
    assert "unrecognized arguments: --pots 3" in said


def test_a_commands_result_is_the_exit_status_and_130_after_ctrl_c(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    for main, status in ((lambda options: 3, 3), (interrupted, 130)):
        monkeypatch.setattr(doctor, "main", main)
        assert cli.main(["doctor"]) == status


def test_ctrl_c_ends_a_command_that_imports_mxnet_without_a_traceback(script, tmp_path):
    path = script(
        """
        import os, signal, time

        def net(store):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        """
    )
    done = start("-m", "gluon_parallel", "parity", "--net", f"{path}:net", "--processes", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_ends_a_launcher_that_is_just_starting_without_a_traceback(tmp_path):
    (tmp_path / "numpy.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    words = "-m", "gluon_parallel", "launch", "-n", "1", "script.py"
    done = start(*words, cwd=tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


SEEN = """
import inspect, os, signal, sys, traceback
try:
    from . import beside
except ImportError:
    import beside

class Thing:
    pass

def failing():
    raise KeyError("x")

print(__name__, __file__, __package__, getattr(__spec__, "name", None), __doc__, beside.NAME, sys.argv, sys.path[0])
print(Thing.__module__, sys.modules["__main__"].Thing is Thing, type(__loader__).__name__, type(__builtins__).__name__)
print(inspect.getsource(failing), inspect.signature(failing), os.getcwd(), signal.getsignal(signal.SIGINT))
try:
    failing()
except KeyError:
    traceback.print_exc(file=sys.stdout, limit=-1)
"""


@pytest.mark.parametrize("words", [["inner.py"], ["package/inner.py"], ["-m", "package.inner"], ["-m", "package"]])
def test_a_script_or_a_module_sees_of_itself_what_python_shows_it(tmp_path, words):
    package = tmp_path / "package"
    package.mkdir()
    for file, text in {"__init__": "", "beside": "NAME = 'beside'", "inner": SEEN, "__main__": SEEN}.items():
        (package / f"{file}.py").write_text(text)
    arguments = [*words, "--help", "-x", "-m", "a b", "--", "run", "", "--", "@file"]
    folder = package if words == ["inner.py"] else tmp_path
    expected = start(*arguments, cwd=folder)
    assert expected.returncode == 0, expected.stderr
    done = start("-m", "gluon_parallel", "run", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr


FROZEN = """
import gc

class Thing:
    pass

print(gc.get_freeze_count() > 10000, any(thing is Thing for thing in gc.get_objects()))
"""


def test_collections_of_garbage_look_at_what_a_script_makes_and_not_at_what_was_imported_before(tmp_path):
    (tmp_path / "script.py").write_text(FROZEN)
    assert start("-m", "gluon_parallel", "run", "script.py", cwd=tmp_path).stdout == "True True\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere.py"], "'nowhere.py' cannot be read"),
        (["."], "'.' cannot be read"),
        (["-m", "nowhere"], "there is no module 'nowhere'"),
        (["-m", "nowhere.inner"], "No module named 'nowhere'"),
        (["-m", "empty"], "'empty.__main__'"),
        (["-m", "breaks.inner"], "No module named 'missing'"),
        (["-m", ""], "module '' cannot be imported"),
        (["-m", "time"], "is no Python code"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(run_here, monkeypatch, tmp_path, capsys, words, complaint):
    for package, text in {"empty": "", "breaks": "import missing"}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run_here(*words) == 2
    message = capsys.readouterr().err
    assert message.startswith("gluon-parallel run: ") and message.count("\n") == 1
    assert complaint in message
