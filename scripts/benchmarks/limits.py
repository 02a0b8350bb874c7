"""Physical limits of this machine, and how much of them the work of a benchmark needs at least.

    python scripts/benchmarks/limits.py

Peak of floating point: NumPy's product of two float32 matrices. Bandwidth of memory: NumPy's sum of two arrays, which
reads two and writes one. Both are the fastest of some runs, by one thread and by a thread on every core.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time

import numpy as np

MATRIX, ARRAY, REPEATS = 3072, 50_000_000, 7  # the array is divided among the cores, so that any number has memory


def flop(net, shape):
    """Floating point operations of a training step on one sample: three times those of the forward pass.

    Counted are the multiplications and additions of convolutions and dense layers.

    Args:
        net: a `HybridBlock` or `Block`; it is used once, and is not hybridized afterwards.
        shape: of one sample.
    """
    import mxnet as mx

    counts = []

    def count(layer, inputs, output):
        if isinstance(layer, (mx.gluon.nn.Dense, mx.gluon.nn.Conv2D)):
            weight = layer.weight.data()
            counts.append(2 * output.size * weight.size // weight.shape[0])

    net.apply(lambda layer: layer.register_forward_hook(count))
    net.hybridize(False)  # else its layers are not called one by one
    net.initialize()
    net(mx.nd.zeros((1, *shape))).wait_to_read()
    return 3 * sum(counts)


def traffic(size, copies):
    """Bytes that memory moves at least where each of `copies` arrays of `size` bytes becomes the sum of all."""
    return 2 * size * copies  # each is read and written once


def fastest(function, amount):
    """`amount` per second of the fastest of some runs."""
    best = 0.0
    for _ in range(REPEATS):
        began = time.perf_counter()
        function()
        best = max(best, amount / (time.perf_counter() - began))
    return best


def measure_here(threads):
    """(floating point operations, bytes) per second; the library of the product has as many threads already."""
    left, right, out = (np.full((MATRIX, MATRIX), value, np.float32) for value in (0.5, 0.25, 0.0))
    flops = fastest(lambda: np.dot(left, right, out=out), 2.0 * MATRIX**3)
    size = ARRAY // threads
    triples = [[np.full(size, value, np.float32) for value in (0.5, 0.25, 0.0)] for _ in range(threads)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:  # NumPy adds without Python's lock
        bandwidth = fastest(lambda: list(pool.map(lambda three: np.add(*three), triples)), 12.0 * size * threads)
    return flops, bandwidth


def measure():
    """{"flops", "bytes": what all cores do per second, "flops of one core", "bytes of one core"}."""
    found: dict[str, float] = {}
    for threads, name in ((len(os.sched_getaffinity(0)), ""), (1, " of one core")):
        limited = {f"{library}_NUM_THREADS": str(threads) for library in ("OPENBLAS", "OMP", "MKL")}  # read at import
        command = [sys.executable, __file__, "--threads", str(threads)]
        done = subprocess.run(command, env={**os.environ, **limited}, check=True, stdout=subprocess.PIPE, timeout=300)
        found.update(zip((f"flops{name}", f"bytes{name}"), json.loads(done.stdout)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        print(json.dumps(measure_here(options.threads)))
        return
    for name, value in measure().items():
        print(f"{name:18} {value / 1e9:8.1f} G/s")


if __name__ == "__main__":
    main()
