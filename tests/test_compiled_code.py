"""Libraries of compiled functions: what is kept on disk, who compiles, and what cannot be compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gluon_parallel as gp
from gluon_parallel.engine.compiled import library


def test_every_file_with_compiled_code_or_its_records_is_part_of_its_name_on_disk():
    folder = Path(gp.__file__).parent
    found = {
        str(path.relative_to(folder))
        for part in ("engine", "kvstore", "nn")
        for path in (folder / part).rglob("*.py")
        if any(word in path.read_text("utf-8") for word in ("import numba", "from numba", "(Record):"))
    }
    assert found <= set(library.SOURCES)
    makes = re.compile("^@c_callback|called_from_python=True", re.MULTILINE)
    modules = [f"gluon_parallel.{name[:-3].replace('/', '.')}" for name in library.SOURCES
               if makes.search((folder / name).read_text("utf-8"))]  # fmt: skip
    assert sorted(modules) == sorted(library.MODULES)


STEP_OF_CODE_ON_DISK = """
import sys
import gluon_parallel as gp
import mxnet as mx

layer = gp.nn.SyncBatchNorm(in_channels=2)
layer.initialize(ctx=mx.cpu(0))
with mx.autograd.record():
    y = layer(mx.nd.ones((4, 2, 3)))
y.backward()
mx.nd.waitall()
print("numba" in sys.modules)
"""


def test_code_that_is_on_disk_is_loaded_without_numba():
    for _ in range(2):  # the first process may have to compile
        done = subprocess.run(
            [sys.executable, "-c", STEP_OF_CODE_ON_DISK], capture_output=True, text=True, timeout=600, check=True
        )
    assert done.stdout == "False\n"


COMPILED = """
from gluon_parallel.engine.compiled.functions import c_callback, types

@c_callback(types.int64(types.int64))
def one_more(number):
    return number + 1

@c_callback(types.void(types.int64))
def fail(number):
    if number:
        raise ValueError
"""
LOADS = """
import sys
from gluon_parallel.engine.compiled.library import Library
code = Library("mine")
print(code.function("one_more", 1)(7), flush=True)
code.function("fail", 1)(len(sys.argv) - 1)
"""


def load_mine(folder, *arguments, **variables):
    """Processes that load and run COMPILED at the same time: (status, lines that say that it is compiled)."""
    (folder / "mine.py").write_text(COMPILED)
    variables = {"GLUON_PARALLEL_COMPILED": str(folder / "kept"), "PYTHONPATH": str(folder), **variables}
    processes = [
        subprocess.Popen([sys.executable, "-c", LOADS, *arguments], env={**os.environ, **variables}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [output for output, _ in outputs] == ["8\n"] * 2, outputs
    lines = "".join(errors for _, errors in outputs).splitlines()
    return [process.returncode for process in processes], lines


def test_one_process_compiles_and_says_so_and_the_others_wait_and_load(tmp_path):
    codes, said = load_mine(tmp_path)
    assert codes == [0, 0] and len(said) == 1 and "compiling" in said[0] and "it is kept on disk" in said[0]
    [kept] = (tmp_path / "kept").glob("*.o")
    assert load_mine(tmp_path) == ([0, 0], [])
    kept.write_bytes(kept.read_bytes()[:-1])  # damaged
    assert len(load_mine(tmp_path)[1]) == 1
    assert load_mine(tmp_path) == ([0, 0], [])


def test_a_line_says_that_compiled_code_cannot_be_kept(tmp_path):
    (tmp_path / "file").touch()
    codes, said = load_mine(tmp_path, GLUON_PARALLEL_COMPILED=str(tmp_path / "file" / "folder"))
    assert codes == [0, 0] and len(said) == 2 and all("GLUON_PARALLEL_COMPILED" in line for line in said)


def test_an_exception_in_compiled_code_ends_the_process_with_the_functions_name(tmp_path):
    load_mine(tmp_path)
    codes, said = load_mine(tmp_path, "fail")
    assert codes == [-6, -6]
    assert sum("mine.fail" in line and "compiled code raises no exception" in line for line in said) == 2


def test_code_that_would_need_numba_when_it_is_loaded_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(COMPILED.replace("return number + 1", "return np.ones(number).sum()"))
    (tmp_path / "mine.py").write_text("import numpy as np\n" + (tmp_path / "mine.py").read_text())
    done = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "GLUON_PARALLEL_COMPILED": str(tmp_path)})  # fmt: skip
    assert "mine.one_more makes an array, which needs Numba" in done.stderr


def test_a_c_function_that_is_not_there_is_named(tmp_path):
    missing = COMPILED.replace("return number + 1", "return missing_one(number)").replace(
        "@c_callback(types.int64(types.int64))",
        "missing_one = c_function('missing_one', 1)\n@c_callback(types.int64(types.int64))",
    )
    (tmp_path / "mine.py").write_text("from gluon_parallel.engine.compiled.functions import c_function\n" + missing)
    for _ in range(2):  # compiled; from disk
        done = subprocess.run([sys.executable, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                              env={**os.environ, "GLUON_PARALLEL_COMPILED": str(tmp_path)})  # fmt: skip
        assert "ImportError: mine: no C function 'missing_one'" in done.stderr
