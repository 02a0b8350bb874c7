"""Parameters of a net as named arrays: the copies of all devices, and whether they fit another net."""

import numpy as np

from ...archive import Archive
from ...errors import CheckpointError
from ...mxnet.blocks import parameters_by_structure
from ...mxnet.compat import mx
from ...mxnet.parameters import has_values, waits_for_shape


def initialized_parameters(net: mx.gluon.Block, may_be_deferred: bool = False) -> dict[str, mx.gluon.Parameter]:
    """The parameters of a net by their place in it.

    CheckpointError: one has no values; with `may_be_deferred`, it may be waiting for its shape.
    """
    if not isinstance(net, mx.gluon.Block):
        raise CheckpointError(f"net: got a {type(net).__name__}, expected a Gluon block; the order is (net, trainer)")
    parameters = parameters_by_structure(net)
    for name, parameter in parameters.items():
        if not has_values(parameter) and not (may_be_deferred and waits_for_shape(parameter)):
            rest = " before loading" if may_be_deferred else ", and run one batch (or state in_channels) before saving"
            raise CheckpointError(
                f"parameter {name} of {type(net).__name__} has no values yet: call net.initialize(...){rest}"
            )
    return parameters


def shape_with(parameter: mx.gluon.Parameter, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter; if it waits for it, and `shape` fits what is known, then that."""
    known = shape if parameter.shape is None else parameter.shape
    fits = len(known) == len(shape) and all(one in (two, 0, -1) for one, two in zip(known, shape))
    return shape if waits_for_shape(parameter) and fits else known


def named_copies(name: str, copies: list[mx.nd.NDArray]) -> dict[str, np.ndarray]:
    """One array for the copies of all devices under a name that says whether they are equal; otherwise their stack."""
    values = [copy.asnumpy() for copy in copies]
    alike = all(np.array_equal(values[0], value, equal_nan=True) for value in values[1:])
    return {f"parameters/{name}": values[0]} if alike else {f"copies/{name}": np.stack(values)}


def copies_by_name(archive: Archive) -> dict[str, list[np.ndarray]]:
    """What :func:`named_copies` named: one array for all devices, or one for each."""
    alike, copies = (
        {key[len(kind) :]: array for key, array in archive.arrays.items() if key.startswith(kind)}
        for kind in ("parameters/", "copies/")
    )
    for name, stack in copies.items():
        if not stack.shape[:1] > (0,):
            raise CheckpointError(f"copies/{name} is of shape {stack.shape}, wanted a copy for each device")
    return {**{name: [array] for name, array in alike.items()}, **{name: list(stack) for name, stack in copies.items()}}


def copies_for(num_devices: int, copies: list[np.ndarray]) -> list[np.ndarray]:
    """A copy for each device: the device's own, or the mean if they were saved on another number of devices."""
    if len(copies) == num_devices:
        return copies
    return [np.mean(copies, axis=0, dtype=np.float64).astype(copies[0].dtype)] * num_devices
