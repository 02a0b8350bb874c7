"""PowerSGD: gradients travel as products of two matrices of low rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..mxnet.compat import mx
from ..mxnet.engine import push, view
from .hook import BucketStore, GradientBucket, StatefulHook

_DEPENDENT = 1e-6  # a column of which less is left, without its part along earlier ones, depends on them
_LEAST_GAIN = 2  # a gradient is compressed if its factors have less than 1 / _LEAST_GAIN of its values
_BLOCK = 1 << 15  # values that are worked on at once: they fit a core's cache


class _Matrix(NamedTuple):
    """A gradient that is compressed."""

    number: int  # of its parameter
    gradient: mx.nd.NDArray
    axes: tuple[int, ...]  # of the gradient: those of the matrix's rows, then those of its columns
    shape: tuple[int, int]  # (n, m) as a matrix
    rank: int
    p: slice  # where its (rank, n) factor lies in the array of all
    q: slice  # where its (rank, m) factor lies

    @property
    def values(self) -> np.ndarray:
        """The gradient with the axes in this order, without a copy."""
        return view(self.gradient).transpose(self.axes)


def as_matrix(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
    """How the gradient of a weight (O, I, kernel...) is a matrix with short factors: (axes, (n, m)).

    Example:
        >>> as_matrix((64, 64, 3, 3)), as_matrix((10, 512))
        (((0, 2, 1, 3), (192, 192)), ((0, 1), (10, 512)))
    """
    kernel = range(2, len(shape))
    found = []
    for num in range(len(kernel) + 1):
        rows, columns = (0, *kernel[:num]), (1, *kernel[num:])
        n, m = (math.prod(shape[axis] for axis in axes) for axes in (rows, columns))
        found.append((n + m, (*rows, *columns), (n, m)))
    return min(found)[1:]


class PowerSGD(StatefulHook):
    """A communication hook by which each gradient travels as two factors of rank `rank` (Vogels et al., 2019).

    A gradient is a matrix M (n, m), of outputs and inputs; the kernel of a convolution counts half to each. The
    processes' M Q, with a Q (m, rank) of orthonormal columns, are summed and made orthonormal, which is P (n, rank);
    then their M^T P are summed. The product of the two, P (M^T P)^T, is applied by all: the projection of the sum of
    all gradients onto the columns of P. What it leaves out is added to the process's next gradient (error feedback).
    The next Q is the orthonormal M^T P (warm start), so P and Q follow the gradients' largest singular vectors.

    (n + m) * rank values travel in the place of n * m. Gradients whose factors would have half as many values or more,
    and those of vectors, travel as they are. The bits of the result are the same on all processes, on processors of
    different kinds too.

    Args:
        rank: columns of the two factors; 1 to 4 are usual, and more for nets with large matrices.
        start_step: so many first updates of the optimizer are not compressed: early gradients change quickly. About a
            tenth of all updates serves well.
        error_feedback: whether what was left out is added to the next gradient. Without it, training converges to
            another place, or not at all.
        seed: of the first Q.

    Raises:
        ValueError: an argument makes no sense.

    Example:
        >>> import gluon_parallel as gp
        >>> net = mx.gluon.nn.Dense(64, in_units=128)
        >>> net.initialize()
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
        >>> hook = gp.communication_hooks.PowerSGD(rank=4, start_step=100)
        >>> training = gp.prepare(net, mx.gluon.loss.L2Loss(), trainer, communication_hook=hook)  # doctest: +SKIP
    """

    only_between_processes = True

    def __init__(
        self,
        rank: int = 4,
        start_step: int = 0,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (("rank", rank, 1), ("start_step", start_step, 0), ("seed", seed, 0)):
            if not isinstance(value, (int, np.integer)) or value < least:
                raise ValueError(f"PowerSGD: {name} is {value!r}, expected a whole number of at least {least}")
        self.rank, self.start_step, self.seed = int(rank), int(start_step), int(seed)
        self.error_feedback = error_feedback

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, start_step={self.start_step})"

    def __call__(self, bucket: GradientBucket, store: BucketStore) -> Sequence[mx.nd.NDArray]:
        matrices = self._matrices(bucket) if bucket.num_updates >= self.start_step else []
        compressed = {matrix.number for matrix in matrices}
        rest = [array for number, array in zip(bucket.numbers, bucket.gradients) if number not in compressed]
        sum_packed(rest, store)
        if matrices:
            self._sum(matrices, bucket, store)
        return bucket.gradients

    def _matrices(self, bucket: GradientBucket) -> list[_Matrix]:
        found: list[_Matrix] = []
        end_p = end_q = 0
        for number, gradient in zip(bucket.numbers, bucket.gradients):
            if len(gradient.shape) < 2:
                continue
            axes, (n, m) = as_matrix(gradient.shape)
            rank = min(n, m, self.rank)
            if n * m > _LEAST_GAIN * (n + m) * rank:
                p, q = slice(end_p, end_p + n * rank), slice(end_q, end_q + m * rank)
                found.append(_Matrix(number, gradient, axes, (n, m), rank, p, q))
                end_p, end_q = p.stop, q.stop
        return found

    def _sum(self, matrices: list[_Matrix], bucket: GradientBucket, store: BucketStore) -> None:
        """Each matrix becomes what is applied for its sum over the processes."""
        dtype, divisor, step = matrices[0].gradient.dtype, bucket.divisor, bucket.num_updates
        gradients = [matrix.gradient for matrix in matrices]
        errors = [self.errors.get(matrix.number) for matrix in matrices]
        before = [self.shared.get(matrix.number) for matrix in matrices]
        p, q, orthonormal = (
            mx.nd.empty(size, dtype=dtype) for size in (matrices[-1].p.stop, matrices[-1].q.stop, matrices[-1].p.stop)
        )
        # Each holds the gradient with what was left out before, and in the end what is left out now.
        left_out = [mx.nd.empty(matrix.shape, dtype=dtype) for matrix in matrices]
        following = [mx.nd.empty((one.rank, one.shape[1]), dtype=dtype) for one in matrices]

        @np.errstate(all="ignore")  # the caller finds what is not finite
        def project() -> None:
            for matrix, array, error, known in zip(matrices, left_out, errors, before):
                own, values = view(array), matrix.values
                own.reshape(values.shape)[...] = values
                if error is not None:
                    own += view(error) * own.dtype.type(divisor)
                basis = self._first(matrix, step).astype(dtype) if known is None else view(known)
                view(p)[matrix.p] = np.matmul(basis, own.T).reshape(-1)

        @np.errstate(all="ignore")  # the caller finds what is not finite
        def project_back() -> None:
            for matrix, array in zip(matrices, left_out):
                basis = view(orthonormal)[matrix.p].reshape(matrix.rank, -1)
                basis[:] = orthonormal_rows(view(sum_of_p)[matrix.p].reshape(matrix.rank, -1))
                view(q)[matrix.q] = np.matmul(basis, view(array)).reshape(-1)

        @np.errstate(all="ignore")  # the caller finds what is not finite
        def expand() -> None:
            for index, (matrix, array) in enumerate(zip(matrices, left_out)):
                rows, columns = (
                    view(factor)[part].reshape(matrix.rank, -1)
                    for factor, part in ((orthonormal, matrix.p), (sum_of_q, matrix.q))
                )
                values, total = matrix.values, _expanded(rows, columns, view(array), store.num_workers, divisor)
                values[...] = total.reshape(values.shape)
                others = functools.partial(self._first, matrix, step + 1)
                view(following[index])[:] = orthonormal_rows(columns, others)

        name = "gluon_parallel.PowerSGD"
        kept = [array for array in (*errors, *before) if array is not None]
        push(project, read=[*gradients, *kept], write=[*left_out, p], name=name)
        sum_of_p = store.allreduce(p)
        push(project_back, read=[*left_out, sum_of_p], write=[q, orthonormal], name=name)
        sum_of_q = store.allreduce(q)
        push(expand, read=[orthonormal, sum_of_q], write=[*gradients, *left_out, *following], name=name)
        numbers = [matrix.number for matrix in matrices]
        self.errors.update(zip(numbers, left_out if self.error_feedback else ()))
        self.shared.update(zip(numbers, following))

    def _first(self, matrix: _Matrix, step: int) -> np.ndarray:
        """(rank, m) float64, orthonormal rows: a random Q^T, the same on all processes."""
        rng = np.random.default_rng([self.seed, matrix.number, step])
        # Uniform: computed without functions of the C library, which differ in the last bit.
        return orthonormal_rows(rng.random((matrix.rank, matrix.shape[1])) - 0.5)


def orthonormal_rows(rows: np.ndarray, others: Callable[[], np.ndarray] | None = None) -> np.ndarray:
    """Gram-Schmidt: orthonormal rows that span what `rows` (rank, length) span, in float64.

    Its bits depend on no library for matrices and on no processor, so they are the same on all processes. A row that
    depends on those before it is replaced by that of ``others()``, (rank, length), or else by zeros.

    Example:
        >>> orthonormal_rows(np.array([[0.0, 0.0], [4.0, 0.0]]), lambda: np.eye(2)[::-1]).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    result = np.array(rows, np.float64, order="C")
    for index, row in enumerate(result):
        if not _normalize(row, result[:index]):
            row[:] = 0 if others is None else others()[index]
            if others is not None and not _normalize(row, result[:index]):
                row[:] = 0
    return result


def _normalize(row: np.ndarray, earlier: np.ndarray) -> bool:
    """Make `row` orthonormal to the earlier ones; whether something is left of it. What is not finite stays so."""
    before = np.sqrt(np.sum(row * row))
    for one in earlier:
        row -= np.sum(one * row) * one
    after = np.sqrt(np.sum(row * row))
    if after <= _DEPENDENT * before:
        return False
    row /= after
    return True


def _expanded(rows: np.ndarray, columns: np.ndarray, matrix: np.ndarray, num: int, divisor: float) -> np.ndarray:
    """(n, m): rows^T columns. What that leaves out of this process's `matrix`, divided by `divisor`, replaces it.

    rows: (rank, n); columns: (rank, m). Element by element: a library for matrices would round as its processor does.
    """
    share, scale = matrix.dtype.type(1 / num), matrix.dtype.type(1 / divisor)
    result, length = np.empty_like(matrix), max(1, _BLOCK // matrix.shape[1])
    for begin in range(0, len(matrix), length):
        block = slice(begin, begin + length)
        total = np.multiply(rows[0, block, None], columns[0], out=result[block])
        for row, column in zip(rows[1:], columns[1:]):
            total += row[block, None] * column
        matrix[block] = (matrix[block] - total * share) * scale
    return result


def sum_packed(arrays: Sequence[mx.nd.NDArray], store: BucketStore) -> None:
    """Arrays of one dtype, which travel as one, become their sums over the processes; returns at once."""
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return
    ends = np.cumsum([array.size for array in arrays]).tolist()
    parts = [slice(end - array.size, end) for array, end in zip(arrays, ends)]
    packed = mx.nd.empty((ends[-1],), dtype=arrays[0].dtype)

    def pack() -> None:
        for array, part in zip(arrays, parts):
            view(packed)[part] = view(array).reshape(-1)

    def unpack() -> None:
        for array, part in zip(arrays, parts):
            view(array).reshape(-1)[:] = view(total)[part]

    push(pack, read=arrays, write=[packed], name="gluon_parallel.sum_packed")
    total = store.allreduce(packed)
    push(unpack, read=[total], write=arrays, name="gluon_parallel.sum_packed")
