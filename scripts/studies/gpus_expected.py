"""What 2, 4 and 8 GPUs should reach with ResNet-50: an expectation from byte counts and link speeds, not a measurement.

python scripts/studies/gpus_expected.py                     the tables of docs/explanation/gpus_expected.md
python scripts/studies/gpus_expected.py --parameters 138.4e6 --images_per_second 230 800      another net
"""

from __future__ import annotations

import argparse
from typing import NamedTuple


class Host(NamedTuple):
    """GPUs of one host, and how they are connected; published speeds in bytes per second, each direction by itself."""

    name: str
    gpu: str
    between_gpus: float
    to_host: float
    memory: float  # the host's, reading and writing together


PCIE_3, PCIE_4 = 16 * 8e9 * 128 / 130 / 8, 16 * 16e9 * 128 / 130 / 8
# DDR4: channels * transfers per second * 8 bytes, of one socket.
HOSTS = [
    Host("PCIe 3.0 x16", "V100", PCIE_3, PCIE_3, 6 * 2.666e9 * 8),
    Host("NVLink 2, 6 links", "V100", 6 * 25e9, PCIE_3, 6 * 2.666e9 * 8),
    Host("PCIe 4.0 x16", "A100", PCIE_4, PCIE_4, 8 * 3.2e9 * 8),
    Host("NVLink 3, 12 links", "A100", 12 * 25e9, PCIE_4, 8 * 3.2e9 * 8),
]
USABLE = 0.8  # of a published speed
FORWARD = 1 / 3  # of a step, in which no gradient is there yet
COUNTS = (2, 4, 8)


def first_device(num: int, size: float, host: Host) -> tuple[float, float]:
    """All gradients go to the first GPU, which sends the sum to all."""
    traffic = (num - 1) * size
    return traffic, traffic / (USABLE * host.between_gpus)


def spread(num: int, size: float, host: Host) -> tuple[float, float]:
    """Each GPU adds up its part, and sends it to all."""
    traffic = 2 * (num - 1) / num * size
    return traffic, traffic / (USABLE * host.between_gpus)


def nccl(num: int, size: float, host: Host) -> tuple[float, float]:
    """A ring: each GPU passes the sum on to the next one, and then the result."""
    traffic = (2 if num > 2 else 1) * size
    return traffic, traffic / (USABLE * host.between_gpus)


def mpi(num: int, size: float, host: Host) -> tuple[float, float]:
    """A process per GPU: each copies to its host's memory, adds up all rows there, and copies the sum back."""
    # Per process: written by the GPU, copied to its row (read, write), `num` rows read, written, read by the GPU.
    memory = num * (num + 5) * size
    return size, max(size / (USABLE * host.to_host), memory / (USABLE * host.memory))


WAYS = {"first GPU adds": first_device, "`allreduce`": spread, "`nccl`": nccl, "`mpi`": mpi}


def efficiency(step: float, exchange: float) -> tuple[float, float]:
    """Speed over that of GPUs that exchange nothing, if nothing of it is hidden, and if all that can be is."""
    return step / (step + exchange), step / max(step, FORWARD * step + exchange)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def traffic_table(size: float) -> str:
    """Megabytes that the busiest GPU sends and that it receives in one step."""
    rows = [[name, *(f"{way(num, size, HOSTS[0])[0] / 1e6:.0f}" for num in COUNTS)] for name, way in WAYS.items()]
    return table(["MB", *(f"{num} GPUs" for num in COUNTS)], rows)


def efficiency_table(size: float, steps: dict[str, float]) -> str:
    """Milliseconds of the exchange and efficiency, for each host and way."""
    rows = []
    for host in HOSTS:
        for num in COUNTS:
            row = [f"{num} {host.gpu}, {host.name}"]
            for way in WAYS.values():
                seconds = way(num, size, host)[1]
                least, most = efficiency(steps[host.gpu], seconds)
                row.append(f"{1e3 * seconds:.1f} ms: {least:.2f} to {most:.2f}")
            rows.append(row)
    return table(["", *WAYS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=25.58e6, help="of the net, float32 (25.58e6: ResNet-50)")
    parser.add_argument("--images", type=int, default=64, help="per GPU and step (64)")
    parser.add_argument(
        "--images_per_second", type=float, nargs=2, default=(379, 1090), help="of one V100 and one A100 (379 1090)"
    )
    options = parser.parse_args()
    steps = {gpu: options.images / speed for gpu, speed in zip(("V100", "A100"), options.images_per_second)}
    print("Expected, not measured.\n")
    print(traffic_table(4 * options.parameters), end="\n\n")
    print(efficiency_table(4 * options.parameters, steps))


if __name__ == "__main__":
    main()
