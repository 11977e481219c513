"""`python -m router.reading.template_main`: the process that writes the prompts of short chats, from stdin to stdout.

It has the model's chat template and its special tokens, which the router tells it first, and nothing to encode with.
It ends when its stdin does. A template that takes too long, or too much memory, takes the process with it at worst.
"""

from common.base.memory_limit import limit_memory
from common.serving.worker.settle import settle_memory
from router.base.helper_frames import MODEL, Kind, bodies, send
from router.base.helper_start import begun
from router.reading.json_body import values_of
from router.reading.packed_requests import packed_or_error, packed_request
from router.requests.responses_api import PARSERS
from router.text.chat_model import ChatModel, unpacked_model

MEMORY_BYTES = 64 << 20
"""Of a template, beside what the longest prompt takes."""
BYTES_PER_TOKEN = 128
"""Of that: a text of the most characters, twice."""


def main() -> None:
    """Answer until stdin ends."""
    begun("router.reading.template_main", ("log",), __doc__ or "", "router-templates")
    with open(0, "rb") as requests, open(1, "wb") as replies:
        (num_bytes,) = MODEL.unpack(requests.read(MODEL.size))
        model = unpacked_model(requests.read(num_bytes))
        settle_memory()
        limit_memory(MEMORY_BYTES + BYTES_PER_TOKEN * model.info.max_model_len)
        for kind, data, max_model_len in bodies(requests):
            send(replies, written(kind, data, model, max_model_len))


def written(kind: Kind, data: bytearray, model: ChatModel, max_model_len: int) -> bytes:
    """Make the request of a conversation, whose prompt is a text; packed, as a RequestError is."""
    num_bytes = len(data)
    return packed_or_error(lambda: packed_request(PARSERS[kind](values_of(data), model, max_model_len)), num_bytes)


if __name__ == "__main__":
    main()
