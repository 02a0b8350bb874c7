"""Each notebook has the cells of its text form and their outputs; `make docs` runs them all, and fails at a warning."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
WRITE = ROOT / "scripts" / "write_notebooks.py"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
TEXTS = sorted(TUTORIALS.glob("*.py"))
LIMIT = 1500  # seconds, against hanging for ever; on two idle cores a notebook needs less than half a minute

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def run(path, folder, seconds_per_cell=LIMIT):
    """Run the notebook in a kernel of this interpreter; the notebook with its outputs, and what went wrong as text.

    The kernel works on this checkout, shows every warning, and keeps its own files in `folder`.
    """
    chosen = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "default",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # Jupyter's own way to show pictures
        "IPYTHONDIR": str(folder / "ipython"),
    }
    command = [sys.executable, str(WRITE), str(path), "--folder", str(folder), "--seconds", str(seconds_per_cell)]
    process = subprocess.Popen(
        command, env={**os.environ, **chosen}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT + 10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its kernel as well
        process.communicate()
        pytest.fail(f"{path.name} has not ended after {LIMIT + 10} s")
    if process.returncode:
        return None, said
    assert "jupyter lab" in said
    return nbformat.read(folder / f"{path.stem}.ipynb", as_version=4), ""


def written(notebook, stream):
    """What the cells have written to a stream, as (cell number, text)."""
    return [
        (number, output.text)
        for number, cell in enumerate(notebook.cells, start=1)
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == stream
    ]


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_every_tutorial_is_there_in_both_forms():
    assert TEXTS
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in TEXTS], "`make notebooks` writes them"


@each_notebook
def test_the_notebook_says_what_its_text_form_says_with_outputs_small_and_without_names_of_a_machine(path):
    notebook = nbformat.read(path, as_version=4)
    assert cells(notebook) == cells(jupytext.read(path.with_suffix(".py"))), "one of them is older: `make notebooks`"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not written(notebook, "stderr")
    found = outputs(notebook)
    assert [one for one in found if "image/png" in one.get("data", {})], "a tutorial shows at least one picture"
    assert path.stat().st_size < 200_000
    texts = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in found]
    assert not re.findall(r"/(?:home|root|tmp|work|usr|var)/\S*", "\n".join(texts).replace("/tmp/folder/", ""))


@pytest.mark.parametrize(
    ("source", "complaint", "seconds"),
    [
        ("1 / 0", "ZeroDivisionError", LIMIT),
        ("import time; time.sleep(600)", "CellTimeoutError", 1),
        ("import warnings; warnings.warn('look here')", "", LIMIT),
        ("open('left.txt', 'w').close()", "has left files behind: left.txt", LIMIT),
    ],
)
def test_a_cell_that_fails_hangs_warns_or_leaves_files_is_noticed(source, complaint, seconds, tmp_path):
    path = tmp_path / "one_cell.py"
    path.write_text(f"# %%\n{source}\n")
    notebook, error = run(path, tmp_path, seconds)
    assert bool(complaint) == bool(error)
    assert complaint in error
    assert error or "look here" in str(written(notebook, "stderr"))


def test_making_a_notebook_twice_gives_the_same():
    script = runpy.run_path(str(WRITE))
    assert script["notebook"](TEXTS[0]) == script["notebook"](TEXTS[0])
