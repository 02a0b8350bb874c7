"""Prints the files and the number of functions of a steady step: ``python step_files.py DEVICES plain|sync STORE``."""

import sys
import threading
import warnings
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "gluon_parallel"
entered, called, is_on = set(), set(), threading.Event()
LATE = "wait_until", "default_timeout"  # where another process comes more than 0.1 s late, as on a busy machine
OF_LOOPS = "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"  # functions before Python 3.12 alone


def note(frame, event, _argument):
    # The thread that looks for lost processes does so every now and then, whatever the steps do.
    if event == "call" and is_on.is_set() and threading.current_thread().name != "gluon_parallel.mpi":
        path = Path(frame.f_code.co_filename)
        name, caller = frame.f_code.co_name, frame.f_back.f_code.co_name if frame.f_back else ""
        if PACKAGE in path.parents and name not in LATE and caller not in LATE:
            entered.add(str(path.relative_to(PACKAGE)))
            if name not in OF_LOOPS:
                called.add((path, frame.f_code.co_firstlineno))


threading.setprofile(note)  # before any thread of the package is there

import gluon_parallel as gp  # noqa: E402
import mxnet as mx  # noqa: E402

STEADY = 27  # the weights are looked at after updates 24 and 32, and read ten updates later


def main(num_devices, norm, store):
    devices = gp.devices(f"cpu:{num_devices}")
    store = gp.kvstore.create(store) if store != "none" else None
    net = mx.gluon.nn.HybridSequential()
    for _ in range(3):
        net.add(mx.gluon.nn.Dense(16, activation="relu", in_units=16))
        if norm == "sync":
            net.add(gp.nn.SyncBatchNorm(in_channels=16, kvstore=store))
    net.initialize(ctx=devices)
    net.hybridize()
    options = {"kvstore": store} if store else {}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, **options)
    parallel = gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
    warnings.filterwarnings("ignore", category=gp.errors.SeparateTraining)  # of equal batches
    x, y = mx.nd.random.uniform(shape=(8, 16)), mx.nd.arange(8)
    for _ in range(STEADY - 1):
        parallel.step(x, y)
    mx.nd.waitall()
    steps = []
    for _ in range(3):  # in one, a process may wait so long for another one that it looks at its limit
        entered.clear()
        called.clear()
        sys.setprofile(note)
        is_on.set()
        parallel.step(x, y)
        mx.nd.waitall()
        is_on.clear()
        sys.setprofile(None)
        steps.append((len(called), sorted(entered)))
    if store is None or store.rank == 0:
        num, files = min(steps)
        print("entered", *files)
        print("called", num)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
