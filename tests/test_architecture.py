"""The house's plan, read from the imports: they point down only, and neighbours do not know each other."""

import ast
import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1]
PACKAGE = HOUSE / "gluon_parallel"

# Every room stands on one floor. Floor 0 is a staircase: each room there may use those before it.
FLOORS = [
    ["errors", "native", "compat", "arrays", "failures", "device_threads", "engine"],
    ["cores"],
    ["devices", "split", "allreduce", "moments", "archive", "seeding"],
    ["kvstore"],
    ["barrier", "exchange"],
    ["nn", "replicas"],
    ["data_parallel", "asynchronous", "pipeline", "sampler", "metrics", "checkpoint", "progress", "report", "pictures"],
    ["cli", "launch", "doctor", "parity", "config", "runs", "prepare", "models", "datasets"],
    ["entry", "__main__"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# `__init__` is the front door: it shows what the rooms offer, and no room walks out through it.
FRONT_DOOR = "__init__"


def rooms():
    """(room, file) of every Python file of the package; a folder is one room, whatever its files."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        yield parts[0], file


def imported_rooms(tree, package):
    """(room, line) for every import from this package in `tree`, a file of `package` (a tuple of names).

    Example:
        >>> list(imported_rooms(ast.parse("from .compat import mx"), ("gluon_parallel",)))
        [('compat', 1)]
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _room_of(tuple(alias.name.split(".")), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = base + tuple((node.module or "").split(".")) if node.module else base
            if module == ("gluon_parallel",):
                for alias in node.names:
                    yield from _room_of((*module, alias.name), node.lineno)
            else:
                yield from _room_of(module, node.lineno)


def _room_of(module, line):
    if module and module[0] == "gluon_parallel":
        yield (module[1] if len(module) > 1 else FRONT_DOOR), line


def may_import(room, other):
    """Whether `room` may import `other`, after the floors' table."""
    if room == other or room == FRONT_DOOR:
        return True
    if other == FRONT_DOOR:
        return False
    if FLOOR[room] == FLOOR[other] == 0:
        return FLOORS[0].index(other) < FLOORS[0].index(room)
    return FLOOR[other] < FLOOR[room]


def forbidden_imports(room, source, package=("gluon_parallel",)):
    """(line, room that may not be imported here) for each such import in `source`."""
    tree = ast.parse(source)
    return [(line, other) for other, line in imported_rooms(tree, package) if not may_import(room, other)]


def test_every_room_has_its_floor():
    unknown = {room for room, _ in rooms()} - set(FLOOR) - {FRONT_DOOR}
    assert not unknown, f"add {sorted(unknown)} to FLOORS, after asking which question each answers"


@pytest.mark.parametrize("room", [*FLOOR, FRONT_DOOR])
def test_imports_point_down_and_neighbours_do_not_import_each_other(room):
    for owner, file in rooms():
        if owner == room:
            package = ("gluon_parallel", *file.relative_to(PACKAGE).parts[:-1])
            for line, other in forbidden_imports(room, file.read_text("utf-8"), package):
                pytest.fail(f"{file.relative_to(HOUSE)}:{line}: {room} may not import {other}")


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("split", "from .data_parallel import DataParallel"),
        ("split", "from . import allreduce"),
        ("split", "def f():\n    from gluon_parallel.allreduce import allreduce"),
        ("compat", "import gluon_parallel.engine"),
        ("models", "import gluon_parallel as gp"),
        ("models", "from .datasets.digits import load"),
    ],
)
def test_the_check_sees_an_import_that_points_up_or_sideways_or_out_of_the_door(room, source):
    assert forbidden_imports(room, source)


@pytest.mark.parametrize(
    ("room", "source", "package"),
    [
        ("split", "from .compat import mx\nfrom .errors import BatchMismatch", ("gluon_parallel",)),
        ("engine", "from .compat import mx", ("gluon_parallel",)),
        ("nn", "from ..allreduce import allreduce\nfrom .converters import convert", ("gluon_parallel", "nn")),
        ("split", "import numpy as np\nfrom mxnet import nd", ("gluon_parallel",)),
    ],
)
def test_the_check_lets_an_import_pass_that_points_down_or_stays_in_the_room(room, source, package):
    assert not forbidden_imports(room, source, package)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_opens_with_the_line_that_says_what_it_is(path):
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, "the first line of a file says what it is"
    assert docstring.splitlines()[0].strip(), "the docstring's first line is the one that says it"


def readers_files():
    """(file, Python source) of the scripts and of the tutorials, which are Markdown with code cells or plain Python."""
    for path in sorted([*HOUSE.glob("scripts/*.py"), *HOUSE.glob("docs/tutorials/*.py")]):
        yield path, path.read_text("utf-8")
    for path in sorted(HOUSE.glob("docs/tutorials/*.md")):
        cells = re.findall(r"^```(?:\{code-cell\}.*|python.*)\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
        # Lines that speak to the notebook (%matplotlib, !ls) and cell options (:tags:) are not Python.
        lines = [line for cell in cells for line in cell.splitlines() if not re.match(r"\s*[%!]|:\w", line)]
        yield path, "\n".join(lines)


def imports_of_ours(source):
    """The import statements in `source` that reach into this package, as text."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.split(".")[0] == "gluon_parallel" for name in names):
            yield ast.unparse(node)


def test_scripts_and_tutorials_use_only_the_front_door():
    found = {str(path.relative_to(HOUSE)): set(imports_of_ours(source)) for path, source in readers_files()}
    wrong = {path: imports - {"import gluon_parallel as gp"} for path, imports in found.items()}
    assert not {path: imports for path, imports in wrong.items() if imports}
