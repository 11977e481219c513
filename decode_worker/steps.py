"""Steps of the decode batch: a step runs while the next is launched.

A step is launched before the last step's tokens are read, because tokens and positions advance on the device. So a
sequence ended by a stop token runs a step too many; the extra token is dropped.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from common.device.steps.output_ring import PendingOutput
from common.kernels.base.sampling_operands import NO_CHOICE
from common.serving.turns.decode_gate import DecodeGate
from decode_worker.admission import Admission
from decode_worker.batch.pace import Pace
from decode_worker.batch.prefix_sharing import PrefixSharing
from decode_worker.batch.runner import DecodeRunner
from decode_worker.outputs import Outputs
from decode_worker.sequences.sequence import DecodeSequence
from decode_worker.sequences.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A launched step and the sequences of its rows."""

    pending: PendingOutput
    sequences: list[DecodeSequence]
    guided: list[DecodeSequence]  # sequences under a grammar
    unsure: list[DecodeSequence]  # guided sequences whose mask may come too late
    launched_s: float


class DecodeSteps:
    """Owner of the steps in flight.

    Args:
        gate: asked by the caller before each launch.
    """

    def __init__(
        self, runner: DecodeRunner, admission: Admission, outputs: Outputs, snapshots: Snapshots, gate: DecodeGate
    ) -> None:
        self.snapshots, self.gate = snapshots, gate
        self.runner, self.batch, self.trace = runner, runner.batch, runner.trace
        self.admission, self.scheduler, self.outputs = admission, admission.scheduler, outputs
        self.grammars, self.masks, self.load = outputs.grammars, outputs.masks, outputs.link.load
        self.sharing = PrefixSharing(self.scheduler.layout.groups[0])
        self.pace = Pace()
        self.in_flight: deque[DecodeStep] = deque()  # oldest first

    def enter(self, sequences: Iterable[DecodeSequence]) -> None:
        """Let sequences with a row join the next step."""
        for sequence in sequences:
            if self.scheduler.active.get(sequence.key) is not sequence:
                self.trace.join([sequence.key])
                self.grammars.begin(sequence)
                self.scheduler.activate(sequence)
            self.masks.enter(sequence)

    def is_due(self) -> bool:
        """Tell whether some row gets a token in the next step, or in the step in flight."""
        rows = self.scheduler.rows.sequences
        return any(sequence.grammar is None or sequence.grammar.mask is not None for sequence in rows)

    def launch(self) -> None:
        """Start a step over all rows, unless no row can get a token."""
        rows = self.scheduler.rows
        with self.trace.phase("apply"):
            self.admission.make_slots()
            if self.runner.shares_prefixes:
                self.sharing.regroup(rows)
            self.batch.apply(rows.take_changes())
        if not self.is_due():
            return
        with self.trace.phase("launch"):
            num_rows, launched_s = len(rows), time.monotonic()
            spared_bytes = self.sharing.spared_bytes(rows)
            self.snapshots.take(rows.sequences)
            pending = self.runner.launch(num_rows, has_logprobs=rows.has_logprobs, spared_bytes=spared_bytes)
            self.pace.launched(pending.num_run)
            self.gate.launched(self.pace.step_s(pending.num_run), self.admission.capacity.client)
            guided = [sequence for sequence in rows.sequences if sequence.grammar is not None]
            unsure = [sequence for sequence in guided if not sequence.has_mask]
            self.in_flight.append(DecodeStep(pending, self.scheduler.launched(), guided, unsure, launched_s))

    def collect(self) -> None:
        """Read the tokens of the oldest step, and free the blocks of ended sequences."""
        step = self.in_flight.popleft()
        with self.trace.phase("collect"):
            output = step.pending.output()
            self.pace.ended()
            self.load.step_ended(step.launched_s, len(step.sequences), len(step.sequences))
            chosen = []
            for sequence, tokens in zip(step.sequences, output.rows, strict=True):
                if tokens[0].token_id == NO_CHOICE and sequence in step.unsure:
                    self.scheduler.slots.was_late(sequence)
                else:
                    chosen.append((sequence, tokens))
            self.outputs.append(chosen)
            self.scheduler.collected(step.sequences)
