"""Probe: train the nets of the command `parity` on one device and on several."""

import json
import time

STEPS = 3


def main():
    """Print, for every net and group of devices, the largest difference of the weights and the seconds per step."""
    from gluon_parallel.commands import parity
    from gluon_parallel.devices import devices, num_gpus

    groups = ["cpu:2", *([f"gpu:{min(2, num_gpus())}"] if num_gpus() else [])]
    runs = [f"{net}, {group}" for net in parity.NETS for group in groups]
    print("@doctor", json.dumps({"runs": runs}), flush=True)
    for net in parity.NETS:
        plan = parity.Plan(net, STEPS, batch_size=14, accumulate=1, dtype="float64", seed=0)
        reference = parity.train(plan, devices("cpu"))
        for group in groups:
            several, start = devices(group), time.monotonic()
            difference = max(parity.differences([parity.train(plan, several)], reference).values())
            seconds = (time.monotonic() - start) / STEPS
            print("@doctor", json.dumps({f"{net}, {group}": [difference, seconds]}), flush=True)


if __name__ == "__main__":
    main()
