"""Blocks granted to waiting prompts by the memory server.

    without blocks ──ask──▶ asked ──PromptBlocks──▶ granted ──admission──▶ the scheduler's
          ▲                                         │  │ ▲
          └──────────release, lose_lent─────────────┘  └─┘ lent to a retrieval, and returned.

A grant has all blocks of a prompt at once: cached blocks of the prefix, and fresh blocks to fill.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.rate import PromptRate
from common.serving.prompts.requests import Key
from common.serving.prompts.sequence import AnyPrompt
from common.wire.messages.memory import PromptBlocks


class PromptGrants(Generic[AnyPrompt]):
    """Owner of blocks granted to waiting prompts.

    Args:
        on_found: called with a prompt whose cached blocks were found.
    """

    def __init__(self, leases: LeaseCache, on_found: Callable[[AnyPrompt], None], rate: PromptRate) -> None:
        self.leases, self.on_found, self.rate = leases, on_found, rate
        self.group = leases.shape.layout.groups[0]
        self.asked: dict[Key, AnyPrompt] = {}

    def ask(self, prompt: AnyPrompt) -> None:
        """Ask for all blocks of a prompt without any."""
        block_size = self.group.block_size
        num_blocks, lacking = self.group.num_places(prompt.num_slots), prompt.lacking(block_size)
        self.asked[prompt.key] = prompt
        self.leases.want_prompt(prompt.key, lacking, num_blocks, prompt.priority, self.rate.block_us(block_size))

    def ask_again(self, prompt: AnyPrompt) -> None:
        """Free the grant of a prompt, if any, and ask for all blocks."""
        self._release(prompt)
        self.ask(prompt)

    def receive(self, message: PromptBlocks) -> AnyPrompt | None:
        """Take over the blocks of a prompt and return the prompt; free the blocks if the prompt is gone."""
        prompt, grant = self.asked.pop((message.request_id, message.attempt), None), self.leases.granted(message)
        if prompt is None:
            self.leases.free([*grant.found, *grant.fresh])
            return None
        prompt.beginning.grant = grant
        if grant.found:
            self._begin_behind_found(prompt)
        return prompt

    def release(self, prompts: Iterable[AnyPrompt]) -> bool:
        """Free the grants of waiting prompts; tell whether there were any. The prompts ask again at their turn."""
        keepers = [prompt for prompt in prompts if prompt.beginning.grant and not prompt.beginning.is_filling]
        for prompt in keepers:
            self._release(prompt)
        return bool(keepers)

    def forget(self, prompt: AnyPrompt) -> None:
        """Withdraw the question of a prompt, and free the grant."""
        if self.asked.pop(prompt.key, None) is not None:
            self.leases.unwant_prompt(prompt.key)
        self._release(prompt)

    def lend(self, prompt: AnyPrompt, count: int) -> list[int]:
        """Take the first fresh blocks out of a prompt's grant; the prompt waits until their return."""
        beginning = prompt.beginning
        assert beginning.grant is not None, "its blocks are granted"
        lent = beginning.grant.fresh[:count]
        del beginning.grant.fresh[:count]
        beginning.is_filling = True
        return lent

    def return_lent(self, prompt: AnyPrompt, sealed: Sequence[int], unfilled: Sequence[int] = ()) -> None:
        """Return lent blocks, sealed or unfilled; all are freed if the prompt is gone."""
        beginning = prompt.beginning
        beginning.is_filling = False
        if beginning.grant is None:
            self.leases.free([*sealed, *unfilled])
            return
        beginning.grant.found.extend(sealed)
        beginning.grant.fresh[:0] = unfilled
        if sealed:
            self._begin_behind_found(prompt)

    def lose_lent(self, prompt: AnyPrompt) -> None:
        """Give up lent blocks; the prompt asks for all blocks again."""
        prompt.beginning.is_filling = False
        if prompt.beginning.grant is not None:
            self.ask_again(prompt)

    def _release(self, prompt: AnyPrompt) -> None:
        """Free the grant of a prompt, if any."""
        beginning = prompt.beginning
        if beginning.grant is not None:
            self.leases.free(beginning.granted)
            beginning.grant = None
            beginning.num_sealed = prompt.num_scheduled_tokens = 0

    def _begin_behind_found(self, prompt: AnyPrompt) -> None:
        """Set a prompt to be computed from behind its found blocks."""
        assert prompt.beginning.grant is not None, "its blocks are granted"
        prompt.beginning.num_sealed = len(prompt.beginning.grant.found)
        prompt.num_scheduled_tokens = prompt.beginning.num_sealed * self.group.block_size
        self.on_found(prompt)
