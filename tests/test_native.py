"""The C library by itself: its records as Python reads them, its arithmetic against float64, and random schedules."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from c_compiler import compiler
from processes import ROOT

from gluon_parallel import native
from gluon_parallel.mxnet.compat.array_types import BFLOAT16, narrowed, widened
from gluon_parallel.native import NATIVE, build
from gluon_parallel.native.records import C, address_of

PROCESSORS = ("baseline", "avx2", "avx512")
BEST = native.function("gp_best_processor", 0)()
VERSIONS = [
    pytest.param(number, id=name, marks=pytest.mark.skipif(number > BEST, reason=f"this machine has no {name}"))
    for number, name in enumerate(PROCESSORS)
]


def test_records_and_constants_are_those_of_the_c_compiler(tmp_path):
    checks = [f'#include "{path.name}"' for path in NATIVE.glob("*.h") if not path.stem.endswith("_of_type")]
    for name, kind in vars(C).items():
        if isinstance(kind, int):
            checks.append(f'_Static_assert({name} == {kind}, "{name}");')
            continue
        checks.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "{name}");')
        for field, _ in kind._fields_:
            offset, size = getattr(kind, field).offset, getattr(kind, field).size
            same = f"offsetof({name}, {field}) == {offset} && sizeof((({name} *)0)->{field}) == {size}"
            checks.append(f'_Static_assert({same}, "{name}.{field}");')
    assert len(checks) > 250
    (tmp_path / "checks.c").write_text("\n".join(["#include <stddef.h>", *checks, ""]))
    command = [*compiler(), "-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", f"-I{NATIVE}", str(tmp_path / "checks.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_a_variable_forces_a_version_and_without_it_the_best_is_taken(version, monkeypatch):
    monkeypatch.setenv("GLUON_PARALLEL_PROCESSOR", PROCESSORS[version])
    assert native.function("gp_processor", 0)() == version
    arithmetic = native.function("gp_arithmetic_in_memory", 2)
    assert arithmetic(0, -1) == arithmetic(0, version) != arithmetic(1, version)
    monkeypatch.delenv("GLUON_PARALLEL_PROCESSOR")
    assert native.function("gp_processor", 0)() == BEST
    monkeypatch.setenv("GLUON_PARALLEL_PROCESSOR", "sse")
    native.library.cache_clear()
    with pytest.raises(ImportError, match=r"GLUON_PARALLEL_PROCESSOR is 'sse', this machine has: baseline"):
        native.library()


@pytest.mark.parametrize("waits", ["ctypes.PyDLL(None).pause()", "time.sleep(1000)"])  # with Python's lock, without it
def test_a_program_whose_part_does_not_end_within_its_limit_ends_with_what_that_says(waits):
    script = f"""
import ctypes, sys, time
from gluon_parallel.native import ends_within
with ends_within(60, "no"), ends_within(60, "no"):
    pass
with ends_within(0.1, "this does not end"):
    {waits}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (1, "this does not end\n")


def shifted(array):
    """A copy that does not begin where a vector register's memory would."""
    memory = np.empty(array.size + 1, array.dtype)
    memory[1:] = array.ravel()
    return memory[1:].reshape(array.shape)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("size", [0, 1, 7, 8192, 8195, 30001])
def test_sums_of_arrays_are_those_of_numpy_in_the_same_order(rng, version, dtype, size):
    limits = np.iinfo(np.int32)
    for num in (1, 2, 3, 5):
        arrays = [shifted(rng.integers(limits.min, limits.max, size).astype(dtype) if dtype == "int32"
                          else (rng.normal(size=size) * 10.0 ** rng.integers(-3, 4)).astype(dtype))
                  for _ in range(num)]  # fmt: skip
        wanted = arrays[0].copy()
        for other in arrays[1:]:
            wanted += other  # int32 wraps around
        sources = np.array([address_of(array) for array in arrays], np.int64)
        for out in (np.full(size, 77, dtype), arrays[0]):  # elsewhere, and in the first of them
            sum_arrays(version, dtype, dtype, sources, out)
            np.testing.assert_array_equal(out, wanted)


def sum_arrays(version, of, to, sources, out):
    arguments = version, getattr(C, of.upper()), getattr(C, to.upper()), address_of(sources), len(sources)
    native.function("gp_sum_arrays", 7)(*arguments, address_of(out), out.size)


def all_halves(dtype):
    """All 65,536 values of a dtype of 16 bits, more than a block of them, as (halves, float32)."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16 if dtype == "float16" else BFLOAT16)
    return halves, widened(halves)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_become_float32_and_back_as_in_numpy(rng, version, dtype):
    halves, wide = all_halves(dtype)
    sources, out = np.array([address_of(halves)]), np.empty(len(halves), np.float32)
    sum_arrays(version, dtype, "float32", sources, out)
    np.testing.assert_array_equal(out, wide)
    with np.errstate(all="ignore"):  # also between two halves, and beyond the largest one
        near = np.concatenate(
            [wide, np.nextafter(wide, np.float32(9e9)), (wide[:-1] + wide[1:]) / 2, wide * 1.0003, [65519, 65520, 1e-9]]
        )
    near, found = near.astype(np.float32), np.empty(len(near), halves.dtype)
    sum_arrays(version, "float32", dtype, np.array([address_of(near)]), found)
    np.testing.assert_array_equal(widened(found), widened(narrowed(near, halves.dtype)))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_added_in_float32_and_rounded_once(rng, version, dtype):
    size, kind = 20001, all_halves(dtype)[0].dtype
    rows = [rng.normal(size=size).astype(np.float32) * 100 for _ in range(3)]
    halves = [narrowed(row, kind) for row in rows]
    out = np.empty(size, np.float32)
    sum_arrays(version, dtype, "float32", np.array([*map(address_of, halves)]), out)
    total = widened(halves[0]) + widened(halves[1]) + widened(halves[2])
    np.testing.assert_array_equal(out, widened(narrowed(total, kind)))
    found = np.empty(size, kind)
    sum_arrays(version, "float32", dtype, np.array([*map(address_of, rows)]), found)
    np.testing.assert_array_equal(widened(found), widened(narrowed(rows[0] + rows[1] + rows[2], kind)))


def stress(tmp_path, command, library, rng, seeds, num):
    """Run the stress test with this library, by random schedules."""
    program = tmp_path / "stress"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", f"-I{NATIVE}", f"-Wl,-rpath,{library.parent}"]
    source = Path(__file__).with_name("support") / "native_stress.c"
    subprocess.run([*command, *flags, str(source), str(library), "-lm", "-o", str(program)], check=True)
    for seed in map(str, rng.integers(1 << 30, size=seeds)):
        for kind in ("rendezvous", "passes", "sums", "killed"):
            done = subprocess.run([program, kind, seed, str(num)], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, (kind, seed, done.stderr)


def test_a_thousand_exchanges_by_a_random_schedule(tmp_path, rng):
    stress(tmp_path, compiler(), NATIVE / build.NAME, rng, seeds=2, num=60)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing_in_random_schedules(tmp_path, rng, sanitizers, monkeypatch):
    [name] = compiler("gcc", "clang")
    library = tmp_path / "library.so"
    monkeypatch.setenv("CC", name)
    build.build(library, sanitizers=sanitizers)
    stress(tmp_path, [name, f"-fsanitize={sanitizers}"], library, rng, seeds=4, num=150)
