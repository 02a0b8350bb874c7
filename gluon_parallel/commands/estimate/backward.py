"""What an operator's backward pass needs of its forward pass: asked of MXNet's own gradients, through its C API."""

from __future__ import annotations

import ctypes
import functools
import json
from typing import NamedTuple

from ...compat import mx

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
