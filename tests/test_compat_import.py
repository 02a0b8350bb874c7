"""The import of MXNet takes its operators' code from a cache, and imports later what it rarely needs."""

import ctypes
import importlib
import os
import sys
import threading
import types

import numpy as np
import pytest

import mxnet as mx
from gluon_parallel.mxnet.compat import operator_code

# ---- the cache of operators' functions ------------------------------------------------------------------------------

SOURCE = """
def scale(data=None, factor=_Null):
    'Doubles (really).'
    return pair(4711, [data, factor])"""
NULL = object()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "__pycache__" / "code.operators")


@pytest.fixture
def may_write(monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)


@pytest.fixture
def make():
    """What makes a function, as MXNet's does; ``make.names`` are the operators that it has made functions of."""
    namespace = {"__name__": "register", "SOURCE": SOURCE, "pair": lambda *values: values, "_Null": NULL, "made": []}
    exec(
        """
def make(handle, name, func_name):
    made.append(name)
    local = {}
    exec(SOURCE.replace("4711", str(handle.value)).replace("scale", func_name), None, local)
    return local[func_name]""",
        namespace,
    )
    namespace["make"].names = namespace["made"]
    return namespace["make"]


def saved(path, make, *names, stamp=1):
    functions = operator_code.OperatorFunctions(path, stamp)
    for name in names or ["_scale"]:
        function_of(functions, make, name)
    functions.save()


def parts(function):
    """All of a function but its docstring and the places in its source."""
    code, defaults = function.__code__, tuple(map(id, function.__defaults__ or ()))
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_filename
    return code.co_name, counts, code.co_code, code.co_consts[1:], code.co_names, code.co_varnames, defaults


PREFIXES = [
    *("", "_contrib_", "_linalg_", "_sparse_", "_image_", "_random_", "_np_", "_np__random_", "_np__linalg_"),
    *("_npi_", "_npx_", "_npx__image_", "_npx__random_"),
]  # which MXNet takes from an operator's name for its function's


@pytest.mark.parametrize("kind", ["ndarray", "symbol"])
def test_each_operator_function_is_one_that_mxnet_makes(kind):
    register = importlib.import_module(f"mxnet.{kind}.register")
    names, size = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_uint()
    mx.base.check_call(mx.base._LIB.MXListAllOpNames(ctypes.byref(size), ctypes.byref(names)))
    made = set()
    for name in [mx.base.py_str(names[i]) for i in range(size.value)]:
        handle = mx.base.OpHandle()
        mx.base.check_call(mx.base._LIB.NNGetOpHandle(mx.base.c_str(name), ctypes.byref(handle)))
        for prefix in PREFIXES:
            if name.startswith(prefix):
                function = getattr(register, f"_make_{kind}_function")(handle, name, name[len(prefix) :])
                made.add(parts(function))
    modules = [module for name, module in sys.modules.items() if name.startswith("mxnet.")]
    functions = {
        value for module in modules for value in vars(module).values() if isinstance(value, types.FunctionType)
    }
    found = {
        function
        for function in functions
        if function.__globals__ is vars(register) and function.__code__.co_filename == "<string>"
    }
    assert len(found) > 1000
    assert {function.__name__ for function in found if parts(function) not in made} == set()
    convolution = mx.base.OpHandle()
    mx.base.check_call(mx.base._LIB.NNGetOpHandle(b"Convolution", ctypes.byref(convolution)))
    expected = getattr(register, f"_make_{kind}_function")(convolution, "Convolution", "Convolution").__doc__
    assert "Parameters" in expected and getattr(mx, kind).Convolution.__doc__ == expected


def function_of(functions, make, name="_scale", address=4711):
    return functions.by(make)(ctypes.c_void_p(address), name, name[1:])


def test_the_next_process_makes_only_what_is_new_inserts_its_own_address_and_hands_over_to_mxnet(path, may_write, make):
    saved(path, make)
    saved(path, make, "_scale", "_other")
    assert make.names == ["_scale", "_other"]
    functions = operator_code.OperatorFunctions(path, 1)
    function, other = function_of(functions, make, address=815), function_of(functions, make, "_other")
    assert function(1, factor=2) == (815, [1, 2]) and function() == (815, [None, NULL])
    assert (function.__name__, function.__doc__, other.__name__) == ("scale", "Doubles (really).", "other")
    assert make.names == ["_scale", "_other"]
    functions.save()
    assert functions.by(make) is make
    saved(path, make, stamp=2)  # another MXNet's
    saved(path, make, stamp=2)
    assert make.names == ["_scale", "_other", "_scale"]


@pytest.mark.parametrize("content", [lambda data: data[:-1], lambda data: b"1234" + data[4:], lambda data: b""])
def test_a_file_that_is_damaged_or_another_pythons_is_written_anew(content, path, may_write, make):
    saved(path, make)
    with open(path, "rb") as file:
        whole = file.read()
    with open(path, "wb") as file:
        file.write(content(whole))
    saved(path, make)
    assert function_of(operator_code.OperatorFunctions(path, 1), make)(1) == (4711, [1, NULL])
    assert make.names == ["_scale"] * 2


@pytest.mark.parametrize("why", ["a file in its place", "no code is to be written", "disk full"])
def test_where_nothing_can_be_written_functions_are_made_all_the_same(tmp_path, may_write, make, monkeypatch, why):
    def fail(*_):
        raise OSError("disk full")

    if why == "a file in its place":
        (tmp_path / "file").touch()
    elif why == "disk full":
        monkeypatch.setattr(os, "replace", fail)
    else:
        monkeypatch.setattr("sys.dont_write_bytecode", True)
    path = str(tmp_path / "file" / "code.operators")
    saved(path, make)
    assert function_of(operator_code.OperatorFunctions(path, 1), make)(1) == (4711, [1, NULL])
    assert not [one for one in tmp_path.rglob("*") if one.is_file() and one.name != "file"]


def test_writers_at_the_same_time_leave_one_whole_file(path, may_write, make):
    threads = [threading.Thread(target=saved, args=[path, make]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(os.path.dirname(path)) == ["code.operators"]
    make.names.clear()
    function_of(operator_code.OperatorFunctions(path, 1), make)
    assert make.names == []


# ---- modules that are imported later --------------------------------------------------------------------------------


def test_arrays_are_made_and_compared_with_scipys_matrices_whoever_imported_scipy():
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed here")
    dense = np.array([[0, 2, 0], [1, 0, 3]], np.float32)
    array = mx.nd.sparse.array(sparse.csr_matrix(dense))
    assert isinstance(array.asscipy(), sparse.csr_matrix) and np.array_equal(array.asscipy().toarray(), dense)
    assert mx.nd.array(sparse.csr_matrix(dense)).stype == "csr"
