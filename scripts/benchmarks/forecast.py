"""Forecast how training ResNet-50 scales to 8 to 256 GPUs by the package's cost models, beside published figures.

    python scripts/benchmarks/forecast.py

Nothing is measured. Between the hosts it is the model of the exchange (`gp.kvstore.step_seconds`), one process per host
as the store `mpi` sums; within a host it is that of `scripts/studies/gpus_expected.py`. Published: NVIDIA's
DeepLearningExamples (8 A100), OneFlow's DLPerf (32 V100), and arXiv 2006.15704 (DistributedDataParallel).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gluon_parallel as gp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "studies"))
import gpus_expected as gpus

SIZE, ARRAYS = 4 * 25.58e6, 193  # bytes of ResNet-50's gradients, and how many arrays they are
IMAGES = 64  # per GPU and step
SPEEDS = {"V100": 379, "A100": 1090}  # images per second of one GPU
LINK = 10e-6, 12.5e9  # of 100GbE: latency in seconds, bytes per second
BACKWARD = 1 - gpus.FORWARD  # of a step


def speed_up(num_hosts, host, overlaps=True):
    """Images per second of so many hosts of 8 GPUs over those of one GPU.

    Args:
        host: of ``gpus_expected.HOSTS``; its GPUs sum by `allreduce`.
        overlaps: whether sums go on during the backward pass.
    """
    step = IMAGES / SPEEDS[host.gpu]
    backward = BACKWARD * step if overlaps else 0.0
    within = max(0.0, gpus.spread(8, SIZE, host)[1] - backward)
    between = 0.0
    if num_hosts > 1:
        sizes = [SIZE / ARRAYS] * ARRAYS
        between = gp.kvstore.step_seconds(num_hosts, sizes, LINK[0], LINK[1], backward=backward)
    return num_hosts * 8 * step / (step + within + between)


def forecast():
    """Rows of ``what``, ``forecast`` and ``published``; the last is None where nobody has published it."""
    hosts = {host.name: host for host in gpus.HOSTS}
    a100, v100 = hosts["NVLink 3, 12 links"], hosts["NVLink 2, 6 links"]
    published = {1: "7.56", 2: "14.6", 4: "26.7 (MXNet with Horovod)"}
    found: list[dict] = [
        {"what": "8 A100 in one host: images/s over those of one", "forecast": speed_up(1, a100), "published": "7.8"}
    ]
    for num in (1, 2, 4, 8, 16, 32):
        what = f"{8 * num} V100, {num} host{'s' * (num > 1)} of 8: images/s over those of one"
        found.append({"what": what, "forecast": speed_up(num, v100), "published": published.get(num)})
    gain = 100 * (1 - speed_up(4, v100, overlaps=False) / speed_up(4, v100))
    what = "32 V100, 4 hosts of 8: % of the step's time that overlap saves"
    found.append({"what": what, "forecast": gain, "published": "27 to 38 (PyTorch DDP, other nets and hosts)"})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for row in forecast():
        print(f"{row['what']:64} {row['forecast']:6.1f}   published {row['published'] or '-'}")


if __name__ == "__main__":
    main()
