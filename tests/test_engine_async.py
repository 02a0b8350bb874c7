"""A function that begins in MXNet's engine and ends elsewhere."""

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import mxnet as mx
from gluon_parallel.mxnet import engine
from gluon_parallel.mxnet.engine import functions
from mxnet import nd


def finish_later(array, seconds, error=None):
    """A function for push_async that adds 1 to `array` after a while, on a thread of its own."""

    def begin(done):
        def work():
            time.sleep(seconds)
            engine.view(array)[:] += 1
            done(error)

        threading.Thread(target=work).start()

    return begin


def test_who_reads_the_array_gets_what_was_written_before_done():
    array = nd.zeros(3)
    for _ in range(5):
        array *= 2
        engine.push_async(finish_later(array, 0.01), write=[array])
    assert array.asnumpy().tolist() == [31.0] * 3  # 0, 1, 3, 7, 15, 31


def test_the_engine_goes_on_with_everything_else_meanwhile():
    slow, release, order = nd.zeros(1), threading.Event(), []

    def begin(done):
        def work():
            release.wait(60)
            order.append("slow")
            done()

        threading.Thread(target=work).start()

    engine.push_async(begin, write=[slow])
    for _ in range(20):  # on the same device: a function that waits in the engine would block its only thread
        other = nd.ones(5) * 2
    assert other.asnumpy().tolist() == [2.0] * 5
    order.append("others")
    release.set()
    slow.wait_to_read()
    assert order == ["others", "slow"]


@pytest.mark.parametrize("early", [True, False])
def test_an_error_is_raised_where_the_array_is_read_once_and_the_array_is_free(early):
    array = nd.zeros(2, dtype="int32")

    def begin(done):
        raise KeyError("at once")

    engine.push_async(begin if early else finish_later(array, 0.01, KeyError("later")), write=[array])
    with pytest.raises(KeyError, match="at once" if early else "later"):
        array.wait_to_read()
    engine.push(lambda: None, read=[array])
    array += 1
    assert array.asnumpy().tolist() == ([1, 1] if early else [2, 2])
    assert engine.settle() == []


def test_ending_twice_is_ending_once():
    array = nd.zeros(1)

    def begin(done):
        done()
        done()

    for _ in range(50):
        engine.push_async(begin, write=[array])
    mx.nd.waitall()
    assert np.array_equal(array.asnumpy(), [0])


def test_devices_may_fail_at_the_same_moment():  # MXNet's list of exceptions has no lock
    program = """
        import threading

        import gluon_parallel
        import mxnet as mx
        from gluon_parallel.mxnet.engine import functions

        def fail(device):
            arrays = [mx.nd.zeros(3, ctx=device) for _ in range(10)]
            for _ in range(300):
                start.wait()
                functions.fail(arrays, ValueError(str(device)))
                for array in arrays:
                    try:
                        array.wait_to_read()
                    except ValueError:
                        continue
                    raise AssertionError("nothing failed")

        start = threading.Barrier(4)
        threads = [threading.Thread(target=fail, args=(mx.cpu(number),)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_the_engines_list_of_exceptions_has_room_for_all_that_may_come():
    functions.make_room()
    words = functions._engine_words()
    size = functions._ROOM * functions._REFERENCE
    rooms = [words[n : n + 2] for n in range(len(words) - 2) if words[n + 2] - words[n] == size]
    assert len(rooms) == 1 and 0 <= rooms[0][1] - rooms[0][0] <= size


def test_two_threads_that_end_a_function_at_the_same_time_end_it_once(monkeypatch):
    """A second end would free the engine's function twice."""
    ends, end = [], functions._end

    class Slow(threading.Event):
        def is_set(self):
            found = super().is_set()
            time.sleep(0.05)  # so that the other thread comes in between
            return found

    def noted(waiting, *arguments):
        ends.append(waiting)
        if len(ends) == 1:
            end(waiting, *arguments)

    monkeypatch.setattr(functions, "_end", noted)
    monkeypatch.setattr(functions.threading, "Event", Slow)
    array, threads = nd.zeros(1), []

    def start(done):
        threads.extend(threading.Thread(target=done) for _ in range(2))

    engine.push_async(start, write=[array])
    while len(threads) < 2:
        time.sleep(0.001)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    array.wait_to_read()
    assert len(ends) == 1
