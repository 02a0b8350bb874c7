"""Random numbers of the device threads: ``mx.random.seed`` in any thread decides those of every device.

MXNet seeds the generators of the thread that calls it. Here the call is also noted, and each device thread seeds its
own generators from the noted seed and its device before it runs the next function.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading

from ..compat import mx

_LIB = mx.base._LIB
_lock = threading.Lock()
_here = threading.local()  # .seen: the number of calls of mx.random.seed that this thread has followed
_calls = 0  # of mx.random.seed
_seed = 0  # of all devices, as MXNet starts with
_num_drawn = 0  # seeds since then
_of_devices: dict[tuple[int, int], int] = {}  # seeds of single devices, given by mx.random.seed(..., ctx=)

os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_mxnet_seed, _mxnet_seed_context = _LIB.MXRandomSeed, _LIB.MXRandomSeedContext


def _note_seed(seed: ctypes.c_int, *device: int) -> int:
    """Note the seed of all devices, or of the one of that type and number, and call MXNet."""
    global _calls, _seed, _num_drawn
    with _lock:
        if device:
            _of_devices[int(device[0]), int(device[1])] = seed.value
        else:
            _seed, _num_drawn = seed.value, 0
            _of_devices.clear()
        _calls += 1
    return _mxnet_seed_context(seed, *device) if device else _mxnet_seed(seed)


_LIB.MXRandomSeed = _LIB.MXRandomSeedContext = _note_seed


def mixed(*parts: object) -> int:
    """A seed, a whole number of 31 bits, that follows from `parts`; those of neighbouring numbers are unrelated.

    Example:
        >>> mixed(0, 1, 2)
        84316401
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def seed_of_device(seed: int, device: mx.Context | str) -> int:
    """The seed of `device`: the first CPU device's is `seed`, as in a thread of its own.

    Example:
        >>> seed_of_device(7, mx.cpu(0)), seed_of_device(7, mx.cpu(1))
        (7, 840696192)
    """
    return seed if device == mx.cpu(0) else mixed(seed, device)


def draw_seed() -> int:
    """A new seed at each call; which one follows from the last ``mx.random.seed`` and the number of calls since.

    Example:
        >>> mx.random.seed(3); first = draw_seed(), draw_seed(); mx.random.seed(3); first == (draw_seed(), draw_seed())
        True
    """
    global _num_drawn
    with _lock:
        _num_drawn += 1
        return mixed(_seed, "draw", _num_drawn)


def seed_this_thread(seed: int) -> None:
    """Start the generators of the thread that calls it anew, until the next ``mx.random.seed``; does not wait."""
    mx.base.check_call(_mxnet_seed(seed))


def follow(device: mx.Context | str) -> None:
    """Seed the generators of this thread, which is that of `device`, again if ``mx.random.seed`` was called since."""
    if getattr(_here, "seen", None) == _calls:
        return
    with _lock:
        _here.seen, seed = _calls, _seed
        key = getattr(device, "device_typeid", 0), getattr(device, "device_id", 0)
        own = _of_devices.get(key)
    if own is None:
        mx.base.check_call(_mxnet_seed(seed_of_device(seed, device)))
    else:
        mx.base.check_call(_mxnet_seed_context(own, *key))
