"""Sources of option values, and the name of an option in each source.

Variable names have two underscores between section and key, unlike foreign variables. Docker's compose file has
variables of its own, and Kubernetes makes BATON_ROUTER_PORT for a service named baton-router.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.plain_file import read_plain

PREFIX, BETWEEN = "BATON_", "__"
MAX_FILE_BYTES = 1 << 20


class Given(NamedTuple):
    """A value and its origin: a flag, a variable, a file, or "" for none."""

    value: object
    origin: str


Table = dict[str, Given]
"""Values of a section, by key."""


def flag_name(section: str, name: str) -> str:
    return f"--{section}-{name}".replace("_", "-")


def variable_name(section: str, name: str) -> str:
    return f"{PREFIX}{section}{BETWEEN}{name}".upper()


def from_environment(
    environ: Mapping[str, str], known: Mapping[str, Mapping[str, object]]
) -> Iterator[tuple[str, str, str]]:
    """Yield section, key and text of each option set in the environment."""
    options = _variables(known)
    return ((*options[variable], environ[variable]) for variable in sorted(environ) if variable in options)


def strangers(environ: Mapping[str, str], known: Mapping[str, Mapping[str, object]]) -> list[str]:
    """List variables that look like options but are unknown, each with a guess at the meant option."""
    options, problems = _variables(known), []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and BETWEEN in variable and variable not in options:
            near = difflib.get_close_matches(variable, options, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{variable} is set in the environment, and no option{meant}")
    return problems


def _variables(known: Mapping[str, Mapping[str, object]]) -> dict[str, tuple[str, str]]:
    """Map the variable of each option to section and key."""
    return {variable_name(section, name): (section, name) for section in known for name in known[section]}


def read_toml(path: str) -> dict[str, Table]:
    """Read the sections of a TOML file; raises ConfigError for a wrong file."""
    try:
        text = read_plain(path, MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES:,} bytes; name a TOML file of options")
        tables = tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    wrong = [name for name, table in tables.items() if not isinstance(table, dict)]
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)} stands outside a [section]")
    return {section: {key: Given(value, path) for key, value in table.items()} for section, table in tables.items()}
