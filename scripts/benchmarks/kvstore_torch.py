"""The steps of kvstore.py with PyTorch's DistributedDataParallel over gloo; started by it, under any Python.

The nets have the layers of this package's LeNet and of GluonCV's ``cifar_resnet20_v1``.
"""

from __future__ import annotations

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("net", choices=["lenet", "resnet20", "resnet20_original", "dense6"], help="what is trained")
NET = parser.parse_args().net  # before PyTorch is needed

import torch  # noqa: E402
from rounds import serve  # noqa: E402
from torch import nn  # noqa: E402


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    ), (1, 28, 28), 128  # fmt: skip


def resnet20():
    layers = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for stage in range(3):
        for number in range(3):
            layers.append(Block(width, 16 << stage, 2 if stage and not number else 1))
            width = 16 << stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), (3, 32, 32), 64


def dense6():
    layers = (layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU()))
    return nn.Sequential(*layers), (1024,), 64


def build(net, shape, num):
    """function(repeats): steps of `num` images."""
    parallel = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()
    x, y = torch.rand(num, *shape), torch.arange(num) % 10

    def steps(repeats):
        for _ in range(repeats):
            optimizer.zero_grad()
            loss(parallel(x), y).backward()
            optimizer.step()

    return steps


def main():
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    made = {"lenet": lenet, "dense6": dense6}.get(NET, resnet20)()
    serve(int(os.environ["RANK"]), {"step": build(*made)})


if __name__ == "__main__":
    main()
