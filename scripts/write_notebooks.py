"""Run the tutorials and write them as notebooks with outputs, which GitHub shows and Jupyter opens.

    python scripts/write_notebooks.py                               all of docs/tutorials, some minutes
    python scripts/write_notebooks.py docs/tutorials/1_*.py         these
    python scripts/write_notebooks.py --folder /tmp/mine            leave docs/tutorials as it is

An existing notebook is replaced, so take what you changed there back first: jupytext --to py:percent NOTEBOOK.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import jupytext
import nbclient
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from PIL import Image

TUTORIALS = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
HOW_TO_OPEN = """
GitHub and editors such as VS Code show them as they are. To run their cells in a browser:
    {install} jupyterlab
    {python} -m jupyter lab {folder}"""


def notebook(text):
    """The notebook of a text file, without outputs; its cells are named by their place, so that nothing is random."""
    made = jupytext.read(text)
    for index, cell in enumerate(made.cells):
        cell["id"] = f"cell-{index + 1}"
    nbformat.validate(made)
    return made


def run(made, seconds):
    """Fill in the outputs, with the interpreter that runs this, in a folder of its own.

    Returns:
        The names of the files that the notebook has left there.

    Raises:
        CellExecutionError: a cell failed.
        CellTimeoutError: a cell took longer than `seconds`.
    """
    specs = KernelSpecManager(kernel_dirs=[])  # no folder to look in, so "python3" is this interpreter
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
        manager = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=specs, connection_file=str(Path(own) / "kernel.json"),
            transport="ipc",
        )  # fmt: skip
        # On a busy machine a kernel begins late, and outputs come seconds after their cell has ended.
        client = nbclient.NotebookClient(
            made, km=manager, timeout=seconds, startup_timeout=600, iopub_timeout=300, record_timing=False
        )
        recorder = {"GLUON_PARALLEL_FLIGHT_RECORDER": own}  # tutorial 3 shows an error that writes the recorder's file
        client.execute(cwd=folder, cleanup_kc=True, env={**os.environ, **recorder})
        return sorted(path.name for path in Path(folder).iterdir())


def tidy(made):
    """Keep pictures in 64 colours, which makes them three times smaller, and no names of this machine."""
    folder, host = rf"{re.escape(tempfile.gettempdir())}/\w+", rf"\b{re.escape(socket.gethostname())}\b"
    for output in [output for cell in made.cells for output in cell.get("outputs", [])]:
        if "text" in output:
            output["text"] = re.sub(host, "this-host", re.sub(folder, "/tmp/folder", output["text"]))
        if "image/png" in output.get("data", {}):
            with Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"]))) as picture:
                smaller = io.BytesIO()
                picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(smaller, "PNG", optimize=True)
            output["data"]["image/png"] = base64.b64encode(smaller.getvalue()).decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, help="tutorials in their text form (default: all)")
    parser.add_argument("--folder", type=Path, help="where the notebooks go (default: beside their text)")
    parser.add_argument("--seconds", type=int, default=600, help="limit of each cell (default: 600)")
    options = parser.parse_args()
    folder = options.folder or TUTORIALS
    for text in options.texts or sorted(TUTORIALS.glob("*.py")):
        path = (options.folder or text.parent) / f"{text.stem}.ipynb"
        made = notebook(text)
        try:
            left = run(made, options.seconds)
        except nbclient.exceptions.CellControlSignal as error:  # a cell failed, or took too long
            sys.exit(f"{text}: {type(error).__name__}: {error}")
        if left:
            sys.exit(f"{text} has left files behind: {', '.join(left)}")
        tidy(made)
        nbformat.write(made, path)
        print(f"{path} ({path.stat().st_size / 1000:.0f} KB)", flush=True)
    has_pip = importlib.util.find_spec("pip") is not None  # an environment that uv made has none
    install = f"{sys.executable} -m pip install" if has_pip else f"uv pip install --python {sys.executable}"
    print(HOW_TO_OPEN.format(install=install, python=sys.executable, folder=folder))


if __name__ == "__main__":
    main()
