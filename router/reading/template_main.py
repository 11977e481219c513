"""`python -m router.reading.template_main`: the process that writes prompts of short chats, from stdin to stdout.

The router first sends the model's chat template and special tokens; the process cannot encode. The process ends with
its stdin. A template taking too much time or memory ends the process at worst.
"""

from contextlib import suppress

from common.base.process import freeze_and_trim, limit_memory
from router.base.helper_frames import MODEL, Kind, bodies, send
from router.base.helper_start import start_helper
from router.reading.json_body import values_of
from router.reading.packed_requests import packed_or_error, packed_request
from router.requests.responses_api import PARSERS
from router.text.chat_model import ChatModel, unpacked_model

MEMORY_BYTES = 64 << 20
"""Limit for a template, beside the longest prompt."""
BYTES_PER_TOKEN = 128
"""Bytes of the longest prompt: the most characters, twice."""


def main() -> None:
    """Answer until stdin ends."""
    start_helper("router.reading.template_main", ("log",), __doc__ or "", "router-templates")
    with open(0, "rb") as requests, open(1, "wb") as replies:
        (num_bytes,) = MODEL.unpack(requests.read(MODEL.size))
        model = unpacked_model(requests.read(num_bytes))
        freeze_and_trim()
        limit_memory(MEMORY_BYTES + BYTES_PER_TOKEN * model.info.max_model_len)
        for kind, data, max_model_len in bodies(requests):
            send(replies, written(kind, data, model, max_model_len))


def written(kind: Kind, data: bytearray, model: ChatModel, max_model_len: int) -> bytes:
    """Make the request of a conversation, with the prompt as text; return the packed request or RequestError."""
    num_bytes = len(data)
    return packed_or_error(lambda: packed_request(PARSERS[kind](values_of(data), model, max_model_len)), num_bytes)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the router is gone
        main()
