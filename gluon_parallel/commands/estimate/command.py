"""The command `estimate`: its arguments, and its result as a table and as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from ...devices import read as read_devices
from ...errors import ConfigError
from ...kvstore.cost import PER_BYTE
from ...launch_engines import ENGINES
from ..named_function import FORM
from .exchange import cost, exchanged, parse_link
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
        "--shard_optimizer", action="store_true", help="each device keeps its part of the optimizer's state alone"
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
    is_sharded, meets_others = options.shard_optimizer, num > 1 and options.engine != "mpi"
    owners = devices * num if is_sharded else 1
    if is_sharded and (owners == 1 or meets_others):
        raise ConfigError(
            f"--shard_optimizer divides the state over the devices of one process, or of several over the engine mpi; "
            f"here are {num} of {devices} over {options.engine}"
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
    weights, words = trained(nodes, net), words_of_batch(nodes, net)
    if words and (is_sharded or meets_others):
        names = ", ".join(nodes[number].name for number in words)
        raise ConfigError(
            f"the gradient of {names} is row_sparse: --shard_optimizer cannot divide it, and gp.DataParallel sums it "
            "between processes over the engine mpi only; build the layer with sparse_grad=False"
        )
    memory = memory_of(nodes, net, optimizer, owners, devices * num)
    of_process = {number: bytes_of_rows(nodes[number], devices * count) for number, count in words.items()}
    step = exchanged(nodes, weights, of_process)
    buffers, rows, returned = temporary(nodes, kind, devices), 0, 0
    if kind == "cpu" and num > 1 and not meets_others:
        rows = shared_rows(nodes, [number for number in weights if number not in words], is_sharded)
        returned = devices * given_back(nodes, weights, optimizer, num) if is_sharded else 0
    gathered = step.gradients if is_sharded else 0  # of the weights
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
            rows.append(("gradients that are given back once sent", _mb(-of_process["given_back"])))
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
