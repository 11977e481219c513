"""The record by which two workers agree on turns: claims, and what is left of a dead writer."""

from common.serving.turns.page import LONGEST_US, PAGE_BYTES, TurnPage

PREFILL, SUCCESSOR = 1 << 63, 7


def test_a_claim_holds_until_its_end_or_release() -> None:
    page = TurnPage(bytearray(PAGE_BYTES))
    assert page.claimed_until_us(0) == 0
    page.claim(PREFILL, 5_000)
    assert [page.claimed_until_us(now_us) for now_us in (0, 4_999, 5_000, 6_000)] == [5_000, 5_000, 0, 0]
    page.release(PREFILL)
    assert page.claimed_until_us(0) == 0


def test_both_workers_see_one_record() -> None:
    memory = bytearray(PAGE_BYTES)
    TurnPage(memoryview(memory)).claim(PREFILL, 9_000)
    assert TurnPage(memory).claimed_until_us(1_000) == 9_000


def test_a_writer_that_died_holds_the_gpu_no_longer_than_its_claim() -> None:
    page = TurnPage(bytearray(PAGE_BYTES))
    page.claim(PREFILL, 5_000)
    assert page.claimed_until_us(5_001) == 0, "decode goes on alone"
    page.claim(SUCCESSOR, 8_000)
    page.release(PREFILL)
    assert page.claimed_until_us(6_000) == 8_000, "a writer that was thought dead ends no claim of its successor"


def test_a_claim_of_another_clock_is_none() -> None:
    page = TurnPage(bytearray(b"\xff" * PAGE_BYTES))
    assert page.claimed_until_us(1_000) == 0
    page.claim(PREFILL, 1_000 + LONGEST_US)
    assert (page.claimed_until_us(1_000), page.claimed_until_us(999)) == (1_000 + LONGEST_US, 0)
