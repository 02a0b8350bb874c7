"""Errors and a warning of MXNet's reading of pictures in folders, which name the folder or the file."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Callable

from ..errors import warn
from ..mxnet.compat import mx


def say_what_is_there(init_in_mxnet: Callable[..., None], self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
    """MXNet's ``ImageFolderDataset.__init__``; says what is there where it finds no folder or no picture."""
    folder = Path(os.path.expanduser(root))
    if not folder.exists():
        above = next(path for path in folder.absolute().parents if path.is_dir())
        raise FileNotFoundError(
            f"ImageFolderDataset: the folder {folder} is not there; {above} has {_names(above) or 'nothing'}. It "
            f"should have a folder for each class, as in {folder}/cat/1.jpg"
        )
    init_in_mxnet(self, root, *args, **kwargs)
    if self.items:
        return
    if self.synsets:
        files = [path for name in self.synsets for path in (folder / name).iterdir()]
        kinds = Counter(path.suffix or "no ending" for path in files)
        found = ", ".join(f"{num} x {kind}" for kind, num in kinds.most_common(5)) or "nothing"
        where = f"its folders {', '.join(self.synsets[:9])} have {found}"
    else:
        where = f"it has {_names(folder) or 'nothing'}, and no folder for each class, as in {folder}/cat/1.jpg"
    warn(f"ImageFolderDataset: no picture (.jpg, .jpeg, .png) was found in {folder}: {where}", UserWarning)


def name_file(imread_of_mxnet: Callable[..., Any], filename: str, *args: Any, **kwargs: Any) -> Any:
    """``mx.image.imread``; its errors name the file."""
    try:
        return imread_of_mxnet(filename, *args, **kwargs)
    except mx.MXNetError as error:
        path = Path(filename)
        if path.is_dir():
            what = "it is a folder"
        elif path.is_file():
            what = f"its {path.stat().st_size:,} bytes are none of JPEG, PNG or another kind that MXNet reads"
        else:
            what = "it is not there"
        raise mx.MXNetError(f"imread: {filename} cannot be read as a picture: {what}") from error


def _names(folder: Path) -> str:
    """Of the first files and folders in it."""
    return ", ".join(sorted(path.name for path in folder.iterdir())[:9])
