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
from .exchange import exchanged, over_link, parse_link, sent_by_each
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
    link, optimizer = parse_link(options.link), make_optimizer(options.optimizer)
    automatic = options.devices.strip().lower() == "auto"
    kind, devices, numbers = read_devices("gpu" if automatic else options.devices)
    if numbers is not None:
        devices = len(numbers)
    elif kind == "cpu":
        devices = devices or 1
    if devices is None:  # as many as the machine has, which need not be this one
        raise ConfigError(f"--devices is {options.devices!r}; expected how many the training has: cpu:2 or gpu:4")
    owners = devices * options.processes if options.shard_optimizer else 1
    if options.shard_optimizer and (owners == 1 or (options.processes > 1 and options.engine != "mpi")):
        raise ConfigError(
            f"--shard_optimizer divides the state over the devices of one process, or of several over the engine mpi; "
            f"here are {options.processes} of {devices} over {options.engine}"
        )
    if options.processes == 1 and options.link != _LINK:
        raise ConfigError("--link is between processes, and there is one: add --processes 2 or more")
    net, inputs = load(options.net)
    if options.input:
        inputs = [Input.parse(text) for text in options.input]
    if not inputs:
        raise ConfigError("the shape of the net's input is not known: add --input 3,224,224, the shape of one sample")
    batch = math.ceil(options.batch_size / (devices * options.processes))
    nodes = trace(net, inputs, batch)
    weights = trained(nodes, net)
    words = words_of_batch(nodes, net)
    if words and (options.shard_optimizer or (options.processes > 1 and options.engine != "mpi")):
        names = ", ".join(nodes[number].name for number in words)
        raise ConfigError(
            f"the gradient of {names} is row_sparse: --shard_optimizer cannot divide it, and gp.DataParallel sums it "
            "between processes over the engine mpi only; build the layer with sparse_grad=False"
        )
    memory = memory_of(nodes, net, optimizer, owners, devices * options.processes)
    of_process = {number: bytes_of_rows(nodes[number], devices * count) for number, count in words.items()}
    step = exchanged(nodes, weights, of_process)
    buffers, rows, returned = temporary(nodes, kind, devices), 0, 0
    if kind == "cpu" and options.processes > 1 and options.engine == "mpi":
        dense = [number for number in weights if number not in words]
        rows = shared_rows(nodes, dense, options.shard_optimizer)
        if options.shard_optimizer:
            returned = devices * given_back(nodes, weights, optimizer, options.processes)
    num, algorithm = options.processes, ENGINES[options.engine].algorithm
    gathered = step.gradients if options.shard_optimizer else 0  # of the weights
    gradients, statistics = sent_by_each(step, num, algorithm)
    of_weights = round((num - 1) / num * gathered)
    seconds = over_link(step, num, link, algorithm, gathered) if num > 1 else (0.0, 0.0)
    sent = round((devices - 1) / devices * (2 * step.gradients + gathered))
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
        "between_devices": {"sent_by_each": sent},
        "between_processes": {
            "engine": options.engine,
            "sent_by_each": gradients + of_weights + statistics,
            "of_it_weights": of_weights,
            "of_it_statistics": statistics,
            "statistics": len(step.statistics),
            "link": options.link,
            "gradients_seconds": seconds[0],
            "statistics_seconds": seconds[1],
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
    devices, processes, memory = result["devices"], result["processes"], result["memory_per_device"]
    many = f"{processes} process{'es' if processes > 1 else ''} of {devices} device{'s' if devices > 1 else ''}"
    lines = [
        f"{result['net']}: a batch of {result['batch_size']} on {many} ({result['kind']}), "
        f"{result['samples_per_device']} on each",
        "",
        f"{'memory of each device':<44}{'MB':>10}",
        *(f"{text:<44}{_mb(memory[name])}" for name, text in _ROWS.items()),
    ]
    if result["kind"] == "cpu":
        process = result["memory_per_process"]
        lines.append(f"{'temporary buffers of a process':<44}{_mb(process['temporary'])}")
        if process["shared"]:
            lines.append(f"{'shared with the other processes, each':<44}{_mb(process['shared'])}")
        if process["given_back"]:
            lines.append(f"{'gradients that are given back once sent':<44}{_mb(-process['given_back'])}")
        lines.append(f"{'each process, with all of its devices':<44}{_mb(process['total'])}")
    else:
        lines.append("(without what cuDNN takes for its algorithms)")
    between, gradients = result["between_processes"], result["gradients"]
    arrays = f"gradients, {gradients['arrays']} arrays"
    lines += ["", f"{'exchanged in each step':<44}{'MB':>10}", f"{arrays:<44}{_mb(gradients['bytes'])}"]
    for name, who, count in (("between_devices", "device", devices), ("between_processes", "process", processes)):
        if count > 1:
            lines.append(f"{f'sent by each {who} to the others':<44}{_mb(result[name]['sent_by_each'])}")
    if between["of_it_weights"]:
        lines.append(f"{'    for the weights of others':<44}{_mb(between['of_it_weights'])}")
    if processes > 1:
        parts = {"gradients": between["gradients_seconds"]}
        if between["statistics"]:
            share = f"    for {between['statistics']} exchanges of SyncBatchNorm"
            lines.append(f"{share:<44}{_mb(between['of_it_statistics'])}")
            parts["statistics of SyncBatchNorm"] = between["statistics_seconds"]
        lines += ["", f"{'taken over ' + between['link'] + ', ' + between['engine']:<44}{'ms':>10}"]
        lines += [f"{name:<44}{seconds * 1e3:10,.2f}" for name, seconds in parts.items()]
        if parse_link(between["link"])[1] > 1 / PER_BYTE:
            lines.append(f"(as over any faster link: processors add up only about {1e-9 / PER_BYTE:.1f} GB/s)")
    return "\n".join(lines)


def _mb(size: int) -> str:
    if 0 < abs(size) < 1e4:  # of which three digits of MB show nothing
        return f"{size / 1e3:7.3f} KB"
    return f"{size / 1e6:10,.1f}" if abs(size) >= 10e6 else f"{size / 1e6:10,.3f}"
