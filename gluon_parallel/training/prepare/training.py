"""Training that ``prepare`` returns: steps, evaluates, prints and saves for all processes."""

from typing import Any

from ... import kvstore
from ...data_parallel import DataParallel
from ...kvstore import collective
from ...kvstore.objects import broadcast_object
from ...metrics import evaluate
from .loop import Loop
from .prediction import predict
from .survival import Survival


class Training(Loop):
    """A net in training on all devices and processes; made by :func:`prepare`, with the attributes of :class:`Loop`.

    Attributes:
        devices: of this process.
    """

    def __init__(self, parallel: DataParallel, *loaders: Any, **options: Any) -> None:
        self.devices, self._parallel = parallel.devices, parallel
        super().__init__(
            *loaders, net=parallel.net, trainer=parallel.trainer, accumulate=parallel.accumulate, **options
        )
        if kvstore.survives(self.store):
            self._survival = Survival(self, parallel)

    def __repr__(self) -> str:
        return f"{super().__repr__()} x {self.devices}"

    def step(self, x: Any, y: Any = ()) -> Any:
        """Train on one batch, of which this process has its part; arguments and return of ``DataParallel.step``.

        Raises:
            NotFinite: the loss of this step or one of the eight before it is NaN or infinite, or a weight since one of
                the 17 updates before; :meth:`end_epoch` notices every such weight.
            Stopped: see :meth:`epochs`.
        """
        loss = self._parallel.step(x, y) if self._survival is None else self._survival.step(x, y)
        self.add(loss, self._parallel.num_samples, self._parallel.parts)
        return loss

    def _finish_updates(self) -> None:
        self._parallel.update()

    @collective("training.evaluate()")
    def evaluate(self, loader: Any, metric: Any) -> list[tuple[str, float]]:
        """``gp.evaluate`` over the batches of all processes, for a loader of :func:`prepare`; all must call it."""
        values = self._together(lambda: evaluate(self.net, loader, metric, self.devices, self.store))
        self._reseed()  # an evaluation draws numbers too, where a net has dropout
        return values

    @collective("training.predict()")
    def predict(self, loader: Any) -> Any:
        """The net's outputs for all samples of a loader, in the order of its data set, on every process; all call it.

        Args:
            loader: one that :func:`prepare` returned, shuffled or not; one process takes any, in the order in which it
                yields. Its batches are ``(inputs, labels)``, whose labels are left out, ``(inputs,)``, or one array.

        Returns:
            What the net returns for a batch, an array or nested tuples, lists and dicts of them, as NumPy arrays
            (N, ...) with one row per sample of the data set. The net runs in prediction mode.

        Raises:
            BatchMismatch: an output has no row per sample, or another shape in another batch; the loader leaves samples
                out (``last_batch="discard"``), or has none.
            TypeError: of several processes, each would read the whole loader.

        Example:
            >>> import mxnet as mx
            >>> import gluon_parallel as gp
            >>> net = mx.gluon.nn.Dense(1, in_units=1, weight_initializer="ones")
            >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
            >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
            >>> data = mx.gluon.data.ArrayDataset(mx.nd.arange(3).reshape((3, 1)), mx.nd.zeros(3))
            >>> test = mx.gluon.data.DataLoader(data, 2, shuffle=True)
            >>> training, test = gp.prepare(net, mx.gluon.loss.L2Loss(), trainer, test)
            >>> training.predict(test).tolist()
            [[0.0], [1.0], [2.0]]
        """
        outputs = self._together(lambda: predict(self.net, loader, self.devices, self.store))
        self._reseed()
        return outputs

    @collective("training.broadcast_object()")
    def broadcast_object(self, value: Any) -> Any:
        """Process 0's `value` on every process, see ``gp.broadcast_object``; all call it."""
        return self._together(lambda: broadcast_object(value, self.store))
