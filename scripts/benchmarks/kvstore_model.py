"""Predict how training scales to 8, 64 and 256 workers, from constants that are measured on two processes.

    python scripts/benchmarks/kvstore_model.py
    python scripts/benchmarks/kvstore_model.py --net lenet --network-bandwidth 25 --picture cost.png

What it prints says what was measured and what is assumed.
"""

from __future__ import annotations

import argparse
import signal
import sys

import kvstore
import rounds

import gluon_parallel as gp
import mxnet as mx

WORKERS = (2, 8, 64, 256)


def predict(options):
    """Predict the efficiency of 8, 64 and 256 workers from constants that are measured here, and draw it."""
    messages = {"GLUON_PARALLEL_SHARED_MEMORY": "0"}  # as between hosts
    with kvstore.Groups(mpi=kvstore.start("mpi", "exchanges", options, messages)) as groups:
        taken = {
            task: rounds.medians(groups, task, kvstore.REPEATS[task], options.rounds, kvstore.WARM_UP)["mpi"][0]
            for task in ("256 B", "pieces")
        }
    with kvstore.Groups(one=kvstore.start("one", options.net, options)) as groups:
        steps = kvstore.STEPS[options.net]
        step = rounds.medians(groups, options.net, steps, options.rounds, kvstore.WARM_UP)["one"][0]
    net = kvstore.network(options.net)[0]
    net.initialize()
    net(mx.nd.zeros((1, *kvstore.network(options.net)[1])))
    size = sum(4 * parameter.data().size for parameter in net.collect_params().values())
    latency, bandwidth = taken["256 B"], 4 * kvstore.VALUES / taken["pieces"]
    wire = min(bandwidth, options.network_bandwidth * 1e9 / 8)
    print(
        f"model: {options.net}, {size / 1e6:.1f} MB of gradients, {step * 1e3:.1f} ms of computing per step "
        f"({rounds.load()})\n"
        f"    measured: {latency * 1e6:.0f} us for a small exchange by messages, {bandwidth / 1e9:.2f} GB/s for 100 MB"
        "\n"
        f"    assumed: a network of {options.network_latency:g} us and {options.network_bandwidth:g} Gbit/s per host, "
        f"one worker per host, {options.hidden:.0%} of the\n    exchange hidden, equal workers, 1 us "
        "per message, no congestion; for ps one server per worker"
    )
    kinds = {"mpi": "mpi", "ring": "ring (Horovod)", "ps": "ps-lite"}
    table, exchange = {}, gp.kvstore.exchange_seconds
    for num in WORKERS:
        seconds = {
            kind: step
            + (1 - options.hidden) * exchange(num, size, latency + options.network_latency * 1e-6, wire, kind)
            for kind in kinds
        }
        table[num] = {kind: step / value for kind, value in seconds.items()}
        shown = "  ".join(f"{kinds[kind]} {value:6.1%}" for kind, value in table[num].items())
        print(f"    {num:4} workers: efficiency {shown}", flush=True)
    if options.picture:
        draw(options.picture, table, kinds, options)


def draw(path, table, kinds, options):
    """Efficiency against workers as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), constrained_layout=True)
    for kind, label in kinds.items():
        axes.plot(list(table), [row[kind] for row in table.values()], marker="o", label=label)
    axes.set(xscale="log", xticks=list(table), xticklabels=list(table), ylim=(0, 1.05), xlabel="workers",
             ylabel="efficiency (1 = linear)")  # fmt: skip
    axes.set_title(f"{options.net}, predicted from constants measured on one machine", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"    drawn in {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement (5)")
    parser.add_argument("--net", choices=list(kvstore.STEPS), default="resnet20", help="what is trained (resnet20)")
    parser.add_argument("--hidden", type=float, default=0.5, help="share of the exchange that is hidden (0.5)")
    parser.add_argument("--network-latency", type=float, default=25.0, help="microseconds (25)")
    parser.add_argument("--network-bandwidth", type=float, default=10.0, help="Gbit/s per host (10)")
    parser.add_argument("--picture", metavar="FILE.png", help="where the picture goes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the groups' end
    predict(options)


if __name__ == "__main__":
    main()
