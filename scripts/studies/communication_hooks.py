"""What compression of gradients between two processes saves, costs and does to the accuracy: three nets, several seeds.

    python scripts/studies/communication_hooks.py                              all of the table
    python scripts/studies/communication_hooks.py --nets resnet20 --hooks none power_sgd --seeds 0
    unshare -n sh -c 'ip link set lo up; python scripts/studies/communication_hooks.py'      as root: counts exactly

Two processes of this machine take each other for other hosts: they exchange over the loopback interface, whose bytes
are counted; in a network namespace of their own they are the only ones there. Runs are added to
communication_hooks.jsonl in --output, and those that are there are not repeated. Accuracies are the last epoch's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

CH = gp.communication_hooks
SEEDS, EXCHANGES = (0, 1, 2), 60
THRESHOLDS = {"lenet": 0.02, "resnet20": 0.02, "lstm": 0.005}  # of 2 bits: of a process's sums
EPOCHS = {"lenet": 12, "resnet20": 16, "lstm": 9}
UPDATES = {"lenet": 276, "resnet20": 800, "lstm": 792}  # of all epochs
# The first one of so many parts of all updates is not compressed.
PARTS = {"power_sgd": 32, "power_sgd_later": 10}
HOOKS = {
    "none": lambda net: None,
    "float16": lambda net: CH.float16,
    "bfloat16": lambda net: CH.bfloat16,
    "two_bits": lambda net: CH.two_bits(THRESHOLDS[net]),
    "power_sgd": lambda net: CH.PowerSGD(rank=4, start_step=UPDATES[net] // PARTS["power_sgd"]),
    "power_sgd_later": lambda net: CH.PowerSGD(rank=4, start_step=UPDATES[net] // PARTS["power_sgd_later"]),
}
NAMES = {
    "none": "none", "float16": "`float16`", "bfloat16": "`bfloat16`", "two_bits": "`two_bits(threshold)`",
    "power_sgd": "`PowerSGD(rank=4)` from 1/32", "power_sgd_later": "`PowerSGD(rank=4)` from 1/10",
}  # fmt: skip


def coloured(part: Any, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images like CIFAR's (num, 3, 16, 16): digits of any colour, at any place, before any texture; and labels."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(part.images), num)
    images = np.zeros((num, 3, 16, 16), np.float32)
    ramp = np.linspace(-1, 1, 16, dtype=np.float32)
    for image, number in zip(images, chosen):
        place = rng.integers(0, 4, 2)
        digit = np.zeros((16, 16), np.float32)
        digit[place[0] : place[0] + 12, place[1] : place[1] + 12] = part.images[number, 0, 2:26:2, 2:26:2]
        slope, front, back = rng.normal(0, 0.5, (3, 3)).astype(np.float32)
        front += np.float32(1.5) * np.sign(front)
        texture = back[:, None, None] + slope[0] * ramp[:, None] + slope[1] * ramp
        image[:] = texture + digit * (front[:, None, None] - back[:, None, None]) + rng.normal(0, 0.3, image.shape)
    return images, part.labels[chosen].astype(np.float32)


def problem(name: str) -> tuple[Any, Any, Any, tuple[str, dict[str, Any]], dict[str, Any]]:
    """(net, loader to train, loader to test, arguments of the trainer, options of ``gp.prepare``)."""
    if name == "lstm":
        text = gp.datasets.text
        data = text.load("before_after")
        words = text.Vocabulary(data.train.texts, 20000)
        train, test = (
            text.batches([words.encode(one, 200) for one in part.texts], part.labels, 32, shuffle=part is data.train)
            for part in (data.train, data.test)
        )
        net = gp.models.TextLSTM(len(words), data.num_classes)
        return net, train, test, ("adam", {"learning_rate": 0.01}), {"clip_global_norm": 1.0}
    digits = gp.datasets.load("digits")
    if name == "lenet":
        net = gp.models.LeNet(10)
        parts = [(part.images, part.labels.astype(np.float32)) for part in (digits.train, digits.test)]
    else:
        from gluoncv.model_zoo import get_model

        net = get_model("cifar_resnet20_v1", classes=10)
        parts = [coloured(digits.train, 3200, seed=1), coloured(digits.test, 2000, seed=2)]
    train, test = (gp.datasets.batches(*part, 64, shuffle=number == 0) for number, part in enumerate(parts))
    steps = UPDATES[name]
    schedule = mx.lr_scheduler.CosineScheduler(steps, 0.1, warmup_steps=steps // 20)
    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4, "lr_scheduler": schedule}
    return net, train, test, ("sgd", options), {}


def initialized(name: str, seed: int) -> tuple[Any, ...]:
    """What :func:`problem` returns, with weights of that seed."""
    mx.random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (the generator that MXNet's initializers use)
    net, *others = problem(name)
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    net.hybridize()
    return net, *others


def train(name: str, hook: str, seed: int) -> dict[str, Any]:
    """Train as one of two processes."""
    net, batches, test, (optimizer, options), others = initialized(name, seed)
    store = gp.kvstore.create("auto")
    trainer = gluon.Trainer(net.collect_params(), optimizer, options, kvstore=store)
    training, batches, test = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, batches, test, seed=seed,
        communication_hook=HOOKS[hook](name), **others,
    )  # fmt: skip
    began, accuracies = time.perf_counter(), []
    for _ in training.epochs(EPOCHS[name]):
        for x, y in batches:
            training.step(x, y)
        [(_, accuracy)] = training.evaluate(test, "acc")
        accuracies.append(accuracy)
        training.end_epoch()
    gp.check_replicas(net, store)
    assert training.num_steps == UPDATES[name]
    steps, seconds = training.num_steps, time.perf_counter() - began
    return {
        "rank": store.rank,
        "accuracy": accuracies[-1],
        "accuracies": accuracies,
        "steps": steps,
        "seconds": seconds,
    }


def sent() -> int:
    """Bytes that have gone through the loopback interface."""
    lines = Path("/proc/self/net/dev").read_text("utf-8").splitlines()
    [line] = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def measure(name: str, hook: str) -> dict[str, Any]:
    """Bytes and processor time of a process for each exchange of the net's gradients, beyond those of the net."""
    net, batches, *_ = initialized(name, 0)
    x, y = next(iter(batches))
    x, y = [mx.nd.array(one) for one in (x if isinstance(x, (tuple, list)) else (x,))], mx.nd.array(y)
    with mx.autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(*x), y)
    loss.backward()
    gradients = [one.grad().copy() for one in net.collect_params().values() if one.grad_req != "null"]
    store, made = gp.kvstore.create("auto"), HOOKS[hook](name)
    if isinstance(made, CH.StoreCompression):
        store.set_gradient_compression(made.compression_params)

    def exchange() -> None:
        arrays = [gradient.copy() for gradient in reversed(gradients)]
        numbers = list(range(len(arrays)))
        if made is None or isinstance(made, CH.StoreCompression):
            store.pushpull(numbers, arrays)
        else:
            bucket = CH.GradientBucket(numbers, list(map(str, numbers)), arrays, 64.0, 10**6)
            arrays[:] = made(bucket, CH.BucketStore(store, "study"))
        for array in arrays:
            array.wait_to_read()

    counts = []
    for repeats in (10, EXCHANGES):  # at first keys are agreed upon
        store.gather("all have come", np.zeros(1))
        before, used = sent(), time.process_time()
        for _ in range(repeats):
            exchange()
        used = time.process_time() - used
        store.gather("all have come", np.zeros(1))
        counts = [(sent() - before) / 2 / repeats, used / repeats]
    return {
        "rank": store.rank,
        "bytes": counts[0],
        "cpu_seconds": counts[1],
        "values": sum(gradient.size for gradient in gradients),
    }


def launch(*words: str) -> dict[str, Any]:
    """Run this script as two processes; what the first one has printed last."""
    apart = {"GLUON_PARALLEL_SHARED_MEMORY": "0", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    command = [sys.executable, "-m", "gluon_parallel", "launch", "-n", "2", "--devices", "cpu:1", __file__, *words]
    done = subprocess.run(command, env={**os.environ, **apart}, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} has failed:\n{done.stdout}{done.stderr}")
    return json.loads(lines[-1].split("RESULT ")[1])


def table(rows: list[dict[str, Any]], nets: list[str]) -> str:
    """Markdown, a table per net."""
    found = {(row["net"], row["hook"], row["seed"]): row for row in rows}
    seeds = " | ".join(f"seed {seed}" for seed in SEEDS)
    lines: list[str] = []
    for net in nets:
        plain = found.get((net, "none", None))
        lines += [
            "",
            f"| {net} | KB | part | in all | ms | {seeds} | mean |",
            f"| --- | --- | --- | --- | --- |{' --- |' * len(SEEDS)} --- |",
        ]
        for hook in HOOKS:
            cost = found.get((net, hook, None))
            values = {seed: 100 * found[net, hook, seed]["accuracy"] for seed in SEEDS if (net, hook, seed) in found}
            if cost is None or plain is None or not values:
                continue
            each = [f"{values[seed]:.1f}" if seed in values else "" for seed in SEEDS]
            compressed, first = cost["bytes"] / plain["bytes"], UPDATES[net] // PARTS.get(hook, sys.maxsize)
            whole = compressed + (1 - compressed) * first / UPDATES[net]
            lines.append(
                f"| {NAMES[hook]} | {cost['bytes'] / 1e3:,.1f} | {compressed:.1%} | {whole:.1%} | "
                f"{1e3 * cost['cpu_seconds']:.1f} | {' | '.join(each)} | {statistics.mean(values.values()):.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=EPOCHS, default=list(EPOCHS), help="which nets to train (all)")
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=list(HOOKS), help="which hooks to compare (all)")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=SEEDS, help="of the initial weights and the order of samples"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/communication_hooks"), help="folder of the runs")
    parser.add_argument("--one", nargs=3, metavar=("NET", "HOOK", "SEED"), help=argparse.SUPPRESS)  # in a process
    options = parser.parse_args()
    if options.one:
        net, hook, seed = options.one
        result = measure(net, hook) if seed == "None" else train(net, hook, int(seed))
        if result.pop("rank") == 0:
            print("RESULT", json.dumps(result))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "communication_hooks.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    for net in options.nets:
        for seed in (None, *options.seeds):
            for hook in options.hooks:
                key = {"net": net, "hook": hook, "seed": seed}
                if any(row.items() >= key.items() for row in rows):
                    continue
                rows.append({**key, **launch("--one", net, hook, str(seed))})
                print(rows[-1], flush=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows, options.nets))


if __name__ == "__main__":
    main()
