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
from gluon_parallel.compat import deferred, operator_code

# ---- the cache of code ----------------------------------------------------------------------------------------------

SOURCE = '''
def scale(data=None, factor=None):
    """Doubles (really)."""
    return pair(4711, [data, factor])'''
NAMES = {"pair": lambda *values: values}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "__pycache__" / "code.operators")


@pytest.fixture
def may_write(monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)


@pytest.fixture
def compiled(monkeypatch):
    """The sources that were compiled so far."""
    sources = []

    def count(source, *others):
        sources.append(source)
        return compile(source, *others)

    monkeypatch.setattr(operator_code, "compile", count, raising=False)
    return sources


def function_of(code, source=SOURCE):
    namespace = {}
    code.execute(source, NAMES, namespace)
    return namespace["scale"]


def saved(path, *sources):
    code = operator_code.OperatorCode(path)
    for source in sources or [SOURCE]:
        function_of(code, source)
    code.save()


def parts(function):
    """All of a function but the places in its source."""
    code, defaults = function.__code__, tuple(map(id, function.__defaults__ or ()))
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_filename
    return code.co_name, counts, code.co_code, code.co_consts, code.co_names, code.co_varnames, defaults


PREFIXES = [
    *("", "_contrib_", "_linalg_", "_sparse_", "_image_", "_random_", "_np_", "_np__random_", "_np__linalg_"),
    *("_npi_", "_npx_", "_npx__image_", "_npx__random_"),
]  # which MXNet takes from an operator's name for its function's


@pytest.mark.parametrize("kind", ["ndarray", "symbol"])
def test_each_operator_function_is_one_that_mxnet_makes(kind):
    register = importlib.import_module(f"mxnet.{kind}.register")
    assert "exec" not in vars(register)  # so these are compiled
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


def test_the_next_process_compiles_nothing_and_inserts_its_own_address(path, may_write, compiled):
    saved(path)
    compiled.clear()
    function = function_of(operator_code.OperatorCode(path), SOURCE.replace("4711", "815"))
    assert function(1, factor=2) == (815, [1, 2])
    assert function.__doc__ == "Doubles (really)."
    assert compiled == []


def test_another_source_is_compiled_and_both_are_kept(path, may_write, compiled):
    other = SOURCE.replace("[data, factor]", "[factor]")
    saved(path)
    saved(path, other)
    assert len(compiled) == 2
    code = operator_code.OperatorCode(path)
    assert function_of(code)(1, 2) == (4711, [1, 2])
    assert function_of(code, other)(1, 2) == (4711, [2])
    assert len(compiled) == 2


@pytest.mark.parametrize("content", [lambda data: data[:-1], lambda data: b"1234" + data[4:], lambda data: b""])
def test_a_file_that_is_damaged_or_another_pythons_is_written_anew(content, path, may_write, compiled):
    saved(path)
    with open(path, "rb") as file:
        whole = file.read()
    with open(path, "wb") as file:
        file.write(content(whole))
    saved(path)
    assert function_of(operator_code.OperatorCode(path))(1) == (4711, [1, None])
    assert len(compiled) == 2


def test_without_a_folder_to_write_to_functions_are_made_all_the_same(tmp_path, may_write):
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "code.operators")
    saved(path)
    assert function_of(operator_code.OperatorCode(path))(1) == (4711, [1, None])
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_no_file(path, may_write, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    saved(path)
    assert os.listdir(os.path.dirname(path)) == []


def test_a_python_that_shall_write_no_code_writes_none(path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    saved(path)
    assert not os.path.exists(path)


def test_writers_at_the_same_time_leave_one_whole_file(path, may_write, compiled):
    threads = [threading.Thread(target=saved, args=[path]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(os.path.dirname(path)) == ["code.operators"]
    compiled.clear()
    function_of(operator_code.OperatorCode(path))
    assert compiled == []


# ---- modules that are imported later --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("older", "newer"), [("1.9", "1.17"), ("1.17.4", "2.0.0.dev0"), ("2.5", "2.5.1"), ("1.26.4", "2.0.0rc1")]
)
def test_versions_are_compared_as_numbers(older, newer):
    assert deferred._version(older) < deferred._version(newer) >= deferred._version(newer)
    assert not deferred._version(newer) <= deferred._version(older)


def test_arrays_are_made_and_compared_with_scipys_matrices_whoever_imported_scipy():
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed here")
    dense = np.array([[0, 2, 0], [1, 0, 3]], np.float32)
    array = mx.nd.sparse.array(sparse.csr_matrix(dense))
    assert isinstance(array.asscipy(), sparse.csr_matrix) and np.array_equal(array.asscipy().toarray(), dense)
    assert mx.nd.array(sparse.csr_matrix(dense)).stype == "csr"
