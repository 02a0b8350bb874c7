"""NVIDIA's driver: its version, and each card's name and compute capability, as itself says them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import Any

DRIVER = "libcuda.so.1"  # comes with the driver alone
NO_DEVICE = 100  # CUDA error: there is no card, or CUDA_VISIBLE_DEVICES hides all
_MAJOR, _MINOR = 75, 76  # attributes of a device: its compute capability
_SECONDS = 60.0  # for an answer; many cards that nobody uses take some seconds to wake up


def ask() -> dict[str, Any]:
    """What the driver says.

    From here on this process has started CUDA: it uses the cards that ``CUDA_VISIBLE_DEVICES`` says now, and processes
    that are forked from it cannot use any. So :func:`ask_apart` does it elsewhere.

    Returns:
        ``cuda``: the newest CUDA that it runs, as 11020 for 11.2; ``release``: its own version; ``devices``: pairs of a
        name and a compute capability, as 86 for 8.6; ``status`` and ``error``, if it does not name its devices. Of a
        driver that does not load, only ``error``.
    """
    import ctypes  # here: the doctor imports this file, also where Python has none

    try:
        library = ctypes.CDLL(DRIVER)
    except OSError as error:
        return {"error": str(error)}
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    library.cuDriverGetVersion(ctypes.byref(number))
    found: dict[str, Any] = {"cuda": number.value, "release": _release(), "devices": []}
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(number))
    if status:
        words = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(words))
        said = f" ({words.value.decode(errors='replace')})" if words.value else ""
        return {**found, "status": status, "error": f"it answers with CUDA error {status}{said}"}
    for index in range(number.value):
        device, numbers = ctypes.c_int(), []
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetName(name, len(name), device)
        for attribute in (_MAJOR, _MINOR):
            library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            numbers.append(number.value)
        found["devices"].append((name.value.decode(errors="replace"), 10 * numbers[0] + numbers[1]))
    return found


def ask_apart() -> dict[str, Any]:
    """The same, asked by another process, which takes some 30 ms more; empty if this program cannot start Python."""
    if getattr(sys, "frozen", False) or not sys.executable:  # a program that would start itself
        return {}
    command = [sys.executable, "-I", "-S", __file__]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except OSError:
        return {}
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {_SECONDS:g} s"}
    if done.returncode < 0:
        return {"error": f"a process that asked it was killed by {signal.Signals(-done.returncode).name}"}
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}  # drivers may print lines before


def _release() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            match = re.search(r"Kernel Module\D*([\d.]+)", file.read())
    except OSError:
        return ""
    return f"release {match.group(1)}" if match else ""


if __name__ == "__main__":
    print(json.dumps(ask()))
