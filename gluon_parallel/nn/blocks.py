"""All blocks of a net."""

from ..compat import mx


def blocks_of(net: mx.gluon.Block) -> list[mx.gluon.Block]:
    """The block and all blocks in it, each once, children first.

    Example:
        >>> net = mx.gluon.nn.Sequential(prefix="net_")
        >>> net.add(mx.gluon.nn.Flatten(prefix="flatten_"))
        >>> [block.name for block in blocks_of(net)]
        ['flatten', 'net']
    """
    found: list[mx.gluon.Block] = []
    net.apply(found.append)
    return list({id(block): block for block in found}.values())


def draws_random_numbers(block: mx.gluon.Block) -> bool:
    """Whether a forward pass may draw random numbers: it has dropout, or layers that are not Gluon's own."""
    layers = blocks_of(block)
    known = all(type(layer).__module__.startswith("mxnet.gluon.nn.") for layer in layers)
    return not known or any(isinstance(layer, mx.gluon.nn.Dropout) for layer in layers)
