"""A file is never half written, and no damage to it goes unnoticed."""

import os
import signal
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from gluon_parallel import archive
from gluon_parallel.errors import CheckpointError, NotFinite


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.npz"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_arrays_of_every_dtype_and_shape_come_back_as_they_were(path, rng, dtype):
    arrays = {
        f"a/{i}": np.asarray(rng.normal(size=shape) * 50).astype(dtype)
        for i, shape in enumerate([(), (0,), (1,), (3, 4), (2, 0, 3), (5, 1, 2, 2)])
    }
    archive.write(path, arrays, {})
    got = archive.read(path).arrays
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape
        np.testing.assert_array_equal(got[name], array)


def test_facts_come_back_as_they_were_to_the_last_bit(path):
    facts = {"epoch": 3, "loss": 0.1 + 0.2, "name": "Größe", "nested": {"list": [1, None, 1e-320]}}
    archive.write(path, {}, facts)
    assert archive.read(path).facts == facts


def test_a_change_of_any_single_byte_and_a_cut_anywhere_are_noticed(path, rng):
    archive.write(path, {"weights": rng.normal(size=20)}, {"epoch": 1})
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = whole[position] ^ 1 << int(rng.integers(8))
        for broken in (whole[:position], whole[:position] + bytes([flipped]) + whole[position + 1 :]):
            path.write_bytes(broken)
            with pytest.raises(CheckpointError, match=r"state\.npz is damaged"):
                archive.read(path)


def test_a_file_of_another_kind_is_refused_by_name(path, tmp_path):
    np.savez(path, weights=np.arange(1000))
    with pytest.raises(CheckpointError, match=r"state\.npz is damaged, or no checkpoint"):
        archive.read(path)
    with pytest.raises(CheckpointError, match=r"missing\.npz cannot be read: No such file"):
        archive.read(tmp_path / "missing.npz")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        archive.read(tmp_path)


def test_a_file_of_a_later_format_says_so(path, monkeypatch):
    monkeypatch.setattr(archive, "VERSION", 99)
    archive.write(path, {}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 99, expected 1"):
        archive.read(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_array_with_a_value_that_is_not_finite_is_refused_and_the_old_file_stays(path, value):
    archive.write(path, {"good": np.ones(3)}, {})
    before = path.read_bytes()
    with pytest.raises(NotFinite, match=r"bad has a value that is NaN or infinite; .*state\.npz was not written"):
        archive.write(path, {"good": np.ones(3), "bad": np.array([1, value], "float16")}, {})
    assert path.read_bytes() == before


def test_an_object_array_is_refused_for_it_would_need_a_pickle(path):
    with pytest.raises(ValueError, match="allow_pickle"):
        archive.write(path, {"objects": np.array([{}], dtype=object)}, {})
    assert os.listdir(path.parent) == []


def test_a_failure_while_writing_leaves_the_old_file_and_no_other(path):
    path.write_text("old")

    def half(file):
        file.write(b"half of the new")
        raise RuntimeError("the power went off")

    with pytest.raises(RuntimeError):
        archive.replace(path, half)
    assert os.listdir(path.parent) == ["state.npz"]
    assert path.read_text() == "old"


def test_the_next_write_into_a_folder_removes_what_killed_writes_left_and_nothing_else(path):
    (path.parent / f".mine.{'0' * 32}").write_text("not a part of a write")
    kill = "lambda file: (file.write(b'half'), file.flush(), os.kill(os.getpid(), signal.SIGKILL))"
    code = f"import os, signal; from gluon_parallel import archive; archive.replace({str(path)!r}, {kill})"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    (left,) = path.parent.glob(".state.npz.*")

    def writes_beside(file):  # another process, for its locks are its own
        assert not left.exists()
        code = f"from gluon_parallel import archive; archive.replace({str(path.parent / 'other')!r}, lambda file: None)"
        subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
        file.write(b"new")

    archive.replace(path, writes_beside)
    assert sorted(os.listdir(path.parent)) == [f".mine.{'0' * 32}", "other", "state.npz"]
    assert path.read_bytes() == b"new"


def test_the_file_is_a_sound_zip_that_numpy_opens_as_readable_as_any_other(path):
    archive.write(path, {"weights": np.arange(6.0).reshape(2, 3)}, {"epoch": 1})
    with np.load(path, allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded["weights"], np.arange(6.0).reshape(2, 3))
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None and opened.namelist() == ["facts.json", "weights.npy"]
    ordinary = path.with_name("ordinary")
    ordinary.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
