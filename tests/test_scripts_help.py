"""Every script says what it does and explains its options, before it does anything."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The others are modules of benchmarks.
SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").rglob("*.py"))
    if "__main__" in path.read_text() or path.parent.name == "scripts" and "parse_args" in path.read_text()
]


def unexplained(text):
    """The options and arguments in a ``--help`` that nothing is said about.

    Example:
        >>> unexplained("\\noptions:\\n  --json FILE  where to\\n  --epochs N\\n  --lr LR\\n         learning rate")
        ['--epochs N']
    """
    entries: list[list[str]] = []
    for line in text.partition("\noptions:\n")[2].splitlines():
        if line.startswith("  ") and line[2:3].strip():
            entries.append([line])
        elif line.strip() and entries:
            entries[-1].append(line)
    return [entry[0].strip() for entry in entries if len(entry) == 1 and "  " not in entry[0].strip()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_answers_help(path, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    if "import gluoncv" in path.read_text() or "from gluoncv" in path.read_text():
        pytest.importorskip("gluoncv")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert not list(tmp_path.iterdir())
    first = path.read_text().split('"""')[1].splitlines()[0]
    assert first.endswith((".", ":")) and first in " ".join(said.split()), said
    assert not unexplained(said), said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("make_venv.sh", ["Make .venv and install what gluon_parallel needs", "UV="]),
        ("make_horovod.sh", ["Build Horovod 0.28.1 for MXNet 1.9.1", "PYTHON=", "g++"]),
    ],
)
def test_an_installer_answers_help_and_installs_nothing(tmp_path, name, words):
    command = ["sh", str(ROOT / "scripts" / name), "--help"]
    done = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", "VENV": str(tmp_path / "venv")}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith(words[0])
    assert all(word in done.stdout for word in words) and "stop" not in done.stdout
    assert not list(tmp_path.iterdir())
