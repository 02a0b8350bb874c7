"""All blocks of a net."""

from __future__ import annotations

from typing import Any

from ..mxnet.compat import mx


def blocks_of(net: mx.gluon.Block) -> list[mx.gluon.Block]:
    """The block and all blocks in it, each once, children first."""
    found: list[mx.gluon.Block] = []
    net.apply(found.append)
    return list({id(block): block for block in found}.values())


class NetAndLoss(mx.gluon.Block):
    """A net and its loss, a block with parameters too; some of these may have equal names."""

    def __init__(self, net: mx.gluon.Block, loss: mx.gluon.Block) -> None:
        super().__init__(prefix="")
        self.register_child(net, "net")
        self.register_child(loss, "loss")

    def collect_params(self, select: str | None = None) -> dict[int, mx.gluon.Parameter]:
        """The parameters of both, by number."""
        blocks = self._children.values()
        return dict(enumerate(one for block in blocks for one in block.collect_params(select).values()))


def net_and_loss(net: mx.gluon.Block, loss: Any) -> mx.gluon.Block:
    """Block of all layers that a step runs: the net itself where the loss has no parameters."""
    return NetAndLoss(net, loss) if isinstance(loss, mx.gluon.Block) and loss.collect_params().keys() else net


def draws_random_numbers(block: mx.gluon.Block) -> bool:
    """Whether a forward pass may draw random numbers: it has dropout, or layers that are not Gluon's own."""
    layers = blocks_of(block)
    known = all(type(layer).__module__.startswith("mxnet.gluon.nn.") for layer in layers)
    return not known or any(isinstance(layer, mx.gluon.nn.Dropout) for layer in layers)
