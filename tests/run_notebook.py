"""Run a notebook from top to bottom and write it with its outputs: run_notebook.py IN OUT SECONDS_PER_CELL.

A program of its own, because a kernel's client leaves sockets and threads to the end of its process.
"""

import sys
from pathlib import Path

import nbclient
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager


def main(source, target, seconds):
    folder = Path(target).parent
    specs = KernelSpecManager(kernel_dirs=[])  # no folder to look in, so "python3" is the interpreter that runs this
    manager = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=specs, connection_file=str(folder / "kernel.json")
    )
    notebook = nbformat.read(source, as_version=4)
    client = nbclient.NotebookClient(notebook, km=manager, timeout=int(seconds))
    try:
        client.execute(cwd=str(folder))
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        nbformat.write(notebook, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
