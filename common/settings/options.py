"""Frozen config dataclasses from command-line flags, the environment and a TOML file.

A config is a dataclass of sections; a section is a dataclass of options made with `option`. The flag `--kv-block-size`,
the variable `BATON_KV__BLOCK_SIZE` and the TOML key `[kv] block_size` name the same option, and win in this order. The
allowed values are declared with the option, shown by --help, and checked for every source. All errors are reported at
once.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from common.base.errors import ConfigError
from common.settings.argument_parser import ArgumentParser
from common.settings.sources import Given, Table, flag_name, from_environment, read_toml, strangers, variable_name

Config = TypeVar("Config")
Number = TypeVar("Number", int, float)
UNSHOWABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and surrogates for bytes outside UTF-8."""


def option(
    default: Any,
    help: str,
    *,
    within: tuple[float, float] | None = None,
    choices: Sequence[object] | None = None,
    form: tuple[str, str] | None = None,
) -> Any:
    """Return a dataclass field with a flag's help text and allowed values.

    Args:
        within: least and greatest number; every number has `within` or `choices`.
        form: for a text, a regular expression and its meaning in words.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "within": within, "choices": choices, "form": form}
    )


def number(kind: Callable[[str], Number], least: Number, most: Number) -> Callable[[str], Number]:
    """Return an argparse type for numbers from `least` to `most`, for arguments outside a config."""

    def parsed(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: {_range_text((least, most))}")
        return value

    return parsed


def parse(
    config_cls: type[Config], sections: Sequence[str], prog: str, description: str, argv: Sequence[str]
) -> Config:
    """Build a program's config; with `--print-config`, print the config and exit instead."""
    parser = ArgumentParser(prog=prog, usage=f"{prog} [option ...]", description=description)
    add_flags(parser, config_cls, sections)
    return from_flags(config_cls, parser.parse_args(argv))


def add_flags(parser: argparse.ArgumentParser, config_cls: type[Any], sections: Sequence[str]) -> None:
    """Add `--config`, `--print-config` and a flag for each option of `sections`."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file; over it win variables such as BATON_KV__BLOCK_SIZE, and flags"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings as such a file, and where each is from, and end",
    )
    for section in sections:
        section_cls = _section_classes(config_cls)[section]
        group = parser.add_argument_group(f"[{section}]", section_cls.__doc__)
        for field in dataclasses.fields(section_cls):
            _add_flag(group, section, field)


def from_flags(config_cls: type[Config], args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Config:
    """Build the config from parsed flags, then the environment, then a TOML file.

    Raises ConfigError naming every wrong value and its origin. Raises SystemExit after printing the config.
    """
    classes = _section_classes(config_cls)
    given = read_toml(args.config) if args.config else {}
    known = {section: {field.name: field for field in dataclasses.fields(classes[section])} for section in classes}
    for section, name, text in from_environment(environ, known):
        default = known[section][name].default
        given.setdefault(section, {})[name] = Given(_read(text, default), variable_name(section, name))
    sections = []
    for key, text in vars(args).items():
        section, dot, name = key.partition(".")
        if dot and section not in sections:
            sections.append(section)
        if dot and text is not None:
            value = _read(text, known[section][name].default)
            given.setdefault(section, {})[name] = Given(value, flag_name(section, name))
    config = _built(config_cls, given, strangers(environ, known))
    if getattr(args, "print_config", False):
        sys.stdout.write(_as_toml(config, sections, given))
        raise SystemExit(0)
    return config


def from_tables(config_cls: type[Config], tables: Mapping[str, Mapping[str, object]]) -> Config:
    """Build the config from TOML tables; an error for an unknown section or key lists the known names."""
    given = {name: {key: Given(value, "") for key, value in table.items()} for name, table in tables.items()}
    return _built(config_cls, given)


def _built(config_cls: type[Config], given: dict[str, Table], found: Sequence[str] = ()) -> Config:
    """Build the config; raises ConfigError with the problems `found` before and all new ones."""
    classes = _section_classes(config_cls)
    problems = [*found, *_unknown("section", given, classes)]
    built = {}
    for section, section_cls in classes.items():
        fields = {field.name: field for field in dataclasses.fields(section_cls)}
        table = given.get(section, {})
        problems += _unknown(f"key in [{section}]", table, fields)
        values: dict[str, object] = {}
        for name in [name for name in table if name in fields]:
            try:
                values[name] = _checked(f"{section}.{name}", table[name].value, fields[name])
            except ConfigError as error:
                problems.append(f"{error}{_said(table[name].origin)}")
        try:
            built[section] = section_cls(**values)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        first = f"{len(problems)} settings are wrong:\n  " if len(problems) > 1 else ""
        raise ConfigError(first + "\n  ".join(problems))
    return config_cls(**built)


def _said(origin: str) -> str:
    """Name the origin of a wrong value, unless the error already names a flag."""
    return "" if not origin or origin.startswith("--") else f" [{origin}]"


def _as_toml(config: Any, sections: Sequence[str], given: dict[str, Table]) -> str:
    """Format the config as a TOML file, each value with its origin."""
    lines: list[str] = []
    for section in sections:
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        table = given.get(section, {})
        for field in dataclasses.fields(getattr(config, section)):
            value = getattr(getattr(config, section), field.name)
            shown = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _flag_text(value)
            origin = table[field.name].origin if field.name in table else "default"
            lines.append(f"{field.name} = {shown}  # {origin}")
    return "\n".join(lines) + "\n"


def to_flags(config: Any, sections: Sequence[str]) -> list[str]:
    """Return the flags that reproduce `sections` of `config` in a child process; defaults are left out.

    A default is passed, too, where the inherited environment sets the option.
    """
    flags = []
    for section in sections:
        values = getattr(config, section)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if value != field.default or variable_name(section, field.name) in os.environ:
                flags += [flag_name(section, field.name), _flag_text(value)]
    return flags


def _section_classes(config_cls: type[Any]) -> dict[str, type[Any]]:
    hints = typing.get_type_hints(config_cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_cls)}


def _flag_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _add_flag(group: argparse._ArgumentGroup, section: str, field: "dataclasses.Field[object]") -> None:
    shown = _flag_text(field.default) or "none"
    within = field.metadata["within"]
    allowed = f"{_range_text(within)}, " if within else ""
    choices = field.metadata["choices"]
    group.add_argument(
        flag_name(section, field.name),
        dest=f"{section}.{field.name}",
        metavar=f"{{{','.join(map(str, choices))}}}" if choices else type(field.default).__name__.upper(),
        help=f"{field.metadata['help']} ({allowed}default: {shown})".replace("%", "%%"),
    )


def _read(text: str, default: Any) -> object:
    """Convert a text to the type of a default; an unreadable text is returned unchanged."""
    kind = type(default)
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    try:
        return kind(text)
    except ValueError:
        return text


def _checked(where: str, value: object, field: "dataclasses.Field[object]") -> object:
    wanted = type(field.default)
    if wanted is float and type(value) is int:
        value = _as_float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{where} = {value!r}: wants {wanted.__name__}, got {type(value).__name__}")
    _check_allowed(where, value, field)
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _check_allowed(where: str, value: Any, field: "dataclasses.Field[object]") -> None:
    choices, within, form = (field.metadata[rule] for rule in ("choices", "within", "form"))
    if choices and value not in choices:
        raise ConfigError(f"{where} = {value!r}: one of {', '.join(map(str, choices))}")
    if within and not within[0] <= value <= within[1]:  # NaN is in no range
        raise ConfigError(
            f"{where} = {value!r:.40}: {_range_text(within)}; choose one of these, or leave it out for {field.default}"
        )
    if isinstance(value, str) and UNSHOWABLE.search(value):
        raise ConfigError(f"{where} = {value!r:.80}: has a control character, or is no UTF-8; leave that out")
    if form and not re.fullmatch(form[0], value):
        raise ConfigError(f"{where} = {value!r:.80}: {form[1]}")


def _range_text(within: tuple[float, float]) -> str:
    return " to ".join(str(limit) if isinstance(limit, int) else f"{limit:g}" for limit in within)


def _unknown(what: str, given: Mapping[str, object], known: Mapping[str, object]) -> list[str]:
    unknown = sorted(set(given) - set(known))
    return [f"unknown {what}: {', '.join(unknown)}; known: {', '.join(sorted(known))}"] if unknown else []
