"""A process that runs random trainings: ``python trainings_worker.py SOCKET``, alone or as one of a group of mpirun.

It sends its rank to the socket, then for each line, a case and a folder, a line with the outcome; see `trainings_pool`.
A worker of MXNet's servers is given a case in the socket's place, and prints the outcome.
"""

import contextlib
import json
import os
import socket
import sys

import trainings_compare
from trainings_case import Case

import gluon_parallel as gp


def main(path):
    """Answer until the other end closes."""
    if "DMLC_ROLE" in os.environ:
        case = Case.read(path)
        store = gp.kvstore.create(case.store)  # MXNet ends the servers with the first one
        print(*trainings_compare.run(case, store.rank))
        return
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        gp.kvstore.create("mpi")
    with socket.socket(socket.AF_UNIX) as connection, open(os.devnull, "w", encoding="utf-8") as nowhere:
        connection.connect(path)
        with connection.makefile("rw", encoding="utf-8") as stream:
            print(rank, file=stream, flush=True)
            for line in stream:
                text, folder = json.loads(line)
                with contextlib.redirect_stdout(nowhere):
                    outcome = trainings_compare.run(Case.read(text), rank, folder)
                print(json.dumps(outcome), file=stream, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
