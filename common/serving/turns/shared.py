"""Turns of the workers on a GPU, by a page beside their memory server's socket."""

import logging
import mmap
import os
from pathlib import Path

from common.device.engine.engine import Engine
from common.serving.turns.decode_gate import DecodeGate, TurnGate
from common.serving.turns.forecast import LearnedForecast, Work
from common.serving.turns.law import TurnLaw
from common.serving.turns.page import PAGE_BYTES, TurnPage
from common.serving.turns.prompt_turns import PromptTurns, StepPlans
from common.settings.slo_section import SloSection

logger = logging.getLogger(__name__)


def prompt_plans(slo: SloSection, engine: Engine, memory_socket: Path, writer: int) -> StepPlans:
    """Return the plans of a prefill worker: with turns on a GPU."""
    page = _page(engine, memory_socket)
    if page is None:
        return StepPlans()
    forecast = LearnedForecast(Work.of(engine.model.config))
    return PromptTurns(TurnLaw(slo, forecast), forecast, page, writer)


def decode_gate(engine: Engine, memory_socket: Path) -> DecodeGate:
    """Return the gate of a decode worker: closed in turns on a GPU, never closed elsewhere."""
    page = _page(engine, memory_socket)
    return DecodeGate() if page is None else TurnGate(page)


def open_page(memory_socket: Path) -> TurnPage:
    """Map the page of the workers with this memory server: a file beside the server's socket; raises OSError."""
    path = memory_socket.with_name(f"{memory_socket.name}.turns")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, PAGE_BYTES)
        return TurnPage(mmap.mmap(descriptor, PAGE_BYTES))
    finally:
        os.close(descriptor)


def _page(engine: Engine, memory_socket: Path) -> TurnPage | None:
    if engine.device.type != "cuda":
        return None
    try:
        return open_page(memory_socket)
    except OSError as error:
        logger.warning("prompts keep to their share of this GPU: no file beside %s: %s", memory_socket, error)
        return None
