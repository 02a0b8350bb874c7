import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.allreduce import copy_sums
from gluon_parallel.mxnet import engine
from mxnet import nd


def test_a_pushed_function_runs_between_the_operators_before_and_after_it():
    array, twos = nd.zeros((100, 50)), np.full((100, 50), 2, "float32")
    for _ in range(300):
        array += 1
        engine.push(lambda: np.multiply(engine.view(array), twos, out=engine.view(array)), write=[array])
        array -= array / 2
    np.testing.assert_array_equal(array.asnumpy(), 150 * twos)


def test_arrays_live_until_the_function_that_uses_them_has_run():
    results, before = [], set(engine.functions.pending)  # of earlier tests, which the engine has yet to free
    for value in range(100):
        array = nd.full((1000,), value)
        engine.push(lambda array=array: results.append(engine.view(array)[0]), read=[array])
        del array
    nd.waitall()
    assert results == list(range(100))
    assert set(engine.functions.pending) <= before


def fail():
    raise ValueError("on purpose")


DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read", ["asnumpy", "wait_to_read"])
def test_what_a_function_raises_is_raised_where_its_arrays_or_what_is_computed_from_them_is_read(dtype, read):
    arrays, called = [nd.zeros(3, dtype=dtype, ctx=mx.cpu(index)) for index in range(3)], threading.Event()
    engine.push(fail, read=arrays[:1], write=[*arrays, arrays[0]])  # an array that is named twice is one array
    later = (arrays[0] + arrays[0]).astype("float32") * 2
    engine.push(called.set, read=arrays[:1])  # which only reads
    for array in (later, *arrays[1:]):  # a failure that was read has ended
        with pytest.raises(ValueError, match="^on purpose$"):
            getattr(array, read)()
    assert called.wait(60) and engine.settle() == []
    array = nd.zeros(3)
    gp.allreduce([array, nd.ones(3, ctx=mx.cpu(1))])  # others are not stopped
    assert array.asnumpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("push", [engine.push, engine.push_async])
def test_a_function_that_is_not_called_is_freed_with_its_arrays(push):
    array, written, called = nd.zeros(3), nd.zeros(1), []

    def function(*_done):
        called.append(1)

    engine.push(fail, write=[array])
    push(function, read=[array * 2], write=[written])
    kept = weakref.ref(function)
    with pytest.raises(ValueError, match="on purpose"):
        written.asnumpy()
    del function
    end = time.monotonic() + 60  # the engine frees it after the arrays are ready
    while kept() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert kept() is None and called == []


def test_a_failed_allreduce_in_python_raises_where_it_is_read(monkeypatch):
    def broken(*_):
        raise MemoryError("no buffer")

    monkeypatch.setattr(copy_sums, "sum_rows", broken)
    arrays = [nd.ones(3, dtype="uint8", ctx=mx.cpu(index)) for index in range(2)]
    gp.allreduce(arrays)
    for array in arrays:
        with pytest.raises(MemoryError, match="no buffer"):
            array.asnumpy()


def test_what_no_array_can_carry_is_raised_by_the_next_push_once_and_one_error_of_several_functions_once():
    engine.push(fail)
    nd.waitall()
    with pytest.raises(ValueError, match="on purpose"):
        engine.push(lambda: None)
    engine.check()
    error = ValueError("on purpose")

    def fail_with_it():
        raise error

    engine.push(fail_with_it)
    nd.waitall()
    with pytest.raises(ValueError, match="on purpose"):
        engine.check()
    engine.push(fail_with_it)
    nd.waitall()
    engine.check()


class CodeError(Exception):
    def __init__(self, text):
        self.code = int(text)  # of its `args`, which a copy is made from, this is a ValueError
        super().__init__(f"code {text}")


class ShapeError(Exception):
    def __init__(self, shape):
        super().__init__(f"bad shape {tuple(shape)}")


@pytest.mark.parametrize("error", [CodeError("3"), ShapeError("ab"), KeyError("name")], ids=repr)
def test_an_error_keeps_its_type_and_text_whatever_its_constructor_does(error):
    array = nd.zeros(2)

    def fail_with_it():
        raise error

    engine.push(fail_with_it, write=[array])
    with pytest.raises(type(error)) as caught:
        array.wait_to_read()
    assert str(caught.value) == str(error)


def test_arrays_fail_although_another_function_has_failed_whose_exception_nobody_has_seen():
    arrays = nd.zeros(2), nd.zeros(2)

    def fail_after_another():
        engine.failures.remember(ValueError("of another function, which writes nothing"))
        raise KeyError("on purpose")

    engine.push(fail_after_another, write=arrays)
    for array in arrays:
        with pytest.raises(KeyError, match="on purpose"):
            array.wait_to_read()
    with pytest.raises(ValueError, match="of another function"):
        engine.check()


class Wordless(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Nested(Exception):
    def __str__(self):  # the garbage collector, too, may end a store there, which waits and raises
        engine.check()
        return "nested"


@pytest.mark.parametrize("error", [Wordless, Nested])
def test_an_error_whose_text_cannot_be_made_or_looks_for_errors_is_raised_as_any_other(error):
    def fail():
        raise error

    array = nd.zeros(2)
    engine.push(fail, write=[array])
    with pytest.raises(error):
        array.wait_to_read()


def test_a_failure_that_nobody_has_read_is_told_at_the_end_and_one_that_was_read_is_not():
    program = """
        import gluon_parallel, mxnet as mx
        from gluon_parallel.mxnet import engine
        def fail(word):
            raise ValueError(word)
        seen, unseen = mx.nd.zeros(3, dtype="int32"), mx.nd.zeros(3)
        engine.push(lambda: fail("apple"), write=[seen])
        try:
            seen.asnumpy()
        except ValueError as error:
            print(error)
        engine.push(lambda: fail("pear"), write=[unseen])
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "apple\n")
    assert done.stderr.count("pear") == 1
    assert "apple" not in done.stderr


def test_a_process_started_meanwhile_does_not_make_a_failure_disappear():
    engine.push(fail, write=[nd.zeros(3)])
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)  # so that it forks
    with pytest.raises(ValueError, match="on purpose"):
        engine.check()


@pytest.mark.parametrize("fork", ["os.waitpid(os.fork() or os._exit(0), 0)", "subprocess.run(['true'])"])
def test_a_process_can_be_started_while_functions_are_queued(fork):
    program = f"""
        import os, subprocess, time, numpy as np, gluon_parallel as gp, mxnet as mx
        arrays = [mx.nd.ones((300, 300), ctx=mx.cpu(index)) for index in range(2)]
        for _ in range(20):
            arrays = [mx.nd.dot(array, array) / 600 for array in arrays]
            gp.allreduce(arrays)
            {fork}
        gp.mxnet.engine.push_async(lambda done: (done(), time.sleep(0.3), print("left")), write=arrays[:1])
        {fork}
        print((arrays[0].asnumpy() == 1).all())
        """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["True", "left"]), done.stderr


def test_the_import_starts_no_engine_so_that_variables_set_after_it_count():
    program = """
        import os
        import gluon_parallel
        os.environ["MXNET_ENGINE_TYPE"] = "NaiveEngine"
        import mxnet as mx
        mx.nd.ones(3).wait_to_read()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "using engine: NaiveEngine" in done.stdout + done.stderr, done
