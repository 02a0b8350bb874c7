"""What is replaced in MXNet keeps the name, the arguments and the type of MXNet's own."""

import importlib
import inspect
import json
import operator
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import patches
from gluon_parallel.mxnet.compat import scalars
from mxnet import autograd, gluon, nd

# Added; replaced for a moment.
NOT_IN_MXNET = {"gluon.Parameter.__getstate__", "gluon.Parameter.__setstate__", "nd.NDArray.__array__"}
NOT_IN_MXNET |= {"operator._ndarray_cls"}
ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/explanation/architecture.md").read_text("utf-8")

# MXNet 1.9.1 on this Python and NumPy, with nothing replaced in it.
PLAIN = """
import sys, types
package = sys.modules["gluon_parallel"] = types.ModuleType("gluon_parallel")
package.__path__ = [sys.argv[1] + "/gluon_parallel"]
for name, function in {"scalars": "accept", "numpy_protocol": "convert", "roi_align": "install"}.items():
    module = sys.modules["gluon_parallel.mxnet.compat." + name] = types.ModuleType(name)
    setattr(module, function, lambda *_: None)
import gluon_parallel.mxnet.compat
"""


def shown_paths():
    """{what the page's table names: the moment of its replacement}, of Python's functions and classes."""
    section = PAGE.partition("## Replaced functions of MXNet")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    paths = {name: row[2] for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    return {path: moment for path, moment in paths.items() if not path.startswith("MX")}  # functions of MXNet's C API


def scalar_paths():
    """The functions that take NumPy's scalars."""
    for path in (*scalars._FUNCTIONS, *scalars._RANDOM):
        names = scalars._FUNCTIONS.get(path) or importlib.import_module(path).__all__
        yield from (f"{path}.{name}".replace(":", ".").replace("mxnet.", "", 1) for name in names)


# How a process comes to the moments of the table that are later than the import of the package.
LATER = {
    "`--sync-batch-norm ours`": "gp.nn.replace_contrib()",
    "first use of recomputation": "gp.nn.recompute(mx.gluon.nn.Dense(1))",
    "while parameters wait for their shapes": "mx.gluon.nn.Dense(1).initialize()",
    "mixed precision is set": "gp.set_precision('bfloat16', [mx.cpu()])",  # which replaces many others, as MXNet does
}

DESCRIBE = """
import inspect, json, operator, pickle, re
import mxnet as mx

def found(path):
    if path == "_cast_symbol_NDArray":
        import mxnet.contrib.amp.amp
        return mxnet.contrib.amp.amp._cast_symbol_NDArray
    return operator.attrgetter(path)(mx)

def described(one):
    "Kind, name and arguments with their defaults, without annotations and addresses; whether it has a docstring."
    if isinstance(one, property):
        return ["property", one.fset is None, one.fdel is None, bool(one.__doc__), False]
    parameters = inspect.signature(one).parameters.values()
    arguments = [str(parameter.replace(annotation=parameter.empty)) for parameter in parameters]
    try:
        pickles = pickle.loads(pickle.dumps(one)) is one
    except Exception:
        pickles = False
    arguments = re.sub(r" at 0x\\w+", "", ", ".join(arguments))
    return [isinstance(one, type), one.__name__, arguments, bool(one.__doc__), pickles]

print(json.dumps({path: described(found(path)) for path in json.loads(sys.stdin.read())}))
"""


def descriptions(start, paths):
    """What a process that runs `start` finds under these paths."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{textwrap.dedent(start)}\n{DESCRIBE}", ROOT], input=json.dumps(paths),
        capture_output=True, text=True, timeout=120, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def mxnets():
    """What MXNet itself has under the paths of all that is replaced."""
    return descriptions(PLAIN, sorted({*shown_paths(), *scalar_paths()} - NOT_IN_MXNET))


@pytest.mark.parametrize("moment", ["import", "mixed precision is set"])
def test_what_is_replaced_has_mxnets_type_name_and_arguments_a_docstring_and_is_found_by_pickle(mxnets, moment):
    later = {text for text in shown_paths().values() if "import" not in text}
    assert later == {*LATER}
    chosen = {moment} if moment in LATER else later - {"mixed precision is set"}
    start = "import gluon_parallel as gp, mxnet as mx\n" + "\n".join(map(LATER.get, sorted(chosen)))
    with_amp = {path for path, text in shown_paths().items() if text == "mixed precision is set"}
    paths = sorted(with_amp if moment in LATER else {*mxnets} - with_amp)
    for path, ours in descriptions(start, paths).items():
        theirs = mxnets[path]
        assert ours[:3] == theirs[:3], path
        assert ours[3:] >= theirs[3:], f"{path}: (docstring, pickle)"


def test_every_wrapper_takes_mxnets_arguments_under_mxnets_names():
    for patch in (*patches.WRAPPERS, *patches.WRAPPERS_IN_GROUPS):
        original = inspect.unwrap(getattr(patch.owner, patch.name))
        names = [*inspect.signature(original).parameters][isinstance(patch.owner, type) :]  # without `self`
        names = [
            name
            for name in names
            if inspect.signature(original).parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL
        ]
        first = [original, *([None] if isinstance(patch.owner, type) else [])]
        inspect.signature(patch.ours).bind(*first, **dict.fromkeys(names))  # TypeError: it does not know a name


@pytest.mark.parametrize("module", [nd, mx.npx])
def test_arrays_are_loaded_from_a_file_that_is_given_by_mxnets_name_of_it(module, tmp_path):
    [name] = inspect.signature(module.load).parameters
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    gp.checkpoint.save(tmp_path / "checkpoint.npz", net, epoch=1)
    with mx.util.np_shape(module is mx.npx), mx.util.np_array(module is mx.npx):
        module.save(str(tmp_path / "arrays"), {"a": mx.np.ones(2) if module is mx.npx else nd.ones(2)})
        assert module.load(**{name: str(tmp_path / "arrays")})["a"].asnumpy().tolist() == [1, 1]
        with pytest.raises(gp.errors.CheckpointError, match="a checkpoint is loaded by"):
            module.load(**{name: str(tmp_path / "checkpoint.npz")})


# ---- the class of executors -----------------------------------------------------------------------------------------


def executor_of(net, shape):
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    net.hybridize()
    net(nd.ones(shape))
    return net._cached_op


def test_the_executor_of_any_graph_is_an_instance_of_mxnets_class():
    plain = executor_of(gluon.nn.Dense(1), (2, 3))
    synchronised = executor_of(gp.nn.SyncBatchNorm(), (2, 3))
    faster = executor_of(gp.nn.convert_for_cpu(gluon.model_zoo.vision.mobilenet_v2_0_25()), (1, 3, 32, 32))
    assert len({type(plain), type(synchronised), type(faster)}) == 3
    for executor in (plain, synchronised, faster):
        assert isinstance(executor, nd.CachedOp) and isinstance(executor, nd._internal.CachedOp)
        assert executor.handle.value
    assert not isinstance(nd.ones(1), nd.CachedOp)


def test_a_class_derived_from_mxnets_executor_makes_its_own_instances():
    class Counting(nd.CachedOp):
        def __init__(self, sym, start):
            super().__init__(sym)
            self.calls = start

        def __call__(self, *args, **kwargs):
            self.calls += 1
            return super().__call__(*args, **kwargs)

    executor = Counting(mx.sym.var("x") * 2, start=3)
    assert executor(nd.array([3.0])).asscalar() == 6 and executor.calls == 4
    assert isinstance(executor, Counting) and isinstance(executor, nd.CachedOp)
    assert not isinstance(nd.CachedOp(mx.sym.var("x") * 2, ()), Counting)


# ---- stores ---------------------------------------------------------------------------------------------------------


def test_on_one_device_a_store_is_named_that_this_mxnet_cannot_open_and_the_training_is_that_without_a_store():
    weights = []
    for store in (None, "nccl"):
        net = gluon.nn.Dense(1, in_units=2)
        net.initialize(mx.init.One())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store)
        with autograd.record():
            loss = net(nd.array([[1, 2], [3, 5]]))
        loss.backward()
        trainer.step(2)
        weights.append(net.weight.data().asnumpy().tolist())
    assert weights == [[[0.0, -0.75]]] * 2


@pytest.mark.parametrize("function", [mx.random.seed, mx.sym.Variable, nd.NDArray.asscalar, nd.load])
def test_a_replaced_object_is_pickled_by_the_name_under_which_mxnet_has_it(function):
    assert pickle.loads(pickle.dumps(function)) is function
    assert operator.attrgetter(function.__qualname__)(importlib.import_module(function.__module__)) is function
    assert function.__module__.startswith("mxnet.")
