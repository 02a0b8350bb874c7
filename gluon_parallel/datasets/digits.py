"""scikit-learn's 1,797 handwritten digits, which come inside its package, as 28x28 images."""

import numpy as np

from .dataset import Dataset, Part

SPLIT_SEED = 0  # of the one fixed split; with another seed accuracies cannot be compared
TEST_SHARE = 0.2  # of every class


def enlarge(images: np.ndarray, size: int, border: int) -> np.ndarray:
    """Square images (N, H, H) interpolated linearly to `size` x `size` pixels, with a `border` of zeros; float32."""
    old = images.shape[1]
    centres = (np.arange(size) + 0.5) * old / size - 0.5  # of the new pixels, in units of the old ones
    weights = np.stack([np.interp(centres, np.arange(old), unit) for unit in np.eye(old)], axis=1)  # (size, old)
    enlarged = (weights @ images @ weights.T).astype(np.float32)
    return np.pad(enlarged, [(0, 0), (border, border), (border, border)])


def stratified_split(labels: np.ndarray, test_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train and to test with, each ascending: the same share of every class, alike with every NumPy."""
    random = np.random.RandomState(seed)  # NumPy has frozen its stream; that of `default_rng` may change
    test = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(test_share * len(members))])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def handwritten_digits() -> Dataset[Part]:
    """Load the handwritten digits: no file and no network needed.

    The 8x8 images (values 0 to 16) are interpolated to 24x24 and framed with zeros, as in MNIST. One fixed split
    (`SPLIT_SEED`) keeps a fifth of every class for testing. The writers are not known, so the same hand may occur in
    both parts: 1,438 images to train with and 359 to test with.
    """
    from sklearn.datasets import load_digits  # here, because importing scikit-learn takes longer than all the rest

    source = load_digits()
    images = enlarge(source.images / 16, size=24, border=2)[:, np.newaxis]  # (N, 1, 28, 28)
    labels = source.target.astype(np.int32)
    train, test = (Part(images[part], labels[part]) for part in stratified_split(labels, TEST_SHARE, SPLIT_SEED))
    return Dataset("digits", train, test, classes=tuple("0123456789"))
