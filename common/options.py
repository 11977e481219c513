"""Frozen config dataclasses from one TOML file and command-line flags over it.

A config is a dataclass of sections, a section a dataclass of options made with `option`. The TOML
key `[kv] block_size` and the flag `--kv-block-size` are the same option; flags win. What an option may be
is declared with it, shown by --help, and checked wherever it comes from.
"""

import argparse
import dataclasses
import re
import tomllib
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError

Config = TypeVar("Config")
Number = TypeVar("Number", int, float)
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def option(
    default: Any,
    help: str,
    *,
    within: tuple[float, float] | None = None,
    choices: Sequence[Any] | None = None,
    form: tuple[str, str] | None = None,
) -> Any:
    """A dataclass field with the help text and the allowed values of its flag.

    Args:
        within: the least and the most that a number may be; each number has them, or `choices`.
        form: of a text: a regular expression, and what that is in words.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "within": within, "choices": choices, "form": form}
    )


def number(kind: Callable[[str], Number], least: Number, most: Number) -> Callable[[str], Number]:
    """The type of an argparse argument that is no option of a config: a number from `least` to `most`."""

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
    """The config of one program: TOML named by `--config`, then flags of `sections` over it."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add_flags(parser, config_cls, sections)
    return from_flags(config_cls, parser.parse_args(argv))


def add_flags(parser: argparse.ArgumentParser, config_cls: type[Any], sections: Sequence[str]) -> None:
    """`--config` and one flag for each option of `sections`."""
    parser.add_argument("--config", metavar="FILE", help="TOML file; flags win over it")
    for section in sections:
        section_cls = _section_classes(config_cls)[section]
        group = parser.add_argument_group(f"[{section}]", section_cls.__doc__)
        for field in dataclasses.fields(section_cls):
            _add_flag(group, section, field)


def from_flags(config_cls: type[Config], args: argparse.Namespace) -> Config:
    """Build the config from parsed flags; raises ConfigError for a wrong TOML file or value."""
    tables = _read_toml(args.config) if args.config else {}
    for key, value in vars(args).items():
        section, dot, name = key.partition(".")
        if dot and value is not None:
            tables.setdefault(section, {})[name] = value
    return from_tables(config_cls, tables)


def from_tables(config_cls: type[Config], tables: dict[str, dict[str, Any]]) -> Config:
    """Build the config from TOML tables; an unknown section or key lists the known ones."""
    classes = _section_classes(config_cls)
    _refuse_unknown("section", tables, classes)
    built = {}
    for section, section_cls in classes.items():
        table = tables.get(section, {})
        fields = {field.name: field for field in dataclasses.fields(section_cls)}
        _refuse_unknown(f"key in [{section}]", table, fields)
        built[section] = section_cls(
            **{name: _checked(f"{section}.{name}", value, fields[name]) for name, value in table.items()}
        )
    return config_cls(**built)


def to_flags(config: Any, sections: Sequence[str]) -> list[str]:
    """The flags that reproduce `sections` of `config` in a child process; defaults are left out."""
    flags = []
    for section in sections:
        values = getattr(config, section)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if value != field.default:
                flags += [_flag(section, field.name), _flag_text(value)]
    return flags


def _section_classes(config_cls: type[Any]) -> dict[str, type[Any]]:
    hints = typing.get_type_hints(config_cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_cls)}


def _flag(section: str, name: str) -> str:
    return f"--{section}-{name}".replace("_", "-")


def _flag_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _add_flag(group: argparse._ArgumentGroup, section: str, field: "dataclasses.Field[Any]") -> None:
    shown = _flag_text(field.default) or "none"
    within = field.metadata["within"]
    allowed = f"{_range_text(within)}, " if within else ""
    group.add_argument(
        _flag(section, field.name),
        dest=f"{section}.{field.name}",
        type=_bool if isinstance(field.default, bool) else type(field.default),
        choices=field.metadata["choices"],
        metavar=None if field.metadata["choices"] else type(field.default).__name__.upper(),
        help=f"{field.metadata['help']} ({allowed}default: {shown})".replace("%", "%%"),
    )


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _checked(where: str, value: Any, field: "dataclasses.Field[Any]") -> Any:
    wanted = type(field.default)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{where} = {value!r}: wants {wanted.__name__}, got {type(value).__name__}")
    _check_allowed(where, value, field)
    return value


def _check_allowed(where: str, value: Any, field: "dataclasses.Field[Any]") -> None:
    choices, within, form = (field.metadata[rule] for rule in ("choices", "within", "form"))
    if choices and value not in choices:
        raise ConfigError(f"{where} = {value!r}: one of {', '.join(map(str, choices))}")
    if within and not within[0] <= value <= within[1]:  # NaN is in no range
        raise ConfigError(
            f"{where} = {value!r:.40}: {_range_text(within)}; choose one of these, or leave it out for {field.default}"
        )
    if isinstance(value, str) and CONTROL.search(value):
        raise ConfigError(f"{where} = {value!r:.80}: has a control character; leave that out")
    if form and not re.fullmatch(form[0], value):
        raise ConfigError(f"{where} = {value!r:.80}: {form[1]}")


def _range_text(within: tuple[float, float]) -> str:
    return " to ".join(str(limit) if isinstance(limit, int) else f"{limit:g}" for limit in within)


def _refuse_unknown(what: str, given: dict[str, Any], known: dict[str, Any]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"unknown {what}: {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def _read_toml(path: str) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    wrong = [name for name, table in tables.items() if not isinstance(table, dict)]
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)} stands outside a [section]")
    return tables
