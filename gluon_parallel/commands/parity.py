"""Command `parity`: train the same steps on one device, several devices and several processes, and compare."""

from typing import Any, NamedTuple, Optional

import numpy as np

from .. import bounds, kvstore
from ..devices import devices as parse_devices
from ..errors import ConfigError, GluonParallelError, WorkerFailed
from ..launch.in_notebook import call_in_processes
from ..mxnet.blocks import parameters_by_structure
from ..mxnet.compat import mx
from ..mxnet.parameters import waits_for_shape
from ..nn import SyncBatchNorm
from ..pipeline import Pipeline
from ..step import DataParallel
from ..store_table import launch_engines
from ..training.seeding import reseed
from .named_function import FORM, call

_MOST = 1_000_000  # steps, samples of a step, ...
_TAKES = "the function takes a store, and returns a net that is not initialized, a loss, and (num, rng) -> (x, y)"


class Task(NamedTuple):
    """What is trained: a net that is not yet initialised, a Gluon loss, and ``batch(num, rng) -> (x, y)`` in NumPy."""

    net: Any
    loss: Any
    batch: Any


class Setup(NamedTuple):
    """The steps, the same in every run."""

    net: str
    steps: int
    batch_size: int
    accumulate: int
    dtype: str
    seed: int
    stages: int = 1  # of a pipeline; 1 for none
    micro_batches: int = 1  # of each replica of the pipeline


def _convolutions(normalise):
    """A small net of two convolutions; ``normalise(channels)`` gives the layers behind each."""
    nn, net = mx.gluon.nn, mx.gluon.nn.HybridSequential()
    for in_channels, channels in ((2, 6), (6, 4)):
        net.add(nn.Conv2D(channels, 3, in_channels=in_channels), *normalise(channels), nn.Activation("tanh"))
    net.add(nn.Dense(5, in_units=4 * 16))

    def batch(num, rng):
        return rng.random((num, 2, 8, 8)) + 3, rng.integers(0, 5, num)

    return Task(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), batch)


# Functions of a store, through which only the layers of the second net meet others.
NETS = {
    "plain": lambda store: _convolutions(lambda channels: []),
    "sync_batch_norm": lambda store: _convolutions(lambda width: [SyncBatchNorm(in_channels=width, kvstore=store)]),
}


def make(name, store):
    """The task called `name`: one of :data:`NETS`, or a function as in :data:`.FORM`."""
    if name in NETS:
        return NETS[name](store)
    if ":" not in name:
        raise ConfigError(f"--net is {name!r}; expected one of {', '.join(NETS)}, or {FORM}")
    try:
        made = call(name, store)
    except ConfigError as error:
        raise ConfigError(f"{error} (--net: {_TAKES})") from error
    if not isinstance(made, tuple) or len(made) != 3:
        raise ConfigError(f"{name} returns {type(made).__name__} (--net: {_TAKES})")
    return Task(*made)


def shard_slice(num, rank, num_workers, step):
    """The samples of one process in a batch: unequal parts, and in every third step none for the last process."""
    takers = num_workers - 1 if num_workers > 1 and step % 3 == 2 else num_workers
    if rank >= takers:
        return slice(num, num)
    weights = np.arange(takers + 1, 1, -1)
    bounds = [0, *np.rint(np.cumsum(weights) / weights.sum() * num).astype(int).tolist()]
    return slice(bounds[rank], bounds[rank + 1])


def train(setup: Setup, devices, store=None) -> dict[str, np.ndarray]:
    """Train the setup's steps on these devices, with the other processes of `store`, or alone without one.

    Returns:
        The value of each parameter, running statistics too; where a device differs from the first, its own as well,
        under another name.
    """
    rank, num_workers = (0, 1) if store is None else (store.rank, store.num_workers)
    task = make(setup.net, store)
    reseed(setup.seed + rank)
    task.net.initialize(mx.init.Xavier(), ctx=devices if setup.stages == 1 else devices[:1])
    task.net.cast(setup.dtype)
    _set_weights(task, np.random.default_rng([setup.seed, rank]), devices[0], setup.dtype)
    task.net.hybridize()
    step = _stepper(setup, task, devices, store)
    rng = np.random.default_rng(setup.seed)
    for number in range(setup.steps * setup.accumulate):
        x, y = task.batch(setup.batch_size, rng)
        mine = shard_slice(len(x), rank, num_workers, number)
        if mine.stop > mine.start:
            step(mx.nd.array(x[mine], dtype=setup.dtype), mx.nd.array(y[mine], dtype=setup.dtype))
        else:
            step(None)
    values = {}
    for name, parameter in parameters_by_structure(task.net).items():
        copies = [array.asnumpy() for array in parameter.list_data()]
        values[name] = copies[0]
        for device, copy in zip(parameter.list_ctx()[1:], copies[1:]):
            if not np.array_equal(copy, copies[0]):
                values[f"{name} on {device}"] = copy
    return values


def _stepper(setup, task, devices, store):
    """The function of a batch that makes a step."""
    optimizer = {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3}
    options = {"kvstore": store or "device", "update_on_kvstore": False}
    if setup.stages == 1:
        trainer = mx.gluon.Trainer(task.net.collect_params(), "sgd", optimizer, **options)
        return DataParallel(task.net, task.loss, trainer, devices, accumulate=setup.accumulate)
    replicas = [devices[begin : begin + setup.stages] for begin in range(0, len(devices), setup.stages)]
    pipe = Pipeline(task.net, replicas, setup.micro_batches, accumulate=setup.accumulate)
    trainer = mx.gluon.Trainer(pipe.collect_params(), "sgd", optimizer, **options)
    return lambda *batch: pipe.step(task.loss, trainer, *batch)


def _set_weights(task, rng, device, dtype):
    """Draw the weights with NumPy; on every process others, for those of rank 0 must win.

    What MXNet draws on a CPU depends on its number of threads, which is not the same in every run.
    """
    if any(waits_for_shape(parameter) for parameter in task.net.collect_params().values()):
        with mx.autograd.pause():
            task.net(mx.nd.array(task.batch(1, np.random.default_rng(0))[0], ctx=device, dtype=dtype))
    for parameter in parameters_by_structure(task.net).values():
        if len(parameter.shape) > 1:
            bound = np.sqrt(3 / np.prod(parameter.shape[1:]))
            parameter.set_data(mx.nd.array(rng.uniform(-bound, bound, parameter.shape), dtype=dtype))


def train_processes(setup: Setup, devices: str, processes: int, engine: str, timeout: float) -> list[dict]:
    """The same in several processes; returns each one's parameters, or raises what a process that failed said."""
    try:
        arguments = (setup, devices, launch_engines()[engine].kvstore)
        return call_in_processes(_train_in_process, arguments, processes, None, engine, timeout, live=False)
    except WorkerFailed as error:
        raise GluonParallelError(f"the {processes} processes failed:\n{error}") from error


def _train_in_process(setup: Setup, devices: str, store: str) -> dict[str, np.ndarray]:
    contexts = parse_devices(devices)  # before anything is computed
    return train(setup, contexts, kvstore.create(store))


def differences(results: list[dict], reference: dict) -> dict[str, float]:
    """The largest difference per parameter in any of the results, as a share of that parameter's largest value.

    Example:
        >>> differences([{"w": np.array([1.0, 2.5])}, {"w": np.array([1.0, 2.0])}], {"w": np.array([1.0, 2.0])})
        {'w': 0.25}
    """
    found: dict[str, float] = {}
    for values in results:
        for name, value in values.items():
            wanted = reference[name.partition(" on ")[0]]
            share = np.abs(value - wanted).max() / max(np.abs(wanted).max(), 1e-3)
            found[name] = float(np.maximum(found.get(name, 0.0), share))  # which keeps NaN
    return found


def configure(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--devices", default="2", help="devices of each process: 2, cpu:2 or gpu:2 (2)")
    parser.add_argument(
        "--processes", type=bounds.flag, default=2, help="how many processes (2); 1 compares devices alone"
    )
    parser.add_argument("--engine", default="mpi", choices=list(launch_engines()), help="how they meet (mpi)")
    known = f"{', '.join(NETS)} (sync_batch_norm), or {FORM}"
    parser.add_argument("--net", default="sync_batch_norm", help=f"{known}; {_TAKES}")
    parser.add_argument("--steps", type=bounds.flag, default=6, help="updates (6)")
    parser.add_argument("--batch_size", type=bounds.flag, default=14, help="samples of all processes together (14)")
    parser.add_argument("--accumulate", type=bounds.flag, default=1, help="batches per update (1)")
    parser.add_argument(
        "--stages", type=bounds.flag, default=1, help="of a pipeline, whose replicas share the devices (1: none)"
    )
    parser.add_argument("--micro_batches", type=bounds.flag, default=2, help="of each replica of the pipeline (2)")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"], help="float64 tells most")
    parser.add_argument("--seed", type=bounds.flag, default=0)
    parser.add_argument(
        "--tolerance", type=float, help="largest relative difference (1e-6; 1e-3 for float32 and over ps)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that processes wait for each other (60)")


def _check(options: Any) -> None:
    most = {"processes": bounds.PROCESSES, "stages": bounds.DEVICES}
    for name in ("processes", "steps", "batch_size", "accumulate", "stages", "micro_batches"):
        bounds.whole(f"--{name}", getattr(options, name), 1, most.get(name, _MOST), ConfigError)
    bounds.whole("--seed", options.seed, 0, error=ConfigError)
    if not options.timeout > 0:
        raise ConfigError(f"--timeout is {options.timeout}, wanted a number of seconds above 0")
    if options.tolerance is not None and not options.tolerance >= 0:
        raise ConfigError(f"--tolerance is {options.tolerance}, wanted a number, 0 or above")


def main(options: Any) -> int:
    """Compare the runs, with one process the devices alone; returns 0, or 1 if a difference is above the tolerance.

    GluonParallelError: nothing could be compared.
    """
    spec = f"cpu:{options.devices}" if options.devices.isdigit() else options.devices
    setup = Setup(*(getattr(options, name) for name in Setup._fields))
    tolerance: Optional[float] = options.tolerance
    if tolerance is None:
        exact = setup.dtype == "float64" and (launch_engines()[options.engine].keeps_float64 or options.processes == 1)
        tolerance = 1e-6 if exact else 1e-3
    _check(options)
    contexts = parse_devices(spec)
    if len(contexts) % setup.stages:
        raise ConfigError(f"--devices {options.devices} with --stages {setup.stages}: wanted a multiple of the stages")
    reference = train(setup._replace(stages=1), contexts[:1])
    runs = {f"{len(contexts)} x 1": [train(setup, contexts)]}
    if options.processes > 1:
        several = train_processes(setup, spec, options.processes, options.engine, options.timeout)
        runs[f"{len(contexts)} x {options.processes}"] = several
    found = {run: differences(results, reference) for run, results in runs.items()}
    names = sorted({name for shares in found.values() for name in shares})
    width = max(map(len, names))
    print(f"{setup.net}: {setup.steps} updates of {setup.batch_size * setup.accumulate} samples, in {setup.dtype}")
    print(f"{'largest difference from 1 x 1':{width}}  {'  '.join(f'{run:>9}' for run in found)}")
    for name in names:
        print(f"{name:{width}}  {'  '.join(f'{shares.get(name, 0.0):9.1e}' for shares in found.values())}")
    worst = np.max([share for shares in found.values() for share in shares.values()])
    good = bool(worst <= tolerance)  # also false for NaN
    print(f"{'equal' if good else 'DIFFERENT'}: {worst:.1e}, tolerance {tolerance:.0e}")
    return 0 if good else 1
