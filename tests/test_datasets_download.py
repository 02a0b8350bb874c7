"""Downloads from a server on this machine: mirrors that fail, transfers that break off, contents that are wrong."""

import contextlib
import hashlib
import http.server
import io
import socket
import threading

import pytest
from datasets_files import cifar_batches, cifar_binary, tar_gz

from gluon_parallel import datasets
from gluon_parallel.datasets import cifar, download
from gluon_parallel.datasets.published import RemoteFile
from gluon_parallel.errors import DatasetUnavailable

CONTENT = bytes(range(256)) * 2000  # more than one chunk
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT at every address /<behaviour>/...; `requests` lists (behaviour, Range header or None)."""

    block_on_close = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.requests = []
        self.go = threading.Event()  # "silent" and "slow" wait for it

    def file(self, *behaviours, sha256=SHA256):
        urls = tuple(f"http://127.0.0.1:{self.server_port}/{behaviour}/file.bin" for behaviour in behaviours)
        return RemoteFile("file.bin", sha256, urls)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        behaviour = self.path.split("/")[1]
        self.server.requests.append((behaviour, self.headers["Range"]))
        getattr(self, behaviour)(self.server.content)

    def good(self, content):
        """Honours ranges, as most servers do."""
        first = self._first()
        if first >= len(content):
            self._head(416, 0)
        elif first:
            content_range = ("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self._send(206, content[first:], content_range)
        else:
            self._send(200, content)

    def ignores_ranges(self, content):
        self._send(200, content)

    def without_length(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

    def breaks_off(self, content):
        """Promises all that was asked for and sends the half of it."""
        rest = content[self._first() :]
        content_range = ("Content-Range", f"bytes {self._first()}-{len(content) - 1}/{len(content)}")
        self._head(206 if self._first() else 200, len(rest), content_range)
        self.wfile.write(rest[: len(rest) // 2])

    def another_range(self, content):
        self._send(206, content, ("Content-Range", f"bytes 0-{len(content) - 1}/{len(content)}"))

    def wrong(self, content):
        """A page of the wireless network's owner, say."""
        self._send(200, b"<html>please log in</html>")

    def wrong_and_breaks_off(self, content):
        self._head(200, 1000)
        self.wfile.write(b"<html>")

    def labelled_as_gzip(self, content):
        self._send(200, content, ("Content-Encoding", "gzip"))

    def moved(self, content):
        self.send_response(302)
        self.send_header("Location", "/good/file.bin")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def missing(self, content):
        self._send(404, b"not here")

    def silent(self, content):
        self.server.go.wait()

    def slow(self, content):
        self.server.go.wait()
        self._send(200, content)

    def hangs_up(self, content):
        self.close_connection = True

    def _first(self):
        return int((self.headers["Range"] or "bytes=0-")[len("bytes=") : -1])

    def _head(self, status, length, *headers):
        self.send_response(status)
        for name, value in (("Content-Length", str(length)), *headers):
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status, content, *headers):
        self._head(status, len(content), *headers)
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


def behaviours(server):
    return [behaviour for behaviour, _range in server.requests]


def assert_complete(folder):
    assert (folder / "file.bin").read_bytes() == CONTENT
    assert not (folder / "file.bin.part").exists()


@pytest.mark.parametrize("behaviour", ["good", "ignores_ranges", "without_length", "labelled_as_gzip", "moved"])
def test_the_file_arrives_byte_for_byte(server, tmp_path, behaviour):
    assert (
        download.fetch(server.file(behaviour), tmp_path / "new" / "folder") == tmp_path / "new" / "folder" / "file.bin"
    )
    assert_complete(tmp_path / "new" / "folder")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("missing", "HTTP 404"),
        ("wrong", "wrong checksum"),
        ("silent", "timed out"),
        ("hangs_up", "no connection"),
        ("wrong_and_breaks_off", "broke off"),
    ],
)
def test_a_mirror_that_fails_gives_way_to_the_next_and_else_its_reason_is_told(
    server, tmp_path, monkeypatch, behaviour, reason
):
    get, given = download.requests.get, []

    def get_soon(url, timeout, **options):
        given.append(timeout)
        return get(url, timeout=(60, 0.2) if behaviour == "silent" and behaviour in url else (60, 60), **options)

    monkeypatch.setattr(download.requests, "get", get_soon)  # a busy machine may be late with the good one
    assert_complete(download.fetch(server.file(behaviour, "good"), tmp_path / "one", timeout=(7, 8)).parent)
    assert behaviours(server)[0] == behaviour
    assert behaviours(server)[-1] == "good"
    with pytest.raises(DatasetUnavailable, match=f"^127.0.0.1: ({reason})$"):
        download.fetch(server.file(behaviour), tmp_path / "two", timeout=(7, 8))
    assert not (tmp_path / "two" / "file.bin").exists()
    assert set(given) == {(7, 8)}


def test_a_port_where_nobody_listens_gives_way_to_the_next_mirror(server, tmp_path):
    good = server.file("good")
    with socket.socket() as mute:  # which keeps the port, and does not listen
        mute.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{mute.getsockname()[1]}/good/file.bin"
        assert_complete(download.fetch(good._replace(urls=(dead, *good.urls)), tmp_path).parent)


def test_a_transfer_that_broke_off_goes_on_where_it_stopped_on_the_next_mirror(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    download.fetch(server.file("missing", "good"), tmp_path)
    assert server.requests == [("missing", "bytes=1000-"), ("good", "bytes=1000-")]
    assert_complete(tmp_path)


def test_a_mirror_that_keeps_breaking_off_is_asked_again_as_long_as_it_brings_something(server, tmp_path):
    download.fetch(server.file("breaks_off", "good"), tmp_path)
    asked = [int(header[len("bytes=") : -1]) for _, header in server.requests[1:]]
    halves = [len(CONTENT) - len(CONTENT) // 2**power for power in range(1, len(asked) + 1)]
    assert asked == pytest.approx(halves, abs=len(asked))
    assert len(asked) > 2
    assert_complete(tmp_path)


def test_what_had_arrived_stays_for_the_next_call(server, tmp_path):
    with pytest.raises(DatasetUnavailable, match="broke off"):
        download.fetch(server.file("breaks_off"), tmp_path)
    assert not (tmp_path / "file.bin").exists()
    had = (tmp_path / "file.bin.part").read_bytes()
    assert len(had) > len(CONTENT) / 2
    assert CONTENT.startswith(had)
    server.requests.clear()
    download.fetch(server.file("good"), tmp_path)
    assert server.requests == [("good", f"bytes={len(had)}-")]
    assert_complete(tmp_path)


def test_a_server_that_ignores_ranges_sends_all_of_it_once_more(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    download.fetch(server.file("ignores_ranges"), tmp_path)
    assert server.requests == [("ignores_ranges", "bytes=1000-")]
    assert_complete(tmp_path)


def test_a_server_that_sends_another_range_does_not_spoil_the_file(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    download.fetch(server.file("another_range", "good"), tmp_path)
    assert_complete(tmp_path)


@pytest.mark.parametrize("part", [b"x" * 1000, CONTENT + b"x", CONTENT[:-1] + b"x"])
def test_a_wrong_beginning_left_by_an_earlier_attempt_is_thrown_away(server, tmp_path, part):
    (tmp_path / "file.bin.part").write_bytes(part)
    download.fetch(server.file("good"), tmp_path)
    assert server.requests == [("good", f"bytes={len(part)}-"), ("good", None)]
    assert_complete(tmp_path)


def test_a_whole_file_that_was_only_not_renamed_yet_is_not_sent_again(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    download.fetch(server.file("good"), tmp_path)
    assert server.requests == [("good", f"bytes={len(CONTENT)}-")]
    assert_complete(tmp_path)


def test_every_mirror_with_the_wrong_content_is_told_and_nothing_is_left(server, tmp_path):
    with pytest.raises(DatasetUnavailable, match="^127.0.0.1: wrong checksum; 127.0.0.1: wrong checksum$"):
        download.fetch(server.file("good", "ignores_ranges", sha256="0" * 64), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".file.bin.lock"]


def test_two_that_want_the_same_file_at_the_same_time_download_it_once(server, tmp_path):
    threads = [threading.Thread(target=download.fetch, args=(server.file("slow"), tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    server.go.set()
    for thread in threads:
        thread.join()
    assert behaviours(server) == ["slow"]
    assert_complete(tmp_path)


def test_who_waits_for_another_process_that_brings_nothing_gives_up_and_names_it(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_PATIENCE", 0.2)
    first = threading.Thread(target=download.fetch, args=(server.file("slow"), tmp_path))
    first.start()
    while not server.requests:
        first.join(0.01)
    with pytest.raises(DatasetUnavailable, match=r"another process holds .*\.file\.bin\.lock"):
        download.fetch(server.file("good"), tmp_path)
    server.go.set()
    first.join()
    assert_complete(tmp_path)


def test_progress_is_shown_on_a_terminal_and_nowhere_else(server, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        download.fetch(server.file("good"), tmp_path / str(shown))
        assert ("file.bin" in stream.getvalue()) is shown
        assert ("100%" in stream.getvalue()) is shown


def test_load_downloads_once_and_reads_the_folder_afterwards(server, tmp_path, monkeypatch):
    server.content = tar_gz(cifar_binary(cifar_batches()))
    file = server.file("missing", "good", sha256=hashlib.sha256(server.content).hexdigest())
    monkeypatch.setattr(cifar, "CIFAR10", file._replace(name="cifar-10-binary.tar.gz"))
    first = datasets.load("cifar10", root=tmp_path)
    assert behaviours(server) == ["missing", "good"]
    again = datasets.load("cifar10", root=tmp_path, download=False)
    assert behaviours(server) == ["missing", "good"]
    assert first.train.labels.tolist() == again.train.labels.tolist()
    assert (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").exists()
