"""Probe: import MXNet as the package does, and say what it took."""

import importlib.util
import json
import time
import types


def main():
    """Print MXNet's version, build features, and what was put back for it; then the devices that it can use."""
    import numpy

    before, start = set(vars(numpy)), time.monotonic()
    from gluon_parallel.compat import mx

    seconds = time.monotonic() - start
    restored = [name for name, value in vars(numpy).items()
                if name not in before and name[0] != "_" and not isinstance(value, types.ModuleType)]  # fmt: skip
    distutils = importlib.util.find_spec("distutils")
    file = getattr(distutils, "origin", None) or ""
    features = [name for name, feature in mx.runtime.Features().items() if feature.enabled]
    facts = {
        "version": mx.__version__,
        "folder": mx.__path__[0],
        "seconds": seconds,
        "features": sorted(features),
        "restored": sorted(restored, key=str.lower),
        "distutils": "setuptools' copy" if "setuptools" in file else "Python's own",
    }
    print("@doctor", json.dumps(facts), flush=True)
    from gluon_parallel.devices import devices, num_gpus

    print("@doctor", json.dumps({"gpus": num_gpus(), "auto": [str(device) for device in devices("auto")]}), flush=True)


if __name__ == "__main__":
    main()
