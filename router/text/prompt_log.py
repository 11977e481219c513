"""Log-probabilities of a prompt's tokens, as received from workers and in the formats of OpenAI and vLLM.

The first token follows nothing, so has no log-probability. A long prompt has many numbers. The numbers stay packed, and
are written a few tokens at a time, so streams do not wait.
"""

import asyncio
import json
from array import array
from collections.abc import Iterator, Sequence

from common.wire.messages.worker import PromptLogprobs
from common.wire.values.packing import unpack_floats, unpack_ids
from router.base.shapes import LogprobsBody, PromptLogprob
from router.text.detokenizer import Decode, IncrementalDecoder
from router.text.logprobs import TokenStrings, finite

AT_ONCE = 64
"""Tokens written in a turn of the event loop."""


class PromptLog:
    """Log-probabilities received for the tokens of a prompt.

    Args:
        num_wanted: log-probabilities of each token: its own, then the likeliest.
    """

    def __init__(self, prompt_ids: Sequence[int], num_wanted: int) -> None:
        assert num_wanted, "its own at least"
        self.num_wanted = num_wanted
        self._prompt_ids = prompt_ids
        self._ranks = array("i", [0])
        self._begins = array("i", [0, 0])  # token `i` has the entries from `[i]` to `[i + 1]`
        self._ids = array("i")
        self._values = array("f")

    @property
    def num_known(self) -> int:
        """Tokens from the first on with complete information."""
        return len(self._ranks)

    @property
    def is_complete(self) -> bool:
        return self.num_known == len(self._prompt_ids)

    def take(self, told: PromptLogprobs, vocab_size: int) -> bool:
        """Append a report, or ignore a report for another position; return False if a report contradicts the prompt."""
        if told.first_position != self.num_known:
            return True
        counts, ids = unpack_ids(told.num_logprobs), unpack_ids(told.logprob_ids)
        begins = [0]
        for count in counts:
            begins.append(begins[-1] + count)
        prompt_ids = self._prompt_ids[self.num_known : self.num_known + len(counts)]
        if 0 in counts or max(ids, default=0) >= vocab_size or len(prompt_ids) < len(counts):
            return False
        if any(ids[begin] != token_id for begin, token_id in zip(begins, prompt_ids, strict=False)):
            return False
        num_before = len(self._ids)
        self._ranks.extend(unpack_ids(told.ranks))
        self._begins.extend(num_before + begin for begin in begins[1:])
        self._ids.extend(ids)
        self._values.extend(unpack_floats(told.logprobs))
        return True

    async def echoed(self, strings: TokenStrings, decode: Decode, num_logprobs: int) -> dict[str, str]:
        """Return OpenAI's format with `num_logprobs` for each token: the items of every list, as JSON.

        Offsets refer to the text given by `decode`.
        """
        decoder, num_chars = IncrementalDecoder(decode), 0
        items: dict[str, list[str]] = {name: [] for name in LogprobsBody.__annotations__}
        for positions in self._slices():
            body: LogprobsBody = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for position in positions:
                ids, values = self._entries(position, num_logprobs)
                body["tokens"].append(strings.of(self._prompt_ids[position]))
                body["token_logprobs"].append(values[0] if values else None)
                body["top_logprobs"].append(strings.named(ids, values) if values else None)
                body["text_offset"].append(num_chars)
                num_chars += len(decoder.push(self._prompt_ids[position]))
            for name, written in items.items():
                written.append(json.dumps(body[name])[1:-1])  # type: ignore[literal-required]
            await asyncio.sleep(0)
        return {name: ", ".join(written) for name, written in items.items()}

    async def told(self, strings: TokenStrings, num_logprobs: int) -> str:
        """Return vLLM's format, as JSON: for each token, its own and the likeliest log-probabilities, by id, ranked."""
        items = []
        for positions in self._slices():
            items.append(json.dumps([self._by_id(position, strings, num_logprobs) for position in positions])[1:-1])
            await asyncio.sleep(0)
        return f"[{', '.join(items)}]"

    def _slices(self) -> Iterator[range]:
        """Return ranges of a few positions that cover the prompt."""
        positions = range(len(self._prompt_ids))
        return (positions[begin : begin + AT_ONCE] for begin in range(0, len(positions), AT_ONCE))

    def _by_id(self, position: int, strings: TokenStrings, num_logprobs: int) -> dict[str, PromptLogprob] | None:
        """Return vLLM's entry of a position, None for the first token."""
        ids, values = self._entries(position, num_logprobs)
        told: dict[str, PromptLogprob] = {}
        for token_id, value, rank in zip(ids, values, [self._ranks[position], *range(1, len(ids))], strict=False):
            told.setdefault(str(token_id), {"logprob": value, "rank": rank, "decoded_token": strings.of(token_id)})
        return told or None

    def _entries(self, position: int, num_logprobs: int) -> tuple[list[int], list[float]]:
        """Return ids and values at a position: the token's own first, then the likeliest."""
        begin, end = self._begins[position], self._begins[position + 1]
        end = min(end, begin + num_logprobs)
        return self._ids[begin:end].tolist(), finite(self._values[begin:end])
