import pytest

from benchmarks.context_mix import parse_mix, uniform


def test_terms_are_counts_of_lengths() -> None:
    mix = parse_mix("2x10+1x300")
    assert mix.contexts == (10, 10, 300)
    assert mix.evened() == uniform(3, 106)


def test_drawn_contexts_are_many_short_and_few_long_and_always_the_same() -> None:
    mix = parse_mix("256~2048", longest=40_000)
    assert mix == parse_mix("256~2048", longest=40_000)
    assert len(mix.contexts) == 256 and max(mix.contexts) == 40_000
    assert 1700 < mix.num_tokens / 256 < 2048, "but for what the longest were cut by"
    assert max(mix.contexts) > 5 * 2048 and sorted(mix.contexts)[128] < 1024


@pytest.mark.parametrize("text", ["", "4", "x5", "4x", "0x5", "4x5+", "4x5,6", "-1x5", "4~"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a mix is COUNTxTOKENS"):
        parse_mix(text)
