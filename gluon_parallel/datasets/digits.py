"""scikit-learn's 1,797 handwritten digits, which come inside its package, as 28x28 images."""

import numpy as np

from .dataset import Dataset, Part

_SPLIT_SEED = 0  # of the one fixed split; with another seed accuracies cannot be compared
_TEST_SHARE = 0.2  # of every class


def enlarge(images: np.ndarray) -> np.ndarray:
    """Images (N, 8, 8) interpolated linearly to 24x24 pixels and framed with two zeros: (N, 28, 28) float32."""
    centres = (np.arange(24) + 0.5) / 3 - 0.5  # of the new pixels, in units of the old ones
    weights = np.stack([np.interp(centres, np.arange(8), unit) for unit in np.eye(8)], axis=1)  # (24, 8)
    return np.pad((weights @ images @ weights.T).astype(np.float32), [(0, 0), (2, 2), (2, 2)])


def stratified_split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train and to test with, each ascending: the same share of every class, alike with every NumPy."""
    random = np.random.RandomState(_SPLIT_SEED)  # NumPy has frozen its stream; that of `default_rng` may change
    test = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(_TEST_SHARE * len(members))])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def handwritten_digits() -> Dataset[Part]:
    """Load the handwritten digits: no file and no network needed.

    The 8x8 images (values 0 to 16) are enlarged and framed, as in MNIST. One fixed split keeps a fifth of every class
    for testing. The writers are not known, so the same hand may occur in both parts: 1,438 images to train with and 359
    to test with.
    """
    from sklearn.datasets import load_digits  # here, because importing scikit-learn takes longer than all the rest

    source = load_digits()
    images = enlarge(source.images / 16)[:, np.newaxis]  # (N, 1, 28, 28)
    labels = source.target.astype(np.int32)
    train, test = (Part(images[part], labels[part]) for part in stratified_split(labels))
    return Dataset("digits", train, test, classes=tuple("0123456789"))
