"""`python -m router.template_main`: the process that writes the prompts of short chats, from stdin to stdout.

It has the model's chat template and its special tokens, which the router tells it first, and nothing to encode with.
It ends when its stdin does. A template that takes too long, or too much memory, takes the process with it at worst.
"""

from functools import partial

from common.serving.settle import settle_memory
from router.chat_api import parse_chat
from router.chat_model import ChatModel, unpacked_model
from router.helper_frames import MODEL, bodies, send
from router.helper_start import begun
from router.json_body import values_of
from router.memory_limit import limit_memory
from router.packed_requests import packed_or_error, packed_request

MEMORY_BYTES = 64 << 20
"""Of a template, beside what the longest prompt takes."""
BYTES_PER_TOKEN = 128
"""Of that: a text of the most characters, twice."""


def main() -> None:
    """Answer until stdin ends."""
    begun("router.template_main", ("log",), __doc__ or "", "router-templates")
    with open(0, "rb") as requests, open(1, "wb") as replies:
        (num_bytes,) = MODEL.unpack(requests.read(MODEL.size))
        model = unpacked_model(requests.read(num_bytes))
        settle_memory()
        limit_memory(MEMORY_BYTES + BYTES_PER_TOKEN * model.info.max_model_len)
        for _, data, max_model_len in bodies(requests):
            send(replies, written(data, model, max_model_len))


def written(data: bytearray, model: ChatModel, max_model_len: int) -> bytes:
    """A chat's request, whose prompt is a text; packed, as a RequestError is."""
    num_bytes = len(data)
    read = partial(parse_chat, model=model, max_model_len=max_model_len)
    return packed_or_error(lambda: packed_request(read(values_of(data))), num_bytes)


if __name__ == "__main__":
    main()
