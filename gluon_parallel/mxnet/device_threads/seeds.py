"""Random seeds of the device threads: ``mx.random.seed`` in any thread seeds the generators of every device.

MXNet seeds the generators of the calling thread. Here the call is noted too, and each device thread seeds its own
generators by the noted seed and its device before it runs the next function.
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
num_calls = 0  # of mx.random.seed
_seed = 0  # of all devices; 0 is MXNet's default
_num_drawn = 0  # seeds that draw_seed has given since then
_device_seeds: dict[tuple[int, int], int] = {}  # seeds of single devices, given by mx.random.seed(..., ctx=)

# A forked child must not get the lock in a locked state.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_mxnet_seed, _mxnet_seed_context = _LIB.MXRandomSeed, _LIB.MXRandomSeedContext


def _note_seed(seed: ctypes.c_int, *device: int) -> int:
    """Note the seed of all devices, or of the one of that type and number, and call MXNet."""
    global num_calls, _seed, _num_drawn
    with _lock:
        if device:
            _device_seeds[int(device[0]), int(device[1])] = seed.value
        else:
            _seed, _num_drawn = seed.value, 0
            _device_seeds.clear()
        num_calls += 1
    return _mxnet_seed_context(seed, *device) if device else _mxnet_seed(seed)


_LIB.MXRandomSeed = _LIB.MXRandomSeedContext = _note_seed


def derive_seed(*parts: object) -> int:
    """A seed, a whole number of 31 bits: a hash of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def seed_of_device(seed: int, device: mx.Context | str) -> int:
    """The seed of `device`, which follows from `seed`; ``cpu(0)`` has `seed` itself, as in plain MXNet.

    Example:
        >>> seed_of_device(7, mx.cpu(0)), seed_of_device(7, mx.cpu(1))
        (7, 840696192)
    """
    return seed if device == mx.cpu(0) else derive_seed(seed, device)


def draw_seed() -> int:
    """A new seed at each call; which one follows from the last ``mx.random.seed`` and the number of calls since."""
    global _num_drawn
    with _lock:
        _num_drawn += 1
        return derive_seed(_seed, "draw", _num_drawn)


def seed_this_thread(seed: int) -> None:
    """Seed the generators of the calling thread, until the next ``mx.random.seed``; does not wait."""
    mx.base.check_call(_mxnet_seed(seed))


def follow(device: mx.Context | str) -> None:
    """Seed the generators of this thread, the thread of `device`, if ``mx.random.seed`` was called since then."""
    if getattr(_here, "seen", None) == num_calls:
        return
    with _lock:
        _here.seen, seed = num_calls, _seed
        key = getattr(device, "device_typeid", 0), getattr(device, "device_id", 0)
        own = _device_seeds.get(key)
    if own is None:
        mx.base.check_call(_mxnet_seed(seed_of_device(seed, device)))
    else:
        mx.base.check_call(_mxnet_seed_context(own, *key))
