"""Lose processes at random moments of a training, and compare the weights with those of an undisturbed one.

    python scripts/studies/lost_processes.py --net lenet --runs 50
    python scripts/studies/lost_processes.py --net resnet20 --runs 50 --processes 5 --losses 3 --own

Each run kills so many processes by SIGKILL, each one (process 0 too) at a random moment of a random step, at times two
at once. A line per run says which, the largest difference of a weight, and the longest time from a kill to the next
finished step, less two steps. The first line compares undisturbed trainings, with all processes and with one less.

ResNet-20 trains in float64. In float32, undisturbed trainings on 3 and on 4 processes already differ: an input of a
ReLU that is 0 to rounding has another sign after sums in another order, in nearly every step.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from gluoncv.model_zoo import cifar_resnet20_v1
from mxnet import gluon

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import rows

LARGEST = {"float32": 1e-5, "float64": 1e-12}  # difference of two weights after sums in another order
SAMPLES, BATCH, EPOCHS = 192, 24, 3
NUM_STEPS = EPOCHS * SAMPLES // BATCH


def lstm():
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(gluon.nn.HybridLambda(lambda F, x: F.reshape(x, (0, 16, 16))))
        net.add(gluon.rnn.LSTM(12, layout="NTC", input_size=16), gluon.nn.Dense(10, in_units=16 * 12))
    return net


def wide():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(1500, "relu", in_units=256), gluon.nn.Dense(2000, "relu", in_units=1500))  # 3, 24 MB
    net.add(gluon.nn.Dense(10, in_units=2000))
    return net


NETS = {  # name -> (net, shape of an image, type of weights)
    "lenet": (lambda: gp.models.LeNet(10, 1, (16, 16)), (1, 16, 16), "float32"),
    "resnet20": (cifar_resnet20_v1, (3, 32, 32), "float64"),
    "lstm": (lstm, (1, 16, 16), "float32"),
    "wide": (wide, (1, 16, 16), "float64"),
}


def train(name: str, dtype: str, is_own: bool, file: str, moments: dict[int, float]) -> None:
    """Train as one of several processes, which kills itself in the step that `moments` names for it."""
    mx.random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the generator that MXNet's initializers use)
    rng = np.random.default_rng(1)
    make_net, shape, _ = NETS[name]
    images = rng.standard_normal((SAMPLES, *shape)).astype(dtype)
    labels = rng.integers(0, 10, SAMPLES).astype(dtype)
    data = gluon.data.ArrayDataset(mx.nd.array(images, dtype=dtype), mx.nd.array(labels, dtype=dtype))
    net = make_net()
    net.cast(dtype)
    net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    loaders = gluon.data.DataLoader(data, BATCH, shuffle=True), gluon.data.DataLoader(data, 64)
    store = gp.kvstore.create("auto")
    if is_own:  # a loop of its own around gluon.Trainer
        gp.nn.convert_sync_batchnorm(net, kvstore=store)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9}, kvstore=store)

        def train_batch(x, y):
            with mx.autograd.record():
                value = loss(net(x), y)
            value.backward()
            trainer.step(BATCH)
            return value.mean()

        step, train_data, test_data = gp.survive(train_batch, net, trainer, *loaders)
        counts = step
    else:
        counts, train_data, test_data = gp.prepare(net, loss, trainer, *loaders, store=store, sync_batch_norm=True)
        step = counts.step
    rank, finished = store.rank, []
    moment, begin = moments.get(rank, 1e9), time.perf_counter()

    def end():
        Path(f"{file}.killed-{rank}").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(EPOCHS) if is_own else counts.epochs(EPOCHS):
        for x, y in train_data:
            if counts.num_steps >= moment // 1:
                delay = (moment % 1) * 2 * (time.perf_counter() - begin)  # also in what comes behind the step
                threading.Timer(delay, end).start()
                moment = 1e9
            begin = time.perf_counter()
            step(x, y)
            finished.append(time.time())
        [(_, accuracy)] = gp.evaluate(net, test_data, "acc", gp.devices("auto"), store)
        if not is_own:
            counts.end_epoch(accuracy=accuracy)
    if store.rank == 0:
        np.save(f"{file}.finished", finished)
        np.savez(file, **{name: one.data(one.list_ctx()[0]).asnumpy() for name, one in parameters(net).items()})


def parameters(net):
    return net._collect_params_with_prefix()


def difference(weights, expected) -> float:
    return max((np.abs(weights[name] - expected[name]).max() for name in weights), default=np.inf)


def pause(folder: Path) -> float:
    """The longest time in seconds from a kill to the next finished step, less two steps; and forget them."""
    pauses, finished = [], np.load(folder / "weights.npz.finished.npy")
    for path in folder.glob("weights.npz.killed-*"):
        killed = float(path.read_text())
        pauses += [min(finished[finished > killed] - killed, default=0.0) - 2 * np.median(np.diff(finished))]
        path.unlink()
    return max(pauses, default=0.0)


def launch(options, folder: Path, moments: dict[int, float], processes: int):
    """The weights that a training ends with, its launch's result, and its wall-clock time."""
    file, begin = folder / "weights.npz", time.perf_counter()
    file.unlink(missing_ok=True)
    words = ["--net", options.net, "--dtype", options.dtype, "--file", str(file), "--moments", repr(moments)]
    words += ["--own"] * options.own
    result = gp.launch.launch(
        __file__, words, processes, devices="cpu:1", timeout=options.timeout, logs=str(folder / "logs"),
        live=False, announces=options.verbose, min_processes=1,
    )  # fmt: skip
    weights = dict(np.load(file)) if file.exists() else {}
    return weights, result, time.perf_counter() - begin


def report(result, logs: Path) -> list[str]:
    """Why a launch has failed, and the ends of its logs."""
    ends = [log.read_text()[-2000:] for log in sorted(logs.glob("rank-*.log"))]
    return [f"status {result.exit_code}: {result.failure or 'no process has failed'}", *ends]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=list(NETS), default="lenet", help="what is trained (lenet)")
    parser.add_argument("--dtype", choices=list(LARGEST), help="of weights (float32, for resnet20 float64)")
    parser.add_argument("--own", action="store_true", help="a loop of its own around gluon.Trainer, with gp.survive")
    parser.add_argument("--runs", type=int, default=50, help="trainings that lose processes (50)")
    parser.add_argument("--processes", type=int, default=4, help="that begin (4)")
    parser.add_argument("--losses", type=int, default=1, help="processes that each run loses (1)")
    parser.add_argument("--seed", type=int, default=0, help="of who is lost, and when (0)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds, as of gluon-parallel launch (60)")
    parser.add_argument("--verbose", action="store_true", help="show what the launcher says")
    parser.add_argument("--file", help=argparse.SUPPRESS)  # of one process: where its weights go
    parser.add_argument("--moments", help=argparse.SUPPRESS)  # of one process: {number: step and part of it}
    rows.add_options(parser)
    options = parser.parse_args()
    if options.file:
        train(options.net, options.dtype, options.own, options.file, ast.literal_eval(options.moments))
        return 0
    chosen, good, pauses = random.Random(options.seed), 0, []
    options.dtype = options.dtype or NETS[options.net][2]
    with tempfile.TemporaryDirectory() as name:
        logs = Path(name) / "logs"
        undisturbed = []
        for processes in options.processes, options.processes - 1:
            weights, result, _ = launch(options, Path(name), {}, processes)
            if result.exit_code or not weights:
                print(f"the undisturbed training on {processes} processes has failed", *report(result, logs), sep="\n")
                return 1
            undisturbed.append(weights)
        expected, fewer = undisturbed
        print(f"undisturbed, with one process less: difference {difference(fewer, expected):.1e}", flush=True)
        for run in range(options.runs):
            victims = chosen.sample(range(options.processes), options.losses)
            moments = {rank: chosen.uniform(0, NUM_STEPS - 1) for rank in victims}
            if options.losses > 1 and chosen.random() < 0.3:
                moments[victims[1]] = moments[victims[0]]
            weights, result, seconds = launch(options, Path(name), moments, options.processes)
            found = difference(weights, expected)
            good += int(result.exit_code == 0 and found <= LARGEST[options.dtype])
            said = " ".join(f"{rank}@{moment:.2f}" for rank, moment in moments.items())
            pauses.append(pause(Path(name)) if weights else np.inf)
            print(
                f"{good} of {run + 1}: {said}: difference {found:.1e}, status {result.exit_code}, {seconds:.0f} s, "
                f"{pauses[-1]:.2f} s until a step"
            )
            if result.exit_code or found > LARGEST[options.dtype]:
                print(*report(result, logs), sep="\n----\n")
            for log in logs.glob("*.log"):
                log.unlink()
            sys.stdout.flush()
    part = f"{options.net}, {options.losses} of {options.processes} processes lost, {good} of {options.runs} runs right"
    name = "from the loss to the next step"
    rows.Rows(options).add(part, {name: pauses}, name, unit="s")
    return good != options.runs


if __name__ == "__main__":
    sys.exit(main())
