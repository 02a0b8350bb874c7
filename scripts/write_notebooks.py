"""Write the tutorials' text form as notebooks without outputs; the same text always gives the same notebook.

    python scripts/write_notebooks.py                               all of docs/tutorials
    python scripts/write_notebooks.py docs/tutorials/1_*.py         these

An existing notebook is replaced, so take what you changed there back first: jupytext --to py:percent NOTEBOOK.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat

TUTORIALS = Path(__file__).resolve().parent.parent / "docs" / "tutorials"


def notebook(text):
    """The notebook of a text file, without outputs; its cells are named by their place, so that nothing is random."""
    made = jupytext.read(text)
    for index, cell in enumerate(made.cells):
        cell["id"] = f"cell-{index + 1}"
    nbformat.validate(made)
    return made


def main(paths):
    for text in map(Path, paths) if paths else sorted(TUTORIALS.glob("*.py")):
        nbformat.write(notebook(text), text.with_suffix(".ipynb"))
        print(text.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
