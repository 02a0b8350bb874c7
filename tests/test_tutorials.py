"""The tutorials run from top to bottom, and each notebook says what its text form says."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

HOUSE = Path(__file__).resolve().parents[1]
TUTORIALS = HOUSE / "docs" / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
TEXTS = sorted(TUTORIALS.glob("*.py"))
LIMIT = 240  # seconds, against hanging for ever; on two idle cores a notebook needs less than half a minute

LONG = ("2_one_step_many_devices", "4_processes_and_hosts", "6_faster_rcnn")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
run_each_notebook = pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else ()) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def run(path, folder, seconds_per_cell=LIMIT):
    """Run the notebook in a kernel of this interpreter; the notebook with its outputs, and what went wrong as text.

    The kernel works on this checkout, shows every warning, and keeps its own files in `folder`.
    """
    chosen = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOUSE), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "default",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # Jupyter's own way to show pictures
        "IPYTHONDIR": str(folder / "ipython"),
    }
    result = folder / "executed.ipynb"
    command = [sys.executable, str(HOUSE / "tests" / "run_notebook.py"), str(path), str(result), str(seconds_per_cell)]
    process = subprocess.Popen(
        command,
        env={**os.environ, **chosen},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT + 10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its kernel as well
        process.communicate()
        pytest.fail(f"{path.name} has not ended after {LIMIT + 10} s")
    return nbformat.read(result, as_version=4), said if process.returncode else ""


def written(notebook, stream):
    """What the cells have written to a stream, as (cell number, text)."""
    return [
        (number, output.text)
        for number, cell in enumerate(notebook.cells, start=1)
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == stream
    ]


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output for output in outputs if "image/png" in output.get("data", {})]


def test_every_tutorial_is_there_in_both_forms():
    assert TEXTS
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in TEXTS], "`make notebooks` writes them"


@each_notebook
def test_the_notebook_says_what_its_text_form_says(path):
    notebook = nbformat.read(path, as_version=4)
    assert cells(notebook) == cells(jupytext.read(path.with_suffix(".py"))), "one of them is older: `make notebooks`"


@each_notebook
def test_the_notebook_is_kept_without_outputs(path):
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells, start=1):
        kept = [name for name in ("outputs", "execution_count", "attachments") if cell.get(name)]
        assert not kept, f"cell {number} holds {kept}; `make notebooks` writes it without"


@run_each_notebook
def test_the_notebook_runs_from_top_to_bottom_without_a_warning(path, tmp_path):
    notebook, error = run(path, tmp_path)
    assert not error
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not written(notebook, "stderr")
    assert pictures(notebook), "a tutorial shows at least one picture"
    left = {file.name for file in tmp_path.iterdir()} - {"executed.ipynb", "ipython", "kernel.json"}
    assert not left, "a tutorial leaves no files behind"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import time; time.sleep(600)", "CellTimeoutError"),
        ("import warnings; warnings.warn('look here')", ""),
    ],
)
def test_a_cell_that_fails_or_hangs_or_warns_is_noticed(source, complaint, tmp_path):
    path = tmp_path / "one_cell.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    notebook, error = run(path, tmp_path, seconds_per_cell=5)
    assert bool(complaint) == bool(error)
    assert complaint in error
    assert error or "look here" in str(written(notebook, "stderr"))


def test_writing_a_notebook_twice_gives_the_same_bytes(tmp_path):
    place = importlib.util.spec_from_file_location("write_notebooks", HOUSE / "scripts" / "write_notebooks.py")
    script = importlib.util.module_from_spec(place)
    place.loader.exec_module(script)
    text = tmp_path / TEXTS[0].name
    text.write_bytes(TEXTS[0].read_bytes())
    results = []
    for _ in range(2):
        script.main([text])
        results.append(text.with_suffix(".ipynb").read_bytes())
    assert results[0] == results[1]
