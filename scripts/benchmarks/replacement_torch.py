"""The training of replacement.py with PyTorch's DistributedDataParallel, one process of it; torchrun starts it.

    torchrun --nproc-per-node 2 --max-restarts 1 scripts/benchmarks/replacement_torch.py FILE 30 89 150

FILE gets a line for each step; a checkpoint is beside it every 30 steps, rank 1 kills itself after step 89, and the
training ends after 150.
"""

import argparse
import datetime
import os
import signal
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path, help="takes a line for each step")
parser.add_argument("every", type=int, help="steps between two checkpoints")
parser.add_argument("dies", type=int, help="the last step of rank 1, of the first attempt")
parser.add_argument("last", type=int, help="the last step")
OPTIONS = parser.parse_args()  # before PyTorch is needed

import torch  # noqa: E402
import torch_nets  # noqa: E402
from torch import nn  # noqa: E402


def main(options):
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))  # else it waits half an hour
    torch.manual_seed(1)
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    net, shape, num = torch_nets.lenet()
    parallel = nn.parallel.DistributedDataParallel(net)
    optimizer, loss = torch.optim.Adam(parallel.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    x, y, first = torch.rand(num, *shape), torch.arange(num) % 10, 0
    checkpoint = Path(f"{options.file}.checkpoint")
    if checkpoint.exists():
        state = torch.load(checkpoint)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first + 1, options.last + 1):
        optimizer.zero_grad()
        loss(parallel(x), y).backward()
        optimizer.step()
        if step == options.dies and (rank, attempt) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            with options.file.open("a") as lines:
                lines.write(f"{step} {time.time()} {torch.distributed.get_world_size()} {attempt}\n")
            if step % options.every == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)


if __name__ == "__main__":
    main(OPTIONS)
