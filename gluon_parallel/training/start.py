"""Start of a configured training script: config, devices, the run's folder, and errors in one sentence."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from .. import bounds, kvstore
from ..devices import devices
from ..errors import GluonParallelError, WorkerLost
from ..step import set_precision
from . import config as configs
from . import stopping
from .run import Run, find, note
from .seeding import reseed

_RESTART = "GLUON_PARALLEL_RESTART"  # how often a launch was started again


def _parent(config: Any) -> Path:
    """The folder of a config's runs: configs/lenet/default.yaml -> runs/lenet/default."""
    if config.output is not None:
        return Path(config.output)
    path = Path(config.config).resolve()
    return Path("runs") / path.parent.name / path.stem


def _restarted() -> Optional[Path]:
    """The run's folder, if this launch was started again after a failure and had saved something by then."""
    path = note()
    if path is None or bounds.whole(_RESTART, os.environ.get(_RESTART, "0"), 0) == 0 or not path.exists():
        return None
    folder = Path(path.read_text(encoding="utf-8"))
    return folder if Run(folder).checkpoints() else None


def _saved_config(config: Any) -> Optional[Path]:
    return None if config.resume is None else find(_parent(config), config.resume) / "config.yaml"


def start(main: Callable[[Any, Run], None], schema: type, default: os.PathLike, argv: Optional[Sequence[str]] = None,
          description: Optional[str] = None) -> int:  # fmt: skip
    """Call a training script's ``main(config, run)`` with the config of the command line and the run's :class:`.Run`.

    The run lies in ``runs/<task>/<config>/<number>``; with ``--resume``, or in a launch that was started again, it is
    the one to continue. Before `main`, devices, precision and random numbers are set as the config says.

    Args:
        main: the script.
        schema: its dataclass of options, derived from :class:`gluon_parallel.config.TrainingConfig`.
        default: its YAML file where no ``--config`` is given.
        argv, description: as of :func:`gluon_parallel.config.parse`; `description` is usually ``__doc__``.

    Returns:
        The exit code: 0; 2 after an error that is told in one message; 130 after Ctrl-C, 143 after SIGTERM.
    """
    try:
        config: Any = configs.parse(schema, default, argv, description, saved=_saved_config)
        contexts = devices(config.devices)  # sets the engine up for them, which has to precede its first operator
        set_precision(getattr(config, "precision", "float32"), contexts)  # before there is a net
        reseed(config.seed)
        folder = _restarted() or (None if config.resume is None else find(_parent(config), config.resume))
        text = configs.to_yaml(config)
        main(config, Run(folder or _parent(config), 2, config.tensorboard, text, is_numbered=folder is None))
    except GluonParallelError as error:
        if isinstance(error, WorkerLost) and stopping.requested() is not None:
            return 128 + (stopping.requested() or 0)  # process 0 has saved and left, as Ctrl-C asked it to
        print(f"error: {error}", file=sys.stderr)
        kvstore.leave_because(f"{type(error).__name__}: {error}")
        return 2
    except stopping.Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        print("stopped at once; the last checkpoint, if there was one, is as it was", file=sys.stderr)
        return 130
    return 0
