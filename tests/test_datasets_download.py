"""Downloads from a server on this machine: mirrors that fail, transfers that break off, contents that are wrong."""

import contextlib
import hashlib
import http.server
import io
import threading

import pytest
import requests
from datasets_files import cifar_batches, cifar_binary, tar_gz

from gluon_parallel import datasets
from gluon_parallel.datasets import published
from gluon_parallel.datasets.published import RemoteFile, fetch
from gluon_parallel.errors import DatasetUnavailable

CONTENT = bytes(range(256)) * 2000  # more than one chunk
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` at every address /<behaviour>/...; `asked` lists the behaviours."""

    block_on_close = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.asked = CONTENT, []
        self.go = threading.Event()  # "silent" and "slow" wait for it

    def file(self, *behaviours, sha256=SHA256):
        urls = tuple(f"http://127.0.0.1:{self.server_port}/{behaviour}/file.bin" for behaviour in behaviours)
        return RemoteFile("file.bin", sha256, urls)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        behaviour = self.path.split("/")[1]
        self.server.asked.append(behaviour)
        getattr(self, behaviour)(self.server.content)

    def good(self, content):
        self._send(200, content)

    def without_length(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def breaks_off(self, content):
        """Promises all and sends half of it."""
        self._send(200, content[: len(content) // 2], ("Content-Length", str(len(content))))

    def wrong(self, content):
        """A page of the wireless network's owner, say."""
        self._send(200, b"<html>please log in</html>")

    def moved(self, content):
        self._send(302, b"", ("Location", "/good/file.bin"))

    def missing(self, content):
        self._send(404, b"not here")

    def silent(self, content):
        self.server.go.wait()

    def slow(self, content):
        self.server.go.wait()
        self._send(200, content)

    def hangs_up(self, content):
        self.close_connection = True

    def _send(self, status, content, *headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client may have given up
            self.wfile.write(content)

    def log_message(self, *_):
        """Silent."""


@pytest.fixture
def server(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):  # whichever is set, and the lower case wins
        monkeypatch.setenv(name, "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.go.set()
            server.shutdown()
            thread.join()


def only_the_file_is_in(folder):
    assert (folder / "file.bin").read_bytes() == CONTENT
    return sorted(path.name for path in folder.iterdir()) == [".file.bin.lock", "file.bin"]


@pytest.mark.parametrize("behaviour", ["good", "without_length", "moved"])
def test_the_file_arrives_byte_for_byte(server, tmp_path, behaviour):
    folder = tmp_path / "new" / "folder"
    assert fetch(server.file(behaviour), folder) == folder / "file.bin"
    assert only_the_file_is_in(folder)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("missing", "HTTP 404"),
        ("wrong", "wrong checksum"),
        ("silent", "timed out"),
        ("hangs_up", "no connection"),
        ("breaks_off", "broke off"),
    ],
)
def test_a_mirror_that_fails_gives_way_to_the_next_and_else_its_reason_is_told(
    server, tmp_path, monkeypatch, behaviour, reason
):
    get, given = requests.get, []

    def get_soon(url, timeout, **options):
        given.append(timeout)
        return get(url, timeout=(60, 0.2) if behaviour == "silent" and behaviour in url else (60, 60), **options)

    monkeypatch.setattr(requests, "get", get_soon)  # a busy machine may be late with the good one
    fetch(server.file(behaviour, "good"), tmp_path / "one", timeout=(7, 8))
    assert only_the_file_is_in(tmp_path / "one") and server.asked == [behaviour, "good"]
    with pytest.raises(DatasetUnavailable, match=f"^127.0.0.1: {reason}; 127.0.0.1: HTTP 404$"):
        fetch(server.file(behaviour, "missing"), tmp_path / "two", timeout=(7, 8))
    assert [path.name for path in (tmp_path / "two").iterdir()] == [".file.bin.lock"]
    assert set(given) == {(7, 8)}


def test_two_that_want_the_same_file_at_the_same_time_download_it_once(server, tmp_path):
    threads = [threading.Thread(target=fetch, args=(server.file("slow"), tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not server.asked:
        threads[0].join(0.01)
    server.go.set()
    for thread in threads:
        thread.join()
    assert only_the_file_is_in(tmp_path) and server.asked == ["slow"]


def test_who_waits_for_another_process_that_brings_nothing_gives_up_and_names_it(server, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "_PATIENCE", 0.2)
    first = threading.Thread(target=fetch, args=(server.file("slow"), tmp_path))
    first.start()
    while not server.asked:
        first.join(0.01)
    with pytest.raises(DatasetUnavailable, match=r"another process holds .*\.lock and has downloaded nothing"):
        fetch(server.file("good"), tmp_path)
    server.go.set()
    first.join()
    assert only_the_file_is_in(tmp_path) and server.asked == ["slow"]


def test_progress_is_shown_on_a_terminal_and_nothing_elsewhere(server, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        fetch(server.file("good"), tmp_path / str(stream.isatty()))
        assert ("100%" in stream.getvalue()) is stream.isatty() is bool(stream.getvalue())


def test_load_downloads_once_and_reads_the_folder_afterwards(server, tmp_path, monkeypatch):
    server.content = tar_gz(cifar_binary(cifar_batches()))
    file = server.file("missing", "good", sha256=hashlib.sha256(server.content).hexdigest())
    monkeypatch.setattr(published, "CIFAR10", file._replace(name="cifar-10-binary.tar.gz"))
    first = datasets.load("cifar10", root=tmp_path)
    again = datasets.load("cifar10", root=tmp_path, download=False)
    assert server.asked == ["missing", "good"]
    assert first.train.labels.tolist() == again.train.labels.tolist()
    assert (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").exists()
