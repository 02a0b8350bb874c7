"""The pages of the reference are what the code says, and leave out no public name and no environment variable."""

import re
import types
from pathlib import Path

import pytest
import script_files

import gluon_parallel as gp

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"


def test_the_pages_are_what_the_script_writes():
    pytest.importorskip("gluoncv")  # which a script imports before it reads its options
    writer = script_files.load("write_reference")
    pages = writer.pages()
    for path, text in pages.items():
        assert (REFERENCE / path).read_text("utf-8") == text, "run scripts/write_reference.py"
    made = {path for path in REFERENCE.rglob("*.md") if path.read_text("utf-8").startswith(writer.FIRST_LINE)}
    assert made == {REFERENCE / path for path in pages}


def entries():
    return set(re.findall(r"^#+ `(gp\.[\w.]+)`$", "".join(p.read_text("utf-8") for p in REFERENCE.rglob("*.md")), re.M))


def used_names():
    """(name, file) of what scripts, tutorials and pages use of gp, and what ``dir`` shows."""
    files = [*ROOT.glob("scripts/*.py"), *ROOT.glob("docs/tutorials/*.py"), *ROOT.glob("docs/**/*.md")]
    files.remove(ROOT / "scripts" / "write_reference.py")  # which reads the package's inside
    yield from ((f"gp.{name}", "dir(gluon_parallel)") for name in dir(gp))
    for file in [*files, ROOT / "README.md"]:
        for name in re.findall(r"(?<![\w.])gp(?:\.[A-Za-z_]\w*)+", file.read_text("utf-8")):
            yield name, file.name


def test_every_public_name_that_is_used_has_an_entry():
    known, missing = entries(), set()
    for name, file in used_names():
        value, path = gp, "gp"
        for word in name.split(".")[1:]:
            path, value = f"{path}.{word}", getattr(value, word, None)
            if not isinstance(value, types.ModuleType):
                break
        is_ours = value is None or (getattr(value, "__module__", None) or "").startswith("gluon_parallel")
        if not isinstance(value, types.ModuleType) and (is_ours or word.isupper()) and path not in known:
            missing.add((path, file))
    assert len(known) > 150 and missing == set()


def test_every_environment_variable_is_explained():
    pattern = re.compile(r"\bGLUON_PARALLEL_(?!TEST)[A-Z_]*[A-Z]\b")
    read = {name for path in ROOT.glob("gluon_parallel/**/*.py") for name in pattern.findall(path.read_text("utf-8"))}
    pages = [REFERENCE / "environment.md", ROOT / "docs" / "howto" / "launching.md"]
    told = {name for page in pages for row in re.findall(r"^\| .*?\|", page.read_text("utf-8"), re.M)
            for name in pattern.findall(row)}  # fmt: skip
    assert read == told
