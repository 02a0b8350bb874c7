"""Small files in the formats that data sets are published in, for the tests."""

import gzip
import io
import struct
import tarfile

import numpy as np


def idx(values, type_code=8):
    """A uint8 array as an IDX file, uncompressed."""
    header = struct.pack(">BBBB", 0, 0, type_code, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def idx_parts(seed=0, train=5, test=3):
    """Random 28x28 images and labels: {"train": (images, labels), "t10k": (images, labels)}, uint8."""
    random = np.random.default_rng(seed)
    return {
        name: (random.integers(256, size=(n, 28, 28), dtype=np.uint8), random.integers(10, size=n, dtype=np.uint8))
        for name, n in (("train", train), ("t10k", test))
    }


def write_idx_set(folder, parts, compress=True):
    """Write the four files of MNIST or Fashion-MNIST, under their published names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in parts.items():
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx(values)
            suffix = ".gz" if compress else ""
            (folder / f"{name}-{kind}-ubyte{suffix}").write_bytes(gzip.compress(content) if compress else content)


def write_files(folder, files):
    """Write {path in the folder: content}."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def cifar_batches(seed=0, sizes=(2, 3, 1, 2, 2, 3)):
    """Random images (N, 3, 32, 32) and labels (N,) for CIFAR-10's six files, by their names."""
    random = np.random.default_rng(seed)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    return {
        name: (random.integers(256, size=(n, 3, 32, 32), dtype=np.uint8), random.integers(10, size=n, dtype=np.uint8))
        for name, n in zip(names, sizes)
    }


def cifar_binary(batches):
    """The files of the binary version: {name: content}."""
    return {
        f"{name}.bin": b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels))
        for name, (images, labels) in batches.items()
    }


def tar_gz(files, folder="cifar-10-batches"):
    """An archive as it is published: the files in a folder, beside others that do not matter."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        directory = tarfile.TarInfo(folder)
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for name, content in {"readme.html": b"<html>", **files, "batches.meta.txt": b"airplane\n"}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
