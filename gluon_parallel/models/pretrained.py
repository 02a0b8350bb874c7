"""Pretrained weights of GluonCV, read from this machine and never downloaded."""

import os
from pathlib import Path

from ..errors import ConfigError


def published_weights(name: str) -> Path:
    """The file of the weights that GluonCV publishes for one of its nets.

    GluonCV itself fetches a file that is not there, and waits for the network without limit; a training script that is
    told at once what is missing, on every process alike, is easier to live with.

    Args:
        name: of the net in GluonCV's model zoo, such as ``resnet50_v1s``.

    Returns:
        The file, in ``$MXNET_HOME/models``; without that variable in ``~/.mxnet/models``.

    Raises:
        ConfigError: there are no such weights, the file is not there, or it is not the one that was published.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():  # of GluonCV's own import
        ...     warnings.simplefilter("ignore")
        ...     published_weights("lenet")
        Traceback (most recent call last):
        gluon_parallel.errors.ConfigError: GluonCV publishes no weights of 'lenet'
    """
    from gluoncv.model_zoo.model_store import short_hash
    from gluoncv.utils import check_sha1

    try:
        sha1 = short_hash(name)
    except ValueError as error:
        raise ConfigError(f"GluonCV publishes no weights of {name!r}") from error
    file = Path(os.environ.get("MXNET_HOME", "~/.mxnet")).expanduser() / "models" / f"{name}-{sha1}.params"
    if not file.exists():
        trouble = "is not there"
    elif check_sha1(file, sha1):
        return file
    else:
        trouble = "is not the file that was published (its SHA-1 is another one)"
    raise ConfigError(
        f"the pretrained weights of {name} are wanted, but {file} {trouble}. Where there is a network, "
        f"`gluoncv.model_zoo.get_model({name!r}, pretrained=True)` brings it; copy it there. "
        "Or begin with random weights (--pretrained null), which takes much longer and ends lower"
    )
