"""A checkpoint's chat template: its source, and its conventions for answers.

Rendering is done by `template_renderer` in a separate process.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from common.base.errors import ConfigError, RequestError
from common.base.json_file import Json, JsonObject
from common.checkpoint.files import TOKENIZER_CONFIG, ModelFiles
from router.base.json_rules import is_text
from router.text.formats.registry import tags_of, tool_format_of
from router.text.formats.shapes import ThoughtTags, ToolFormat

if TYPE_CHECKING:
    from router.text.template_renderer import TemplateRenderer

MAX_MESSAGE_CHARS = 300
NOTHING: Mapping[str, Json] = MappingProxyType({})


class ChatTemplate:
    """Jinja source with the special tokens available as variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = special_tokens

    @cached_property
    def tags(self) -> ThoughtTags | None:
        """Tags around thoughts at the beginning of answers; None if answers have no thoughts."""
        return tags_of(self.source)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """Format in which the template asks the model to call tools."""
        return tool_format_of(self.source)

    @cached_property
    def writes_begin(self) -> bool:
        """True if the template writes the token that begins a text (BOS)."""
        begin = self.special_tokens.get("bos_token", "")
        return bool(begin) and ("bos_token" in self.source or begin in self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        options: Mapping[str, Json],
        max_chars: int,
        tools: Sequence[Json] = (),
        wishes: Mapping[str, Json] = NOTHING,
    ) -> str:
        """Render a prompt; see `TemplateRenderer.render`."""
        return self._renderer.render(messages, options, max_chars, tools, wishes)

    @cached_property
    def _renderer(self) -> "TemplateRenderer":
        from router.text.template_renderer import (
            TemplateRenderer,  # here, because other processes need no Jinja
        )

        return TemplateRenderer(self.source, self.special_tokens)


def load_chat_template(files: ModelFiles) -> ChatTemplate | None:
    """Load a model's chat template, None without one; raises ConfigError for unreadable files."""
    config = files.tokenizer_config()
    source: Json = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    file = files.template()
    source = source if file is None else file
    special_tokens = special_tokens_of(config)
    if not isinstance(source, str):
        return None
    if not all(map(is_text, (source, *special_tokens, *special_tokens.values()))):
        raise ConfigError(f"{files.where(TOKENIZER_CONFIG)}: its texts are not valid Unicode; fetch the model again")
    return ChatTemplate(source, special_tokens)


def template_error(reason: str) -> RequestError:
    """Make the error for a conversation refused by the template."""
    message = f"the model's chat template does not take this conversation: {reason[:MAX_MESSAGE_CHARS]}"
    return RequestError(message, param="messages", code="chat_template_error")


def special_tokens_of(config: JsonObject) -> dict[str, str]:
    """Return `bos_token` and all other special tokens, each stored as a text or as an object with a text."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
