"""Compilation of functions that run without Python's lock, and the C and Python functions that they call."""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any, Callable

import numba  # which takes half a second
from llvmlite import binding, ir
from numba import types
from numba.core.ccallback import CFunc
from numba.core.typing import Signature
from numba.extending import intrinsic

from .library import SYMBOL, target_machine

SECOND = 1_000_000_000  # nanoseconds
MONOTONIC, PROCESSOR = 1, 3  # clocks: CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID

# Of Numba: division as in NumPy, and no functions that Python calls.
_OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_c_functions: dict[str, dict[str, CFunc]] = collections.defaultdict(dict)  # by module and name


def compiled(signature: Any, called_from_python: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for a signature, or for each of a list.

    Python must not call the result. With `called_from_python`, the module's :class:`.Library` has it as a C function.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        made = numba.njit(signature, **{**_OPTIONS, **options})(function)
        if called_from_python:
            c_callback(signature, **options)(function)
        return made

    return decorate


def c_callback(signature: Signature, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function as a C function of this signature, by its name in the :class:`.Library` of its module."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = numba.cfunc(signature, error_model="numpy", **options)(function)
        _c_functions[function.__module__][function.__name__] = made
        return made

    return decorate


def compile_module(name: str) -> tuple[list[str], bytes]:
    """Compile a module's C functions: returns the names of the C functions that they call, and their object code."""
    config: Any = numba.config
    given, config.DISABLE_JIT = config.DISABLE_JIT, 0  # it is for functions of the user's
    try:
        importlib.import_module(name)
    finally:
        config.DISABLE_JIT = given
    parts = []
    for function in _c_functions[name].values():
        part = _without_exceptions(function, f"{name}.{function.__name__}")
        part.get_function(function.native_name).name = SYMBOL + function.__name__
        parts.append(part)
    whole, *others = parts
    for part in others:
        whole.link_in(part)
    called = sorted(f.name for f in whole.functions if f.is_declaration and not f.name.startswith("llvm."))
    return called, target_machine().emit_object(whole)


def _without_exceptions(function: CFunc, name: str) -> binding.ModuleRef:
    """LLVM's module of a C function, which ends the process where Numba would print an exception and go on.

    Our code raises none. Numba cannot always see that, for example where lengths of arrays could differ. Its functions
    for this would need Numba when the code is loaded.
    """
    failed = ir.Module()
    failed.triple, failed.data_layout = binding.get_process_triple(), str(target_machine().target_data)
    pointer, raised = ir.IntType(8).as_pointer(), SYMBOL + "raised." + function.__name__
    signature = ir.FunctionType(ir.VoidType(), [pointer, pointer, ir.IntType(32), pointer])
    end = ir.Function(failed, signature, "__assert_fail")  # of the C library: says this, and ends the process
    builder = ir.IRBuilder(ir.Function(failed, ir.FunctionType(ir.VoidType(), []), raised).append_basic_block())
    words = []
    for number, text in enumerate(("compiled code raises no exception", name, function.__name__)):
        data = bytearray(text.encode() + b"\0")
        where = ir.GlobalVariable(failed, ir.ArrayType(ir.IntType(8), len(data)), f"{raised}.{number}")
        where.initializer, where.linkage = ir.Constant(where.value_type, data), "internal"
        words.append(builder.bitcast(where, pointer))
    builder.call(end, (*words[:2], ir.Constant(ir.IntType(32), 0), words[2]))
    builder.unreachable()
    code = function.inspect_llvm()
    if "@NRT_MemInfo_alloc_aligned" in code:
        raise TypeError(f"{name} makes an array, which needs Numba when the code runs; use memory of its caller's")
    text, num = re.subn(
        r"^declare ([^@\n]*@(?:numba_|NRT_|Py)\w+\([^\n]*\))[^\n)]*$",
        rf'define internal \1 {{\n  call void @"{raised}"()\n  unreachable\n}}',
        code, flags=re.MULTILINE,
    )  # fmt: skip
    module = binding.parse_assembly(text + f'\ndeclare void @"{raised}"()\n' * bool(num))
    module.link_in(binding.parse_assembly(str(failed)))
    return module


def c_function(name: str, num_arguments: int, result: types.Type = types.int32) -> Callable[..., int]:
    """A C function of `num_arguments` words, found by its name when compiled code is loaded.

    It is the C library's, MXNet's, or one that the :class:`.Library` of the module is given.
    """
    if not hasattr(ctypes.CDLL(None), name) and binding.address_of_symbol(name) is None:
        binding.add_symbol(name, 1)  # so that Numba can load what it compiles; Library sets the real address
    return types.ExternalFunction(name, result(*[types.int64] * num_arguments))


def instruction(result: types.Type, *kinds: types.Type | None) -> Callable[[Callable[..., ir.Value]], Any]:
    """An operation for compiled code on arguments of the types `kinds`, None for any; the function emits it in LLVM."""

    def decorate(emit: Callable[..., ir.Value]) -> Any:
        def operation(_typing: Any, *arguments: types.Type) -> tuple[Signature, Callable[..., ir.Value]]:
            def code(_context: Any, builder: ir.IRBuilder, _signature: Signature, values: Sequence[ir.Value]) -> Any:
                return emit(builder, *values)

            return result(*(kind or given for kind, given in zip(kinds, arguments))), code

        return intrinsic(functools.wraps(emit)(operation))  # Numba counts the arguments after the first

    return decorate


@instruction(types.int32, *[types.int64] * 4)
def call(builder: ir.IRBuilder, function: ir.Value, first: ir.Value, second: ir.Value, third: ir.Value) -> ir.Value:
    """Call the C function at that address with three words; its result is an ``int``."""
    word = ir.IntType(64)
    kind = ir.FunctionType(ir.IntType(32), [word] * 3)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), (first, second, third))


@instruction(types.int64)
def two_words(builder: ir.IRBuilder) -> ir.Value:
    """The address of 16 bytes on the stack, valid until the calling function returns."""
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(ir.IntType(64), 2))
    return builder.ptrtoint(memory, ir.IntType(64))


pthread_mutex_lock = c_function("pthread_mutex_lock", 1)
pthread_mutex_unlock = c_function("pthread_mutex_unlock", 1)
pthread_cond_broadcast = c_function("pthread_cond_broadcast", 1)
