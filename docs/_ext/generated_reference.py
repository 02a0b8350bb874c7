"""Pages of the reference that are made from the code: commands, `make` targets, config keys, environment variables."""

import argparse
import importlib.util
import inspect
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import yaml
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from gluon_parallel.commands import cli
from gluon_parallel.training import config

LOG = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]


def cell(text):
    """A text as a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Command(SphinxDirective):
    """Options of a command of ``gluon-parallel``, or of a script, from its argparse."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        if name in cli.COMMANDS:
            module, text = cli.COMMANDS[name]
            parser = argparse.ArgumentParser(prog=f"gluon-parallel {name}", add_help=False)
            command = importlib.import_module(module, cli.__package__)
            command.configure(parser)
            self.env.note_dependency(inspect.getsourcefile(command))
        else:
            parser = parser_of(ROOT / name)
            parser.prog, text = name, parser.description
            self.env.note_dependency(str(ROOT / name))
        usage = parser.format_usage().removeprefix("usage: ")
        rows = []
        for action in parser._actions:
            if argparse.SUPPRESS in (action.help, action.default):  # the latter is --help
                continue
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            value = " ".join(value) if isinstance(value, tuple) else value
            shown = ", ".join(f"{flag} {value}".strip() for flag in action.option_strings) or value or action.dest
            said = (action.help or "") % {**vars(action), "prog": parser.prog}
            rows.append([f"`{shown}`", cell(said)])
        page = f"{text}\n\n```text\n{usage}```\n\n{table(['option', 'meaning'], rows)}"
        return self.parse_text_to_nodes(page)


def parser_of(script):
    """The parser of a script's arguments; the script runs as far as there."""

    class Found(Exception):
        pass

    def end(parser):
        raise Found(parser)

    try:
        with mock.patch.object(argparse.ArgumentParser, "parse_args", end):
            runpy.run_path(str(script), run_name="__main__")
    except Found as found:
        return found.args[0]
    raise ValueError(f"{script} reads no arguments")


class MakeTargets(SphinxDirective):
    """Targets of the Makefile, from what ``make`` prints."""

    def run(self):
        makefile = ROOT / "Makefile"
        self.env.note_dependency(str(makefile))
        printed = re.findall(r'^\t@echo "make ([\w-]+) +(.+)"$', makefile.read_text("utf-8"), re.MULTILINE)
        rows = [[f"`{target}`", cell(text)] for target, text in printed]
        return self.parse_text_to_nodes(table(["target", "meaning"], rows))


def schema_of(script):
    """The dataclass with the config keys of a script, and the YAML file that it reads by default."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = sys.modules[script.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Config, module.DEFAULT


class ConfigKeys(SphinxDirective):
    """Config keys of a script, or those of all scripts, from the typed schema, with the values of its default file."""

    optional_arguments = 1

    def run(self):
        common = config._keys(config.MixedPrecisionConfig)
        if not self.arguments:
            rows = [[f"`{name}`", cell(key.words), cell(key.metadata["help"])] for name, key in common.items()]
            return self.parse_text_to_nodes(table(["key", "wanted", "meaning"], rows))
        script = ROOT / self.arguments[0]
        self.env.note_dependency(str(script))
        schema, default = schema_of(script)
        keys, values = config._keys(schema), config.read(default, schema)
        rows = []
        for name, key in keys.items():
            if name in ("config", "resume"):
                continue
            value = values.get(name, key.metadata["default"])
            shown = yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
            same = name in common and common[name].metadata["help"] == key.metadata["help"]
            meaning = "as above" if same else cell(key.metadata["help"])
            if key.metadata["only_for"]:
                other, allowed = key.metadata["only_for"]
                meaning += f"; only with `{other}` {' or '.join(allowed)}"
            rows.append([f"`{name}`", cell(key.words), f"`{shown}`", meaning])
        others = sorted(path.name for path in default.parent.glob("*.yaml"))
        files = ", ".join(f"`{name}`" for name in others)
        page = f"Files in `{default.parent.relative_to(ROOT)}`: {files}.\n\n"
        return self.parse_text_to_nodes(page + table(["key", "wanted", f"in `{default.name}`", "meaning"], rows))


def check_variables(app, env):
    """Warn of variables that the package reads and no page explains, and of those that nothing reads."""
    pattern = re.compile(r"\bGLUON_PARALLEL_(?!TEST)[A-Z_]*[A-Z]\b")
    read = {name for path in ROOT.glob("gluon_parallel/**/*.py") for name in pattern.findall(path.read_text("utf-8"))}
    pages = (ROOT / "docs/reference/environment.md", ROOT / "docs/howto/launching.md")
    told = {name for page in pages for name in re.findall(r"^\| .*?\|", page.read_text("utf-8"), re.MULTILINE)}
    told = {name for line in told for name in pattern.findall(line)}
    for name in sorted(read ^ told):
        LOG.warning("%s: %s", name, "no page explains it" if name in read else "it is explained, and nothing reads it")


def check_complete(app, env):
    """Warn of commands, and of scripts with config keys, that the reference leaves out."""
    wanted = [("commands", f"{{command}} {name}") for name in cli.COMMANDS]
    wanted += [
        ("configuration", f"{{config-keys}} scripts/{path.name}")
        for path in sorted(ROOT.glob("scripts/*.py"))
        if "class Config(" in path.read_text("utf-8")
    ]
    flags_only = ("train_your_own", "gluoncv_with_gluon_parallel")
    wanted += [("configuration", f"{{command}} scripts/{name}.py") for name in flags_only]
    for page, directive in wanted:
        if f"{directive}\n" not in (ROOT / f"docs/reference/{page}.md").read_text("utf-8"):
            LOG.warning("docs/reference/%s.md has no %s", page, directive)


def setup(app):
    app.add_directive("command", Command)
    app.add_directive("make-targets", MakeTargets)
    app.add_directive("config-keys", ConfigKeys)
    app.connect("env-check-consistency", check_variables)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
