"""What ``mx.onnx.export_model`` needs to work with today's onnx; nothing is imported until somebody exports."""

import contextlib
import importlib
import importlib.util
import sys
import types
from typing import Any

from .after_import import Change
from .replacing import stands_for

_OPSET = 13  # the newest one that MXNet's translations are written for


def _restore_mapping(onnx):
    """Put ``onnx.mapping`` back where it is gone: MXNet takes its absence for that of onnx."""
    if hasattr(onnx, "mapping"):
        return
    helper: Any = importlib.import_module("onnx.helper")
    numpy_types = {number: helper.tensor_dtype_to_np_dtype(number) for number in helper.get_all_tensor_dtypes()}
    numbers: dict[Any, int] = {}
    for number, dtype in numpy_types.items():
        numbers.setdefault(dtype, number)
    mapping = types.ModuleType("onnx.mapping")
    vars(mapping).update(TENSOR_TYPE_TO_NP_TYPE=numpy_types, NP_TYPE_TO_TENSOR_TYPE=numbers)
    onnx.mapping = sys.modules["onnx.mapping"] = mapping


@contextlib.contextmanager
def _of_our_opset():
    """In here models are made and graphs are checked for the operators of :data:`_OPSET`.

    MXNet would take the newest that this onnx knows, where operators have other arguments.
    """
    helper: Any = importlib.import_module("onnx.helper")
    checker: Any = importlib.import_module("onnx.checker")
    make_model, check_graph = helper.make_model, checker.check_graph
    opsets = [helper.make_opsetid("", _OPSET)]
    version = helper.find_min_ir_version_for(opsets)
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = version, {"": _OPSET}

    def make(graph, **kwargs):
        weights = {weight.name for weight in graph.initializer}
        inputs = [one for one in graph.input if one.name not in weights]
        del graph.input[:]  # of which a weight is none: runtimes would keep room for another one, and warn of it
        graph.input.extend(inputs)
        return make_model(graph, opset_imports=opsets, ir_version=version, **kwargs)

    helper.make_model, checker.check_graph = make, lambda graph: check_graph(graph, context)
    try:
        yield
    finally:
        helper.make_model, checker.check_graph = make_model, check_graph


def _export_for_our_opset(module):
    export = module.export_model

    @stands_for(export, module, "export_model")
    def export_model(*args, **kwargs):
        if importlib.util.find_spec("onnx") is None:
            return export(*args, **kwargs)  # which says so
        with _of_our_opset():
            return export(*args, **kwargs)

    module.export_model = export_model


CHANGES = {
    "onnx": Change(None, _restore_mapping),
    "mxnet.onnx.mx2onnx._export_model": Change(None, _export_for_our_opset),
}
