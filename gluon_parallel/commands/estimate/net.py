"""The net of an estimate, traced without memory for activations, and what its backward passes need."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from typing import Any, NamedTuple

import numpy as np

from ...compat import mx
from ...compat.array_types import leaves
from ...errors import ConfigError
from ..named_function import call, first_line

_DTYPES = "float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool"  # of MXNet


class Input(NamedTuple):
    """One input of a net: its shape for one sample, without the batch's axis."""

    shape: tuple
    dtype: str = "float32"

    @classmethod
    def parse(cls, text):
        """An input from "3,224,224", or "int32:35"."""
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
    """What the named function returns: (net, [Input, ...] or None)."""
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
    """The operators of `net` for `batch` samples, a list of :class:`Node` in the order of the forward pass."""
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


_LIB = mx.base._LIB


class Backward(NamedTuple):
    """The backward pass of one operator."""

    inputs: frozenset  # numbers of the inputs that it reads
    outputs: frozenset  # numbers of the outputs that it reads
    new: frozenset  # numbers of the inputs whose gradient is a new array


_NOTHING = Backward(frozenset(), frozenset(), frozenset())


def num_outputs(graph):
    """How many outputs each node of a symbol has, those that no user sees among them."""
    with _Graph(graph) as made:
        bounds = made.after()["node_row_ptr"]
    return [end - begin for begin, end in zip(bounds, bounds[1:])]


def backward_of(node):
    """The :class:`Backward` of a :class:`.Node`; of one without a gradient, that it needs nothing."""
    attrs = {name: text for name, text in node.attrs.items() if not name.startswith("__")}
    return _backward_of(node.op, tuple(sorted(attrs.items())), len(node.inputs), len(node.shapes))


@functools.cache
def _backward_of(op, attrs, num_inputs, count):
    variables = [{"op": "null", "name": f"x{number}", "inputs": []} for number in range(num_inputs)]
    one = {"op": op, "name": "y", "attrs": dict(attrs), "inputs": [[number, 0, 0] for number in range(num_inputs)]}
    if not num_inputs:
        return _NOTHING

    heads = [[num_inputs, output, 0] for output in range(count)]
    alone = {"nodes": [*variables, one], "arg_nodes": list(range(num_inputs)), "heads": heads}
    y = mx.sym.load_json(json.dumps({**alone, "attrs": {"mxnet_version": ["int", 10901]}}))
    with _Graph(y) as graph:
        graph.set("grad_ys", y)
        graph.set("grad_ys_out_grad", mx.sym.Group([mx.sym.var(f"dy{output}") for output in range(count)]))
        graph.set("grad_xs", mx.sym.Group([y.get_internals()[f"x{number}"] for number in range(num_inputs)]))
        try:
            made = graph.after("MXGradient")
        except mx.base.MXNetError:
            return _NOTHING  # it has no gradient
    names = [node["name"] for node in made["nodes"]]
    forward = names.index("y") if "y" in names else -1
    read_inputs, read_outputs = set(), set()
    for number, node in enumerate(made["nodes"]):
        if node["op"] != "null" and number != forward:
            for source, output, *_ in node["inputs"]:
                if source == forward:
                    read_outputs.add(output)
                elif names[source].startswith("x"):
                    read_inputs.add(int(names[source][1:]))
    gradients = [made["nodes"][head[0]] for head in made["heads"]]
    new = (number for number, node in enumerate(gradients) if node["op"] != "null")
    return Backward(frozenset(read_inputs), frozenset(read_outputs), frozenset(new))


class _Graph:
    """A graph of MXNet's C API."""

    def __init__(self, symbol):
        self._handles = [ctypes.c_void_p()]
        _check(_LIB.NNGraphCreate(symbol.handle, ctypes.byref(self._handles[0])))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            _LIB.NNGraphFree(handle)

    def set(self, name, symbol):
        """Give the graph an attribute: the outputs of a symbol."""
        _check(_LIB.NNGraphSetNodeEntryListAttr_(self._handles[0], name.encode(), symbol.handle))

    def after(self, *passes):
        """The graph as JSON, after these passes."""
        for name in (*passes, "SaveJSON"):
            after = ctypes.c_void_p()
            names = (ctypes.c_char_p * 1)(name.encode())
            _check(_LIB.NNGraphApplyPasses(self._handles[-1], 1, names, ctypes.byref(after)))
            self._handles.append(after)
        text, found = ctypes.c_char_p(), ctypes.c_int()
        _check(_LIB.NNGraphGetJSONAttr(self._handles[-1], b"json", ctypes.byref(text), ctypes.byref(found)))
        return json.loads(json.loads(text.value or b"")[1])


def _check(status):
    if status != 0:
        raise mx.base.MXNetError("MXNet's graph passes")
