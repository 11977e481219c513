"""`python -m router.reading.reader_main`: the process that reads long bodies for a router, from stdin to stdout.

The process ends with its stdin, so never outlives the router. The kernel limits the memory. A body with too many values
is refused, or ends the process, and the router starts another.
"""

import gc
from contextlib import suppress
from io import BufferedReader, BufferedWriter

from common.base.process import freeze_and_trim, limit_memory, tame_allocator, trim_memory
from router.base.helper_frames import bodies, send
from router.base.helper_start import start_helper
from router.reading.reading import read
from router.text.tokenizer import Tokenizer, encode_in_one_thread, load_tokenizer

BODY_COPIES = 3
"""Copies of a body, beside encoding; an emoji makes each character four bytes, twice."""
BYTES_PER_TOKEN = 2048
"""Bytes for encoding; up to 1.8 kB were seen at the most characters per token."""


def main() -> None:
    """Answer until stdin ends."""
    config = start_helper("router.reading.reader_main", ("model", "router", "log"), __doc__ or "", "router-reader")
    tame_allocator()
    encode_in_one_thread()
    tokenizer = load_tokenizer(config.model, config.router.text_cache_bytes)
    gc.disable()  # JSON has no cycles, and each collection would walk millions of values
    freeze_and_trim()
    body_bytes = BODY_COPIES * config.router.max_body_bytes
    limit_memory(body_bytes + BYTES_PER_TOKEN * tokenizer.info.max_model_len + config.router.text_cache_bytes)
    with open(0, "rb") as requests, open(1, "wb") as replies:
        serve(tokenizer, requests, replies)


def serve(tokenizer: Tokenizer, requests: BufferedReader, replies: BufferedWriter) -> None:
    """Send a reply to each request."""
    for kind, data, max_model_len in bodies(requests):
        before = tokenizer.text_counts
        reply = read(data, tokenizer, max_model_len, kind)
        counts = tokenizer.text_counts
        send(replies, reply, counts.num_found - before.num_found, counts.num_encoded - before.num_encoded)
        del reply, data
        gc.collect()
        trim_memory()


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the router is gone
        main()
