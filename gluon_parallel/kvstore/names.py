"""Numbers for names of keys over MXNet's servers, which take only one kind of key.

MXNet's store takes either names or whole numbers, for good, whichever came first. The checks and statistics of this
package travel under whole numbers, so the store is given only those. MXNet numbers names from 0 in the order in which
they are opened, and an optimizer on the servers knows them by these numbers; so do we.
"""

from __future__ import annotations

from ..compat import mx
from .reserved_keys import NAMES_END


class Names:
    """The numbers of one store's names.

    Args:
        store: its type, for errors.

    Example:
        >>> names = Names("dist_sync")
        >>> names.open(["weight", "bias"])
        >>> names.numbers("bias"), names.numbers(["weight", "bias"]), names.numbers(1 << 20)
        (1, [0, 1], 1048576)
    """

    def __init__(self, store):
        self._store = store
        self._numbers: dict = {}
        self._has_own_numbers = False

    def open(self, keys):
        """Give new names their numbers.

        Raises:
            MXNetError: names and whole numbers are mixed, which MXNet refuses, too.
        """
        for key in keys:
            if isinstance(key, str):
                self._numbers.setdefault(key, len(self._numbers))
            elif key < NAMES_END:
                self._has_own_numbers = True
        if self._numbers and self._has_own_numbers:
            raise mx.base.MXNetError(
                f"store {self._store!r}, key {keys[0]!r}: mixed key types; a store takes either names or whole numbers"
            )

    def numbers(self, key):
        """What MXNet's store is given for `key`, a name, a whole number, or a list of them.

        Raises:
            MXNetError: nothing has been opened under a name.
        """
        if isinstance(key, (list, tuple)):
            return [self.numbers(one) for one in key]
        if not isinstance(key, str):
            return key
        if key not in self._numbers:
            raise mx.base.MXNetError(
                f"store {self._store!r}, key {key!r}: nothing has been opened under it; call init or broadcast first"
            )
        return self._numbers[key]
