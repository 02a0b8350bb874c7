"""Config: YAML that says only what differs from its base, checked against a typed schema, overridden by flags.

A schema is a dataclass whose fields are made by :func:`option`. A file may name the file it builds on, relative to
itself: ``base: default.yaml``.
"""

import argparse
import contextlib
import dataclasses
import difflib
import math
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Callable, NamedTuple, Optional, TypeVar, Union

import yaml

from .. import bounds
from ..bounds import shown
from ..errors import ConfigError

PositiveInt = Annotated[int, "above 0"]
NonNegativeInt = Annotated[int, "0 or more"]
PositiveFloat = Annotated[float, "above 0"]
NonNegativeFloat = Annotated[float, "0 or more"]
YamlFile = Annotated[str, "YAML"]

_LONGEST = 1 << 20  # characters of a YAML file
_LARGEST = 10_000  # values in a YAML file, those of an alias counted wherever it stands


def _is_text(value: str) -> bool:
    """Whether it may be the name of a file; ValueError: it is none that the system can write."""
    return b"\0" not in os.fsencode(value)


# Types of keys: the plain type, what is wanted in words, and whether a value of the plain type is allowed.
_KINDS: dict[Any, tuple[type, str, Callable[[Any], bool]]] = {
    PositiveInt: (int, "a whole number above 0", lambda value: 0 < value <= bounds.MOST),
    NonNegativeInt: (int, "a whole number, 0 or more", lambda value: 0 <= value <= bounds.MOST),
    PositiveFloat: (float, "a number above 0", lambda value: 0 < value < math.inf),
    NonNegativeFloat: (float, "a number, 0 or more", lambda value: 0 <= value < math.inf),
    int: (int, "a whole number", lambda value: abs(value) <= bounds.MOST),
    float: (float, "a number", math.isfinite),
    bool: (bool, "true or false", lambda value: True),
    str: (str, "a text", _is_text),
    YamlFile: (str, "the name of a YAML file", _is_text),
}


def option(
    help: str, default: Any = None, flag_alone: Any = None, only_for: Optional[tuple[str, Sequence[str]]] = None
) -> Any:
    """One field of a schema: what ``--help`` says about it, and its value where no YAML states one.

    Args:
        help: one line.
        default: used when neither the YAML nor the command line has a value. Where it is None and the field's type is
            not ``Optional``, one of the two must have it.
        flag_alone: the value that ``--name`` means when nothing follows it.
        only_for: another key and those of its values with which this one has an effect, such as ``("model",
            ["small"])``. With other values it has to be None (``null``), and whatever else it is set to is refused.
    """
    metadata = {"help": help, "default": default, "flag_alone": flag_alone, "only_for": only_for}
    return dataclasses.field(metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The keys that every training script has; a script's own schema derives from it and adds its recipe."""

    config: YamlFile = option("the YAML file with the values of all other keys")
    dataset: str = option("digits, fashion_mnist, mnist or cifar10")
    data_root: Optional[str] = option("folder of the data sets' files")
    devices: str = option("where to train: auto, cpu:2, gpu, gpu:4, gpu@0,2")
    kvstore: str = option("how processes meet: auto (as they were started), mpi, dist_sync", default="auto")
    epochs: PositiveInt = option("passes over the training images")
    batch_size: PositiveInt = option("images per step, over all devices and processes together")
    lr: PositiveFloat = option("learning rate")
    patience: Optional[PositiveInt] = option("end after so many epochs without a better score (null: never)")
    seed: NonNegativeInt = option("of the initial weights, the order of the images and everything random", default=0)
    output: Optional[str] = option("folder for the runs of this config (null: runs/<task>/<config>)")
    resume: Optional[str] = option(
        "continue the newest run in the output folder, or the run in the folder that follows", flag_alone="newest"
    )
    tensorboard: bool = option("also write TensorBoard event files", default=False)


Schema = TypeVar("Schema", bound=TrainingConfig)


@dataclasses.dataclass(frozen=True)
class MixedPrecisionConfig(TrainingConfig):
    """The keys of a training script that can compute in fewer bits than float32, see :func:`gp.set_precision`."""

    precision: str = option(
        "of matrix products and convolutions: float32, bfloat16 or (on GPUs alone) float16", default="float32"
    )


def _did_you_mean(key: str, keys: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(key.lower().replace("-", "_"), keys, n=1)
    listed = ", ".join(prefix + known for known in keys)
    return (f"Did you mean {prefix}{close[0]}? " if close else "") + f"The right ones are: {listed}"


_WANTED = "Wanted lines like `epochs: 10`"


class _Key(NamedTuple):
    """What a key may be set to; `metadata` is that of :func:`option`."""

    plain: type
    words: str
    allows: Callable[[Any], bool]
    required: bool = True
    nullable: bool = False
    metadata: Mapping[str, Any] = {}

    def convert(self, value: Any, said: str) -> Any:
        """A value of a file, or the text after a flag, as the key's type; ConfigError: `said`, and what was wanted."""
        if value is None and self.nullable:
            return None
        with contextlib.suppress(ValueError, OverflowError):
            found = value
            if self.plain is int and type(value) is str:
                found = bounds.whole("it", value, -bounds.MOST)
            elif self.plain in (int, float) and type(value) in (int, float, str):  # YAML reads 1e-3 as a text
                found = self.plain(value)
            if type(found) is self.plain and (type(value) is str or found == value) and self.allows(found):
                return found
        raise ConfigError(f"{said}, wanted {self.words}")


def _keys(schema: type) -> dict[str, _Key]:
    """The keys of a schema; one that has an effect only sometimes may also be ``null``."""
    hints, keys = typing.get_type_hints(schema, include_extras=True), {}
    for field in dataclasses.fields(schema):
        kind = next((kind for kind in _KINDS if hints[field.name] in (kind, Optional[kind])), None)
        if kind is None:
            wanted = "a type of gp.config, bool, int, float or str, or Optional of one"
            raise TypeError(f"{schema.__name__}.{field.name} is of {hints[field.name]}, wanted {wanted}")
        required = hints[field.name] == kind
        nullable = not required or field.metadata["only_for"] is not None
        plain, words, allows = _KINDS[kind]
        keys[field.name] = _Key(plain, words + " or null" * nullable, allows, required, nullable, field.metadata)
    return keys


def _parser(keys: Mapping[str, _Key], description: Optional[str], values: Mapping) -> argparse.ArgumentParser:
    """A parser that returns the texts after the flags that are given; ``--help`` shows `values` beside them."""
    parser = argparse.ArgumentParser(
        description=description, exit_on_error=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False,
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
    for name, key in keys.items():
        value = "null" if values.get(name) is None else values[name]
        limits = f"; {key.words}" if key.plain in (int, float) else ""
        help = f"{key.metadata['help']} (default: {value}{limits})".replace("%", "%%")
        alone = {"nargs": "?", "const": key.metadata["flag_alone"]} if key.metadata["flag_alone"] else {}
        parser.add_argument(f"--{name}", help=help, **({"action": "store_true"} if key.plain is bool else alone))
        if key.plain is bool:
            parser.add_argument(f"--no_{name}", action="store_false", dest=name, help="the opposite")
    return parser


class _Loader(yaml.SafeLoader):
    """YAML of a limited size with simple keys, each of which stands once; all that is wrong is a YAMLError.

    PyYAML silently takes the last of two values with one key, expands aliases within aliases to any size, and raises
    Python's errors where a value is not of the type that its tag names.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[int, int] = {}  # id of a complete node -> how many values are in it

    def compose_sequence_node(self, anchor: Any) -> Any:
        node = super().compose_sequence_node(anchor)
        self._measure(node, node.value)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, seen = super().compose_mapping_node(anchor), set[tuple[str, str]]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong("a key is a list or a mapping", key)
            if (key.tag, key.value) in seen:
                raise _wrong(f"the key {shown(key.value)} stands twice", key)
            seen.add((key.tag, key.value))
        self._measure(node, [value for _, value in node.value])
        return node

    def _measure(self, node: Any, values: Sequence[Any]) -> None:
        if any(not isinstance(value, yaml.ScalarNode) and id(value) not in self._sizes for value in values):
            raise _wrong("it contains itself", node)
        self._sizes[id(node)] = size = 1 + sum(self._sizes.get(id(value), 1) for value in values)
        if size > _LARGEST:
            raise _wrong(f"it has more than {_LARGEST} values", node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _wrong(f"{shown(node.value)} is no value of type {shown(kind)}", node) from error


def _wrong(problem: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _read_yaml(path: Path, named_by: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        there = sorted(str(other) for other in path.parent.glob("[!.]*.yaml")) if path.parent.is_dir() else []
        beside = f" In that folder there are: {', '.join(there)}" if there else ""
        raise ConfigError(f"{named_by} names the config {path}, which cannot be read: {error}.{beside}") from error
    if len(text) > _LONGEST:
        raise ConfigError(f"{path} is no config: it has more than {_LONGEST} characters")
    try:
        values = yaml.load(text, _Loader)
    except RecursionError as error:
        raise ConfigError(f"{path}: lists and mappings are nested too deeply. {_WANTED}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        raise ConfigError(f"{path}{line}: this is not YAML: {problem}. {_WANTED}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got a {type(values).__name__}, wanted lines like `epochs: 10`")
    return values


def read(path: Union[str, os.PathLike], schema: type, above: Sequence[Path] = ()) -> dict[str, Any]:
    """The values of a YAML file, of the schema's types, over those of its base, a path from the file's own folder.

    `above` are files that build on it. Raises ConfigError, which names the file and the key.
    """
    path, named_by = Path(path), f"{above[-1]}: base:" if above else "--config"
    values = _read_yaml(path, named_by)
    if path.resolve() in [file.resolve() for file in above]:
        names = " -> ".join(map(str, [*above, path]))
        raise ConfigError(f"{above[-1]}: base: names a file that builds on this one: {names}. Remove one `base:`")
    # A file that named its own path, or to continue a run, would only contradict the command line.
    keys = {name: key for name, key in _keys(schema).items() if name not in ("config", "resume")}
    keys = {"base": _Key(*_KINDS[YamlFile], nullable=True), **keys}
    for name, value in values.items():
        if name not in keys:
            hint = _did_you_mean(shown(name).strip("'"), list(keys))
            raise ConfigError(f"{path}: there is no key {shown(name)}. {hint}")
        values[name] = keys[name].convert(value, f"{path}: {name} is {shown(value)} ({type(value).__name__})")
    base = values.pop("base", None)
    return values if base is None else {**read(path.parent / base, schema, [*above, path]), **values}


def _parse_flags(keys: Mapping[str, _Key], argv: Sequence[str]) -> dict[str, Any]:
    """The values of the flags that are given, or that of ``help``; ConfigError names the wrong flag."""
    try:
        given, rest = _parser(keys, None, {}).parse_known_args(argv)
    except argparse.ArgumentError as error:
        flag = str(error.argument_name)
        key = keys.get(flag[2:])
        wanted = "nothing" if key is None or key.plain is bool else key.words
        raise ConfigError(f"{flag} wants {wanted} after it") from error
    values = vars(given)
    if "help" in values:
        return values
    if rest:
        flag = rest[0].split("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"{flag!r} stands alone on the command line; values follow a flag, as in --epochs 10")
        raise ConfigError(f"there is no flag {flag}. {_did_you_mean(flag.lstrip('-'), list(keys), prefix='--')}")
    for name, value in values.items():
        null = keys[name].nullable and value in ("null", "~")
        values[name] = keys[name].convert(None if null else value, f"--{name} is {shown(value)}")
    return values


def parse(schema: type[Schema], default: Union[str, os.PathLike], argv: Optional[Sequence[str]] = None,
          description: Optional[str] = None,
          saved: Optional[Callable[[Schema], Optional[Path]]] = None) -> Schema:  # fmt: skip
    """The config that a script runs with: YAML named by ``--config``, then the other flags of the command line.

    Args:
        schema: a dataclass of :func:`option` fields, usually derived from :class:`TrainingConfig`.
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
        >>> config = parse(TrainingConfig, folder / "short.yaml", ["--lr", "0.2"])
        >>> config.epochs, config.lr, config.batch_size
        (2, 0.2, 64)
    """
    flags = _parse_flags(_keys(schema), sys.argv[1:] if argv is None else argv)
    flags["config"] = path = flags.get("config", str(default))
    config = _resolve(schema, path, flags, description)
    own = saved(config) if saved is not None else None
    return config if own is None else _resolve(schema, own, flags)


def _resolve(schema: type[Schema], path: Any, flags: Mapping[str, Any], description: Optional[str] = None) -> Schema:
    """The config of the schema's defaults, a YAML file and flags; ConfigError: a key is missing or has no effect."""
    keys = _keys(schema)
    merged = {**{name: key.metadata["default"] for name, key in keys.items()}, **read(path, schema), **flags}
    if "help" in flags:
        _parser(keys, description, merged).print_help()
        raise SystemExit(0)
    for name, key in keys.items():
        value = merged[name]
        other, allowed = key.metadata["only_for"] or (name, [value])
        if merged[other] not in allowed:
            if value is not None:
                only = f"only with {' or '.join(allowed)}. Leave it out, or set it to null to overrule {path}"
                raise ConfigError(f"{name} is {value!r}, which has no effect with {other} {merged[other]}, {only}")
        elif value is None and key.required:
            raise ConfigError(f"{path}: the key {name} is missing ({key.metadata['help']}), here and in its base")
    return schema(**merged)


def to_yaml(config: Any) -> str:
    """The whole config as a YAML file that :func:`read` accepts."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in ("config", "resume")}
    return yaml.safe_dump(values, sort_keys=False)
