"""The steps of kvstore.py with PyTorch's DistributedDataParallel over gloo; started by it, under any Python."""

from __future__ import annotations

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("net", choices=["lenet", "resnet20", "resnet20_original", "dense6"], help="what is trained")
NET = parser.parse_args().net  # before PyTorch is needed

import torch  # noqa: E402
import torch_nets  # noqa: E402
from rounds import serve  # noqa: E402
from torch import nn  # noqa: E402


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
    make = getattr(torch_nets, NET.removesuffix("_original"))
    serve(int(os.environ["RANK"]), {"step": build(*make())})


if __name__ == "__main__":
    main()
