"""Probe: name the devices that MXNet can use."""

import json


def main():
    """Print what "auto" means, and how many GPUs there are."""
    from gluon_parallel.devices import devices, num_gpus

    print("@doctor", json.dumps({"gpus": num_gpus(), "auto": [str(device) for device in devices("auto")]}), flush=True)


if __name__ == "__main__":
    main()
