"""Predict how training scales to 64, 256 and 1,024 hosts, from the package's cost model and a step measured here.

    python scripts/benchmarks/kvstore_model.py
    python scripts/benchmarks/kvstore_model.py --net lenet --network-bandwidth 25 --picture cost.png

Its constants were measured as docs/explanation/estimate.md says; kvstore_scaling.py compares them with the processor
time of this machine. What it prints says what is measured and what is assumed.
"""

from __future__ import annotations

import argparse
import signal
import sys

import kvstore
import rounds

import gluon_parallel as gp
import mxnet as mx

WORKERS = (2, 8, 64, 256, 1024)
BACKWARD = 2 / 3  # of a step's computing


def predict(options):
    """Predict the efficiency of so many workers from a step that is measured here, and draw it."""
    with kvstore.Groups(one=kvstore.start("one", options.net, options)) as groups:
        steps = kvstore.STEPS[options.net]
        step = rounds.medians(groups, options.net, steps, options.rounds, kvstore.WARM_UP)["one"][0]
    net = kvstore.network(options.net)[0]
    net.initialize()
    net(mx.nd.zeros((1, *kvstore.network(options.net)[1])))
    sizes = [4 * parameter.data().size for parameter in reversed(net.collect_params("^(?!.*running).*").values())]
    print(
        f"model: {options.net}, {sum(sizes) / 1e6:.1f} MB of gradients, {step * 1e3:.1f} ms of computing per step "
        f"({rounds.load()})\n"
        f"    assumed: a network of {options.network_latency:g} us and {options.network_bandwidth:g} Gbit/s per host, "
        f"one worker per host, sums during the\n    backward pass, two thirds of the step, equal workers, no "
        "congestion; for ps one server per worker"
    )
    kinds = {"mpi": "mpi", "ring": "ring (Horovod)", "ps": "ps-lite"}
    table, link = {}, (options.network_latency * 1e-6, options.network_bandwidth * 1e9 / 8)
    for num in WORKERS:
        remain = {kind: gp.kvstore.step_seconds(num, sizes, *link, kind, backward=BACKWARD * step) for kind in kinds}
        table[num] = {kind: step / (step + seconds) for kind, seconds in remain.items()}
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
    axes.set_title(f"{options.net}, predicted from a cost model", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"    drawn in {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement (5)")
    parser.add_argument("--net", choices=list(kvstore.STEPS), default="resnet20", help="what is trained (resnet20)")
    parser.add_argument("--network-latency", type=float, default=25.0, help="microseconds (25)")
    parser.add_argument("--network-bandwidth", type=float, default=10.0, help="Gbit/s per host (10)")
    parser.add_argument("--picture", metavar="FILE.png", help="where the picture goes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the groups' end
    predict(options)


if __name__ == "__main__":
    main()
