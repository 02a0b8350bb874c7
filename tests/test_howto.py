"""The how-to guides: their Python runs, prints what they say, and loops side by side train the same weights."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mxnet as mx
from gluon_parallel.commands import cli
from gluon_parallel.data_parallel.precision import has_bfloat16_on_cpus

ROOT = Path(__file__).resolve().parents[1]
HOWTO = ROOT / "docs" / "howto"
PAGES = "several_devices sync_batch_norm uneven_data choose_store asynchronous own_data from_ddp".split()
LONG = "checkpoints own_script notebook losing_processes".split()
SIDE_BY_SIDE = "from_gluon from_gluoncv".split()
PARTS = "launching profile recompute".split()  # their code is a part of a script
SCRIPT = """
import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon
images, labels = mx.nd.random.uniform(shape=(64, 4)).asnumpy(), (mx.nd.arange(64) % 2).asnumpy()
net, data = gluon.nn.Dense(2, in_units=4), [(images, labels)] * 25
net.initialize(ctx=gp.devices("cpu:2"))
step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), gluon.Trainer(net.collect_params(), "sgd"))
"""

# The guides say this of nets with BatchNorm.
pytestmark = pytest.mark.filterwarnings("ignore::gluon_parallel.errors.StatisticsPerDevice")


def blocks(page):
    text = (HOWTO / f"{page}.md").read_text("utf-8")
    return python_of(text)


def python_of(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(lines, names):
    mx.random.seed(5)
    exec(compile(lines, "page", "exec"), names)
    return names


@pytest.mark.parametrize("page", [*PAGES, *(pytest.param(page, marks=pytest.mark.slow) for page in LONG)])
def test_the_code_of_a_guide_runs_and_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "gluoncv" in "".join(blocks(page)):
        pytest.importorskip("gluoncv")
    names = {"__name__": "page"}
    for lines in blocks(page):
        run(lines, names)
    wanted = re.findall(r"^print\(.*\)  # (.+)$", "".join(blocks(page)), re.MULTILINE)
    said = capsys.readouterr().out
    assert [text for text in wanted if text not in said] == []


@pytest.mark.parametrize("page", PARTS)
def test_the_code_of_a_guide_runs_in_a_script(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(SCRIPT, {"__name__": "page"})
    for lines in blocks(page):
        run(lines, names)
    if page == "profile":
        assert (tmp_path / "profile" / "profile.html").exists()
    if page == "recompute":
        names["net"].initialize()
        with mx.autograd.record():
            loss = (names["net"](mx.nd.random.uniform(shape=(2, 3, 64, 64))) ** 2).sum()
        loss.backward()
        gradient = names["net"].features[0].weight.grad().asnumpy()
        assert np.isfinite(gradient).all() and gradient.any()
    if page == "launching":
        assert [x.shape for x, _ in names["batches"]] == [(64, 4)]


@pytest.mark.slow
@pytest.mark.skipif(not has_bfloat16_on_cpus(), reason="MXNet computes in bfloat16 on CPUs with AVX-512 only")
def test_the_code_of_mixed_precision_trains_in_bfloat16(tmp_path):
    automatic, cast = blocks("mixed_precision")
    made = automatic.replace("net = ...", "net.initialize(ctx=devices, force_reinit=True)")
    assert made != automatic
    (tmp_path / "script.py").write_text(
        f"{SCRIPT}loss = gluon.loss.SoftmaxCrossEntropyLoss()\n{made}"
        "weights = net.weight.data(devices[0]).asnumpy()\n"
        "step(mx.nd.array(images), mx.nd.array(labels)).asnumpy()\n"
        "assert (net.weight.data(devices[0]).asnumpy() != weights).any()\n"
        f"{cast}print(net(mx.nd.array(images, dtype='float16')).dtype)\n"
    )
    # In a process of its own: the precision is that of the whole process, for good.
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_estimate_of_the_page_is_what_its_command_prints(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs" / "explanation" / "estimate.md").read_text("utf-8")
    [code] = python_of(text)
    [(words, wanted)] = re.findall(
        r"^```\n\$ gluon-parallel (estimate [^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    (tmp_path / "net.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 0
    assert capsys.readouterr().out.strip() == wanted.strip()


class SameForEveryShape(mx.init.Initializer):
    """Weights that do not depend on when, or in which thread, a parameter is initialised."""

    def _init_weight(self, _, array):
        array[:] = np.random.RandomState(array.size).normal(0, 0.1, array.shape)


@pytest.mark.parametrize("page", SIDE_BY_SIDE)
def test_two_loops_side_by_side_train_the_same_weights(page, monkeypatch):
    monkeypatch.setattr(mx.init, "Xavier", SameForEveryShape)
    if page == "from_gluoncv":
        pytest.importorskip("gluoncv")
    before, after = (run(lines, {"__name__": "page"})["net"].collect_params().values() for lines in blocks(page))
    for theirs, ours in zip(before, after):
        if theirs.grad_req != "null":  # running statistics are those of one shard, in plain loops
            for device in (mx.cpu(0), mx.cpu(1)):
                got, wanted = ours.data(device).asnumpy(), theirs.data(device).asnumpy()
                # float32 sums in another order; batch norm divides by small deviations, which makes rounding larger
                np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4, err_msg=ours.name)


TORCHRUN = ROOT / ".venv-torch" / "bin" / "torchrun"
ACCURACY = "print('accuracy', float((net(images).argmax(1) == labels).float().mean()))\n"


@pytest.mark.slow
@pytest.mark.skipif(not TORCHRUN.exists(), reason="no .venv-torch: make bench-peers makes it")
def test_the_loop_of_pytorch_ddp_trains(tmp_path):
    [program] = re.findall(r"^```py\n(.*?)^```", (HOWTO / "from_ddp.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    end = "if distributed.get_rank() == 0:\n"
    assert program.count(end) == 1
    (tmp_path / "train.py").write_text(program.replace(end, ACCURACY + end))
    command = TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    accuracies = [float(number) for number in re.findall(r"^accuracy (.+)$", done.stdout, re.MULTILINE)]
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1] > 0.5
    assert (tmp_path / "net.pt").exists()


def test_the_script_of_the_readme_trains(capsys):
    [script] = python_of((ROOT / "README.md").read_text("utf-8"))
    run(script, {"__name__": "page"})
    assert 0.8 < float(re.fullmatch(r"\[\('accuracy', (0\.\d+)\)\]\n", capsys.readouterr().out)[1]) < 0.95


def test_links_and_pictures_of_the_readme_are_there():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 15 and [link for link in links if not (ROOT / link).exists()] == []
