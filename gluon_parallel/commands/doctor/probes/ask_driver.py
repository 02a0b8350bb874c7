"""Probe: ask NVIDIA's driver what it is and which cards it has, and the loader for CUDA's libraries."""

import ctypes
import json
import os
import re
import sys

_MAJOR, _MINOR = 75, 76  # attributes of a device: its compute capability


def ask_driver():
    """What the driver says: its version, and each card's name and compute capability (86 for 8.6)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    library.cuDriverGetVersion(ctypes.byref(number))
    found = {"cuda": number.value, "release": _release(), "devices": []}
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(number))
    if status:
        return {**found, "error": f"it answers with CUDA error {status}"}
    for index in range(number.value):
        device, numbers = ctypes.c_int(), []
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetName(name, len(name), device)
        for attribute in (_MAJOR, _MINOR):
            library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            numbers.append(number.value)
        found["devices"].append((name.value.decode(errors="replace"), 10 * numbers[0] + numbers[1]))
    return found


def _release():
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            match = re.search(r"Kernel Module\D*([\d.]+)", file.read())
    except OSError:
        return ""
    return f"release {match.group(1)}" if match else ""


def missing(folder, names):
    """Those libraries that can be loaded neither from MXNet's folder nor from where the loader looks."""
    absent = []
    for name in names:
        beside = os.path.join(folder, name)
        try:
            ctypes.CDLL(beside if os.path.exists(beside) else name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            absent.append(name)
    return absent


def main():
    """Print the answers; the arguments are MXNet's folder and the libraries that it asks for."""
    print("@doctor", json.dumps({"driver": ask_driver()}), flush=True)
    print("@doctor", json.dumps({"missing": missing(sys.argv[1], sys.argv[2:])}), flush=True)


if __name__ == "__main__":
    main()
