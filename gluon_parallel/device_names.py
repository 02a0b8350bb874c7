"""Names of devices, as users write them, read without MXNet: "cpu:2", "gpu@0,2"."""

import re

from . import bounds
from .errors import DeviceUnavailable

FORMS = '"cpu", "cpu:2" (the first 2), "gpu" (all), "gpu:2", "gpu@0,2" (these), "auto", or a list of them'


def read(text):
    """Parse "cpu", "gpu:2" or "gpu@0,2", whether they exist here or not: (kind, count or None, numbers or None).

    Example:
        >>> read("gpu:2"), read("gpu@0,2")
        (('gpu', 2, None), ('gpu', None, [0, 2]))
    """
    match = re.fullmatch(r"(cpu|gpu)(?::(\d+)|@(\d+(?:,\d+)*)|\((\d+)\))?", text.strip().lower())
    if match is None:
        raise DeviceUnavailable(f"devices: cannot read {bounds.shown(text)}; expected {FORMS}")
    kind, count, chosen, one = match.groups()
    if count is not None and not count.strip("0"):
        raise DeviceUnavailable(
            f'devices: {text!r} asks for 0 devices; the device with number 0 is "{kind}@0"; expected {FORMS}'
        )
    many, which = (f"devices: the number {what}" for what in ("of devices", "of a device"))
    most, error = bounds.DEVICES, DeviceUnavailable
    numbers = (
        [bounds.whole(which, one, 0, most - 1, error) for one in (chosen or one).split(",")] if chosen or one else None
    )
    return kind, None if count is None else bounds.whole(many, count, 1, most, error), numbers
