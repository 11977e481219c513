"""Sandboxed rendering of chat templates: from messages to the text of a prompt.

A template is a program delivered with the weights. The sandbox hides everything but its variables, and limits CPU time
and output. The rendering process bounds memory and uninterruptible operations (`template_main`, `reader_main`).
"""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.base.errors import RequestError
from common.base.json_file import Json, JsonObject
from router.base.json_rules import is_text, shown
from router.text.chat_template import NOTHING, template_error

RENDER_CPU_S = 2.0
"""Far more than the longest conversation takes."""
AGAIN_S = 0.1
"""Seconds between repeated stop signals, in case the template caught the first."""


class TemplateRenderer:
    """Renderer of a template, compiled at first use within the rendering limits."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source, self._special_tokens = source, special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        options: Mapping[str, Json],
        max_chars: int,
        tools: Sequence[Json] = (),
        wishes: Mapping[str, Json] = NOTHING,
    ) -> str:
        """Write the prompt; raises RequestError (400) with the reason if the template fails or writes too much.

        Call in the main thread.

        Args:
            options: further variables; the template must know all of them.
            wishes: variables without effect in a template that ignores them.
        """
        variables = {**wishes, **self._special_tokens, "messages": messages, **options}
        variables |= {"tools": tools} if tools else {}
        try:
            with _cpu_time(RENDER_CPU_S):
                self._check_known(options)
                if tools and "tools" not in self._variables:
                    raise template_error("it takes no tools")
                return self._text(variables, max_chars)
        except RequestError:
            raise
        except _OutOfTimeError:
            raise template_error(f"it took more than {RENDER_CPU_S:g} s") from None
        except MemoryError:
            raise template_error("it took too much memory") from None
        except TemplateError as error:
            raise template_error(str(error.message)) from None
        except Exception as error:  # noqa: BLE001 - a template may do anything that Python expressions can
            raise template_error(f"{type(error).__name__}: {error}") from None

    def _text(self, variables: JsonObject, max_chars: int) -> str:
        pieces, num_chars = [], 0
        for piece in self._compiled.generate(variables):
            num_chars += len(piece)
            if num_chars > max_chars:
                message = f"the prompt has more than {max_chars} characters, which no prompt may have: shorten it"
                raise RequestError(message, param="messages", code="context_length_exceeded")
            pieces.append(piece)
        text = "".join(pieces)
        if not is_text(text):
            raise template_error("it writes what is not valid Unicode")
        return text

    def _check_known(self, options: Mapping[str, Json]) -> None:
        taken = {"messages", "tools", "documents", *self._special_tokens, *_ENVIRONMENT.globals}
        own = self._variables - taken - {"add_generation_prompt"}
        for name in options.keys() - own - {"add_generation_prompt"}:
            known = ", ".join(sorted(own)) or "none"
            param = f"chat_template_kwargs.{name[:64].encode('ascii', 'backslashreplace').decode()}"
            message = f"{shown(param)}: the model's chat template has no such option; it has: {known:.200}"
            raise RequestError(message, param=param, code="unknown_field")

    @cached_property
    def _compiled(self) -> Template:
        return _ENVIRONMENT.from_string(self._source)

    @cached_property
    def _variables(self) -> set[str]:
        return meta.find_undeclared_variables(_ENVIRONMENT.parse(self._source))


class _OutOfTimeError(Exception):
    """Interruption of a template after too much CPU time."""


class _Generation(Extension):
    """`{% generation %}` marks text for training; no effect on the output."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an attribute of instances

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@contextmanager
def _cpu_time(limit_s: float) -> Iterator[None]:
    """Raise _OutOfTimeError inside the block after `limit_s` of this process's CPU time."""

    def stop(*_: object) -> NoReturn:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _to_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment expected by templates of checkpoints."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


_ENVIRONMENT = _environment()
