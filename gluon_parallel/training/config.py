"""Config: YAML that says only what differs from its base, checked against a typed schema, overridden by flags.

A schema is a dataclass whose fields are made by :func:`option`; the values live in YAML, so that there is one place to
read them. A file may name the file it builds on, relative to itself: ``base: default.yaml``.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar, Union

import jsonargparse
import yaml
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from ..errors import ConfigError

REQUIRED = object()  # a value that the YAML must state

_NAMES = {
    PositiveInt: "a whole number above 0",
    NonNegativeInt: "a whole number, 0 or more",
    PositiveFloat: "a number above 0",
    NonNegativeFloat: "a number, 0 or more",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


def option(
    help: str, default: Any = REQUIRED, flag_alone: Any = None, only_for: Optional[tuple[str, Sequence[str]]] = None
) -> Any:
    """One field of a schema: what ``--help`` says about it, and its value where no YAML states one.

    Args:
        help: one line.
        default: used when neither the YAML nor the command line has a value; without it the YAML must have one.
        flag_alone: the value that ``--name`` means when nothing follows it.
        only_for: another key and those of its values with which this one has an effect, such as ``("model",
            ["small"])``. With other values it has to be None (``null``), and whatever else it is set to is refused.
    """
    metadata = {"help": help, "default": default, "flag_alone": flag_alone, "only_for": only_for}
    return dataclasses.field(metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Training:
    """The keys that every training script has; a script's own schema derives from it and adds its recipe."""

    config: str = option("the YAML file with the values of all other keys", default=None)
    dataset: str = option("digits, fashion_mnist, mnist or cifar10")
    data_root: Optional[str] = option("folder of the data sets' files", default=None)
    devices: str = option("where to train: auto, cpu:2, gpu, gpu:4, gpu@0,2")
    kvstore: str = option("how processes meet: auto (as they were started), mpi, dist_sync", default="auto")
    epochs: PositiveInt = option("passes over the training images")
    batch_size: PositiveInt = option("images per step, over all devices and processes together")
    lr: PositiveFloat = option("learning rate")
    seed: NonNegativeInt = option("of the initial weights, the order of the images and everything random", default=0)
    output: Optional[str] = option("folder for the runs of this config (null: runs/<task>/<config>)", default=None)
    resume: Optional[str] = option(
        "continue the newest run in the output folder, or the run in the folder that follows",
        default=None,
        flag_alone="newest",
    )
    tensorboard: bool = option("also write TensorBoard event files", default=False)


Schema = TypeVar("Schema", bound=Training)


@dataclasses.dataclass(frozen=True)
class MixedPrecisionTraining(Training):
    """The keys of a training script that can compute in fewer bits than float32, see :func:`gp.set_precision`."""

    precision: str = option(
        "of matrix products and convolutions: float32, bfloat16 or (on GPUs alone) float16", default="float32"
    )


def _did_you_mean(key: str, keys: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(key.lower().replace("-", "_"), keys, n=1)
    listed = ", ".join(prefix + known for known in keys)
    return (f"Did you mean {prefix}{close[0]}? " if close else "") + f"The right ones are: {listed}"


def _wanted(kind: Any) -> tuple[str, bool]:
    """What a type accepts, in words; and whether ``null`` is among it."""
    if typing.get_origin(kind) is Union:
        inner = [member for member in typing.get_args(kind) if member is not type(None)]
        return " or ".join([*(_wanted(member)[0] for member in inner), "null"]), True
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind))), False


def _types(schema: type) -> dict[str, Any]:
    """What each key may be set to; one that has an effect only sometimes, also to ``null``."""
    hints = typing.get_type_hints(schema)
    fields = dataclasses.fields(schema)
    return {f.name: Optional[hints[f.name]] if f.metadata["only_for"] else hints[f.name] for f in fields}


class _HelpFormatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Values of the chosen file after each key, and the lines of a script's docstring as they stand there."""


def _parser(schema: type, description: Optional[str] = None) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        description=description, exit_on_error=False, allow_abbrev=False, formatter_class=_HelpFormatter
    )
    for field, kind in zip(dataclasses.fields(schema), _types(schema).values()):
        default, alone = field.metadata["default"], field.metadata["flag_alone"]
        extra: dict[str, Any] = {"default": None if default is REQUIRED else default, "help": field.metadata["help"]}
        if kind is bool:
            extra["action"] = jsonargparse.ActionYesNo
        else:
            extra["type"] = kind
        if alone is not None:
            extra.update(nargs="?", const=alone)
        parser.add_argument(f"--{field.name}", **extra)
    return parser


class _OnceEach(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error: of two values PyYAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path, named_by: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        there = sorted(str(other) for other in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        beside = f" In that folder there are: {', '.join(there)}" if there else ""
        raise ConfigError(f"{named_by} names the config {path}, which cannot be read: {error}.{beside}") from error
    try:
        values = yaml.load(text, _OnceEach)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(f"{path}{line}: this is not YAML: {problem}. Wanted lines like `epochs: 10`") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, wanted lines like `epochs: 10`")
    return values


def _check(values: dict[str, Any], schema: type, path: Path) -> dict[str, Any]:
    """`values` as the schema's types, or the error that names file, key, what it got and what it wanted."""
    kinds, parser = _types(schema), _parser(schema)
    # A file that named its own path, or to continue a run, would only contradict the command line.
    keys = [key for key in kinds if key not in ("config", "resume")]
    checked = {}
    for key, value in values.items():
        if key not in keys:
            raise ConfigError(f"{path}: there is no key {key!r}. {_did_you_mean(str(key), ['base', *keys])}")
        wanted, nullable = _wanted(kinds[key])
        problem = f"{path}: {key} is {value!r} ({type(value).__name__}), wanted {wanted}"
        if value is None and not nullable or kinds[key] is bool and not isinstance(value, bool):
            raise ConfigError(problem)
        try:
            checked[key] = parser.parse_object({key: value})[key]
        except argparse.ArgumentError as error:
            raise ConfigError(problem) from error
        if isinstance(checked[key], float) and not math.isfinite(checked[key]):
            raise ConfigError(problem)
    return checked


def read(path: Union[str, os.PathLike], schema: type, above: Sequence[Path] = ()) -> dict[str, Any]:
    """The values of a YAML file, of the schema's types, laid over those of its base, and of the base's base.

    A ``base`` is named relative to the file's own folder; `above` are the files that build on this one. ConfigError: a
    file cannot be read or names itself as its base; an unknown key; a value of the wrong type.
    """
    path, named_by = Path(path), f"{above[-1]}: base:" if above else "--config"
    if path.resolve() in [file.resolve() for file in above]:
        names = " -> ".join(map(str, [*above, path]))
        raise ConfigError(f"{above[-1]}: base: names a file that builds on this one: {names}. Remove one `base:`")
    values = _read_yaml(path, named_by)
    base = values.pop("base", None)
    checked = _check(values, schema, path)
    if base is None:
        return checked
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base is {base!r} ({type(base).__name__}), wanted the name of a YAML file")
    return {**read(path.parent / base, schema, [*above, path]), **checked}


def _parse_flags(parser: jsonargparse.ArgumentParser, schema: type, argv: Sequence[str]) -> dict[str, Any]:
    kinds = _types(schema)
    try:
        return vars(parser.parse_args(list(argv)))
    except argparse.ArgumentError as error:
        message = str(error)
    unknown = re.match(r"unrecognized arguments: (\S+)", message, re.IGNORECASE)
    if unknown:
        flag = unknown.group(1).split("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"{flag!r} stands alone on the command line; values follow a flag, as in --epochs 10")
        raise ConfigError(f"there is no flag {flag}. {_did_you_mean(flag.lstrip('-'), list(kinds), prefix='--')}")
    wrong = re.match(r'Parser key "(\w+)"', message)
    if wrong:
        flag = f"--{wrong.group(1)}"
        got = [value for name, value in zip(argv, [*argv[1:], ""]) if name == flag]
        got += [word.split("=", 1)[1] for word in argv if word.startswith(flag + "=")]
        raise ConfigError(f"{flag} is {(got or ['?'])[-1]!r}, wanted {_wanted(kinds[wrong.group(1)])[0]}")
    raise ConfigError(re.sub(r"\s+", " ", message))


def parse(
    schema: type[Schema],
    default: Union[str, os.PathLike],
    argv: Optional[Sequence[str]] = None,
    description: Optional[str] = None,
    saved: Optional[Callable[[Schema], Optional[Path]]] = None,
) -> Schema:
    """The config that a script runs with: YAML named by ``--config``, then the other flags of the command line.

    Args:
        schema: a dataclass of :func:`option` fields, usually derived from :class:`Training`.
        default: the YAML file where no ``--config`` is given.
        argv: the command line's words after the script's name; by default the process's own.
        description: what ``--help`` says first, before the keys with the values of the chosen YAML file.
        saved: given the config, returns the YAML file that replaces ``--config``, or None. A resumed run continues
            with the values that it began with, through this.

    Raises:
        ConfigError: names the file or the flag, the key, what it got and what it wanted.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "default.yaml").write_text(
        ...     "dataset: digits\\ndevices: cpu:2\\nepochs: 9\\nbatch_size: 64\\nlr: 0.1")
        >>> _ = (folder / "short.yaml").write_text("base: default.yaml\\nepochs: 2")
        >>> config = parse(Training, folder / "short.yaml", ["--lr", "0.2"])
        >>> config.epochs, config.lr, config.batch_size
        (2, 0.2, 64)
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", default=str(default))
    try:
        path = finder.parse_known_args(argv)[0].config
    except argparse.ArgumentError as error:
        raise ConfigError("--config wants the name of a YAML file after it") from error
    config = _resolve(schema, path, path, argv, description)
    own = saved(config) if saved is not None else None
    return config if own is None else _resolve(schema, own, path, argv, description)


def _resolve(schema: type[Schema], path: Any, name: str, argv: Sequence[str], description: Optional[str]) -> Schema:
    values = read(path, schema)
    parser = _parser(schema, description)
    parser.set_defaults({**values, "config": str(name)})
    merged = _parse_flags(parser, schema, argv)
    merged["config"] = str(name)
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        value = merged[field.name]
        other, allowed = field.metadata["only_for"] or ("config", [name])
        if merged[other] not in allowed:
            if value is not None:
                raise ConfigError(
                    f"{field.name} is {value!r}, which has no effect with {other} {merged[other]}, only with "
                    f"{' or '.join(allowed)}. Leave it out, or set it to null to overrule {path}"
                )
        elif value is None and not _wanted(hints[field.name])[1]:
            raise ConfigError(
                f"{path}: the key {field.name} is missing ({field.metadata['help']}), here and in its base"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{field.name} is {value}, wanted a finite number")
    return schema(**{field.name: _plain(merged[field.name]) for field in dataclasses.fields(schema)})


def _plain(value: Any) -> Any:
    """jsonargparse's numbers with a limit are types of their own; YAML and JSON write only the plain ones."""
    plain = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return value if plain is None else plain(value)


def to_yaml(config: Any) -> str:
    """The whole config as a YAML file that :func:`read` accepts: what a run keeps beside its results."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in ("config", "resume")}
    return yaml.safe_dump(values, sort_keys=False)
