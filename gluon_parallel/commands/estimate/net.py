"""The net of an estimate: loaded from a file, and traced without memory for a single activation."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import numpy as np

from ...compat import mx
from ...compat.array_types import leaves
from ...errors import ConfigError
from ..named_function import call, first_line
from .backward import num_outputs

_DTYPES = "float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool"  # of MXNet


class Input(NamedTuple):
    """One input of a net: its shape for one sample, without the batch's axis."""

    shape: tuple
    dtype: str = "float32"

    @classmethod
    def parse(cls, text):
        """An input from "3,224,224", or "int32:35".

        Example:
            >>> Input.parse("int32:35"), Input.parse("3,8,8").shape
            (Input(shape=(35,), dtype='int32'), (3, 8, 8))
        """
        dtype, _, sizes = text.rpartition(":")
        try:
            shape = tuple(int(size) for size in sizes.split(",") if size.strip())
        except ValueError:
            shape = (0,)
        if min(shape, default=1) < 1 or (dtype or "float32") not in _DTYPES:
            raise ConfigError(
                f"the input {text!r} is not the shape of one sample, such as 3,224,224, or int32:35 with a dtype (one "
                f"of {', '.join(_DTYPES)})"
            )
        return cls(shape, dtype or "float32")


def load(name):
    """What the named function returns: (net, [Input, ...] or None).

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    made = call(name)
    net, shapes = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(net, mx.gluon.Block):
        raise ConfigError(
            f"{name} returns {type(made).__name__}; expected a Gluon net, or (net, shapes of its inputs for one sample)"
        )
    if shapes is None:
        return net, None
    if isinstance(shapes, (tuple, list)) and shapes and not isinstance(shapes[0], (tuple, list)):
        shapes = [shapes]
    try:
        return net, [Input.parse(",".join(str(int(size)) for size in shape)) for shape in shapes]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: the shapes are {shapes!r}; expected such as (3, 224, 224)") from error


class Node(NamedTuple):
    """One operator of the traced net, or a variable, whose `op` is "null"."""

    op: str
    name: str
    attrs: dict
    inputs: list  # (number of a node, which of its outputs)
    shapes: list  # of its outputs
    dtypes: list

    @property
    def sizes(self):
        """Bytes of each output."""
        return [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in zip(self.shapes, self.dtypes)]


def trace(net, inputs, batch):
    """The operators of `net` for `batch` samples, a list of :class:`Node` in the order of the forward pass.

    Raises:
        ConfigError: the net cannot be traced, or cannot take such inputs.
    """
    if not isinstance(net, mx.gluon.HybridBlock):
        raise ConfigError(
            f"the net, a {type(net).__name__}, cannot be traced; expected a HybridBlock, such as nn.HybridSequential"
        )
    names = [f"data{number}" for number in range(len(inputs))]
    variables = [mx.sym.var(name) for name in names]
    if mx.util.is_np_array():
        variables = [variable.as_np_ndarray() for variable in variables]
    try:
        graph = _group(net(*variables))
    except Exception as error:
        raise ConfigError(
            f"the net cannot be traced with {len(inputs)} input{'s' if len(inputs) > 1 else ''}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    nodes = json.loads(graph.tojson())
    counts = num_outputs(graph)
    entries = [(number, output) for number, count in enumerate(counts) for output in range(count)]
    nodes["heads"] = [[number, output, 0] for number, output in entries]
    everything = mx.sym.load_json(json.dumps(nodes))
    shapes = {name: (batch, *one.shape) for name, one in zip(names, inputs)}
    types = {name: one.dtype for name, one in zip(names, inputs)}
    types.update({name: one.dtype for name, one in net.collect_params().items() if name in everything.list_inputs()})
    try:
        _, found, _ = everything._infer_shape_impl(False, **shapes)  # without _impl, they print before they raise
        _, dtypes, _ = everything._infer_type_impl(False, **types)
    except mx.base.MXNetError as error:
        shown = ", ".join(f"{types[name]} {shape}" for name, shape in shapes.items())
        raise ConfigError(f"the net cannot take as its inputs {shown}: {first_line(error)}") from error
    if found is None or dtypes is None:
        raise ConfigError("MXNet cannot infer all shapes and dtypes from the inputs; state in_units and in_channels")
    facts = iter(zip(found, dtypes))
    traced = []
    for node, count in zip(nodes["nodes"], counts):
        pairs = list(itertools.islice(facts, count))
        sources = [(number, output) for number, output, *_ in node["inputs"]]
        attrs = node.get("attrs", {})
        traced.append(Node(node["op"], node["name"], attrs, sources, *map(list, zip(*pairs))))
    return traced


def _group(outputs) -> Any:
    """One symbol of all outputs, however nested."""
    legacy = [one.as_nd_ndarray() if hasattr(one, "as_nd_ndarray") else one for _, one in leaves(outputs)]
    return legacy[0] if len(legacy) == 1 else mx.sym.Group(legacy)
