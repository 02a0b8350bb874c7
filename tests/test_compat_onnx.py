"""Nets that are exported to ONNX by MXNet's function compute the same numbers in onnxruntime."""

import numpy as np
import onnx
import onnxruntime
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import nd
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

DEVICES = [mx.cpu(0), mx.cpu(1)]


class Reductions(nn.HybridBlock):
    """Operators that have other arguments in newer versions of ONNX."""

    def hybrid_forward(self, F, x):
        parts = F.split(x, num_outputs=2, axis=1)
        mean = F.mean(parts[0], axis=(2, 3), keepdims=True)
        padded = F.pad(parts[1], mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1), constant_value=2.0)
        return F.softmax(F.squeeze(F.max(F.broadcast_mul(padded, mean), axis=3), axis=1))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: gp.models.LeNet(num_classes=10), (4, 1, 28, 28)),
        (lambda: vision.resnet18_v1(classes=10), (8, 3, 32, 32)),
        (lambda: vision.mobilenet_v2_0_25(classes=10), (8, 3, 32, 32)),
        (Reductions, (2, 2, 4, 4)),
    ],
    ids=["lenet", "resnet18", "mobilenet_v2", "reductions"],
)
def test_an_exported_net_computes_the_same_in_onnxruntime(make, shape, tmp_path):
    net = make()
    gp.nn.convert_sync_batchnorm(net)
    net.initialize(mx.init.MSRAPrelu(), ctx=DEVICES)
    net.hybridize()
    data = nd.random.uniform(-1, 1, shape=shape)
    if net.collect_params().keys():  # running statistics that are not those of a new layer
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
        gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer)(data, nd.arange(shape[0]))
    expected = net(data.as_in_context(DEVICES[0])).asnumpy()
    net.export(str(tmp_path / "net"))
    symbol, params = str(tmp_path / "net-symbol.json"), str(tmp_path / "net-0000.params")

    written = mx.onnx.export_model(symbol, params, [shape], np.float32, str(tmp_path / "net.onnx"))

    model = onnx.load(written)
    onnx.checker.check_model(model, full_check=True)
    assert [one.name for one in model.graph.input] == ["data"]
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"data": data.asnumpy()})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_an_export_leaves_onnx_as_it_was():
    functions = onnx.helper.make_model, onnx.checker.check_graph
    with pytest.raises(Exception, match="Symbol and params files provided are invalid|nowhere"):
        mx.onnx.export_model("nowhere-symbol.json", "nowhere.params", [(1, 1)], np.float32, "nowhere.onnx")
    assert functions == (onnx.helper.make_model, onnx.checker.check_graph)
