"""Forecast how training ResNet-50 scales to 8 to 256 V100 by a model of the exchange, beside published figures.

    python scripts/studies/forecast.py

Nothing is measured. Between the hosts it is the model `gp.kvstore.step_seconds`, one process per host as the store
`mpi` sums, over 100GbE; within a host of 8 GPUs, gradients cross NVLink at 80 % of its published speed. Reading data,
stragglers, congestion and copies between GPU and host are left out. Published: OneFlow's DLPerf (MXNet with Horovod).
"""

from __future__ import annotations

import argparse

import gluon_parallel as gp

SIZE, ARRAYS = 4 * 25.58e6, 193  # bytes of ResNet-50's gradients, and how many arrays they are
STEP = 64 / 379  # seconds of one GPU: images per step, images per second
BACKWARD = 2 / 3 * STEP
NVLINK = 0.8 * 6 * 25e9  # bytes per second that a GPU sends and receives
LATENCY, BANDWIDTH = 10e-6, 12.5e9  # of 100GbE, in seconds and bytes per second
PUBLISHED = {1: "7.56", 2: "14.6", 4: "26.7"}


def speed_up(num_hosts: int) -> float:
    """Images per second of so many hosts of 8 GPUs over those of one GPU."""
    within = max(0.0, 2 * 7 / 8 * SIZE / NVLINK - BACKWARD)
    between = 0.0
    if num_hosts > 1:
        between = gp.kvstore.step_seconds(num_hosts, [SIZE / ARRAYS] * ARRAYS, LATENCY, BANDWIDTH, backward=BACKWARD)
    return num_hosts * 8 * STEP / (STEP + within + between)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("hosts of 8 V100   images/s over those of one V100   published")
    for num in (1, 2, 4, 8, 16, 32):
        print(f"{num:15} {speed_up(num):33.1f}   {PUBLISHED.get(num, '-')}")


if __name__ == "__main__":
    main()
