"""Messages for tests: what a test does not name has an ordinary value."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from common.wire.messages.handoff import DecodeRequest, KVPoolExport
from common.wire.messages.memory import KVOffer
from common.wire.messages.worker import Heartbeat, KVPathReport, PrefillRequest, Role, WorkerReady
from common.wire.values.flags import pack_flags
from common.wire.values.packing import num_ids, pack_ids
from common.wire.values.sampling_params import SamplingParams
from common.wire.values.step_counts import PullMeter, StepMeter
from tests.support.layouts import one_group

LAYOUT = one_group("fake", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def worker_ready(worker_id: str, role: Role, epoch: int = 1, **fields: Any) -> WorkerReady:
    ordinary: dict[str, Any] = {
        "pid": 1, "version": "1", "device": "cpu",
        "model_name": "m", "model_fingerprint": "f", "tokenizer_fingerprint": "t",
        "kv_layout": LAYOUT, "num_blocks": (9,), "max_model_len": 999, "max_batch_tokens": 100, "max_num_seqs": 8,
        "transport": "shm", "handoff_endpoint": "", "standby": 0, "memory_server_id": "", "memory_server_epoch": 0,
        "pool_id": 0, "prefix_min_tokens": 0, "takes_replies": role is Role.PREFILL, "short_prompt_tokens": 0,
    }  # fmt: skip
    return WorkerReady(worker_id=worker_id, epoch=epoch, role=role, **ordinary | fields)


def heartbeat(worker_id: str, epoch: int = 1, **fields: Any) -> Heartbeat:
    """Of an idle worker without a free block."""
    ordinary: dict[str, Any] = {
        "num_waiting": 0, "num_running": 0, "num_paused": 0, "num_free_blocks": (0,), "num_handoffs": 0,
        "last_step_age_s": 0.0, "num_dropped_frames": 0, "num_pulled_blocks": 0, "num_found_blocks": 0,
        "spared_bytes": 0, "num_turns": 0, "in_turns": False, "steps": StepMeter().counts(),
        "pulls": PullMeter().counts(), "prompt_block_us": 0,
        "taking_us": 0, "short_prompt_us": 0,
    }  # fmt: skip
    return Heartbeat(worker_id=worker_id, epoch=epoch, **ordinary | fields)


def kv_path(prefill_worker_id: str, decode_worker_id: str, **fields: Any) -> KVPathReport:
    """That blocks travel from one to the other."""
    ordinary: dict[str, Any] = {"epoch": 1, "prefill_epoch": 1, "transport": "shm", "gb_per_s": 1.0, "error": ""}
    ids = {"worker_id": decode_worker_id, "prefill_worker_id": prefill_worker_id}
    return KVPathReport(**ids | ordinary | fields)


def prefill_request(request_id: str, token_ids: Iterable[int], **fields: Any) -> PrefillRequest:
    """A prompt for decode worker `d`."""
    ordinary: dict[str, Any] = {
        "attempt": 0, "num_outputs": 0, "sampling": SamplingParams(), "decode_worker_id": "d", "decode_epoch": 1,
        "priority": 0, "turn": 0, "client": 0, "num_prompt_logprobs": 0, "first_scored": 0,
        "salt": b"", "holder_worker_id": "", "holder_epoch": 0, "most_tokens": 0, "waited_ms": 0,
    }  # fmt: skip
    return PrefillRequest(request_id=request_id, token_ids=pack_ids(token_ids), **ordinary | fields)


def decode_request(request_id: str, token_ids: Iterable[int], **fields: Any) -> DecodeRequest:
    """Announce a prompt to a decode worker."""
    ordinary: dict[str, Any] = {
        "attempt": 0, "num_outputs": 0, "sampling": SamplingParams(), "priority": 0, "client": 0, "num_known": 0,
    }  # fmt: skip
    return DecodeRequest(request_id=request_id, token_ids=pack_ids(token_ids), **ordinary | fields)


def first_sealed(num_sealed: int, num_blocks: int) -> bytes:
    """Flags of an offer whose first blocks are sealed."""
    return pack_flags(np.arange(num_blocks) < num_sealed)


def kv_offer(request_id: str, block_ids: Iterable[int], *, num_sealed: int = 0, **fields: Any) -> KVOffer:
    """Offer blocks to decode worker `d`; every block is of the generation that is its number."""
    ids = pack_ids(block_ids)
    flags = first_sealed(num_sealed, num_ids(ids))
    ordinary: dict[str, Any] = {
        "decode_worker_id": "d", "decode_epoch": 1, "attempt": 0, "token_id": 7,
        "block_ids": ids, "generations": ids, "are_sealed": flags, "root": b"", "digest": b"",
    }  # fmt: skip
    return KVOffer(request_id=request_id, **ordinary | fields)


def pool_export(worker_id: str = "p", epoch: int = 1, **fields: Any) -> KVPoolExport:
    ordinary: dict[str, Any] = {
        "transport": "shm", "device_uuid": "", "pool_id": epoch, "memory_socket": "/nowhere/theirs.sock",
        "layout": LAYOUT,
    }  # fmt: skip
    return KVPoolExport(worker_id=worker_id, epoch=epoch, **ordinary | fields)
