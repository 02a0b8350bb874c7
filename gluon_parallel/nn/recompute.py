"""Recomputation: a block keeps its inputs alone, and computes its activations again in the backward pass."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from ..mxnet.arrays import UNDEFINED_STORAGE, has_graph
from ..mxnet.attached import Attached, replace_method
from ..mxnet.blocks import (
    NumPySymbol,
    flags_of,
    flatten,
    output_structure,
    own_parameters,
    trace,
    traced_graph,
    unflatten,
)
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import BFLOAT16, as_class_of, as_legacy
from ..mxnet.compat.replacing import stands_for
from ..mxnet.device_threads.seeds import seed_this_thread
from ..mxnet.device_threads.thread import thread_of
from ..mxnet.engine import make_plain
from ..mxnet.parameters import gradient_storage
from ..native import function
from .blocks import blocks_of, draws_random_numbers
from .executor import building, finish_initialization
from .rewrite_graph import Node, graph_of, new_node, replace_nodes
from .sync_batch_norm.participants import waiting_sync_groups

_OPERATOR = "gluon_parallel_recompute"
_graph_of: Attached[_Graph] = Attached("recomputed")  # blocks
_marked: weakref.WeakSet[mx.gluon.Block] = weakref.WeakSet()
_graphs: weakref.WeakValueDictionary[str, _Graph] = weakref.WeakValueDictionary()  # by the name in operators
_call_in_mxnet = mx.gluon.HybridBlock._call_cached_op
_leave_out_passes = function("gp_leave_out_passes", 0, keeps_lock=True)


def recompute(block: mx.gluon.HybridBlock) -> mx.gluon.HybridBlock:
    """Have a block keep its inputs alone for the backward pass, and compute its activations again there, in place.

    It takes a second forward pass of the block, and saves the memory of what is between its inputs and outputs. Mark
    the parts of a net that follow each other, such as its residual units: what is kept is then the input of each, and
    while one goes backward its own activations. Dropout draws the same masks both times, and running statistics of
    batch norm move once. Outputs and gradients are those of the block without it, apart from the seeds of dropout.

    The block runs as a graph of its own, hybridized or not. Hybridized blocks around it run layer by layer while MXNet
    records; their other layers still run as graphs. Outside of ``autograd.record()`` nothing changes, and neither do
    names and files of parameters, and exported graphs.

    Args:
        block: a HybridBlock, before or after initialization and hybridization. Its inputs and outputs may be nested.

    Returns:
        `block`, for use in an expression.

    Raises:
        TypeError: `block` is no HybridBlock.
        ValueError: when it runs: it has a SyncBatchNorm layer, or a row_sparse gradient.

    Example:
        >>> net = mx.gluon.model_zoo.vision.resnet18_v1()
        >>> for stage in net.features[4:8]:
        ...     for unit in stage:
        ...         _ = recompute(unit)
        >>> net.hybridize()
    """
    if not isinstance(block, mx.gluon.HybridBlock):
        raise TypeError(
            f"recompute: expected a HybridBlock, got {type(block).__name__}; mark the HybridBlocks in it one by one"
        )
    if block not in _marked:
        mx.gluon.HybridBlock._call_cached_op = _call_graph
        replace_method(block, "forward", functools.partial(_forward, block, block.forward))
        _marked.add(block)
    return block


@stands_for(_call_in_mxnet, mx.gluon.HybridBlock, "_call_cached_op")
def _call_graph(block: mx.gluon.HybridBlock, *args: Any) -> Any:
    """Run a hybridized block as a graph, or layer by layer while MXNet records where blocks in it are recomputed."""
    inner = blocks_of(block)[:-1] if mx.autograd.is_recording() else []  # the block itself comes last
    if not any(one in _marked for one in inner):
        return _call_in_mxnet(block, *args)
    finish_initialization(block, args, block.collect_params().values())
    device = next(array for array in flatten(args, "input")[0] if array is not None).ctx
    parameters = {name: parameter.data(device) for name, parameter in own_parameters(block).items()}
    return block.hybrid_forward(mx.nd, *args, **parameters)


def _forward(block: mx.gluon.HybridBlock, plain: Callable[..., Any], *args: Any) -> Any:
    flat = flatten(args, "input")[0]
    if not mx.autograd.is_recording() or any(isinstance(one, mx.sym.Symbol) for one in flat):
        return plain(*args)
    if waiting_sync_groups(block):
        raise ValueError(
            f"recompute: {block.name} has a SyncBatchNorm layer, which would exchange statistics a second time, in an "
            "order of the backward pass that need not be that of the other devices; mark the blocks between such layers"
        )
    finish_initialization(block, args, block.collect_params().values())
    graph, symbol = _graph_of.of(block), trace(block, *args)[1]
    data = [array for array in flat if array is not None]
    dtypes = [array.dtype for array in data]
    # The first call, or the block was cast, or hybridized anew, or gets another dtype.
    if graph is None or graph.traced is not symbol or graph.dtypes != dtypes:
        graph = _graph_of.set(block, _Graph(block, data))
    outputs = graph.run(data)
    return unflatten(outputs, output_structure(block))


class _Graph:
    """The graph of a recomputed block, which several devices run."""

    def __init__(self, block: mx.gluon.HybridBlock, data: Sequence[Any]) -> None:
        inputs, self.traced = traced_graph(block)
        self.dtypes = [array.dtype for array in data]
        parameters, indices = block.collect_params(), {one.name: index for index, one in enumerate(inputs)}
        self.states = self.traced.list_auxiliary_states()
        self.arguments = self.traced.list_arguments()
        self.names = self.traced.list_inputs()  # both, in the executor's order
        self._sources = [indices[name] if name in indices else parameters[name] for name in self.arguments]
        of_arguments = [data[one] if isinstance(one, int) else one.data(data[0].ctx) for one in self._sources]
        dtypes = {name: array.dtype for name, array in zip(self.arguments, of_arguments)}
        self.symbol, self._outputs = _with_float32_around(_copying(self.traced), dtypes)
        self._statistics = [parameters[name] for name in self.states]
        sparse = [
            one.name for one in parameters.values() if gradient_storage(one) != "default" and one.grad_req != "null"
        ]
        if sparse:
            raise ValueError(
                f"recompute: {', '.join(sparse)}: gradients must be dense; build it with sparse_grad=False"
            )
        is_data = [name in indices for name in self.names]
        flags = [(name, value) for name, value in flags_of(block) if not name.startswith("static")]  # they keep memory
        flags.append(("data_indices", np.flatnonzero(is_data).tolist()))
        flags.append(("param_indices", np.flatnonzero(np.logical_not(is_data)).tolist()))
        with building(block):
            self._executor = mx.nd.CachedOp(self.symbol, flags)
        self._lock = threading.Lock()  # MXNet's executors are for one thread at a time
        self._modes = mx.util.is_np_shape(), mx.util.is_np_array()
        self.is_random = draws_random_numbers(block)
        self.token = str(id(self))
        _graphs[self.token] = self

    def run(self, data: Sequence[Any]) -> list[Any]:
        """The outputs for these inputs, recorded."""
        device = data[0].ctx
        arrays = [data[one] if isinstance(one, int) else one.data(device) for one in self._sources]
        states = [one.data(device) for one in self._statistics]
        arrays, states = [*map(_as_float32, map(as_legacy, arrays))], list(map(as_legacy, states))
        make_plain(*arrays)  # custom operators cannot read oneDNN's layouts
        if self.is_random:  # the seed is an input, so it is the same in both passes; float32 has these whole numbers
            with mx.autograd.pause():
                arrays.append(mx.nd.random.uniform(0, 1 << 24, (1,), ctx=device).floor())
        outputs = mx.nd.Custom(*arrays, *states, op_type=_OPERATOR, token=self.token)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        # As in `SyncBatchNorm`: the gradients that come back are in the plain layout, and nothing is copied.
        outputs = [mx.nd.squeeze(one, axis=(), out=one.detach()) for one in outputs]
        halves = [dtype == BFLOAT16 for dtype in self._outputs]
        outputs = [mx.nd.amp_cast(one, dtype=BFLOAT16) if half else one for one, half in zip(outputs, halves)]
        return [as_class_of(one, data[0]) for one in outputs]

    def call(self, arguments: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        named = {**dict(zip(self.arguments, arguments)), **dict(zip(self.states, states))}
        if self.is_random:
            seed_this_thread(int(arguments[-1].asscalar()))
        shapes, arrays = self._modes
        with mx.util.np_shape(shapes), mx.util.np_array(arrays):
            outputs = self._executor(*(named[name] for name in self.names))
        return [as_legacy(one) for one in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]

    def forward(self, is_train: bool, arguments: Sequence[Any], outputs: Sequence[Any], states: Sequence[Any]) -> None:
        """Write the outputs, and change nothing else."""
        mode = mx.autograd.train_mode() if is_train else mx.autograd.predict_mode()
        with self._lock, mode:
            found = self.call(arguments, [state.copy() for state in states])
        for output, value in zip(outputs, found):
            output[:] = value.reshape(output.shape)

    def backward(
        self, is_train: bool, reqs: Sequence[str], heads: Sequence[Any], arguments: Sequence[Any],
        gradients: Sequence[Any], states: Sequence[Any],
    ) -> None:  # fmt: skip
        """Write, or add, the gradients of the arguments; running statistics move."""
        wanted, added = [], []
        for index, (req, argument, gradient) in enumerate(zip(reqs, arguments, gradients)):
            if req == "null":
                continue
            # oneDNN would write the gradient of an input in a layout of its own, which only this array would know.
            if argument.ndim > 2 and isinstance(self._sources[index], int):
                own = mx.nd.empty(argument.shape, argument.ctx, argument.dtype)
                added.append((req, own, gradient))
                wanted.append((argument, own, "write"))
            else:
                wanted.append((argument, gradient, "add" if req == "add" else "write"))
        _leave_out_passes()
        with self._lock:
            mx.autograd.mark_variables(*map(list, zip(*wanted)))
            with mx.autograd.record(train_mode=is_train):
                outputs = self.call(arguments, states)
            pairs = [(one, head.reshape(one.shape)) for one, head in zip(outputs, heads) if has_graph(one)]
            if pairs:
                mx.autograd.backward(*map(list, zip(*pairs)), train_mode=is_train)
        for req, own, gradient in added:
            gradient[:] = gradient + own if req == "add" else own


def _as_float32(array: mx.nd.NDArray) -> mx.nd.NDArray:
    return mx.nd.amp_cast(array, dtype="float32") if array.dtype == BFLOAT16 else array


def _with_float32_around(symbol: mx.sym.Symbol, dtypes: dict[str, Any]) -> tuple[mx.sym.Symbol, list]:
    """A graph that takes and returns float32 in the place of bfloat16, which MXNet's custom operators do not know.

    The numbers are the same. Also the dtypes of the outputs of `symbol`, whose arguments have these `dtypes`.
    """
    halves = {name for name, dtype in dtypes.items() if dtype == BFLOAT16}

    def replacement(_number: int, node: Node) -> list[Node]:
        if node["op"] != "null" or node["name"] not in halves:
            return [node]
        # MXNet's cast does not add to a gradient (grad_req="add") on CPUs, a copy does.
        copy = new_node("_copy", f"{node['name']}_copied_apart")
        return [node, copy, new_node("amp_cast", f"{node['name']}_bfloat16", dtype="bfloat16")]

    symbol = replace_nodes(symbol, replacement) if halves else symbol
    outputs = symbol.infer_type(**{name: np.float32 if name in halves else dtype for name, dtype in dtypes.items()})[1]
    if not any(dtype == BFLOAT16 for dtype in outputs):
        return symbol, outputs
    is_np = isinstance(symbol, NumPySymbol)
    heads = [one.as_nd_ndarray() if is_np else one for one in symbol]
    heads = [mx.sym.amp_cast(one, dtype="float32") if dtype == BFLOAT16 else one for one, dtype in zip(heads, outputs)]
    group = mx.sym.Group(heads)
    return (group.as_np_ndarray() if is_np else group), outputs


def _copying(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """The graph with copies of inputs that are outputs too: of small graphs, MXNet would lose their gradients."""
    heads = {source for source, *_ in graph_of(symbol)["heads"]}

    def replacement(number: int, node: Node) -> list[Node]:
        is_passed = number in heads and node["op"] == "null"
        return [node, new_node("_copy", f"{node['name']}_copied")] if is_passed else [node]

    return replace_nodes(symbol, replacement)


class _Recompute(mx.operator.CustomOp):
    """Launches both passes from one thread of each device: MXNet's temporary memory belongs to the launching thread."""

    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self._graph = graph

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self._is_train = is_train
        thread_of(("recompute", in_data[0].ctx))(lambda: self._graph.forward(is_train, in_data, out_data, aux))

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        arrays = req, out_grad, in_data, in_grad, aux
        thread_of(("recompute", in_data[0].ctx))(lambda: self._graph.backward(self._is_train, *arrays))


class _RecomputeProp(mx.operator.CustomOpProp):
    def __init__(self, token: str) -> None:
        super().__init__(need_top_grad=True)
        self._graph = _graphs[token]

    def list_arguments(self) -> list[str]:
        return [*self._graph.arguments, *(["seed"] if self._graph.is_random else [])]

    def list_outputs(self) -> list[str]:
        return self._graph.symbol.list_outputs()

    def list_auxiliary_states(self) -> list[str]:
        return self._graph.states

    def infer_shape(self, in_shape: Any) -> tuple:
        graph = self._graph
        _, outputs, states = graph.symbol.infer_shape(**dict(zip(graph.arguments, map(tuple, in_shape))))
        return in_shape, outputs, states

    def infer_type(self, in_type: Any) -> tuple:
        graph = self._graph
        _, outputs, states = graph.symbol.infer_type(**dict(zip(graph.arguments, in_type)))
        return in_type, outputs, states

    def declare_backward_dependency(self, out_grad: Any, in_data: Any, out_data: Any) -> list:
        return [*out_grad, *in_data, *out_data]  # the outputs for the gradient of squeeze, see `SyncBatchNorm`

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _Recompute:
        return _Recompute(self._graph)


def _array(handle: Any, writable: bool = True, stype: int = UNDEFINED_STORAGE) -> mx.nd.NDArray:
    """An array that the operator is given; MXNet's own function fails on gradients that nobody wants."""
    return mx.nd.NDArray(handle, writable=writable)


def _register() -> None:
    """Register the operator, whose arrays are all dense."""
    makes_arrays, mx.operator._ndarray_cls = mx.operator._ndarray_cls, _array
    try:
        mx.operator.register(_OPERATOR)(_RecomputeProp)  # which keeps the function of that moment
    finally:
        mx.operator._ndarray_cls = makes_arrays


_register()
