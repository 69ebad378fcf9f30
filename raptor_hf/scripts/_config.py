"""Settings of a script: a YAML file, overridden by the command line, into dataclasses.

A setting that is silently ignored would train with another guarantee than the one written down. So an unknown or
repeated key, an unknown flag and a value of the wrong type are errors, each naming what to write instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from raptor_hf.errors import PrivacyConfigError

__all__ = ["make_parser", "parse_dataclasses"]

# On the command line, the value of a number that is not set. Text keeps these words: `report_to none` means them.
_UNSET = ("none", "null")
_EPILOG = "A number without default that the configuration file sets is unset by `--field none` (or `null`)."


class _Parser(HfArgumentParser):
    """Raises instead of exiting: the usage text of some hundred flags would bury the message."""

    def error(self, message: str) -> NoReturn:
        raise PrivacyConfigError(
            f"The command line of `{self.prog}` was not understood: {message}",
            "Guessing what was meant could change the guarantee",
            f"See `{self.prog} --help` for every setting",
        )


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise PrivacyConfigError(
                    f"The key `{key}` is given twice (line {key_node.start_mark.line + 1})",
                    "Only one of the two values could be used",
                    "Keep one of them",
                )
            seen.add(key if isinstance(key, Hashable) else id(key_node))
        return super().construct_mapping(node, deep=deep)


def make_parser(dataclass_types: Sequence[type], *, prog: str) -> HfArgumentParser:
    """Return the parser of `dataclass_types`: one flag a field, help from the fields' metadata.

    Args:
        dataclass_types: dataclasses with distinct field names.
        prog: the command as a user types it, e.g. "raptor-hf train".
    """
    parser = _Parser(
        dataclass_types,
        prog=prog,
        usage=f"{prog} [CONFIG.yaml] [--field value ...]",
        epilog=_EPILOG,
        # An abbreviation is a typing error that happens to be unique today.
        allow_abbrev=False,
    )
    actions = _actions(parser)
    for cls in parser.dataclass_types:
        for name, hint in get_type_hints(cls).items():
            kinds = set(get_args(hint))
            if name in actions and type(None) in kinds and kinds <= {int, float, bool, type(None)}:
                actions[name].type = _or_unset(actions[name].type)
    return parser


def _or_unset(convert: Any) -> Callable[[str], Any]:
    """`convert`, that takes the words for an unset value too."""

    @wraps(convert, updated=())
    def read(text: str) -> Any:
        return None if text.lower() in _UNSET else convert(text)

    return read


def parse_dataclasses(dataclass_types: Sequence[type], argv: Sequence[str], *, prog: str) -> tuple[Any, ...]:
    """Return one instance of each dataclass, filled from `[CONFIG.yaml] [--field value ...]`.

    A flag wins over the file, the file over a field's default. A field without default may come from either.

    Args:
        dataclass_types: dataclasses with distinct field names.
        argv: the arguments; the first may be a YAML file, a flat mapping of field names to values.
        prog: the command as a user types it, for messages.

    Raises:
        PrivacyConfigError: on an unknown, repeated or missing setting, or one of the wrong type.
    """
    parser = make_parser(dataclass_types, prog=prog)
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        _set_defaults(parser, _read_yaml(Path(arguments.pop(0))))
    # Parsed once before any dataclass is made, so that a misspelt flag is reported as that and not as whatever check
    # fails for want of its value.
    _, unknown = parser.parse_known_args(arguments)
    if unknown:
        _reject_argument(unknown[0], parser)
    return parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise PrivacyConfigError(
            f"The configuration file `{path}` was given",
            "There is no such file",
            "Give the path of a YAML file, or flags only (`--field value`)",
        )
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PrivacyConfigError(
            f"The configuration file `{path}` was given", f"It is not valid YAML: {error}", "Correct it"
        ) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise PrivacyConfigError(
            f"The configuration file `{path}` holds a {type(loaded).__name__}",
            "Settings have names",
            "Write one `field: value` a line",
        )
    return loaded


def _set_defaults(parser: HfArgumentParser, settings: dict[str, Any]) -> None:
    """Make the file's values the parser's defaults, converted as the command line would convert them."""
    actions = _actions(parser)
    values = {}
    for name, value in settings.items():
        if name not in actions:
            raise PrivacyConfigError(
                f"The key `{name}` is in the configuration file",
                "No setting has this name, so it would change nothing",
                _suggest(str(name), actions),
            )
        values[name] = _convert(name, value, actions[name])
        actions[name].required = False
    parser.set_defaults(**values)


def _actions(parser: HfArgumentParser) -> dict[str, argparse.Action]:
    """Field name -> the action of its own flag (not that of a bool's `--no_` complement)."""
    names = {field.name for cls in parser.dataclass_types for field in dataclasses.fields(cls) if field.init}
    return {
        action.dest: action
        for action in parser._actions
        if action.dest in names and f"--{action.dest}" in action.option_strings
    }


def _convert(name: str, value: Any, action: argparse.Action) -> Any:
    """Return a YAML value as the command line would have given it.

    YAML reads `1e-3` as text and a bare `no` as False; the field's type decides, not YAML's reading.
    """
    if action.nargs == "+" and value is not None:
        items = value if isinstance(value, list) else [value]
        if action.type is str and any(isinstance(item, bool) for item in items):
            raise PrivacyConfigError(
                f"`{name}: {value!r}` is in the configuration file",
                "YAML reads a bare yes, no, on, off, true or false as a truth value, and a name was asked for",
                f'Write it in quotes, e.g. `{name}: ["no", "yes"]`',
            )
        return [_convert_one(name, item, action) for item in items]
    return _convert_one(name, value, action)


def _convert_one(name: str, value: Any, action: argparse.Action) -> Any:
    convert = action.type
    if value is None or not callable(convert):
        return value
    # Some fields take text or a structure (`lr_scheduler_kwargs`): the structure is the dataclass's to check.
    if isinstance(value, (dict, list)) and getattr(convert, "__wrapped__", convert) not in (int, float, string_to_bool):
        return value
    if value is False and action.choices and "no" in action.choices:
        return "no"
    try:
        converted = convert(value if isinstance(value, str) else str(value))
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        kind = getattr(convert, "__name__", str(convert)).removeprefix("string_to_")
        raise PrivacyConfigError(
            f"`{name}: {value!r}` is in the configuration file",
            f"The value cannot be read as {kind}",
            f"Give `{name}` a value of that type",
        ) from error
    if action.choices is not None and converted not in action.choices:
        listed = ", ".join(map(str, action.choices))
        raise PrivacyConfigError(
            f"`{name}: {value!r}` is in the configuration file", f"It must be one of {listed}", "Choose one of these"
        )
    return converted


def _reject_argument(argument: str, parser: HfArgumentParser) -> NoReturn:
    if not argument.startswith("-"):
        raise PrivacyConfigError(
            f"The argument `{argument}` stands without a flag",
            "Only the first argument may be a configuration file",
            "Write `--field value`",
        )
    flag = argument.partition("=")[0]
    known = {option for action in parser._actions for option in action.option_strings}
    raise PrivacyConfigError(
        f"The flag `{flag}` was given",
        "No setting has this name, so it would change nothing",
        _suggest(flag.replace("-", "_").lstrip("_"), {option.lstrip("-") for option in known}, prefix="--"),
    )


def _suggest(name: str, known: Collection[str], *, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"Write `{prefix}{close[0]}` if that was meant; `--help` lists every setting"
    return "Remove it; `--help` lists every setting"
