"""The launcher's output goes on whatever a terminal shows, whoever has closed it, and where nothing can be written."""

import errno
import io
import os
import sys

import pytest

import gluon_parallel as gp
from gluon_parallel.launch import worker
from gluon_parallel.launch.logs import Logs

CAFE = b"caf\xe9".decode("utf-8", "surrogateescape")  # as an agent reads what a process of latin-1 prints


@pytest.fixture
def logs(tmp_path):
    made = Logs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def standard_output(monkeypatch):
    """A function that puts a file in the place of Python's standard output, as the shell's redirection does."""
    opened = []

    def put(file, encoding="utf-8"):
        stream = open(file, "w", encoding=encoding)
        opened.append(stream)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)

    yield put
    for stream in opened:
        stream.close()  # an error here is what Python ends with status 120 for


def whose_reader_has_gone():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_a_terminal_of_any_encoding_shows_what_it_can_and_the_log_has_the_bytes(
    logs, standard_output, tmp_path, encoding
):
    standard_output(tmp_path / "shown", encoding)
    logs.write("rank 0", ["café →", CAFE])
    assert logs.path("rank 0").read_bytes() == "café →\n".encode() + b"caf\xe9\n"
    shown = (tmp_path / "shown").read_text(encoding)
    escaped = {"utf-8": "café →", "latin-1": "café \\u2192", "ascii": "caf\\xe9 \\u2192"}
    assert shown.splitlines()[0] == f"[0] {escaped[encoding]}"
    assert shown.splitlines()[1].startswith("[0] caf") and len(shown.splitlines()) == 2


def test_bytes_that_are_no_utf8_are_shown_in_the_terminals_encoding(logs, standard_output, tmp_path):
    standard_output(tmp_path / "shown", "latin-1")
    logs.write("rank 0", [CAFE])
    assert (tmp_path / "shown").read_bytes() == b"[0] caf\xe9\n"


@pytest.mark.parametrize(
    ("make", "reason"), [(whose_reader_has_gone, "Broken pipe"), (lambda: "/dev/full", "No space left on device")]
)
def test_a_terminal_that_cannot_be_written_is_named_once_and_the_logs_are_complete(
    logs, standard_output, capsys, make, reason
):
    standard_output(make())
    for number in range(3):
        logs.write("rank 0", [f"line {number}"])
    said = capsys.readouterr().err
    assert said.count(f"standard output cannot be written: {reason}; the logs in {logs.folder} have what") == 1
    assert logs.path("rank 0").read_text() == "line 0\nline 1\nline 2\n"


def test_what_is_written_after_space_has_come_back_is_shown_again(logs, standard_output, tmp_path, monkeypatch):
    standard_output(tmp_path / "shown")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: refuse() if b"first" in data else write(file, data[:3]))
    logs.write("rank 0", ["first"])
    logs.write("rank 0", ["second"])
    assert (tmp_path / "shown").read_text() == "[0] second\n"  # three bytes at a time


def refuse():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_standard_files_that_were_closed_when_python_began_are_left_out(logs, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    logs.write("rank 0", ["out"], 1)
    logs.write("rank 0", ["trouble"], 2)
    logs.say("that is all", ["rank 0"])
    assert logs.path("rank 0").read_text() == "out\ntrouble\ngluon-parallel launch: that is all\n"


def test_a_file_that_was_put_into_the_place_of_standard_output_is_used(logs, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    logs.write("rank 0", ["out"])
    assert sys.stdout.getvalue() == "[0] out\n"
    sys.stdout.close()
    logs.write("rank 0", ["too late"])
    assert logs.path("rank 0").read_text().endswith("too late\n")


def test_a_log_that_cannot_be_written_is_named_once_and_its_process_is_shown(logs, capsys):
    logs.path("rank 0").symlink_to("/dev/full")
    logs.write("rank 0", ["one"])
    logs.write("rank 0", ["two"])
    shown = capsys.readouterr()
    assert shown.out == "[0] one\n[0] two\n"
    assert shown.err.count(f"{logs.path('rank 0')} cannot be written: No space left on device; what is") == 1


def test_a_log_that_cannot_be_closed_ends_nothing(tmp_path, capsys):
    closing = Logs(tmp_path)
    closing.write("rank 0", ["one"])
    os.close(closing.open("rank 0").fileno())
    closing.close()
    assert "rank-0.log cannot be written: Bad file descriptor; its end is missing" in capsys.readouterr().err


def test_a_log_that_cannot_be_opened_is_refused_with_another_folder_to_name(logs):
    logs.path("rank 0").mkdir()
    with pytest.raises(
        gp.errors.OutputUnavailable, match=r"Is a directory\. .*or choose another folder: --logs FOLDER"
    ):
        logs.open("rank 0")


def test_the_tail_of_a_log_is_its_last_lines_however_long_it_is(logs):
    logs.write("rank 0", [f"line {number}" for number in range(5000)])
    assert logs.tail("rank 0") == "".join(f"\n    line {number}" for number in range(4988, 5000))
    assert logs.tail("rank 1") == ""


def test_lines_for_the_log_alone_are_not_shown(logs, capsys):
    logs.write("rank 0", ["seen", f"{worker.LOG_ONLY}kept"])
    assert logs.path("rank 0").read_text() == "seen\nkept\n"
    assert capsys.readouterr().out == "[0] seen\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(text):
    """What a terminal shows: its lines, each overwritten from a carriage return on."""
    shown = []
    for line in text.split("\n"):
        columns = ""
        for part in line.split("\r"):
            columns = part + columns[len(part) :]
        shown.append(columns.rstrip())
    return shown


def test_a_terminal_shows_a_bar_below_the_lines_and_nothing_else_does(logs, tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logs.show_bar("rank 0", "epoch 1: a long line of 9 steps")
    assert screen(terminal.getvalue()) == ["[0] epoch 1: a long line of 9 steps"]
    logs.write("rank 1", ["a line"], stream=2)
    assert screen(terminal.getvalue()) == ["[1] a line", "[0] epoch 1: a long line of 9 steps"]
    logs.show_bar("rank 0", "epoch 1: 10")
    logs.say("done")
    assert screen(terminal.getvalue()) == ["[1] a line", "gluon-parallel launch: done", "[0] epoch 1: 10"]
    logs.show_bar("rank 0", "x" * 1000)
    assert len(screen(terminal.getvalue())[-1]) < 1000
    logs.show_bar("rank 0", "")
    logs.say("more")
    logs.show_bar("rank 0", "last")
    logs.close()
    assert screen(terminal.getvalue())[2:] == ["gluon-parallel launch: more", ""]
    assert logs.path("rank 1").read_text() == "a line\n" and not logs.path("rank 0").exists()
    for file, live in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", file)
        quiet = Logs(tmp_path, live)
        quiet.show_bar("rank 0", "epoch 1")
        assert file.getvalue() == ""
