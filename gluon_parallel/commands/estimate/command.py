"""The command `estimate`: what a step exchanges, and the result as a table and as JSON."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np

from ...devices import read as read_devices
from ...errors import ConfigError
from ...kvstore import exchange_seconds
from ...kvstore.cost import PER_BYTE, statistics_seconds, step_seconds, times_sent
from ...launch_engines import ENGINES
from ...nn.sync_batch_norm.graph import MARK
from ..named_function import FORM
from .net import Input, load, trace
from .step_memory import (
    bytes_of_rows,
    given_back,
    make_optimizer,
    memory_of,
    shared_rows,
    temporary,
    trained,
    words_of_batch,
)  # fmt: skip

_LINK = "25us:10Gbit"


def configure(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("net", help=f"{FORM}; it returns a net, or (net, shapes of its inputs)")
    parser.add_argument(
        "--devices", default="cpu", help="of each process, such as cpu:2 or gpu:4; this machine need not have them"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="how many processes (1)")
    parser.add_argument("--batch_size", type=int, default=32, help="samples of all devices and processes together (32)")
    parser.add_argument(
        "--input", action="append", metavar="SHAPE",
        help="shape of one sample, such as 3,224,224, or int32:35 with a dtype; once for each of the net's inputs",
    )  # fmt: skip
    parser.add_argument("--optimizer", default="sgd", help="MXNet's name of the optimizer (sgd, with momentum)")
    parser.add_argument(
        "--shard_optimizer", action="store_true", help="each device keeps only its part of the optimizer's state (ZeRO)"
    )
    parser.add_argument("--engine", default="mpi", choices=list(ENGINES), help="how processes exchange (mpi)")
    parser.add_argument("--link", default=_LINK, help=f"latency and bandwidth between processes ({_LINK})")
    parser.add_argument("--json", action="store_true", help="the result as JSON")


def main(options: Any) -> None:
    """Print the estimate."""
    result = estimate(options)
    print(json.dumps(result, indent=2) if options.json else table(result))


def estimate(options: Any) -> dict[str, Any]:
    """The result as a dict: sizes in bytes, times in seconds."""
    for name in ("processes", "batch_size"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}, wanted a whole number above 0")
    link, optimizer, num = parse_link(options.link), make_optimizer(options.optimizer), options.processes
    automatic = options.devices.strip().lower() == "auto"
    kind, devices, numbers = read_devices("gpu" if automatic else options.devices)
    devices = len(numbers) if numbers is not None else devices or (1 if kind == "cpu" else None)
    if devices is None:  # as many as the machine has, which need not be this one
        raise ConfigError(f"--devices is {options.devices!r}; expected how many the training has: cpu:2 or gpu:4")
    is_sharded, other_engine = options.shard_optimizer, num > 1 and options.engine != "mpi"
    owners = devices * num if is_sharded else 1
    if is_sharded and (owners == 1 or other_engine):
        raise ConfigError(
            f"--shard_optimizer divides the state over the devices of one process, or of several over the engine mpi; "
            f"here: {num} x {devices} devices, {options.engine}"
        )
    if num == 1 and options.link != _LINK:
        raise ConfigError("--link is between processes, and there is one: add --processes 2 or more")
    net, inputs = load(options.net)
    if options.input:
        inputs = [Input.parse(text) for text in options.input]
    if not inputs:
        raise ConfigError("the shape of the net's input is not known: add --input 3,224,224, the shape of one sample")
    batch = math.ceil(options.batch_size / (devices * num))
    nodes = trace(net, inputs, batch)
    weights, lookups = trained(nodes, net), words_of_batch(nodes, net)
    if lookups and (is_sharded or other_engine):
        names = ", ".join(nodes[number].name for number in lookups)
        raise ConfigError(
            f"the gradient of {names} is row_sparse: --shard_optimizer cannot divide it, and gp.DataParallel sums it "
            "between processes over the engine mpi only; build the layer with sparse_grad=False"
        )
    memory = memory_of(nodes, net, optimizer, owners, devices * num)
    of_process = {number: bytes_of_rows(nodes[number], devices * count) for number, count in lookups.items()}
    step = exchanged(nodes, weights, of_process)
    buffers, rows, returned = temporary(nodes, kind, devices), 0, 0
    if kind == "cpu" and num > 1 and not other_engine:
        rows = shared_rows(nodes, [number for number in weights if number not in lookups], is_sharded)
        returned = devices * given_back(nodes, weights, optimizer, num) if is_sharded else 0
    gathered = step.gradients if is_sharded else 0  # weights, all-gathered
    sent, seconds = cost(step, num, link, ENGINES[options.engine].algorithm, gathered)
    return {
        "net": options.net,
        "devices": devices,
        "kind": kind,
        "processes": num,
        "batch_size": options.batch_size,
        "samples_per_device": batch,
        "memory_per_device": {**memory._asdict(), "total": memory.total},
        "memory_per_process": {
            "temporary": buffers,
            "shared": rows,
            "given_back": returned,
            "total": devices * memory.total + buffers + rows - returned,
        },
        "gradients": {"arrays": len(step.sizes) + len(step.rows), "bytes": step.gradients},
        "exchange": {
            "engine": options.engine,
            "link": options.link,
            "sent_by_each_device": round((devices - 1) / devices * (2 * step.gradients + gathered)),
            "sent_by_each_process": sent,
            "statistics": len(step.statistics),
            "seconds": seconds,
        },
    }


_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "state of the optimizer",
    "inputs": "inputs",
    "activations": "activations and their gradients, at most",
    "kept": "    kept for the backward pass",
    "total": "together",
}


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    devices, processes = result["devices"], result["processes"]
    of_device, of_process, exchange = (result[key] for key in ("memory_per_device", "memory_per_process", "exchange"))
    rows = [("memory of each device", "MB"), *((text, _mb(of_device[name])) for name, text in _ROWS.items())]
    if result["kind"] == "cpu":
        rows.append(("temporary buffers of a process", _mb(of_process["temporary"])))
        if of_process["shared"]:
            rows.append(("shared with the other processes, each", _mb(of_process["shared"])))
        if of_process["given_back"]:
            rows.append(("memory of gradients, freed once sent", _mb(-of_process["given_back"])))
        rows.append(("each process, with all of its devices", _mb(of_process["total"])))
    else:
        rows.append(("(without what cuDNN takes for its algorithms)", ""))
    gradients, statistics = result["gradients"], exchange["statistics"]
    rows += [("", ""), ("exchanged in each step", "MB")]
    rows.append((f"gradients, {gradients['arrays']} arrays", _mb(gradients["bytes"])))
    if devices > 1:
        rows.append(("sent by each device to the others", _mb(exchange["sent_by_each_device"])))
    if processes > 1:
        rows.append(("sent by each process to the others", _mb(exchange["sent_by_each_process"])))
        if statistics:
            rows.append((f"    with {statistics} exchanges of SyncBatchNorm", ""))
        seconds = f"{exchange['seconds'] * 1e3:,.2f} ms"
        rows.append((f"which takes over {exchange['link']}, {exchange['engine']}", seconds))
        if parse_link(exchange["link"])[1] > 1 / PER_BYTE:
            rows.append((f"(as over any faster link: processors add up only about {1e-9 / PER_BYTE:.1f} GB/s)", ""))
    many = f"{processes} process{'es' if processes > 1 else ''} of {devices} device{'s' if devices > 1 else ''}"
    head = f"{result['net']}: a batch of {result['batch_size']} on {many} ({result['kind']}), "
    lines = [f"{text:<44}{value:>10}".rstrip() for text, value in rows]
    return "\n".join([f"{head}{result['samples_per_device']} on each", "", *lines])


def _mb(size: int) -> str:
    if 0 < abs(size) < 1e4:  # of which three digits of MB show nothing
        return f"{size / 1e3:.3f} KB"
    return f"{size / 1e6:,.1f}" if abs(size) >= 10e6 else f"{size / 1e6:,.3f}"


_HEADER = 2  # numbers in front of a SyncBatchNorm layer's own


class Exchanged(NamedTuple):
    """Of one step."""

    sizes: list  # bytes of each gradient, in the order of the backward pass
    statistics: list  # bytes of each SyncBatchNorm layer's vectors, of both directions
    rows: list  # bytes of each row_sparse gradient of a process, which it sends to every other one

    @property
    def gradients(self):
        """Bytes of all gradients of a process."""
        return sum(self.sizes) + sum(self.rows)


def exchanged(nodes, weights, rows):
    """The :class:`Exchanged` of a traced net with these trained variables, of which `rows` has the row_sparse ones."""
    statistics = []
    for node in nodes:
        if MARK in node.attrs:
            (channels,) = nodes[node.inputs[1][0]].shapes[0]
            statistics += [8 * (_HEADER + 1 + 2 * channels), 8 * (_HEADER + 2 * channels)]
    dense = [nodes[number].sizes[0] for number in reversed(weights) if number not in rows]
    return Exchanged(dense, statistics, list(rows.values()))


def cost(step, num_workers, link, kind, gathered=0):
    """(bytes that a process, as a mean, sends to the others, seconds that this takes with nothing hidden) in a step.

    Args:
        step: an :class:`Exchanged`.
        link: (seconds of latency, bytes per second) of each process.
        kind: ``mpi``, ``ring`` or ``ps``.
        gathered: bytes of weights of which each process sends its part to all after the update.
    """
    if num_workers == 1:
        return 0, 0.0
    (latency, bandwidth), rows, share = link, sum(step.rows), times_sent(num_workers, kind)
    # A store that cannot gather sums vectors with a row for each process, of four float32 per float64.
    width = 1 if kind == "mpi" else 2 * num_workers
    times = num_workers - 1 if kind == "mpi" else share * width
    sent = share * sum(step.sizes) + (num_workers - 1) * rows + times * sum(step.statistics)
    seconds = step_seconds(num_workers, step.sizes, latency, bandwidth, kind)
    if gathered + rows:  # the second half of a sum
        seconds += exchange_seconds(num_workers, gathered + num_workers * rows, latency, bandwidth, kind) / 2
    for size in step.statistics:
        if kind == "mpi":
            seconds += statistics_seconds(num_workers, size, latency, bandwidth)
        else:
            seconds += exchange_seconds(num_workers, width * size, latency, bandwidth, kind)
    return round(sent + (num_workers - 1) / num_workers * gathered), seconds


def parse_link(text):
    """(seconds of latency, bytes per second) of a link."""
    latency, _, bandwidth = text.lower().partition(":")
    try:
        link = float(latency.removesuffix("us")) / 1e6, float(bandwidth.removesuffix("gbit")) * 1e9 / 8
    except ValueError:
        link = 0.0, 0.0
    if not (0 <= link[0] < np.inf and 0 < link[1] < np.inf):
        raise ConfigError(f"--link: {text!r}; expected a latency and a bandwidth such as 25us:10Gbit")
    return link
