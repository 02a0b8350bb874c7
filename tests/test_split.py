import array
import collections
import re

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import split
from gluon_parallel.mxnet.device_threads import hand_written_loops, launch_by_device
from mxnet import nd

pytestmark = pytest.mark.arithmetic

DEVICES = [mx.cpu(number) for number in range(5)]


@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(1, 23),
    num_devices=st.integers(1, 5),
    axis=st.integers(0, 2),
    dtype=st.sampled_from(["float16", "float32", "int32", "uint8", "int64"]),
    on_host=st.booleans(),
)
def test_shards_put_together_are_the_batch_and_differ_by_at_most_one(num, num_devices, axis, dtype, on_host):
    shape = [2, 3, 2]
    shape[axis] = num
    batch = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    data = batch if on_host else nd.array(batch, dtype=dtype)
    shards = gp.split_and_load(data, DEVICES[:num_devices], axis)
    sizes = [shard.shape[axis] for shard in shards]
    assert len(shards) == min(num, num_devices)
    assert max(sizes) - min(sizes) <= 1
    assert [shard.context for shard in shards] == DEVICES[: len(shards)]
    assert all(shard.dtype == np.dtype(dtype) for shard in shards)
    np.testing.assert_array_equal(np.concatenate([shard.asnumpy() for shard in shards], axis), batch)


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4],
        (1.5, True, 3, np.float64(4)),
        [[1, 2], [3, 4]],
        range(6),
        np.arange(8, dtype="uint16").reshape(4, 2),
        np.arange(-4, 4, dtype="int16"),
        np.arange(4, dtype="uint32"),
        np.arange(4, dtype="uint64"),
        np.array([[1, 2.5], [3, 4]], object),
        np.arange(4, dtype="longdouble"),
        array.array("d", [1, 2, 3, 4]),
        collections.deque([1, 2, 3, 4]),
        bytearray(b"\1\2\3\4"),
        memoryview(np.ones((4, 2), "float32")),
        nd.array(np.eye(4)).tostype("csr"),
        scipy.sparse.csr_matrix(np.eye(6, dtype="float32")),
    ],
    ids="list tuple rows range u16 i16 u32 u64 object longdouble array deque bytearray memoryview csr scipy".split(),
)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_it_takes_what_gluon_takes(data, num_devices):
    ours = gp.split_and_load(data, DEVICES[:num_devices])
    theirs = mx.gluon.utils.split_and_load(data, ctx_list=DEVICES[:num_devices])
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs):
        assert (our.context, our.dtype, our.stype) == (their.context, their.dtype, their.stype)
        np.testing.assert_array_equal(our.asnumpy(), their.asnumpy())
    for our, their in zip(gp.split_and_load(data, ctx_list=iter(DEVICES[:num_devices])), ours):
        np.testing.assert_array_equal(our.asnumpy(), their.asnumpy())
    [(image, labels)] = gp.split_and_load((np.zeros((2, 3)), [4, 5]), DEVICES[:1])  # one array per part of a batch
    assert image.shape == (2, 3) and labels.asnumpy().tolist() == [4, 5]


def test_nested_batches_keep_their_nesting_on_every_device():
    Pair = collections.namedtuple("Pair", "image label")
    batch = {"pair": Pair(np.zeros((5, 2)), nd.arange(5)), "more": [np.arange(5), (np.ones((5, 1)),)]}
    shards = gp.split_and_load(batch, DEVICES[:2])
    assert [shard["pair"].label.asnumpy().tolist() for shard in shards] == [[0, 1, 2], [3, 4]]
    for shard in shards:
        assert isinstance(shard["pair"], Pair)
        assert isinstance(shard["more"], list) and isinstance(shard["more"][1], tuple)


def test_a_shard_that_is_already_there_is_not_copied():
    data = nd.zeros((4, 2))
    shards = gp.split_and_load(data, DEVICES[:2])
    data[:] = 5
    assert shards[0].asnumpy().max() == 5
    assert shards[1].asnumpy().max() == 0


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((np.zeros((4, 2)), np.zeros(3)), {}, r"data\[0\] has 4, data\[1\] has 3"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(5)}, {}, r"data\['x'\] has 4, data\['y'\] has 5"),
        (np.zeros((0, 3)), {}, "no samples"),
        ((), {}, "no array"),
        ([1.0, np.zeros(2)], {}, r"data\[0\] is a float.*numpy.asarray"),
        ([[1, 2], [3]], {}, "a list of the batch makes no array of numbers"),
        (np.float32(3), {}, "is a float32"),
        (nd.ones((4, 2)).tostype("row_sparse"), {}, r"tostype\('default'\)"),
        (np.zeros(3), {"batch_axis": 1}, r"shape \(3,\).*no axis 1"),
        (np.zeros((3, 4)), {"batch_axis": -1}, "batch_axis is -1"),
        (np.zeros(5), {"even_split": True}, "5 samples do not divide evenly over 2 devices"),
        (np.ones(4) * 1j, {}, "dtype complex128.*astype"),
        (np.array(["a", "b"]), {}, "dtype <U1.*astype"),
        (np.zeros(4, "M8[s]"), {}, "dtype date.*astype"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(data, options, message):
    with pytest.raises(gp.errors.BatchMismatch, match=message):
        gp.split_and_load(data, DEVICES[:2], **options)
    assert len(gp.split_and_load(np.zeros(6), DEVICES[:2], 0, True)) == 2


def test_a_defaultdict_an_array_of_mxnets_numpy_and_scipys_newer_arrays_are_split_too():
    shards = gp.split_and_load(scipy.sparse.csr_array(np.eye(5)), DEVICES[:2])
    np.testing.assert_array_equal(np.concatenate([shard.asnumpy() for shard in shards]), np.eye(5))
    batch = collections.defaultdict(list, image=mx.np.ones((2, 4)))
    shards = gp.split_and_load(batch, DEVICES[:2], batch_axis=1)
    assert [shard["image"].shape for shard in shards] == [(2, 2), (2, 2)]
    assert isinstance(shards[1], collections.defaultdict)


@pytest.mark.parametrize(
    ("devices", "written"),
    [
        ("cpu:2", "'cpu:2'"), (["cpu(0)"], "['cpu(0)']"), (mx.cpu, '"auto"'),
        (None, '"auto"'), (2, '"auto"'), ([0, 1], '"auto"'), ([], '"auto"'), ([None], '"auto"'),
    ],
)  # fmt: skip
def test_what_is_no_list_of_devices_is_refused_with_what_to_write(devices, written):
    with pytest.raises(gp.errors.DeviceUnavailable, match=re.escape(f"write gp.devices({written})")):
        gp.split_and_load(np.zeros(5), devices)


def test_a_batch_that_is_split_within_record_on_its_way_to_gpus_connects_no_devices(monkeypatch):
    monkeypatch.setattr(split, "_is_gpu", lambda device: True)
    monkeypatch.setattr(hand_written_loops, "_connected", False)
    monkeypatch.setattr(hand_written_loops, "_push_one_by_one", lambda: None)
    launch_by_device()  # as the first SyncBatchNorm layer does
    with mx.autograd.record():
        shards = gp.split_and_load(np.arange(4.0), DEVICES[1:3])
    assert [shard.asnumpy().tolist() for shard in shards] == [[0, 1], [2, 3]]
    assert not hand_written_loops._connected
