"""Model weights in memory owned by the memory server."""

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from common.memory.client.client import MemoryClient
from common.memory.client.mapping import Mapping
from common.models.loading.upload import Progress
from common.models.loading.weights import Fill, Loading, WeightsLayout
from common.wire.messages.memory import RegionState


class ServedWeights:
    """The memory server's region for the weights; the first worker fills the region for all.

    Args:
        fingerprint: of the model, made by `wire.values.fingerprint`.
        progress: called with the bytes filled so far, by any worker.
    """

    def __init__(self, client: MemoryClient, fingerprint: str, device: torch.device, progress: Progress) -> None:
        self.client, self.fingerprint, self.device, self.progress = client, fingerprint, device, progress

    def begin(self, layout: WeightsLayout, fill: Fill) -> tuple[Tensor, Loading]:
        claim = self.client.claim_weights(self.fingerprint, layout.name, layout.num_bytes)
        mapping = Mapping(claim, self.device)
        loading = ServedLoading(self, mapping, claim.state, fill)
        return mapping.tensor(writable=False), loading

    def report(self, num_filled: int, num_bytes: int) -> None:
        """Report progress of a fill by this worker, here and to the memory server."""
        self.progress(num_filled, num_bytes)
        self.client.report(num_filled)


class ServedLoading:
    """Weights filled by this or another worker; the model reads through a mapping without write access."""

    def __init__(self, weights: ServedWeights, mapping: Mapping, state: RegionState, fill: Fill) -> None:
        self.weights, self.mapping, self.state, self.fill = weights, mapping, state, fill
        self.num_bytes = mapping.claim.num_bytes
        self.begun = ExitStack()
        self.loading = self._filled() if state is RegionState.EMPTY else None

    def wait(self) -> None:
        client = self.weights.client
        while self.state is not RegionState.FILLED:
            if self.loading is None:
                self.state = client.wait_filled(self.num_bytes, self.weights.progress)
                self.loading = self._filled() if self.state is RegionState.EMPTY else None
            else:
                self.loading.wait()
                client.publish(self.num_bytes)
                self.state = RegionState.FILLED
        self.mapping.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.begun.__exit__(*failure)

    def _filled(self) -> Loading:
        return self.begun.enter_context(self.fill(self.mapping.tensor(writable=True), self.weights.report))
