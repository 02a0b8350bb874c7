"""Entry of a training script: config, processes, the run's folder, and errors in one sentence."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from .. import kvstore
from ..data_parallel import set_precision
from ..devices import devices
from ..errors import GluonParallelError, WorkerLost
from . import config as configs
from . import runs


def _parent(config: Any) -> Path:
    """The folder of a config's runs: configs/lenet/default.yaml -> runs/lenet/default."""
    if config.output is not None:
        return Path(config.output)
    path = Path(config.config).resolve()
    return Path("runs") / path.parent.name / path.stem


def _after_restart(argv: Sequence[str]) -> list[str]:
    """`argv`, and ``--resume`` if this launch was started again after a failure and had saved something by then."""
    note = _note()
    if note is None or int(os.environ.get("GLUON_PARALLEL_RESTART", "0")) == 0 or not note.exists():
        return list(argv)
    folder = Path(note.read_text(encoding="utf-8"))
    return [*argv, "--resume", str(folder)] if runs.checkpoints(folder) else list(argv)


def _note() -> Optional[Path]:
    """The file in which a launch keeps the name of its run's folder, for its next attempt; None without a launcher."""
    folder = os.environ.get("GLUON_PARALLEL_LAUNCH_FOLDER")
    return None if folder is None else Path(folder) / "run.txt"


def _folder(config: Any, store: Any) -> Path:
    """The run's folder: the one to continue, or a new one, which process 0 alone makes, for it alone writes."""
    if config.resume is not None:
        folder = runs.find(_parent(config), config.resume)
    else:
        folder = runs.begin(_parent(config)) if store.rank == 0 else _parent(config)
    note = _note()
    if note is not None and store.rank == 0:
        note.write_text(str(folder.resolve()), encoding="utf-8")
    return folder


def _saved_config(config: Any) -> Optional[Path]:
    return None if config.resume is None else runs.find(_parent(config), config.resume) / "config.yaml"


def start(
    main: Callable[[Any, runs.Run], None],
    schema: type,
    default: os.PathLike,
    argv: Optional[Sequence[str]] = None,
    description: Optional[str] = None,
) -> int:
    """Run a training script's ``main(config, run)``, in this process or in each of several.

    ``run.store`` is the KVStore through which processes meet. Process 0 alone writes; where all are to continue a run
    (``--resume``, or a launch that was started again), all read the same folder.

    Args:
        main: the script.
        schema: its dataclass of options, derived from :class:`gluon_parallel.training.config.Training`.
        default: its YAML file where no ``--config`` is given.
        argv, description: as of :func:`gluon_parallel.training.config.parse`; `description` is usually ``__doc__``.

    Returns:
        The exit code: 0; 2 after an error that the caller can act on, told in one message on standard error; 130 after
        Ctrl-C, on all processes.
    """
    try:
        words = _after_restart(sys.argv[1:] if argv is None else argv)
        config: Any = configs.parse(schema, default, words, description, saved=_saved_config)
        contexts = devices(config.devices)  # sets the engine up for them, which has to precede its first operator
        set_precision(getattr(config, "precision", "float32"), contexts)  # before there is a net
        store = kvstore.create(config.kvstore)
        folder = _folder(config, store)
        title = f"{folder} on {config.dataset}"
        resumed = config.resume is not None
        with runs.Run(folder, configs.to_yaml(config), title, config.tensorboard, resumed, store) as run:
            try:
                main(config, run)
            except WorkerLost:
                if run.interrupted is None:
                    raise
                return 128 + run.interrupted  # process 0 has saved and left, as Ctrl-C asked it to
    except GluonParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        kvstore.leave_because(f"{type(error).__name__}: {error}")
        return 2
    except runs.Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print("stopped at once; the last checkpoint, if there was one, is as it was", file=sys.stderr)
        return 130
    return 0
