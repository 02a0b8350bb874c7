"""Measure steps between two hosts with a limited network: exact sums, communication hooks, and other libraries.

    python scripts/benchmarks/limited_network.py                               with and without a limit
    python scripts/benchmarks/limited_network.py --rates 10000 --nets dense6   10 Gbit/s
    python scripts/benchmarks/limited_network.py --hooks exact --torch-python PYTHON --horovod-python PYTHON

The hosts are network namespaces of this machine, each with one process; Linux's token bucket filter (``tbf``) limits
what each one sends. It needs root, and ``ip`` and ``tc`` of iproute2. Both share the processor, so computing takes as
long as on one machine. They are compared with one process that trains on two devices, with as many samples. "No limit"
stands for a network that is much faster than the step.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import kvstore
import rounds
import rows

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import hosts

# horovodrun starts processes by ssh, with options before and behind the host's name.
SSH = """#!/bin/sh
while :; do
    case "$1" in
        -o | -p | -i) shift 2 ;;
        *) [ -z "$host" ] || break; host=$1; shift ;;
    esac
done
exec {shell} "$host" "$*"
"""
HOOKS = {
    "exact": lambda: None,
    "bfloat16": lambda: gp.communication_hooks.bfloat16,
    "PowerSGD": lambda: gp.communication_hooks.PowerSGD(rank=4, start_step=0),
}
PEERS = {"horovod": "horovod_python", "ddp": "torch_python"}
NAMES = {
    **kvstore.NAMES,
    "exact": "exact sums",
    "PowerSGD": "PowerSGD(rank=4)",
    "one": "one process, two devices",
}
RATES = {"lenet": (0, 100), "resnet20": (0, 100), "dense6": (0, 1000)}  # Mbit/s; 100 for dense6: 4 s a step


def worker(options):
    """The process of one host, or the one process without hosts."""
    for category in (gp.errors.SeparateTraining, gp.errors.StatisticsPerDevice):  # on purpose
        warnings.simplefilter("ignore", category)
    [name], [hook], devices = options.nets, options.hooks, gp.devices(options.devices)
    net, shape, num = kvstore.network(name)
    num *= len(devices)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True)
    store = gp.kvstore.create(options.store)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
    parallel = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, communication_hook=HOOKS[hook]())
    x, y = mx.nd.random.uniform(shape=(num, *shape)), mx.nd.arange(num) % 10

    def steps(times):
        for _ in range(times):
            parallel.step(x, y)
        mx.nd.waitall()

    rounds.serve(store.rank, {"step": steps})


def compare(net, rate, options, results):
    """Steps of one net with each hook, at `rate` Mbit/s; None: without a limit."""
    limit, work = f"{rate / 1000:g} Gbit/s" if rate else "no limit", kvstore.work(net)
    part, peers = f"{kvstore.TITLES[net]}, 2 hosts, {limit}", [name for name in PEERS if getattr(options, PEERS[name])]
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(2, rate) as made, rounds.started() as groups:
        for name in (*([] if peers else ["one"]), *options.hooks, *peers):
            groups[name] = start(name, net, made, Path(folder), options)
        for when, taken in rounds.early_and_late(groups, "step", options.quick):
            for hook in options.hooks:
                others = peers or ["one"] if hook == "exact" else ["exact"]
                results.add(part, taken, hook, others, names=NAMES, when=when, work=work)


def start(name, net, made, folder, options):
    """The group that is called `name`: a hook of the store mpi, another library, or one process."""
    me, env = [str(Path(__file__).resolve()), "--worker", "--nets", net], {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(rows.ROOT)
    if name == "one":
        return rounds.Group(name, [([sys.executable, *me, "--hooks", "exact", "--devices", "cpu:2"], {})], 1)
    if name == "ddp":
        commands = rounds.data_parallel_torch(options.torch_python, net, made.names[0], "cable")
        pairs = zip(made.names, commands)
        return rounds.Group(name, [([made.shell, host, shlex.join(argv)], env) for host, (argv, env) in pairs], 2)
    if name == "horovod":
        python, ssh, names = Path(options.horovod_python).absolute(), folder / "ssh", folder / "hosts"
        names.write_text("".join(f"{address} host-{number}\n" for number, address in enumerate(made.names)))
        for number in range(2):  # gloo looks up a host's own name
            made.run(number, ["mount", "--bind", str(names), "/etc/hosts"])
        ssh.write_text(SSH.format(shell=made.shell))
        ssh.chmod(0o755)
        env["PATH"] = f"{folder}:{os.environ['PATH']}"
        words = [str(python), "-m", "gluon_parallel", "run", str(python.with_name("horovodrun")), "--gloo", "-np", "2"]
        words += ["-H", ",".join(f"{host}:1" for host in made.names), "--network-interfaces", "cable", str(python)]
        words += [*me, "--hooks", "exact", "--devices", "cpu:1", "--store", "horovod"]
    else:
        launched = ["--devices", "cpu:1", "--quiet", "--logs", folder / name, *me, "--hooks", name]
        words = made.launching(1, *launched)
    return rounds.Group(name, [([made.shell, made.names[0], shlex.join(words)], env)], 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nets",
        nargs="+",
        choices=list(RATES),
        default=["resnet20", "dense6"],
        help="what is trained",
    )
    rates = "Mbit/s; 0: no limit (0 100 for lenet and resnet20, 0 1000 for dense6)"
    parser.add_argument("--rates", type=int, nargs="+", help=rates)
    parser.add_argument("--hooks", nargs="+", choices=list(HOOKS), default=list(HOOKS), help="beside exact sums")
    parser.add_argument("--horovod-python", help="a Python with Horovod, as scripts/make_horovod.sh makes one")
    parser.add_argument("--torch-python", help="a Python with PyTorch, for DistributedDataParallel over gloo")
    parser.add_argument("--store", default="mpi", help=argparse.SUPPRESS)
    parser.add_argument("--devices", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = rows.parse(parser, worker)
    options.hooks = list(dict.fromkeys(["exact", *options.hooks]))
    if why := hosts.why_none() or ("" if shutil.which("tc") else "tc is not there; install iproute2"):
        print(f"no hosts can be made here: {why}", file=sys.stderr)
        sys.exit(rows.NOT_HERE)
    results = rows.Rows(options)
    for net in options.nets:
        for rate in options.rates or RATES[net]:
            compare(net, rate or None, options, results)


if __name__ == "__main__":
    main()
