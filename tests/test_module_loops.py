"""``mx.mod.Module`` on several devices trains as on one, with any optimizer, and whatever is set between updates."""

import numpy as np
import pytest

import mxnet as mx

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "nadam": {"learning_rate": 0.01},  # which keeps a factor of all its updates
    "lars": {"learning_rate": 0.1, "momentum": 0.9},  # the rate of the update before
    "adam": {"learning_rate": 0.1},
    "sgld": {"learning_rate": 0.01},  # draws noise
}


def contexts(num_devices):
    return [mx.cpu(number) for number in range(num_devices)]


def symbol(data, hidden=2):
    hidden = mx.sym.FullyConnected(data, num_hidden=hidden, name="first")
    output = mx.sym.FullyConnected(hidden, num_hidden=1, no_bias=True, name="second")
    return mx.sym.LinearRegressionOutput(output, mx.sym.var("label"))


def module(num_devices, **options):
    made = mx.mod.Module(symbol(mx.sym.var("data")), ["data"], ["label"], context=contexts(num_devices), **options)
    made.bind([("data", (12, 3))], [("label", (12, 1))])
    made.init_params(mx.init.One())
    return made


def update(trained, number):
    x = mx.nd.array(np.random.RandomState(number).normal(size=(12, 3)))
    trained.forward_backward(mx.io.DataBatch([x], [mx.nd.ones((12, 1))]))
    trained.update()


def weights(trained):
    return {name: value.asnumpy() for name, value in trained.get_params()[0].items()}


def assert_same(found, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)  # float32, sums in another order


def set_params(trained):
    trained.set_params({name: mx.nd.array(value) * 0.5 for name, value in weights(trained).items()}, {})


def write_in_place(trained):
    for copies in trained._exec_group.param_arrays:
        for copy in copies:
            copy[:] = copy.clip(-0.5, 0.5)


@pytest.mark.parametrize("frozen", [None, ["first_weight"]])
@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_module_on_several_devices_trains_as_on_one(optimizer, store, frozen):
    def train(num_devices):
        mx.random.seed(5)
        trained = module(num_devices, fixed_param_names=frozen)
        trained.init_optimizer(store, optimizer, OPTIMIZERS[optimizer])
        for number, write in enumerate([None, set_params, None, write_in_place, None]):
            update(trained, number)
            if write is not None:
                write(trained)
        return weights(trained)

    wanted = train(1)
    for num_devices in (2, 3):
        assert_same(train(num_devices), wanted)


def test_gradients_that_accumulate_stay_those_of_each_device():
    def train(num_devices):
        trained = mx.mod.Module(symbol(mx.sym.var("data")), ["data"], ["label"], context=contexts(num_devices))
        trained.bind([("data", (12, 3))], [("label", (12, 1))], grad_req="add")
        trained.init_params(mx.init.One())
        trained.init_optimizer(optimizer_params={"learning_rate": 0.001})
        for number in range(4):
            update(trained, number)
        return weights(trained)

    assert_same(train(3), train(1))


@pytest.mark.parametrize("num_devices", [2, 3])
def test_buckets_whose_parameters_come_in_another_order_share_the_optimizers_state(num_devices):
    def train(num_devices):
        def generate(length):
            data = mx.sym.sum(mx.sym.var("data"), axis=1, keepdims=True)
            first = mx.sym.FullyConnected(data, num_hidden=1, no_bias=True, name="first")
            second = mx.sym.FullyConnected(data, num_hidden=1, no_bias=True, name="second")
            output = first + 2 * second if length == 5 or num_devices == 1 else 2 * second + first
            return mx.sym.LinearRegressionOutput(output, mx.sym.var("label")), ("data",), ("label",)

        trained = mx.mod.BucketingModule(generate, 5, context=contexts(num_devices))
        trained.bind([("data", (6, 5))], [("label", (6, 1))])
        trained.init_params(mx.init.Constant(0.1))
        trained.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.1})
        random = np.random.RandomState(3)
        for length in (5, 3, 5, 4, 3, 5):
            x = mx.nd.array(random.normal(size=(6, length)))
            shapes = {"provide_data": [("data", x.shape)], "provide_label": [("label", (6, 1))]}
            trained.forward_backward(mx.io.DataBatch([x], [mx.nd.ones((6, 1))], bucket_key=length, **shapes))
            trained.update()
        return weights(trained)

    assert_same(train(num_devices), train(1))


@pytest.mark.parametrize(
    "stype", ["default", "row_sparse"]
)  # a row_sparse weight stays on the store, as MXNet wants it
def test_row_sparse_gradients_are_summed(stype):
    def train(num_devices):
        weight = mx.sym.var("words_weight", **({} if stype == "default" else {"stype": stype}))
        embedding = mx.sym.Embedding if stype == "default" else mx.sym.contrib.SparseEmbedding
        options = {"sparse_grad": True} if stype == "default" else {}
        words = embedding(mx.sym.var("data"), weight=weight, input_dim=7, output_dim=2, name="words", **options)
        trained = mx.mod.Module(symbol(words), ["data"], ["label"], context=contexts(num_devices))
        trained.bind([("data", (6,))], [("label", (6, 1))])
        trained.init_params(mx.init.One())
        trained.init_optimizer(optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
        assert trained._update_on_kvstore == (stype == "row_sparse" and num_devices > 1)
        for x in np.random.RandomState(0).randint(0, 7, (5, 6)):
            batch = mx.io.DataBatch([mx.nd.array(x)], [mx.nd.ones((6, 1))])
            if trained._update_on_kvstore:
                trained.prepare(batch, sparse_row_id_fn=lambda batch: {"words_weight": batch.data[0].astype("int64")})
            trained.forward_backward(batch)
            trained.update()
        return weights(trained)

    wanted = train(1)
    for num_devices in (2, 3):
        assert_same(train(num_devices), wanted)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # MXNet does not close it
def test_a_file_of_states_continues_on_another_number_of_devices(tmp_path):
    def continued(*nums_of_devices):
        values = {}
        for turn, num_devices in enumerate(nums_of_devices):
            trained = module(num_devices)
            if values:
                trained.set_params(values, {})
            trained.init_optimizer(
                optimizer="adam", optimizer_params={"learning_rate": 0.1, "begin_num_update": 2 * turn}
            )
            if turn:
                trained.load_optimizer_states(str(tmp_path / "states"))
            for number in range(2 * turn, 2 * turn + 2):
                update(trained, number)
            trained.save_optimizer_states(str(tmp_path / "states"))
            values = {name: mx.nd.array(value) for name, value in weights(trained).items()}
        return weights(trained)

    wanted = continued(1, 1)
    for nums_of_devices in ((3, 2), (1, 3), (2, 1)):
        assert_same(continued(*nums_of_devices), wanted)


def test_the_environment_may_have_the_store_update(monkeypatch):
    for value in (None, "1", "0"):
        if value is not None:
            monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", value)
        trained = module(2)
        trained.init_optimizer()
        assert trained._update_on_kvstore == (value == "1")
