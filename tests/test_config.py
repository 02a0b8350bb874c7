"""A config says only what differs, is checked before anything starts, and every error names what to write instead."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gluon_parallel.errors import ConfigError
from gluon_parallel.training import config as configs
from gluon_parallel.training.config import TrainingConfig, option, parse, read

REPOSITORY = Path(__file__).resolve().parents[1]
BOMB = "a: &a [1]\n" + "".join(
    f"{key}: &{key} [{', '.join(9 * [f'*{last}'])}]\n" for last, key in zip("abcdefgh", "bcdefghi")
)
RECIPE = "dataset: digits\ndevices: cpu:2\nepochs: 9\nbatch_size: 64\nlr: 0.1\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "default.yaml").write_text(RECIPE)
    return tmp_path


def write(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_the_file_over_its_base_in_its_own_folder(folder):
    config = parse(TrainingConfig, folder / "default.yaml", [])
    assert (config.dataset, config.epochs, config.lr, config.resume) == ("digits", 9, 0.1, None)
    assert config.config == str(folder / "default.yaml")
    (folder / "inner").mkdir()
    write(folder, "base: default.yaml\nepochs: 5\nlr: 1e-3\n", "middle.yaml")
    mine = write(folder / "inner", "base: ../middle.yaml\nepochs: 2\n")
    config = parse(TrainingConfig, folder / "default.yaml", ["--config", str(mine), "--batch_size=32", "--seed", "7"])
    assert (config.epochs, config.lr, config.batch_size, config.seed) == (2, 1e-3, 32, 7)
    assert read(write(folder, "base: default.yaml"), TrainingConfig) == read(folder / "default.yaml", TrainingConfig)
    assert read(write(folder, "# nothing\n"), TrainingConfig) == {}
    # Whole numbers may be written as any number.
    values = read(write(folder, "epochs: 5.0\nbatch_size: '7'\nlr: 1\n"), TrainingConfig)
    assert [(value, type(value)) for value in values.values()] == [(5, int), (7, int), (1.0, float)]


def test_bases_that_go_round_in_a_circle_and_misspelt_keys_of_a_base_are_refused(folder):
    write(folder, "base: b.yaml\n", "a.yaml")
    write(folder, "base: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        read(folder / "a.yaml", TrainingConfig)
    write(folder, RECIPE + "speed: 3\n", "default.yaml")
    with pytest.raises(ConfigError, match=r"default\.yaml: there is no key 'speed'"):
        read(write(folder, "base: default.yaml\n"), TrainingConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: many", r": epochs is 'many' \(str\), wanted a whole number above 0"),
        ("epochs: 2.5", r": epochs is 2\.5 \(float\), wanted a whole number above 0"),
        ("epochs: 0", r": epochs is 0 \(int\), wanted a whole number above 0"),
        ("epochs: true", r": epochs is True \(bool\), wanted a whole number"),
        ("epochs:", r": epochs is None \(NoneType\), wanted a whole number above 0"),
        ("lr: -0.1", r": lr is -0\.1 \(float\), wanted a number above 0"),
        ("lr: .nan", r": lr is nan \(float\), wanted a number above 0"),
        ("lr: .inf", r": lr is inf \(float\), wanted a number above 0"),
        ("lr: [0.1, 0.2]", r": lr is \[0\.1, 0\.2\] \(list\), wanted a number above 0"),
        ("devices: 2", r": devices is 2 \(int\), wanted a text"),
        ("tensorboard: 3", r": tensorboard is 3 \(int\), wanted true or false"),
        ("output: 3", r": output is 3 \(int\), wanted a text or null"),
        ("batch-sise: 3", r".*'batch-sise'.*Did you mean batch_size\?.*base, dataset.*epochs"),
        ("epochs: [1\nlr: 2", r", line 2: this is not YAML"),
        ("lr: 1\nepochs: 2\nlr: 3", r", line 3: this is not YAML: the key 'lr' stands twice"),
        ("just words", r": got a str, wanted lines like `epochs: 10`"),
        ("base: 3", r": base is 3 \(int\), wanted the name of a YAML file"),
        ("base: nowhere.yaml", r": base: names the config .*nowhere\.yaml.*there are: .*default\.yaml"),
        ("config: other.yaml", r": there is no key 'config'"),
        (BOMB, r", line 5: this is not YAML: it has more than 10000 values"),
        ("x: &a [*a]", r", line 1: this is not YAML: it contains itself"),
        ("<<: &a {<<: *a}", r", line 1: this is not YAML: it contains itself"),
        ("[" * 9999, r": lists and mappings are nested too deeply"),
        ("{a: " * 9999, r": lists and mappings are nested too deeply"),
        ("x" * 2_000_000, r" is no config: it has more than 1048576 characters"),
        ("7: 3", r": there is no key 7\. The right ones"),
        ("~: 3", r": there is no key None\. The right ones"),
        ("[lr]: 3", r", line 1: this is not YAML: a key is a list or a mapping"),
        ("{lr: 1}: 3", r", line 1: this is not YAML: a key is a list or a mapping"),
        ("? !!python/name:os.system\n: 3", r", line 1: this is not YAML: could not determine a constructor"),
        ("epochs: !!int abc", r", line 1: this is not YAML: 'abc' is no value of type 'int'"),
        ("epochs: !!int ''", r", line 1: this is not YAML: '' is no value of type 'int'"),
        ("lr: !!float abc", r", line 1: this is not YAML: 'abc' is no value of type 'float'"),
        ("tensorboard: !!bool abc", r", line 1: this is not YAML: 'abc' is no value of type 'bool'"),
        ("lr: 1\nepochs: 2026-02-31", r", line 2: this is not YAML: '2026-02-31' is no value of type 'timestamp'"),
        ("output: !!timestamp soon", r", line 1: this is not YAML: 'soon' is no value of type 'timestamp'"),
        ("lr: \0", r", line 1: this is not YAML: |: this is not YAML: special characters are not allowed"),
        (f"epochs: {'9' * 6000}", r"wanted a whole number above 0|is no value of type 'int'"),
        (f"epochs: '{'9' * 6000}'", r": epochs is '9+\.\.\. \(str\), wanted a whole number above 0$"),
        (f"? 0x{'f' * 6000}\n: 1", r": there is no key a number of thousands of digits"),
        (f"epochs: 0x{'f' * 6000}", r": epochs is a number of thousands of digits \(int\), wanted a whole number"),
        (f"epochs: {1 << 63}", r": epochs is 9223372036854775808 \(int\), wanted a whole number above 0"),
        (f"lr: {'9' * 6000}.0", r": lr is inf \(float\), wanted a number above 0"),
        (f"? {'k' * 6000}\n: 1", r": there is no key 'k+\.\.\.\. The right ones"),
        ('base: "a\\0b"', r": base is 'a\\x00b' \(str\), wanted the name of a YAML file"),
        ('output: "a\\0b"', r": output is 'a\\x00b' \(str\), wanted a text or null"),
        ('output: "\\ud800"', r": output is '\\ud800' \(str\), wanted a text or null"),
        (f"base: {'a' * 5000}", r": base: names the config .*cannot be read"),
        ("base: .", r": base: names the config .*cannot be read"),
        ("resume: newest", r": there is no key 'resume'"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_file_key_got_and_wanted(folder, text, message):
    with pytest.raises(ConfigError, match=r"mine\.yaml" + message):
        read(write(folder, text), TrainingConfig)


def test_aliases_and_merge_keys_of_yaml_are_read_and_own_keys_win(folder):
    text = "<<: &a {epochs: 3, lr: 0.5, seed: 7}\nlr: 0.25\nbatch_size: &n 8\npatience: *n\n"
    wanted = {"epochs": 3, "seed": 7, "lr": 0.25, "batch_size": 8, "patience": 8}
    assert read(write(folder, text), TrainingConfig) == wanted
    inner = "<<: &b {<<: &a {epochs: 3, lr: 0.5}, lr: 0.25}\nseed: 7\n"
    assert read(write(folder, inner), TrainingConfig) == {"epochs": 3, "lr": 0.25, "seed": 7}


_WORDS = ["lr", "epochs", "base", "<<", "1", "2026-13-45", "1:2:3", ".inf", "~", "yes", "9" * 5000, "''", '"\\x00"']
_TAGS = ["", *(f"!!{kind} " for kind in "int float bool timestamp binary set omap pairs merge unknown".split())]
_SCALARS = st.builds("{}{}".format, st.sampled_from([*_TAGS, "&a ", "&b "]), st.sampled_from(_WORDS))
_VALUES = st.recursive(
    st.one_of(_SCALARS, st.sampled_from(["*a", "*b"]), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.builds("{}[{}]".format, st.sampled_from([*_TAGS, "&a "]), st.lists(inner, max_size=3).map(", ".join)),
        st.builds(
            "{}{{{}}}".format,
            st.sampled_from([*_TAGS, "&b "]),
            st.lists(st.builds("{}: {}".format, inner, inner), max_size=3).map(", ".join),
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.lists(st.builds("{}: {}".format, _VALUES, _VALUES), max_size=4).map("\n".join))
def test_whatever_a_file_says_is_a_config_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, "utf-8", "surrogatepass")
    with contextlib.suppress(ConfigError):
        read(path, TrainingConfig)


def test_a_key_that_no_file_states_is_named(folder):
    with pytest.raises(ConfigError, match=r"mine\.yaml: the key dataset is missing"):
        parse(TrainingConfig, write(folder, "lr: 0.1"), [])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rate", "1"], r"there is no flag --learning_rate.*--lr"),
        (["--batch-size", "1"], r"no flag --batch-size. Did you mean --batch_size\?"),
        (["--epoch=3"], r"no flag --epoch. Did you mean --epochs\?"),
        (["--epochs", "some"], r"--epochs is 'some', wanted a whole number above 0"),
        (["--epochs=0"], r"--epochs is '0', wanted a whole number above 0"),
        (["--lr", "nan"], r"--lr is (')?nan(')?, wanted a"),
        (["--lr"], r"--lr"),
        (["--config"], r"--config wants the name of a YAML file"),
        (["--tensorboard=yes"], r"--tensorboard wants nothing after it"),
        (["--no_tensorboard=yes"], r"--no_tensorboard wants nothing after it"),
        (["digits"], r"'digits' stands alone"),
        (["--config", "nowhere.yaml"], r"--config names the config nowhere\.yaml.*: 'nowhere\.yaml'\.$"),
    ],
)
def test_a_wrong_flag_is_refused_with_what_to_write(folder, argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(TrainingConfig, folder / "default.yaml", argv)


def test_flags_may_stand_alone_turn_switches_or_say_null(folder):
    def parsed(*argv, path=folder / "default.yaml"):
        return parse(TrainingConfig, path, argv)

    assert parsed("--resume").resume == "newest" and parsed("--resume", "runs/3", "--seed", "1").resume == "runs/3"
    mine = write(folder, "base: default.yaml\ntensorboard: true\ndata_root: here")
    assert parsed(path=mine).tensorboard is parsed("--tensorboard").tensorboard is True
    assert parsed("--no_tensorboard", path=mine).tensorboard is False
    config = parsed("--data_root", "null", "--dataset", "null", path=mine)
    assert (config.data_root, config.dataset) == (None, "null")  # where there may be none


def test_a_saved_config_takes_the_place_of_the_file_but_not_of_the_flags(folder):
    saved = write(folder, RECIPE.replace("9", "33") + "seed: 5\n", "saved.yaml")
    config = parse(TrainingConfig, folder / "default.yaml", ["--lr", "3"], saved=lambda config: saved)
    assert (config.epochs, config.seed, config.lr) == (33, 5, 3.0)
    assert config.config == str(folder / "default.yaml")


def test_a_schema_whose_type_no_yaml_can_be_checked_against_is_refused(folder):
    @dataclasses.dataclass(frozen=True)
    class Mine(TrainingConfig):
        sizes: tuple = option("of layers")

    with pytest.raises(TypeError, match=r"Mine\.sizes is of <class 'tuple'>, wanted a type of gp\.config"):
        parse(Mine, folder / "default.yaml", [])


@dataclasses.dataclass(frozen=True)
class Norm(TrainingConfig):
    model: str = option("which", default="small")
    norm: str = option("of the small net", only_for=("model", ["small", "tiny"]))


def test_a_key_without_an_effect_is_refused_and_one_that_is_needed_may_not_be_missing(folder):
    small = write(folder, "base: default.yaml\nnorm: batch_norm\n", "small.yaml")
    assert parse(Norm, small, []).norm == parse(Norm, small, ["--model", "tiny"]).norm == "batch_norm"
    with pytest.raises(ConfigError, match=r"norm is 'batch_norm', which has no effect with model large, only with s"):
        parse(Norm, small, ["--model", "large"])
    large = write(folder, "base: small.yaml\nmodel: large\nnorm: null\n", "large.yaml")
    assert parse(Norm, large, []).norm is parse(Norm, small, ["--model", "large", "--norm", "null"]).norm is None
    with pytest.raises(ConfigError, match=r"the key norm is missing \(of the small net\)"):
        parse(Norm, large, ["--model", "tiny"])
    with pytest.raises(ConfigError, match=r"no effect with model large.*set it to null to overrule .*large.yaml"):
        parse(Norm, large, ["--norm", "batch_norm"])


def test_a_config_written_to_yaml_reads_back_the_same(folder):
    config = parse(TrainingConfig, folder / "default.yaml", ["--output", "some where", "--resume"])
    text = configs.to_yaml(config)
    again = parse(TrainingConfig, write(folder, text, "again.yaml"), [])
    assert dataclasses.replace(again, config=config.config, resume=config.resume) == config


def test_help_shows_every_key_its_meaning_and_the_values_of_the_chosen_file(folder, capsys):
    @dataclasses.dataclass(frozen=True)
    class Mine(TrainingConfig):
        momentum: configs.NonNegativeFloat = option("how much of the last step goes on", default=0.0)

    path = write(folder, "base: default.yaml\nepochs: 4321\n")
    with pytest.raises(SystemExit) as left:
        parse(Mine, folder / "default.yaml", ["--config", str(path), "--help"], description="What this does.")
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert "What this does." in text and "default: 4321" in text and "how much of the last step goes on" in text
    for field in dataclasses.fields(Mine):
        assert f"--{field.name}" in text


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("configs/*/*.yaml")), ids=lambda path: path.stem)
def test_a_config_of_this_project_says_only_what_differs_from_its_base(path):
    values = yaml.safe_load(path.read_text())
    base = values.pop("base", None)
    if base is not None:
        said: dict = {}
        while base is not None:
            below = yaml.safe_load((path.parent / base).read_text())
            base = below.pop("base", None)
            said = {**below, **said}
        assert not {key for key, value in values.items() if said.get(key) == value}
