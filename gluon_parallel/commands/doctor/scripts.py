"""Scripts that try one thing, a function each: ``python scripts.py FUNCTION arguments...``; run without the package."""

import json
import os
import sys
from pathlib import Path

SIZES = {"256 B": 64, "16 MB": 1 << 22}  # values
STEPS = 3


def tell(found):
    """Print a part of the answer."""
    print("@doctor", json.dumps(found), flush=True)


def import_numpy():
    """NumPy's version."""
    import numpy

    numpy.dot(numpy.ones((8, 8)), numpy.ones((8, 8)))  # its linear algebra is a library of its own
    tell({"version": numpy.__version__})


def ask_cuda(package, folder, *names):
    """What NVIDIA's driver says, and which libraries do not load as in the import of the MXNet in `folder`.

    `package` is the folder gluon_parallel, `names` are the libraries that MXNet asks for.
    """
    sys.path.insert(0, os.path.join(package, "mxnet"))  # `import gluon_parallel` would need MXNet
    from cuda import driver, libraries

    tell({"driver": driver.ask()})
    missing = libraries.load(Path(folder), names)
    tell({"missing": missing, "nvrtc": libraries.nvrtc_version() if names else 0})


def import_mxnet():
    """MXNet's version, then the devices that it can use."""
    from gluon_parallel.mxnet.compat import mx

    tell({"version": mx.__version__})
    from gluon_parallel.devices import devices

    tell({"auto": [str(device) for device in devices("auto")]})


def train_steps():
    """For each net of the command `parity` and group of devices: the largest difference of weights."""
    from gluon_parallel.commands import parity
    from gluon_parallel.devices import devices, num_gpus

    groups = ["cpu:2", *([f"gpu:{min(2, num_gpus())}"] if num_gpus() else [])]
    tell({"runs": [f"{net}, {group}" for net in parity.NETS for group in groups]})
    for net in parity.NETS:
        setup = parity.Setup(net, STEPS, batch_size=14, accumulate=1, dtype="float64", seed=0)
        reference = parity.train(setup, devices("cpu"))
        for group in groups:
            tell(
                {f"{net}, {group}": max(parity.differences([parity.train(setup, devices(group))], reference).values())}
            )


def exchange():
    """Exchange arrays with the other processes: the library, and for each size whether the sums were right."""
    from gluon_parallel import kvstore
    from gluon_parallel.mxnet.compat import mx

    store = kvstore.create("auto")
    tell({"processes": store.num_workers, "library": store.library})
    wanted = store.num_workers * (store.num_workers + 1) / 2
    for key, (name, size) in enumerate(SIZES.items()):
        array = mx.nd.zeros(size)
        store.broadcast(key, array, [array])
        right = True
        for _ in range(3):  # the first ones agree about the key
            array[:] = store.rank + 1
            store.pushpull(key, array)
            right = right and bool((array.asnumpy() == wanted).all())
        tell({f"size {name}": {"bytes": 4 * size, "right": right}})


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
