"""What the processes of `notebook` run, as `python -m gluon_parallel.launch.notebook_process FOLDER`."""

import sys

from .in_notebook import call_in_process

if __name__ == "__main__":
    call_in_process(sys.argv[1])
