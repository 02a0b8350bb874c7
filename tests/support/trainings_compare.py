"""Whether a random training has the weights of one device: equal, refused, different, failed or impossible."""

import tempfile
import traceback
import warnings
from typing import NamedTuple

import numpy as np
import trainings_one_device as one_device
import trainings_ways as ways

import gluon_parallel as gp
import mxnet as mx

# In vain, for a device or process; that one has the reason, or there is none.
WAITED = gp.errors.WorkerLost, gp.errors.BarrierTimeout, gp.errors.BarrierBroken


class Outcome(NamedTuple):
    """What came of a case in one process."""

    kind: str  # "equal", "refused", "waited", "different", "failed", or "impossible": MXNet fails on one device
    text: str = ""


def tolerance(case):
    """The largest difference of two numbers, of the size of the larger one or of 1."""
    if case.hook == "float16":
        return 2e-2  # 11 bits of each gradient, in which optimizers divide by its size
    if case.dtype == "float32":
        return 2e-4  # 24 bits; sums in another order, which optimizers divide by the size of a gradient
    if case.clip_global_norm is not None or case.is_of_batch:
        return 1e-5  # factors in float32
    return 1e-6  # MXNet's operators take learning rates and 1 / (number of samples) in float32


def differences(case, found, wanted):
    """What differs, in words."""
    weights, averages, losses, scores = wanted
    largest = tolerance(case)
    lines = []
    for kind, ours, theirs in (("", found.weights(), weights), ("average of ", found.averages(), averages)):
        if ours.keys() != theirs.keys():
            lines.append(f"{kind}other parameters: {sorted(ours.keys() ^ theirs.keys())}")
        for name in ours.keys() & theirs.keys():
            for device, copy in enumerate(ours[name]):
                if error := _error(copy, theirs[name], largest):
                    lines.append(f"{kind}{name} on cpu({device}): {error}")
    for number, (loss, (_, step, _)) in enumerate(zip(found.losses, one_device.batches(case))):
        if loss is None:
            continue
        values = losses[number]
        if not case.is_of_batch and not case.samples:
            values = found.own(values, step.sizes)
        if error := _error(np.mean(loss), np.mean(values), largest):
            lines.append(f"loss of step {number}: {error}")
    for epoch, (ours, theirs) in enumerate(zip(found.scores, scores)):
        if error := _error(ours, theirs, largest):
            lines.append(f"{case.score} after epoch {epoch}: {error}")
    return sorted(lines)


def _error(found, wanted, largest):
    if found.shape != wanted.shape:
        return f"shape {found.shape}, expected {wanted.shape}"
    error = np.abs(found - wanted) / np.maximum(np.abs(wanted), 1)
    if error.max() <= largest:
        return ""
    place = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    return f"{found[place]:.6g}, expected {wanted[place]:.6g}"


def run(case, rank=0, folder=None):
    """The outcome of a case in this process; `folder` is that of its files, of all processes."""
    try:
        wanted = one_device.train(case)
    except mx.base.MXNetError as error:
        return Outcome("impossible", _words(error))
    except Exception:
        return Outcome("failed", traceback.format_exc(limit=-4))
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as own:
        warnings.simplefilter("always")
        try:
            mx.npx.set_np(case.numpy_mode, case.numpy_mode)
            found = differences(case, ways.train(case, folder or own, rank), wanted)
        except gp.errors.GluonParallelError as error:
            return Outcome("waited" if isinstance(error, WAITED) else "refused", _words(error))
        except Exception:
            return Outcome("failed", traceback.format_exc(limit=-4))
        finally:
            mx.npx.reset_np()
    if not found:
        return Outcome("equal")
    said = [one for one in caught if one.category.__module__.startswith("gluon_parallel")]
    return Outcome("refused", f"warned: {said[0].message}") if said else Outcome("different", "\n".join(found))


def _words(error):
    """The class and the text; of MXNet's errors the line that says what was checked."""
    lines = [line for line in str(error).splitlines() if "Traceback" not in line and "  File" not in line]
    return f"{type(error).__name__}: {' '.join(lines).strip()[:300]}"
