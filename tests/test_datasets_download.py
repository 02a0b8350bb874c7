"""Downloads: mirrors that fail, contents that are wrong, and processes that want the same file."""

import hashlib
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


class Mirrors:
    """In place of ``requests.get``; each mirror's name says what it does, and `asked` lists those that were asked."""

    content = CONTENT

    def __init__(self):
        self.asked, self.timeouts, self.go = [], set(), threading.Event()  # "slow" waits for it

    def file(self, *names, name="file.bin"):
        sha256 = hashlib.sha256(self.content).hexdigest()
        return RemoteFile(name, sha256, tuple(f"http://{mirror}.example/{name}" for mirror in names))

    def get(self, url, stream, timeout, headers, **_options):
        name = url.partition("//")[2].partition(".")[0]
        self.asked.append(name)
        self.timeouts.add(timeout)
        assert stream and headers == {"Accept-Encoding": "identity"}
        if name in ("silent", "dead"):
            raise {"silent": requests.ReadTimeout, "dead": requests.ConnectionError}[name]
        response = requests.Response()
        response.status_code = 404 if name == "missing" else 200
        response.headers["content-length"] = str(len(self.content))
        response.raw = io.BytesIO(b"<html>please log in</html>" if name == "wrong" else self.content)
        response.raw.stream = lambda size, decode_content: self._pieces(name, response.raw, size)
        return response

    def _pieces(self, name, raw, size):
        yield raw.read(size)
        if name == "breaks_off":
            raise requests.exceptions.ChunkedEncodingError
        if name == "slow":
            assert self.go.wait(60)
        yield from iter(lambda: raw.read(size), b"")


@pytest.fixture
def mirrors(monkeypatch):
    made = Mirrors()
    monkeypatch.setattr(requests, "get", made.get)
    yield made
    made.go.set()


def only_the_file_is_in(folder):
    assert (folder / "file.bin").read_bytes() == CONTENT
    return sorted(path.name for path in folder.iterdir()) == [".file.bin.lock", "file.bin"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "HTTP 404"),
        ("wrong", "wrong checksum"),
        ("silent", "timed out"),
        ("dead", "no connection"),
        ("breaks_off", "broke off"),
    ],
)
def test_a_mirror_that_fails_gives_way_to_the_next_and_else_its_reason_is_told(mirrors, tmp_path, name, reason):
    folder = tmp_path / "new" / "folder"
    assert fetch(mirrors.file(name, "good"), folder, timeout=(7, 8)) == folder / "file.bin"
    assert only_the_file_is_in(folder) and mirrors.asked == [name, "good"] and mirrors.timeouts == {(7, 8)}
    with pytest.raises(DatasetUnavailable, match=f"^{name}.example: {reason}; missing.example: HTTP 404$"):
        fetch(mirrors.file(name, "missing"), tmp_path / "two")
    assert [path.name for path in (tmp_path / "two").iterdir()] == [".file.bin.lock"]


def test_several_that_want_the_same_file_download_it_once_and_one_gives_up_that_waits_in_vain(
    mirrors, tmp_path, monkeypatch
):
    def fetching():
        thread = threading.Thread(target=fetch, args=(mirrors.file("slow"), tmp_path))
        thread.start()
        return thread

    first = fetching()
    while not mirrors.asked:
        first.join(0.01)
    with monkeypatch.context() as patched:
        patched.setattr(published, "_PATIENCE", 0.2)
        with pytest.raises(DatasetUnavailable, match=r"another process holds .*\.lock and has downloaded nothing"):
            fetch(mirrors.file("good"), tmp_path)
    threads = [first, fetching(), fetching()]
    mirrors.go.set()
    for thread in threads:
        thread.join()
    assert only_the_file_is_in(tmp_path) and mirrors.asked == ["slow"]


def test_progress_is_shown_on_a_terminal_and_nothing_elsewhere(mirrors, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        fetch(mirrors.file("good"), tmp_path / str(stream.isatty()))
        assert ("100%" in stream.getvalue()) is stream.isatty() is bool(stream.getvalue())
    monkeypatch.setattr("sys.stderr", None)  # it was closed when Python began
    assert fetch(mirrors.file("good"), tmp_path / "closed").exists()


def test_load_downloads_once_and_reads_the_folder_afterwards(mirrors, tmp_path, monkeypatch):
    mirrors.content = tar_gz(cifar_binary(cifar_batches()))
    monkeypatch.setattr(published, "CIFAR10", mirrors.file("missing", "good", name="cifar-10-binary.tar.gz"))
    first = datasets.load("cifar10", root=tmp_path)
    again = datasets.load("cifar10", root=tmp_path, download=False)
    assert mirrors.asked == ["missing", "good"]
    assert first.train.labels.tolist() == again.train.labels.tolist()
