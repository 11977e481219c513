"""The record by which the workers of a GPU agree on turns: claims, decode steps, and what is left of a dead writer."""

import os
from pathlib import Path

from common.serving.turns.page import LONGEST_US, PAGE_BYTES, TurnPage
from common.serving.turns.shared import open_page

FIRST, SECOND = 1 << 63, (1 << 63) + 1


def test_a_turn_lasts_until_its_end_or_release() -> None:
    page = TurnPage(bytearray(PAGE_BYTES))
    assert page.turn(0) == 0
    page.claim(FIRST, 5_000)
    assert [page.turn(now_us) for now_us in (0, 4_999, 5_000, 6_000)] == [FIRST, FIRST, 0, 0]
    page.release(FIRST)
    assert page.turn(0) == 0


def test_a_decode_step_counts_until_its_end() -> None:
    page = TurnPage(bytearray(PAGE_BYTES))
    assert page.step_us(0) == 0
    page.decode(5_200, 1_000_000)
    assert [page.step_us(now_us) for now_us in (0, 999_999, 1_000_000)] == [5_200, 5_200, 0]
    assert page.client() is None, "of several clients"
    page.decode(5_200, 1_000_000, 0)
    assert page.client() == 0, "anonymous ones are one client"
    page.decode(5_200, 1_000_000, (1 << 63) - 1)
    assert (page.client(), page.turn(0)) == ((1 << 63) - 1, 0)
    page.decode(0, 0)
    assert (page.step_us(0), page.turn(0)) == (0, 0)


def test_a_writer_that_died_holds_streams_up_no_longer_than_its_claim() -> None:
    page = TurnPage(bytearray(PAGE_BYTES))
    page.claim(FIRST, 5_000)
    assert page.turn(5_001) == 0, "decode goes on alone"
    page.claim(SECOND, 8_000)
    page.release(FIRST)
    assert page.turn(6_000) == SECOND, "a writer that was thought dead ends no turn of its successor"


def test_a_claim_of_another_clock_is_none() -> None:
    page = TurnPage(bytearray(b"\xff" * PAGE_BYTES))
    assert (page.turn(1_000), page.step_us(1_000)) == (0, 0)
    page.claim(FIRST, 1_000 + LONGEST_US)
    assert (page.turn(1_000), page.turn(999)) == (FIRST, 0)


def test_workers_of_a_memory_server_have_one_page_for_their_user_alone(tmp_path: Path) -> None:
    socket = tmp_path / "memory-GPU-1.sock"
    open_page(socket).claim(FIRST, 5_000)
    assert open_page(socket).turn(1_000) == FIRST, "a second opening keeps what is there"
    assert open_page(tmp_path / "memory-GPU-2.sock").turn(1_000) == 0
    [path] = tmp_path.glob("memory-GPU-1*")
    assert (os.stat(path).st_mode & 0o777, os.stat(path).st_size) == (0o600, PAGE_BYTES)
