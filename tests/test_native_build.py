"""The C library: its build, what its loader refuses, and the instructions of each processor's version."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest

from gluon_parallel import native
from gluon_parallel.native import build

SUM = """
#include <stdint.h>
#define JOIN(name, processor) name##_##processor
#define VERSION(name, processor) JOIN(name, processor)
double VERSION(sum, PROCESSOR)(const double *values, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += values[i];
    return sum;
}
"""
EXPORT = '__attribute__((visibility("default")))'
VERSION = f"""{EXPORT} const char *gluon_parallel_sources(void) {{ return SOURCES; }}
{EXPORT} int gp_processor(void) {{ return 0; }}
"""


@pytest.fixture(params=["", pytest.param("gcc", marks=pytest.mark.slow)], ids=["ziglang", "gcc"])
def compiler(request, monkeypatch):
    """The compiler of the build, for each that is here."""
    if not shutil.which(request.param or sys.executable):
        pytest.skip(f"this machine has no {request.param}")
    monkeypatch.setenv("CC", request.param)
    if not request.param:
        pytest.importorskip("ziglang")


@pytest.fixture
def fast_compiler(monkeypatch):
    monkeypatch.setenv("CC", "gcc" if shutil.which("gcc") else "")


@pytest.fixture
def folder(tmp_path):
    """A folder like the library's, with two small C files."""
    small = tmp_path / "package" / "native"
    small.mkdir(parents=True)
    for path in build.NATIVE.glob("*.py"):
        shutil.copy(path, small)
    (small / "version.c").write_text(VERSION)
    (small / "sum.c").write_text(f"/* A sum [per processor] [sums in any order]. */{SUM}")
    return small


def run_build(folder, *arguments, **environment):
    command = [sys.executable, str(folder / "build.py"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200)


def load(folder):
    """What Python says last when it loads the library of this folder: nothing if it can."""
    command = [sys.executable, "-c", "import native; native.library()"]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=60)
    return done.stderr.strip().rpartition("\n")[2]


def instructions(objects):
    """The instructions of each object file, as text."""
    if platform.machine() != "x86_64" or not shutil.which("objdump"):
        pytest.skip("needs an x86-64 machine with objdump, which reads object code")
    command = ["objdump", "-d", "--no-show-raw-insn"]
    return {path.stem: subprocess.check_output([*command, str(path)], text=True) for path in objects}


def test_the_library_is_built_from_the_files_beside_it():
    text = native.function("gluon_parallel_sources", 0, keeps_lock=True)()
    assert ctypes.string_at(text).decode() == build.sources()
    assert build.is_current(build.NATIVE / build.NAME)


def test_the_build_prints_nothing_and_the_library_loads(folder, compiler):
    done = run_build(folder, HOME="/proc/no home")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert load(folder) == ""
    assert not [path for path in folder.iterdir() if path.suffix not in (".c", ".py", ".so") and path.is_file()]


def test_a_change_of_any_source_is_seen(folder, fast_compiler):
    library = folder / build.NAME
    run_build(folder)
    built = library.stat().st_ino
    run_build(folder, "--if-changed")
    assert library.stat().st_ino == built
    (folder / "new.h").write_text("#define NEW\n")
    assert "was built from other C files than are here" in load(folder)
    run_build(folder, "--if-changed")
    assert library.stat().st_ino != built and load(folder) == ""
    run_build(folder, "--debug")
    assert load(folder) == ""
    debugged = library.stat().st_ino
    run_build(folder, "--if-changed")  # by one that is fast
    assert library.stat().st_ino != debugged and load(folder) == ""
    (folder / "new.h").rename(folder / "newer.h")
    assert "was built from other C files than are here" in load(folder)


@pytest.mark.parametrize("place", ["checkout", "installation"])
@pytest.mark.parametrize("fault", ["missing", "another architecture", "no library"])
def test_a_library_that_does_not_load_is_one_sentence_with_what_to_type(folder, fault, place):
    library = folder / build.NAME
    if place == "checkout":
        (folder.parents[1] / "Makefile").touch()
    if fault == "another architecture":
        header = bytearray((build.NATIVE / build.NAME).read_bytes())
        header[18] ^= 0xFF  # the machine, in the header of an ELF file
        library.write_bytes(header)
    elif fault == "no library":
        library.write_text("not object code")
    said = load(folder)
    assert said.startswith("ImportError: The C library ") and str(library) in said
    assert ("run `make venv` in the checkout" if place == "checkout" else "pip install ") in said


def test_without_a_compiler_the_build_names_what_to_run(folder):
    command = [sys.executable, "-S", str(folder / "build.py")]
    done = subprocess.run(command, env={"CC": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert f"pip install '{build.ZIGLANG}'" in done.stderr and "CC=gcc" in done.stderr
    said = run_build(folder, CC="no-compiler").stderr
    assert said.count("\n") == 1 and "'no-compiler' does not start" in said and "CC=gcc" in said


def test_a_file_that_does_not_compile_leaves_the_library_alone(folder, fast_compiler):
    (folder / build.NAME).write_text("the one before")
    (folder / "sum.c").write_text("int f(void) { return missing; }\n")
    done = run_build(folder)
    assert done.returncode == 1 and "missing" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("build.py: ") and "CC=gcc" in done.stderr.splitlines()[-1]
    (folder / "sum.c").write_text('int g(void); __attribute__((visibility("default"))) int f(void) { return g(); }\n')
    assert "undefined" in run_build(folder).stderr
    assert (folder / build.NAME).read_text() == "the one before"


def test_no_compiler_warns_and_each_processor_has_instructions_of_its_own(compiler, tmp_path, capfd):
    objects = build.compile_files(tmp_path, [*build.compiler(), "-O3"])
    assert capfd.readouterr() == ("", "")
    found = instructions(objects)
    assert {"avx2", "avx512"} <= {name.rpartition("-")[2] for name in found}
    for name, text in found.items():
        vectors = {"ymm": "%ymm" in text, "zmm": "%zmm" in text}
        if name.endswith("-avx512"):
            assert vectors["zmm"], name
        else:
            assert vectors == {"ymm": name.endswith("-avx2"), "zmm": False}, name


def test_only_sums_that_may_be_in_any_order_are_of_vectors(folder, compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "NATIVE", folder)
    (folder / "exact.c").write_text(f"/* A sum [per processor]. */{SUM}")
    found = instructions(build.compile_files(tmp_path, [*build.compiler(), "-O3"]))
    for processor, addition in {"baseline": r"addpd .*xmm", "avx2": "vaddpd .*ymm", "avx512": "vaddpd .*zmm"}.items():
        assert re.search(addition, found[f"sum-{processor}"])
        assert not re.search(addition, found[f"exact-{processor}"])


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_a_library_with_sanitizers_is_another_file(folder, sanitizers):
    assert "CC=gcc" in run_build(folder, "--sanitize", sanitizers, CC="").stderr
    if not shutil.which("gcc"):
        pytest.skip("this machine has no gcc")
    assert run_build(folder, "--sanitize", sanitizers, CC="gcc").stderr == ""
    (library,) = folder.glob("*.so")
    assert library.name == f"libgluon_parallel-{sanitizers}.so"
    assert {"address,undefined": b"__asan", "thread": b"__tsan"}[sanitizers] in library.read_bytes()
