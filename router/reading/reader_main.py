"""`python -m router.reading.reader_main`: the process that reads long bodies for a router, from stdin to stdout.

It ends when its stdin does, so it never outlives its router. Its memory is limited by the kernel: what a body's
values would take beyond that is refused, or costs this process, which the router then starts again.
"""

import gc
from io import BufferedReader, BufferedWriter

from common.base.malloc import tame_allocator, trim_memory
from common.base.memory_limit import limit_memory
from common.serving.worker.settle import settle_memory
from router.base.helper_frames import bodies, send
from router.base.helper_start import begun
from router.reading.reading import read
from router.text.tokenizer import Tokenizer, encode_in_one_thread, load_tokenizer

BODY_COPIES = 3
"""What a body holds, beside what encoding may take: with an emoji in it each character takes four bytes, twice."""
BYTES_PER_TOKEN = 2048
"""What encoding takes, seen at up to 1.8 kB for a text of the most characters per token that are let through."""


def main() -> None:
    """Answer until stdin ends."""
    config = begun("router.reading.reader_main", ("model", "router", "log"), __doc__ or "", "router-reader")
    tame_allocator()
    encode_in_one_thread()
    tokenizer = load_tokenizer(config.model, config.router.text_cache_bytes)
    gc.disable()  # JSON holds no cycles, and collections would walk millions of values again and again
    settle_memory()
    body_bytes = BODY_COPIES * config.router.max_body_bytes
    limit_memory(body_bytes + BYTES_PER_TOKEN * tokenizer.info.max_model_len + config.router.text_cache_bytes)
    with open(0, "rb") as requests, open(1, "wb") as replies:
        serve(tokenizer, requests, replies)


def serve(tokenizer: Tokenizer, requests: BufferedReader, replies: BufferedWriter) -> None:
    """One reply for each request."""
    for kind, data, max_model_len in bodies(requests):
        before = tokenizer.text_counts
        reply = read(data, tokenizer, max_model_len, kind)
        counts = tokenizer.text_counts
        send(replies, reply, counts.num_found - before.num_found, counts.num_encoded - before.num_encoded)
        del reply, data
        gc.collect()
        trim_memory()


if __name__ == "__main__":
    main()
