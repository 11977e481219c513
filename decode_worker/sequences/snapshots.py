"""Snapshots of states of decoding sequences, so that the next turn of a conversation goes on behind a reply.

Nobody knows where a reply will end. So a sequence has a single block for snapshots of each state. The state is copied
there each `DISTANCE_TOKENS` tokens, over the snapshot before. The last one is sealed at the end (see `sealing`).

    asked ──PromptBlocks──▶ spare in the sequence's table ──copied──▶ sealed at the end, or free.

The block is asked for shortly before the first copy, and comes if it is free. While a worker waits for blocks,
sequences seal their snapshots and give the blocks up, so nobody waits for a snapshot. A copy runs before the step of
the next token. So it is over when that step is.
"""

from collections.abc import Callable, Iterable

from common.memory.client.lease_cache import LeaseCache
from common.serving.prompts.requests import Key
from common.wire.messages.memory import PromptBlocks
from decode_worker.sequences.sealing import Sealing
from decode_worker.sequences.sequence import DecodeSequence


class Snapshots:
    """Owner of requests for blocks of snapshots; the blocks belong to the sequences.

    Args:
        copy: copies a block to another on the device, behind all that is launched.
    """

    def __init__(self, leases: LeaseCache, sealing: Sealing, copy: Callable[[int, int], None]) -> None:
        self.leases, self.sealing, self.copy, self.layout = leases, sealing, copy, leases.shape.layout
        self.states = self.layout.states if self.layout.is_reusable else []
        self.asked: dict[Key, DecodeSequence] = {}

    def take(self, sequences: Iterable[DecodeSequence]) -> None:
        """Copy the states of sequences where a snapshot is due; ask for a block before. Call before each step.

        A late mask leaves a state ahead of its sequence, so sequences with a grammar have no snapshots.
        """
        if not self.states:
            return
        num_places, size, is_short = self.sealing.distance, self.layout.block_size, self.leases.demand.is_short
        for sequence in sequences:
            if is_short:
                self._give_up(sequence)
                continue
            place, within = divmod(sequence.num_scheduled - 1, size)  # tokens that the state has seen
            if within or not sequence.chain.digest or sequence.grammar is not None:
                continue
            states = [sequence.tables[number] for number in self.states]
            if not all(table.spare for table in states):
                if (place + 1) % num_places == 0:
                    self._ask(sequence)
            elif place % num_places == 0:
                for table in states:
                    self.copy(table.block_ids[0], table.spare[-1])
                sequence.snapshot_place = place

    def receive(self, message: PromptBlocks) -> bool:
        """Take over the blocks of a request made here; tell whether it was."""
        sequence = self.asked.pop((message.request_id, message.attempt), None)
        if sequence is None:
            return False
        for table, fresh in zip(sequence.tables, self.leases.granted(message).fresh, strict=True):
            table.spare += fresh
        return True

    def forget(self, sequence: DecodeSequence) -> None:
        """Withdraw the request of an ended sequence; the caller frees the blocks of a late answer."""
        if self.asked.pop(sequence.key, None) is not None:
            self.leases.unwant_prompt(sequence.key)

    def _give_up(self, sequence: DecodeSequence) -> None:
        """Seal the snapshot of a sequence in a row, and free its blocks after the next step."""
        self.sealing.seal_snapshot(sequence)
        for number in self.states:
            table = sequence.tables[number]
            table.gone += table.spare
            table.spare.clear()

    def _ask(self, sequence: DecodeSequence) -> None:
        if sequence.key not in self.asked:
            self.asked[sequence.key] = sequence
            priority = sequence.request.priority
            self.leases.want_prompt(sequence.key, (), self.layout.nothing, priority, num_snapshots=1)
