"""Bytes that one of the hosts of ``hosts.py`` sends in a step, as root: ``python hosts_bytes.py [PROCESSES_PER_HOST]``.

Two hosts sum 4 MB of gradients in 20 arrays. Started on a host by the launcher, it is one process of that; its word is
the type of compression.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

STEPS = 20


def bytes_per_step(num, folder, compression="none"):
    """Of two hosts with `num` processes each; `folder` takes logs."""
    from hosts import hosts

    with hosts(2) as made:
        done = made.launch(num, "--logs", folder, __file__, compression)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if "bytes per step" in line]
    return float(line.split()[-1])


def step(store, gradients):
    """Sum all gradients, and wait for them."""
    for key, gradient in enumerate(gradients):
        store.pushpull(key, gradient, priority=-key)
    for gradient in gradients:
        gradient.wait_to_read()


def train():
    """One process: steps without a net."""
    from hosts_checks import bytes_sent

    import gluon_parallel as gp
    from mxnet import nd

    store = gp.kvstore.create("mpi")
    store.set_gradient_compression({"type": sys.argv[1]})
    gradients = [nd.ones((50_000,)) for _ in range(20)]
    for _ in range(5):  # the keys are agreed upon
        step(store, gradients)
    before = bytes_sent(store)
    for _ in range(STEPS):
        step(store, gradients)
    after = bytes_sent(store)
    if store.rank == 0:
        print("bytes per step", (after - before) / STEPS)


if __name__ == "__main__":
    if "GLUON_PARALLEL_RANK" in os.environ:
        train()
    else:
        import tempfile

        with tempfile.TemporaryDirectory() as logs:
            print(f"{bytes_per_step(int((*sys.argv[1:], 1)[0]), logs):,.0f} bytes")
