"""The C library by itself: its records as Python reads them, its arithmetic against float64, and random schedules."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from c_compiler import compiler

from gluon_parallel import native
from gluon_parallel.compat.array_types import BFLOAT16, narrowed, widened
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
def test_a_variable_forces_a_version(version, monkeypatch):
    monkeypatch.setenv("GLUON_PARALLEL_PROCESSOR", PROCESSORS[version])
    assert native.function("gp_processor", 0)() == version
    arithmetic = native.function("gp_arithmetic_in_memory", 2)
    assert arithmetic(0, -1) == arithmetic(0, version) != arithmetic(1, version)


def test_without_the_variable_the_best_version_is_taken_and_another_name_is_refused(monkeypatch):
    monkeypatch.delenv("GLUON_PARALLEL_PROCESSOR", raising=False)
    assert native.function("gp_processor", 0)() == BEST
    monkeypatch.setenv("GLUON_PARALLEL_PROCESSOR", "sse")
    native.library.cache_clear()
    with pytest.raises(ImportError, match=r"GLUON_PARALLEL_PROCESSOR is 'sse', this machine has: baseline"):
        native.library()


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


class Layer:
    """The steps of one version on a shard x (outer, channels, inner)."""

    STEPS = [name for name, _ in C.Arithmetic._fields_]

    def __init__(self, version, x, channels, fix_gamma=0):
        self.x, real = shifted(x), x.dtype
        self.vectors, self.message, scratch = (
            np.zeros((3, channels)),
            np.zeros(1 + 2 * channels),
            np.zeros((5, channels)),
        )
        self.kept = [scratch]
        self.record = C.State(is_double=real == np.float64, outer=x.shape[0], channels=channels, inner=x.shape[2])
        self.record.message, self.record.scratch = address_of(self.message), address_of(scratch)
        self.record.mean, self.record.variance, self.record.rstd = map(address_of, self.vectors)
        self.record.momentum, self.record.epsilon, self.record.fix_gamma = 0.9, 1e-5, fix_gamma
        self.arithmetic = native.function("gp_arithmetic_in_memory", 2)(self.record.is_double, version)
        self.set(x=self.x)

    def set(self, **arrays):
        """Point the record's fields at these arrays; returns them."""
        for name, array in arrays.items():
            self.kept.append(array)
            setattr(self.record, name, address_of(array))
        return arrays.values()

    def run(self, step):
        where = C.Arithmetic.from_address(self.arithmetic)
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(getattr(where, step))(address_of(self.record))


SHAPES = [(1, 1, 1), (5, 3, 1), (33, 17, 1), (6000, 2, 1), (3, 5, 7), (2, 3, 4097), (1, 1, 9000), (0, 3, 4), (0, 3, 1),
          (2, 3, 0)]  # fmt: skip  # channels last, and first


def batch(rng, shape, dtype, offset):
    """Values whose channels have this mean, and one that is constant."""
    x = rng.normal(size=shape) + offset
    if shape[1] > 1:
        x[:, 1] = np.float32(offset + 0.1)  # a sum of such is exact in float64
    return x.astype(dtype)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_of_both_passes_are_those_of_numpy(rng, version, dtype, offset, shape):
    x, dy = batch(rng, shape, dtype, offset), rng.normal(size=shape).astype(dtype)
    channels, count = shape[1], shape[0] * shape[2]
    wide, head = x.astype(np.longdouble), dy.astype(np.longdouble)
    mean, variance = (wide.mean((0, 2)), wide.var((0, 2))) if count else np.zeros((2, channels))
    layer = Layer(version, x, channels)
    layer.run("measure")
    # Roundings of float64, of numbers of the size of the mean.
    np.testing.assert_allclose(layer.message[0], count, rtol=0, atol=0)
    np.testing.assert_allclose(layer.message[1 : 1 + channels], mean, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(layer.message[1 + channels :], variance * count, rtol=1e-9, atol=1e-9)
    if channels > 1:
        assert layer.message[2 + channels] == 0 and layer.message[2] == (wide[0, 1, 0] if count else 0)

    layer.vectors[0], layer.vectors[1], layer.vectors[2] = mean, variance, 1 / np.sqrt(variance + 1e-5)
    layer.record.count = count
    rstd, column = layer.vectors[2].copy(), (slice(None), None)
    gamma, beta, before = (rng.normal(size=size).astype(dtype) for size in (channels, channels, shape))
    running, y = rng.normal(size=(2, channels)).astype(dtype), before.copy()
    layer.set(gamma=gamma, beta=beta, y=y, running_mean=running[0], running_variance=running[1])
    # Both add a few roundings of the dtype; a constant channel has rstd = 316, which they are multiplied by.
    tolerance = {"rtol": 0, "atol": 3e-4 if dtype == "float32" else 3e-13 * max(1, abs(offset)) * 316}
    normal = (wide - mean[column]) * rstd[column]
    wanted = normal * gamma[column] + beta[column]
    layer.run("normalise")
    np.testing.assert_allclose(y, wanted, **tolerance)
    layer.record.adds = 1
    layer.run("normalise")
    np.testing.assert_allclose(y, 2 * wanted, **tolerance)

    old = running.astype(np.float64)
    layer.run("take_batch")
    np.testing.assert_allclose(running, 0.9 * old + 0.1 * layer.vectors[:2], rtol=3e-7, atol=1e-7)

    layer.set(dy=dy, dx=before, dgamma=np.zeros(channels, dtype), dbeta=np.ones(channels, dtype))
    dgamma, dbeta = layer.kept[-2:]
    layer.record.adds_beta, layer.record.adds = 1, 0
    layer.run("sums")
    total, dot = head.sum((0, 2)), (head * (wide - mean[column])).sum((0, 2))
    size = 1 + np.sqrt(count)
    np.testing.assert_allclose(layer.message[:channels], total, rtol=1e-12, atol=1e-13 * size)
    np.testing.assert_allclose(layer.message[channels : 2 * channels], dot, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(dgamma, dot * rstd, rtol=2e-7, atol=1e-6)
    np.testing.assert_allclose(dbeta, 1 + total, rtol=2e-7, atol=1e-6)
    layer.record.adds_gamma = 1
    layer.run("sums")
    np.testing.assert_allclose(dgamma, 2 * dot * rstd, rtol=4e-7, atol=2e-6)

    factor = (gamma * rstd)[column]
    batch_part = (total[column] + normal * (rstd * dot)[column]) / max(count, 1)
    for call, wanted in ((-1, factor * head), (0, factor * (head - batch_part))):  # constant statistics; the batch's
        for adds in (0, 1):
            layer.record.call, layer.record.adds = call, adds
            layer.run("gradient")
            np.testing.assert_allclose(before, (1 + adds) * wanted, rtol=1e-5, atol=3 * tolerance["atol"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_layer_without_gamma_and_with_running_statistics(rng, version, dtype):
    x = rng.normal(size=(5, 3, 4)).astype(dtype)
    layer = Layer(version, x, 3, fix_gamma=1)
    running, dgamma, y = rng.uniform(1, 2, (2, 3)).astype(dtype), np.ones(3, dtype), np.zeros_like(x)
    gamma, beta = np.full(3, np.nan, dtype), rng.normal(size=3).astype(dtype)
    layer.set(gamma=gamma, beta=beta, y=y, dy=x, dx=x.copy(), dgamma=dgamma)
    layer.set(running_mean=running[0], running_variance=running[1])
    layer.run("take_running")
    np.testing.assert_array_equal(layer.vectors[:2], running.astype(np.float64))
    layer.vectors[2] = 1 / np.sqrt(layer.vectors[1])
    layer.run("normalise")
    mean, rstd = layer.vectors[0][:, None], layer.vectors[2][:, None]
    np.testing.assert_allclose(y, (x - mean) * rstd + beta[:, None], rtol=1e-5, atol=1e-6)
    layer.run("sums")
    assert (dgamma == 0).all()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(64, 5, 1), (4, 5, 33)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_channel(rng, version, dtype, shape, value):
    x = rng.normal(size=shape).astype(dtype)
    others = np.arange(5) != 2
    finite = Layer(version, x, 5)
    x[3, 2, 0] = value
    layer = Layer(version, x, 5)
    for one in (finite, layer):
        one.set(dy=one.x)
        one.run("measure")
        one.vectors[0], one.vectors[2] = one.message[1:6], 1
        moments = one.message[1:].reshape(2, 5).copy()
        one.run("sums")
        one.found = np.concatenate([moments, one.message[:10].reshape(2, 5)])
    np.testing.assert_array_equal(layer.found[:, others], finite.found[:, others])
    assert not np.isfinite(layer.found[:, 2]).any()


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
