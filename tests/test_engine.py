import subprocess
import sys
import textwrap

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import engine
from mxnet import nd


def test_a_pushed_function_runs_between_the_operators_before_and_after_it():
    array = nd.zeros((100, 100))
    for _ in range(300):
        array += 1
        engine.push(lambda: np.multiply(engine.view(array), 2, out=engine.view(array)), write=[array])
        array -= engine_free_half(array)
    np.testing.assert_array_equal(array.asnumpy(), np.full((100, 100), 300.0, "float32"))


def engine_free_half(array):
    return array / 2


def test_arrays_live_until_the_function_that_uses_them_has_run():
    results = []
    for value in range(100):
        array = nd.full((1000,), value)
        engine.push(lambda array=array: results.append(engine.view(array)[0]), read=[array])
        del array
    nd.waitall()
    assert results == list(range(100))
    assert not engine._pending


def test_a_function_that_raises_is_reported_by_the_next_push_and_stops_nobody():
    array = nd.zeros(3)

    def fail():
        raise ValueError("on purpose")

    engine.push(fail, write=[array])
    array.wait_to_read()
    with pytest.raises(ValueError, match="on purpose"):
        engine.push(lambda: None, write=[array])
    engine.check()
    gp.allreduce([array, nd.ones(3, ctx=mx.cpu(1))])
    assert array.asnumpy().tolist() == [1, 1, 1]


def test_an_array_named_twice_is_one_array():
    array = nd.ones(4)
    engine.push(lambda: np.add(engine.view(array), 1, out=engine.view(array)), read=[array], write=[array, array])
    assert array.asnumpy().tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 4), (0,)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"])
def test_a_view_is_the_array_itself(shape, dtype):
    if 0 in shape:
        with mx.util.np_shape(True):
            assert engine.view(nd.zeros(shape, dtype=dtype)).shape == shape
        return
    array = nd.array(np.arange(np.prod(shape)).reshape(shape), dtype=dtype)
    array.wait_to_read()
    memory = engine.view(array)
    np.testing.assert_array_equal(memory, array.asnumpy())
    memory[...] = 7
    assert (array.asnumpy() == 7).all()


def test_make_plain_undoes_the_layout_of_a_convolution():
    convolution = mx.gluon.nn.Conv2D(32, 3, in_channels=16)
    convolution.initialize()
    output = convolution(nd.random.normal(shape=(4, 16, 20, 20)))
    engine.make_plain(output)
    seen = []
    engine.push(lambda: seen.append(engine.view(output).copy()), write=[output])
    nd.waitall()
    np.testing.assert_array_equal(seen[0], output.asnumpy())


@pytest.mark.parametrize("fork", ["os.waitpid(os.fork() or os._exit(0), 0)", "subprocess.run(['true'])"])
def test_a_process_can_be_started_while_functions_are_queued(fork):
    program = f"""
        import os, subprocess, numpy as np, gluon_parallel as gp, mxnet as mx
        arrays = [mx.nd.ones((300, 300), ctx=mx.cpu(index)) for index in range(2)]
        for _ in range(20):
            arrays = [mx.nd.dot(array, array) / 600 for array in arrays]
            gp.allreduce(arrays)
            {fork}
        print((arrays[0].asnumpy() == 1).all())
        """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
