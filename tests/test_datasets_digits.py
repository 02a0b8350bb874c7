"""The embedded digits: scikit-learn's images, enlarged, in one fixed split."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from gluon_parallel import datasets
from gluon_parallel.datasets.digits import enlarge, stratified_split


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


def test_every_digit_of_scikit_learn_is_there_exactly_once(digits):
    images = np.concatenate([digits.train.images, digits.test.images])[:, 0, 2:-2, 2:-2]
    middles = images[:, 1::3, 1::3]  # the middle pixel of each patch lies on the old pixel's centre
    labels = np.concatenate([digits.train.labels, digits.test.labels])
    source = load_digits()
    found = sorted((tuple((image.ravel() * 16).round().astype(int)), label) for image, label in zip(middles, labels))
    wanted = sorted((tuple(image.ravel().astype(int)), label) for image, label in zip(source.images, source.target))
    assert found == wanted


def test_images_are_float32_nchw_between_0_and_1_and_a_fifth_of_every_class_is_kept_for_testing(digits):
    for part in (digits.train, digits.test):
        assert part.images.dtype == np.float32 and part.images.shape == (len(part.labels), 1, 28, 28)
        assert part.images.min() == 0 and part.images.max() == 1 and part.labels.dtype == np.int32
    assert digits.num_classes == len(digits.classes) == 10
    train, test = (np.bincount(part.labels, minlength=10) for part in (digits.train, digits.test))
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.5 / 174)  # half a sample of the smallest class


def test_the_split_is_the_one_that_published_accuracies_were_measured_on():
    # Written down on purpose: it must not change with the version of NumPy or scikit-learn, nor by an edit.
    _train, test = stratified_split(load_digits().target)
    assert test[:12].tolist() == [3, 7, 13, 19, 36, 38, 43, 48, 53, 55, 60, 62]
    assert (len(test), int(test.sum())) == (359, 311827)


def test_enlarging_is_linear_interpolation_of_rows_and_of_columns():
    random = np.random.RandomState(0)
    image = random.rand(8, 8)
    centres = (np.arange(24) + 0.5) / 3 - 0.5
    rows = np.stack([np.interp(centres, np.arange(8), row) for row in image])
    wanted = np.stack([np.interp(centres, np.arange(8), column) for column in rows.T], axis=1)
    framed = enlarge(image[None])[0]
    np.testing.assert_allclose(framed[2:-2, 2:-2], wanted, rtol=1e-6, atol=1e-7)  # float32 against float64
    assert framed.sum() == pytest.approx(wanted.sum(), rel=1e-5)  # nothing but zeros in the border
