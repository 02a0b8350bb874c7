"""Reference of the public names: the `public` directive, and links from `gp.name` on every page to its entry.

The build fails if a name that scripts, tutorials or pages use, or that `dir(gluon_parallel)` shows, has no entry.
"""

import inspect
import re
import types
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import gluon_parallel

LOG = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
USED = re.compile(r"\bgp((?:\.[A-Za-z_]\w*)+)")
KINDS = (("autoexception", BaseException), ("autoclass", type), ("autofunction", object))


def members(module, packages):
    """The module's functions and classes by name, as they are written; those of `packages` alone, if there are any.

    A name belongs to a package of gluon_parallel by the module that defines it, such as ``training.prepare``.
    """
    found = {}
    for name in dir(module) if module is gluon_parallel else vars(module):
        value = getattr(module, name)
        home = getattr(value, "__module__", None) or ""
        is_ours = home.startswith(f"{module.__name__}.") or home == module.__name__
        if name.startswith("_") or isinstance(value, types.ModuleType) or not callable(value) or not is_ours:
            continue
        if not packages or any(f"{home}.".startswith(f"gluon_parallel.{package}.") for package in packages):
            found[name] = value
    return found


class Public(SphinxDirective):
    """Entries, made from their docstrings, for the public functions and classes of a module.

    ``:from:`` keeps those that the named packages define, ``:without:`` leaves names out, ``:only:`` lists them, and
    ``:also:`` those that another module defines.
    ``:data:`` adds values, which have no docstring, each with what it is: ``NAME names of the stores; ...``.
    """

    required_arguments = 1
    option_spec = dict.fromkeys(("from", "without", "only", "also", "data"), directives.unchanged_required)

    def run(self):
        shown = self.arguments[0]  # gluon_parallel.sampler, wherever the module is
        module = gluon_parallel
        for name in shown.split(".")[1:]:
            module = getattr(module, name)
        chosen = members(module, self.options.get("from", "").split())
        if "only" in self.options:
            chosen = {name: getattr(module, name) for name in self.options["only"].split()}
        chosen |= {name: getattr(module, name) for name in self.options.get("also", "").split()}
        lines = ["```{eval-rst}", f".. py:currentmodule:: {shown}", ""]
        for name in [name for name in chosen if name not in self.options.get("without", "").split()]:
            value = chosen[name]
            kind = next(kind for kind, base in KINDS if isinstance(value, base) or _is_subclass(value, base))
            lines += [f".. {kind}:: {shown}.{name}"]
            lines += ["   :members:"] * (kind == "autoclass") + [""]
            self.env.note_dependency(inspect.getsourcefile(value) or __file__)
        for text in filter(None, self.options.get("data", "").split("; ")):
            name, _, text = text.partition(" ")
            lines += [f".. py:data:: {name}", f"   :value: {getattr(module, name)!r}", "", f"   {text}", ""]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


def _is_subclass(value, base):
    return isinstance(value, type) and base is not type and issubclass(value, base) and base is not object


def entry(env, name):
    """The name under which ``gp.name`` has an entry, or None; `name` may end in attributes that have none."""
    objects = env.get_domain("py").objects
    full = f"gluon_parallel.{name}"
    if full in objects:
        return full
    return next((known for known in objects if known.rpartition(".")[2] == name), None) if "." not in name else None


class Links(SphinxPostTransform):
    """`gp.name` and `gp.name(...)` in a page's text become links to the entry of the name."""

    default_priority = 5

    def run(self):
        for literal in list(self.document.findall(nodes.literal)):
            found = re.match(r"(?:gluon_parallel|gp)\.([A-Za-z_][\w.]*\w)", literal.astext())
            inside = (nodes.reference, nodes.title, nodes.literal_block)
            if found is None or any(isinstance(parent, inside) for parent in _parents(literal)):
                continue
            target = self.env.get_domain("py").objects.get(f"gluon_parallel.{found[1]}")
            if target is not None:
                where = self.env.docname, target.docname, target.node_id
                literal.replace_self(make_refnode(self.app.builder, *where, literal.deepcopy()))


def _parents(node):
    while node.parent is not None:
        node = node.parent
        yield node


def resolve(app, env, node, contents):
    """Docstrings name functions and classes as their readers write them: `gp.name`, or the name alone."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removeprefix("gp.").removeprefix("gluon_parallel.")
    found = entry(env, target) or entry(env, target.rpartition(".")[2])
    if found is None:
        return None
    at = env.get_domain("py").objects[found]
    return make_refnode(app.builder, node["refdoc"], at.docname, at.node_id, contents, found)


def used_names():
    """Names under ``gp.`` in scripts, tutorials and pages, with a file of each."""
    files = [*ROOT.glob("scripts/*.py"), *ROOT.glob("docs/tutorials/*.py"), *ROOT.glob("docs/**/*.md")]
    names = dict.fromkeys(dir(gluon_parallel), "gluon_parallel/__init__.py")
    for file in files:
        for match in USED.finditer(file.read_text("utf-8")):
            names.setdefault(match[1][1:], str(file.relative_to(ROOT)))
    return names


def check(app, env):
    """Warn, which fails the build, of names without an entry."""
    objects = env.get_domain("py").objects
    for name, file in sorted(used_names().items()):
        value, path = gluon_parallel, "gluon_parallel"
        for part in name.split("."):
            if not hasattr(value, part):
                LOG.warning("%s: there is no gp.%s", file, name)
                break
            value, path = getattr(value, part), f"{path}.{part}"
            if not isinstance(value, types.ModuleType):
                break
        is_ours = (getattr(value, "__module__", None) or "").startswith("gluon_parallel") or part.isupper()
        if not isinstance(value, types.ModuleType) and is_ours and path not in objects:
            LOG.warning("%s: gp.%s has no entry in docs/reference/api", file, name)


def setup(app):
    app.add_directive("public", Public)
    app.add_post_transform(Links)
    app.connect("missing-reference", resolve)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
