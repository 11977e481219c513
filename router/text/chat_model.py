"""Model data needed to write chat prompts, packed for the process that writes chat prompts."""

from dataclasses import asdict, dataclass
from typing import Protocol

import msgpack

from router.text.chat_template import ChatTemplate
from router.text.control_tokens import ControlTokens
from router.text.model_info import ModelInfo


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
    packed: bytes = msgpack.packb(
        {
            "info": asdict(model.info),
            "template": (template.source, dict(template.special_tokens)),
            "control_tokens": model.control_tokens.texts,
        }
    )
    return packed


def unpacked_model(packed: bytes) -> UnpackedModel:
    """Invert `packed_model`."""
    told = msgpack.unpackb(packed, use_list=False)
    template, control_tokens = ChatTemplate(*told["template"]), ControlTokens(told["control_tokens"])
    return UnpackedModel(ModelInfo(**told["info"]), template, control_tokens)
