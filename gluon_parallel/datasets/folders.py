"""Warning where MXNet's data set of pictures in folders finds none."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Callable

from ..errors import warn


def warn_of_no_pictures(init_in_mxnet: Callable[..., None], self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
    """MXNet's ``ImageFolderDataset.__init__``; says what is in the folder where it has found no picture."""
    init_in_mxnet(self, root, *args, **kwargs)
    if self.items:
        return
    folder = Path(os.path.expanduser(root))
    if self.synsets:
        files = [path for name in self.synsets for path in (folder / name).iterdir()]
        kinds = Counter(path.suffix or "no ending" for path in files)
        found = ", ".join(f"{num} x {kind}" for kind, num in kinds.most_common(5)) or "nothing"
        where = f"its folders {', '.join(self.synsets[:9])} have {found}"
    else:
        there = sorted(path.name for path in folder.iterdir())
        where = f"it has {', '.join(there[:9]) or 'nothing'}, and no folder for each class, as in {folder}/cat/1.jpg"
    warn(f"ImageFolderDataset: no picture (.jpg, .jpeg, .png) was found in {folder}: {where}", UserWarning)
