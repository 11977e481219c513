"""Blocks granted to waiting prompts by the memory server.

    without blocks ──ask──▶ asked ──PromptBlocks──▶ granted ──admission──▶ the scheduler's
          ▲                                         │  │ ▲
          └──────────release, lose_lent─────────────┘  └─┘ lent to a retrieval, and returned.

A grant has all blocks of a prompt at once: cached blocks of the prefix, and fresh blocks to fill.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Generic

from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.rate import PromptRate
from common.serving.prompts.requests import Key
from common.serving.prompts.sequence import AnyPrompt
from common.wire.messages.memory import PromptBlocks
from common.wire.values.kv_layout import Counts
from common.wire.values.resumption import needed


class PromptGrants(Generic[AnyPrompt]):
    """Owner of blocks granted to waiting prompts.

    Args:
        on_found: called with a prompt whose cached blocks were found.
        num_snapshots: returns how many snapshots a prompt takes of each state, if blocks are free.
    """

    def __init__(
        self,
        leases: LeaseCache,
        on_found: Callable[[AnyPrompt], None],
        rate: PromptRate,
        num_snapshots: Callable[[AnyPrompt], int],
    ) -> None:
        self.leases, self.on_found, self.rate = leases, on_found, rate
        self.layout, self.num_snapshots = leases.shape.layout, num_snapshots
        self.asked: dict[Key, AnyPrompt] = {}

    def ask(self, prompt: AnyPrompt) -> None:
        """Ask for all blocks of a prompt without any."""
        block_size = self.layout.block_size
        self.asked[prompt.key] = prompt
        block_us = self.rate.block_us(block_size)
        wanted = prompt.key, prompt.lacking(block_size), prompt.beginning.num_blocks, prompt.priority, block_us
        self.leases.want_prompt(*wanted, num_snapshots=self.num_snapshots(prompt))

    def ask_again(self, prompt: AnyPrompt) -> None:
        """Free the grant of a prompt, if any, and ask for all blocks."""
        self._release(prompt)
        self.ask(prompt)

    def receive(self, message: PromptBlocks) -> AnyPrompt | None:
        """Take over the blocks of a prompt and return the prompt; free the blocks if the prompt is gone."""
        prompt, grant = self.asked.pop((message.request_id, message.attempt), None), self.leases.granted(message)
        if prompt is None:
            self.leases.free(grant.block_ids)
            return None
        prompt.beginning.grant, prompt.beginning.num_alike = grant, grant.num_alike
        if grant.num_places:
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

    def may_lend(self, prompt: AnyPrompt, counts: Counts, num_free: Counts) -> bool:
        """Tell whether `lend` has the blocks: of windows `num_free` may be taken, of states the spare ones."""
        assert prompt.beginning.grant is not None, "its blocks are granted"
        columns = zip(self.layout.groups, prompt.beginning.grant.fresh, counts, num_free, strict=True)
        return all(
            count <= (free if group.window else len(fresh) - (not group.grows)) for group, fresh, count, free in columns
        )

    def lend(self, prompt: AnyPrompt, counts: Counts) -> list[list[int]]:
        """Take blocks to fill, by group; the prompt waits until their return.

        Of append-only groups, the prompt's first fresh blocks are taken, of states the last. Of windows, blocks at hand
        are taken.
        """
        grant = prompt.beginning.grant
        assert grant is not None, "its blocks are granted"
        groups = self.layout.groups
        lent = self.leases.allocate(
            tuple(count if group.window else 0 for group, count in zip(groups, counts, strict=True))
        )
        for group, fresh, taken, count in zip(groups, grant.fresh, lent, counts, strict=True):
            if not group.window:
                begin = 0 if group.grows else len(fresh) - count
                taken += fresh[begin : begin + count]
                del fresh[begin : begin + count]
        prompt.beginning.is_filling = True
        return lent

    def return_lent(
        self, prompt: AnyPrompt, num_filled: int, sealed: Sequence[Sequence[int]], unfilled: Sequence[Sequence[int]]
    ) -> None:
        """Return lent blocks by group, sealed ones of the next `num_filled` places, or unfilled.

        All are freed if the prompt is gone.
        """
        beginning, grant = prompt.beginning, prompt.beginning.grant
        beginning.is_filling = False
        if grant is None:
            self.leases.free(chain.from_iterable([*sealed, *unfilled]))
            return
        num_places = grant.num_places + num_filled
        for number, group in enumerate(self.layout.groups):
            if group.window:
                self.leases.free(unfilled[number])
            elif group.grows:
                grant.fresh[number][:0] = unfilled[number]
            else:
                grant.fresh[number] += unfilled[number]
            if num_filled and needed(group, num_places).start >= grant.num_places:
                self.leases.free(grant.found[number])
                grant.found[number].clear()
            grant.found[number] += sealed[number]
        if num_filled:
            beginning.num_alike = max(grant.num_alike, num_places)
            beginning.grant = grant._replace(num_places=num_places, num_alike=beginning.num_alike)
            self._begin_behind_found(prompt)

    def return_nothing(self, prompt: AnyPrompt) -> None:
        """End the wait of a prompt that has lent no blocks."""
        nothing: list[list[int]] = [[] for _ in self.layout.groups]
        self.return_lent(prompt, 0, nothing, nothing)

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
            beginning.num_sealed = beginning.num_marked = beginning.num_alike = 0
            prompt.num_scheduled_tokens = prompt.num_found = 0

    def _begin_behind_found(self, prompt: AnyPrompt) -> None:
        """Set a prompt to be computed from behind its found blocks."""
        assert prompt.beginning.grant is not None, "its blocks are granted"
        prompt.beginning.num_sealed = prompt.beginning.num_marked = prompt.beginning.grant.num_places
        prompt.num_scheduled_tokens = prompt.num_found = prompt.beginning.num_sealed * self.layout.block_size
        self.on_found(prompt)
