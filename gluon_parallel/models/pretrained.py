"""Pretrained weights of GluonCV, read from this machine and never downloaded."""

import os
from pathlib import Path

from ..errors import ConfigError


def published_weights(name: str) -> Path:
    """Find the local file with the weights that GluonCV publishes for a net, and check its SHA-1.

    GluonCV itself would download a missing file, and wait for the network without limit. This function raises at once.
    It looks at this host's disk only.

    Args:
        name: of the net in GluonCV's model zoo, such as ``resnet50_v1s``.

    Returns:
        The file, in ``$MXNET_HOME/models``; without that variable in ``~/.mxnet/models``.

    Raises:
        ConfigError: GluonCV publishes no weights of that name, the file does not exist, or its SHA-1 differs.

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
    if file.exists() and check_sha1(file, sha1):
        return file
    trouble = "is not the file that was published (its SHA-1 is another one)" if file.exists() else "is not there"
    raise ConfigError(
        f"the pretrained weights of {name} are wanted, but {file} {trouble}. On a machine with a network, "
        f"`gluoncv.model_zoo.get_model({name!r}, pretrained=True)` downloads it; copy it to this path. "
        "Or start from random weights (--pretrained null): training takes longer and reaches a lower accuracy"
    )
