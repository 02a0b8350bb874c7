"""A training whose processes end at chosen steps, while others join in their place."""

import contextlib
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import launcher
from gluon_parallel.environment import joins
from gluon_parallel.kvstore.mpi import pmix
from gluon_parallel.kvstore.mpi.store import MPI
from gluon_parallel.survive import meeting
from mxnet import gluon

collective = sys.modules["gluon_parallel.kvstore.collective"]  # its name in the package is that of a function
SAMPLES, BATCH = 24, 6
NUM_WORKERS = int(os.environ.get("GLUON_PARALLEL_NUM_WORKERS", 1))


def make_net(units=5, has_shapes=True):
    """A net that knows its shapes, or gets them with its first batch."""
    mx.random.seed(3)
    net = gluon.nn.HybridSequential()
    hidden = units if has_shapes else 0
    net.add(gluon.nn.Dense(units, activation="tanh", in_units=3 * has_shapes), gluon.nn.BatchNorm(in_channels=hidden))
    net.add(gluon.nn.Dense(2, in_units=hidden))
    net.cast("float64")
    net.initialize(mx.init.Xavier())
    return net


def make_data():
    random = np.random.default_rng(1)
    arrays = random.standard_normal((SAMPLES, 3)), random.integers(0, 2, SAMPLES).astype("float64")
    return gluon.data.ArrayDataset(*(mx.nd.array(array, dtype="float64") for array in arrays))


def weights_of(net):
    return {name: one.data().asnumpy() for name, one in net._collect_params_with_prefix().items()}


def known():
    """The processes of other jobs whose addresses PMIx has here, without a word to mpirun."""
    if not pmix.process_names:
        return []  # this process is alone, and may have no library of PMIx
    library = ctypes.CDLL(pmix._LIBRARY)
    only_here = pmix._info(library, b"pmix.optional", ctypes.byref(ctypes.c_bool(True)), pmix._BOOL)
    found = []
    for number, (job, rank) in pmix.process_names.items():
        one, value = pmix._Process(job.encode(), rank), ctypes.c_void_p()
        arguments = ctypes.byref(one), pmix._KEY, only_here, ctypes.c_size_t(1), ctypes.byref(value)
        if job != pmix.own_process_name()[0] and library.PMIx_Get(*arguments) == 0:
            found.append(number)
    return sorted(found)


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def own_stub():
    """The processes that stand for this one under mpirun: the one that it has started, and that one's child."""
    job, rank = pmix.own_process_name()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (path / "environ").read_bytes().split(b"\0")
            is_stub = (path / "cmdline").read_bytes().endswith(b"agent.py\0stub\0")
            if is_stub and {f"PMIX_NAMESPACE={job}".encode(), f"PMIX_RANK={rank}".encode()} <= {*variables}:
                found.append(int(path.name))
    return sorted(found, key=lambda process: parent_of(process) in found)


class Orders:
    """What is to happen to which process, in words ``number:moment:what``.

    A moment is a number of steps, or of a process that joins ``begin`` (before gp.prepare), ``ready`` (it waits to be
    met), ``exchange`` (it is killed when MPI in it is about to publish the key that stands in the place of what
    happens, and process 0 waits for that) or ``met`` (MPI has), or of others ``meet``,
    ``meet+5`` (5 ms after it begins to meet a new one), ``connect`` (all that train meet it), ``connected`` (MPI has),
    ``state2`` (the third part of the state is on its way to it) or ``lost3`` (this one hears that process 3 is lost).
    What happens is an ``error``, a signal, ``sleep``, ``host`` (it waits until its host is lost), ``late`` (a second
    passes), ``mpirun`` (that is killed), ``stub`` (its stub under mpirun is), at the beginning ``net``, ``mark`` (it
    makes the file MARK), or, when MPI in it has the names of those that meet, ``IN_CONNECT=ends`` (it is killed, and
    mpirun is stopped for 15 s) or ``IN_CONNECT=late`` (a second passes). With the word ``unwatched``, nothing ends a
    meeting that MPI does not end.
    """

    def __init__(self, words):
        self.number = int(os.environ.get("GLUON_PARALLEL_RANK", 0))
        mine = [word.split(":") for word in words if ":" in word]
        self._mine = {moment: what for number, moment, what in mine if int(number) == self.number}
        moments = [moment for moment in self._mine if moment.startswith("meet")]
        if moments:
            connect, self._delay = meeting.connect, float(moments[0].partition("+")[2] or 0) / 1e3
            meeting.connect = lambda *arguments: [self.meet(moments[0]), connect(*arguments)][1]
        connected = meeting._connected
        meeting._connected = lambda *arguments: [self.at("connect"), connected(*arguments), self.at("connected")][1]
        send_part, self._num_parts = MPI.broadcast_bytes, itertools.count()
        MPI.broadcast_bytes = lambda *arguments: [self.at(f"state{next(self._num_parts)}"), send_part(*arguments)][1]
        if any("state" in word for word in words):
            collective._MOST_BYTES = 1000
        if "exchange" in self._mine:
            os.environ["ENDS_AT_KEY"] = self._mine["exchange"]
        if "FAULTS" in os.environ:
            ctypes.CDLL(os.environ["FAULTS"], ctypes.RTLD_GLOBAL)
        if "unwatched" in words:
            meeting._end_if_held = lambda *_: None
        merged, tell, send = meeting._merged, pmix._tell_mpi, launcher.send
        launcher.send = lambda text: [send(text), text.startswith(launcher.READY) and self.at("ready")][0]
        meeting._merged = lambda *arguments, **named: [self.at("met"), merged(*arguments, **named)][1]
        pmix._tell_mpi = lambda library, number: [self.at(f"lost{number}"), tell(library, number)][1]

    def at(self, moment):
        what = self._mine.pop(str(moment), "")
        if what.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what in ("sleep", "host"):
            print(f"waits at {moment}", flush=True)
            time.sleep(1000)
        elif what == "error":
            raise OSError(f"an error at {moment}")
        elif what == "late":
            time.sleep(1)
        elif what.startswith("IN_CONNECT"):
            os.environ.update([what.split("=")])
            mpirun = parent_of(own_stub()[0])
            os.environ["MPIRUN"] = str(mpirun)
            threading.Timer(15, os.kill, [mpirun, signal.SIGCONT]).start()  # MPI may not hold anyone that long
        elif what == "mpirun":
            os.kill(parent_of(own_stub()[0]), signal.SIGKILL)
        elif what == "mark":
            Path(os.environ["MARK"]).touch()
        elif what == "stub":
            os.kill(own_stub()[1], signal.SIGKILL)  # the other one follows
            time.sleep(1000)  # until the launcher ends it
        return what

    def meet(self, moment):
        threading.Timer(self._delay, self.at, [moment]).start() if self._delay else self.at(moment)


def main(file, folder, kind, epochs, *words):
    orders = Orders(words)
    is_other = joins() is not None and orders.at("begin") == "net"
    net, data, epochs = make_net(6 if is_other else 5, "unshaped" not in words), make_data(), int(epochs)
    store = gp.kvstore.create("auto")
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=store)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    train = gluon.data.DataLoader(data, BATCH, shuffle=True)
    run = gp.Run(folder, log_every=1)  # so that a row of a step waits to be written whenever a process joins
    average = gp.ExponentialMovingAverage(net, decay=0.9)
    if kind == "prepare":
        training, train = gp.prepare(
            net, loss, trainer, train, store=store, sync_batch_norm=True, run=run, saved={"average": average}
        )
        step, loop = training.step, training.epochs(epochs)
    else:
        gp.nn.convert_sync_batchnorm(net, kvstore=store)
        parallel = gp.DataParallel(net, loss, trainer)
        training, train = gp.survive(parallel.step, net, trainer, train)
        step, loop = training, range(epochs) if kind == "range" else training.epochs(epochs)
    print(f"begins at step {training.num_steps}", flush=True)
    sizes = []
    for _ in loop:
        for x, y in train:
            orders.at(training.num_steps)
            step(x, y)
            if kind == "prepare":
                average.update()
            sizes.append(store.num_workers)
            # So that a process has the time to start before the training ends
            time.sleep(0.1 if "slow" in words else 0.3 * (store.num_workers < NUM_WORKERS))
        if kind == "prepare":
            training.end_epoch(score=0.5)
    gp.check_replicas(net, store)
    print(f"ends with {store.num_workers} processes, addresses of {known()} are known", flush=True)
    if store.rank == 0:
        weights = weights_of(net)
        if kind == "prepare":
            with average.applied():
                weights.update({f"average {name}": array for name, array in weights_of(net).items()})
        np.savez(file, **weights)
        Path(file + ".sizes").write_text(repr(sizes))


if __name__ == "__main__":
    main(*sys.argv[1:])
