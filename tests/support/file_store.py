"""A store over files in a folder, as one file and one row of the table: ``python file_store.py`` trains over it.

Each process writes what it sends to a file of its own, and reads those of the others in the order of the ranks.
"""

import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np

from gluon_parallel import store_table
from gluon_parallel.kvstore.base import Store
from gluon_parallel.launch_engines import LaunchEngine
from gluon_parallel.mxnet.compat import mx

FOLDER = "FILE_STORE_FOLDER"


class Files(LaunchEngine):
    """Processes that find each other by the name of a folder, which all have in their environment."""

    kvstore, library = "files", "a folder"


class FileStore(Store):
    """Sums and broadcasts by files ``KEY.CALL.RANK.npy``."""

    type = "files"

    def __init__(self):
        self.rank, self.num_workers = (int(os.environ[f"GLUON_PARALLEL_{name}"]) for name in ("RANK", "NUM_WORKERS"))
        self._folder, self._calls = Path(os.environ[FOLDER]), {}
        self._open("a folder")

    def _exchange(self, key, own, wanted):
        """The arrays of the ranks `wanted`, when all of them have sent theirs."""
        call = next(self._calls.setdefault(key, itertools.count()))
        mine = self._folder / f"{key}.{call}.{self.rank}.npy"
        with mine.with_suffix(".new").open("wb") as file:
            np.save(file, own)
        mine.with_suffix(".new").rename(mine)
        paths = [self._folder / f"{key}.{call}.{rank}.npy" for rank in wanted]
        while not all(path.exists() for path in paths):
            time.sleep(0.001)
        return [np.load(path) for path in paths]

    def _broadcast(self, key, value, outs, priority):
        self._write(f"broadcast {key}", [value], outs, [0])

    def _sum(self, key, values, outs, priority):
        self._check(key, [*values, *outs])
        self._write(f"sum {key}", values, outs, range(self.num_workers))

    def _write(self, name, values, outs, wanted):
        own = sum(value.asnumpy() for value in values)  # it waits; a transport that is worth it does without
        total = mx.nd.array(sum(self._exchange(name, own, wanted)), dtype=own.dtype)
        for out in outs:
            total.copyto(out)


ROW = store_table.Row("file_store:FileStore", "files", "file_store:Files")


def main():
    import gluon_parallel as gp

    store = gp.kvstore.create("auto")
    net = mx.gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    step = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer)
    x = mx.nd.arange(10).reshape((5, 2))[store.rank :: store.num_workers] / 10
    for _ in range(3):
        step(x, x.sum(axis=1))
    gp.check_replicas(net, store)
    print("type", store.type, "weights", *net.weight.data(mx.cpu(1)).asnumpy().ravel().tolist())


if __name__ == "__main__":
    sys.modules["file_store"] = sys.modules["__main__"]
    store_table.STORES["files"] = ROW
    main()
