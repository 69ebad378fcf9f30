"""Settings from YAML and flags: which one wins, and that nothing is ignored."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Optional

import pytest
from transformers import TrainingArguments

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.scripts._config import parse_dataclasses


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Model:
    name: str = field(metadata={"help": "which model"})
    layers: list[int] = field(default_factory=lambda: [1, 2])
    targets: list[str] | None = None
    colour: Colour = Colour.RED
    rule: Literal["gate", "vote"] = "gate"


@dataclass
class Run:
    learning_rate: float = 0.1
    steps: int = 10
    shuffle: bool = True
    verbose: bool = False
    target_epsilon: float | None = None
    limit: Optional[int] = None  # noqa: UP045 (as TrainingArguments has some)
    fast: bool | None = None
    note: str | None = None

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError("steps")


@pytest.fixture
def parse(tmp_path):
    """`parse(yaml_text_or_None, *flags) -> (Model, Run)`."""

    def run(text, *flags):
        arguments = list(flags)
        if text is not None:
            path = tmp_path / "config.yaml"
            path.write_text(text, encoding="utf-8")
            arguments.insert(0, str(path))
        return parse_dataclasses([Model, Run], arguments, prog="raptor-hf demo")

    return run


def test_flags_win_over_yaml_and_yaml_over_defaults(parse):
    model, run = parse("name: tiny\nlearning_rate: 0.5\nsteps: 20\n", "--steps", "30")
    assert (model.name, run.learning_rate, run.steps, run.verbose) == ("tiny", 0.5, 30, False)
    assert model.layers == [1, 2]


def test_flags_alone(parse):
    model, run = parse(None, "--name", "tiny", "--target-epsilon", "8", "--learning_rate=1e-3")
    assert (model.name, run.target_epsilon, run.learning_rate) == ("tiny", 8.0, 1e-3)


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file_changes_nothing(parse, text):
    assert parse(text, "--name", "tiny") == parse(None, "--name", "tiny")


def test_required_field_may_come_from_the_file(parse):
    assert parse("name: tiny")[0].name == "tiny"


def test_required_field_missing_everywhere(parse):
    with pytest.raises(PrivacyConfigError, match=r"--name.*raptor-hf demo --help"):
        parse("steps: 3")


def test_values_get_the_type_of_the_field_not_of_yaml(parse):
    # YAML 1.1 reads 1e-3 as text, 8 as an integer and 2024 as a number.
    model, run = parse("name: 2024\nlearning_rate: 1e-3\ntarget_epsilon: 8\ncolour: blue\nrule: vote\nnote: null\n")
    assert (model.name, run.learning_rate, run.target_epsilon, run.note) == ("2024", 1e-3, 8.0, None)
    assert isinstance(run.target_epsilon, float)
    assert (Colour(model.colour), model.rule) == (Colour.BLUE, "vote")


@pytest.mark.parametrize(
    ("flags", "shuffle", "verbose"),
    [
        ((), False, True),
        (("--shuffle",), True, True),
        (("--verbose", "false"), False, False),
        (("--shuffle", "true", "--verbose=no"), True, False),
    ],
)
def test_bools_from_yaml_and_flags(parse, flags, shuffle, verbose):
    _, run = parse("name: tiny\nshuffle: false\nverbose: yes\n", *flags)
    assert (run.shuffle, run.verbose) == (shuffle, verbose)


def test_bool_complement(parse):
    assert parse("name: tiny\nshuffle: true", "--no_shuffle")[1].shuffle is False


@pytest.mark.parametrize("text", ["layers: [3, 5]\ntargets: [q, v]", "layers:\n- 3\n- '5'\ntargets:\n- q\n- v\n"])
def test_lists_from_yaml(parse, text):
    model, _ = parse(f"name: tiny\n{text}")
    assert (model.layers, model.targets) == ([3, 5], ["q", "v"])


def test_lists_from_flags_replace_those_of_the_file(parse):
    model, _ = parse("name: tiny\nlayers: [3, 5]\ntargets: q", "--layers", "7", "9")
    assert (model.layers, model.targets) == ([7, 9], ["q"])


def test_unknown_key_names_the_closest(parse):
    with pytest.raises(PrivacyConfigError, match=r"`target_epsilo`.*Write `target_epsilon`"):
        parse("name: tiny\ntarget_epsilo: 1\n")


def test_unknown_key_far_from_all(parse):
    with pytest.raises(PrivacyConfigError, match=r"`xyzzy`.*Remove it"):
        parse("name: tiny\nxyzzy: 1\n")


@pytest.mark.parametrize("flag", ["--target_epsilo", "--target-epsilo", "--target_epsilon_"])
@pytest.mark.parametrize("join", [True, False])
def test_unknown_flag_names_the_closest(parse, flag, join):
    with pytest.raises(PrivacyConfigError, match=rf"`{flag}`.*Write `--target_epsilon`"):
        parse("name: tiny", *([f"{flag}=1"] if join else [flag, "1"]))


def test_unknown_flag_is_reported_before_other_checks(parse):
    with pytest.raises(PrivacyConfigError, match="--learning_rat"):
        parse("name: tiny\nsteps: 0", "--learning_rat", "1")


def test_checks_of_the_dataclass_surface(parse):
    with pytest.raises(ValueError, match=r"^steps$"):
        parse("name: tiny\nsteps: 0")


def test_abbreviated_flag_is_refused(parse):
    with pytest.raises(PrivacyConfigError, match="--verb"):
        parse("name: tiny", "--verb", "true")


def test_repeated_key_is_refused(parse):
    with pytest.raises(PrivacyConfigError, match=r"`steps` is given twice \(line 3\)"):
        parse("steps: 1\nname: tiny\nsteps: 2\n")


def test_second_file_is_refused(parse):
    with pytest.raises(PrivacyConfigError, match=r"`other\.yaml` stands without a flag"):
        parse("name: tiny", "other.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: tiny\nsteps: many", "`steps: 'many'`.*cannot be read as int"),
        ("name: tiny\nsteps: 1.5", "`steps: 1.5`.*cannot be read as int"),
        ("name: tiny\nsteps: true", "`steps: True`.*cannot be read as int"),
        ("name: tiny\nlearning_rate: [0.1]", r"`learning_rate: \[0.1\]`.*cannot be read as float"),
        ("name: tiny\ntarget_epsilon: [8]", r"`target_epsilon: \[8\]`.*cannot be read as float"),
        ("name: tiny\nshuffle: maybe", "`shuffle: 'maybe'`.*cannot be read as bool"),
        ("name: tiny\nrule: coin", "`rule: 'coin'`.*one of gate, vote"),
        ("name: tiny\ncolour: green", "`colour: 'green'`.*one of red, blue"),
        ("- name\n- tiny", "holds a list.*`field: value`"),
        ("name: [tiny", "not valid YAML"),
    ],
)
def test_bad_files(parse, text, message):
    with pytest.raises(PrivacyConfigError, match=message):
        parse(text)


@pytest.mark.parametrize("word", ["none", "null", "None", "NULL"])
def test_a_number_of_the_file_is_unset(parse, word):
    text = "name: tiny\ntarget_epsilon: 8\nlimit: 3\nfast: true"
    assert parse(text)[1].target_epsilon == 8
    for join in ("--{}={}", "--{} {}"):
        flags = [part for name in ("target_epsilon", "limit", "fast") for part in join.format(name, word).split()]
        run = parse(text, *flags)[1]
        assert (run.target_epsilon, run.limit, run.fast) == (None, None, None)
    assert parse(f"name: tiny\ntarget_epsilon: {word}")[1].target_epsilon is None


def test_words_for_unset_stay_words_elsewhere(parse):
    """Of text they are a value, and a number that must be set has no such value."""
    model, run = parse("name: tiny\nnote: what", "--note", "none", "--targets", "null")
    assert (run.note, model.targets) == ("none", ["null"])
    for flag, kind in (("--steps", "int"), ("--learning_rate", "float")):
        with pytest.raises(PrivacyConfigError, match=f"invalid {kind} value: 'none'"):
            parse("name: tiny", flag, "none")
    with pytest.raises(PrivacyConfigError, match="invalid float value: 'nothing'"):
        parse("name: tiny", "--target_epsilon", "nothing")


def test_bad_flag_value(parse):
    with pytest.raises(PrivacyConfigError, match="invalid int value: 'many'"):
        parse("name: tiny", "--steps", "many")


def test_missing_file():
    with pytest.raises(PrivacyConfigError, match=r"no/such\.yaml.*no such file"):
        parse_dataclasses([Model, Run], ["no/such.yaml"], prog="raptor-hf demo")


def test_help_shows_fields_and_the_file(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_dataclasses([Model, Run], ["--help"], prog="raptor-hf demo")
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert "usage: raptor-hf demo [CONFIG.yaml]" in text
    assert "which model" in text and "--target_epsilon" in text


def test_training_arguments(parse, tmp_path):
    path = tmp_path / "training.yaml"
    # A bare `no` is False in YAML; `lr_scheduler_kwargs` takes a mapping.
    path.write_text(
        f"output_dir: {tmp_path}\nsave_strategy: no\nlearning_rate: 3e-4\nreport_to: none\nuse_cpu: true\n"
        "lr_scheduler_type: cosine\nlr_scheduler_kwargs:\n  num_cycles: 2\n",
        encoding="utf-8",
    )
    (arguments,) = parse_dataclasses([TrainingArguments], [str(path), "--max_steps", "7"], prog="x")
    assert arguments.save_strategy == "no"
    assert (arguments.learning_rate, arguments.max_steps) == (3e-4, 7)
    assert arguments.lr_scheduler_kwargs == {"num_cycles": 2}
