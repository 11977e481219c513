"""Model data needed to write chat prompts, packed for the process that writes chat prompts."""

from dataclasses import dataclass
from typing import Protocol

from msgspec import msgpack

from router.text.chat_template import ChatTemplate
from router.text.control_tokens import ControlTokens
from router.text.model_info import ModelInfo

_MODEL = msgpack.Decoder(tuple[ModelInfo, str, dict[str, str], list[str]])


class ChatModel(Protocol):
    """Model data for chat prompts; `Tokenizer` implements this protocol."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def control_tokens(self) -> ControlTokens: ...


@dataclass(frozen=True, slots=True)
class UnpackedModel:
    """A `ChatModel` unpacked in another process."""

    info: ModelInfo
    chat_template: ChatTemplate
    control_tokens: ControlTokens


def packed_model(model: ChatModel) -> bytes:
    """Pack a model with a chat template; the template is required."""
    template = model.chat_template
    assert template is not None, "nobody asks for chats of others"
    return msgpack.encode((model.info, template.source, template.special_tokens, model.control_tokens.texts))


def unpacked_model(packed: bytes) -> UnpackedModel:
    """Invert `packed_model`."""
    info, source, special_tokens, texts = _MODEL.decode(packed)
    return UnpackedModel(info, ChatTemplate(source, special_tokens), ControlTokens(texts))
