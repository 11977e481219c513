"""Stops within a text: few, however long the text is."""

from common.serving.prompts.stops import FIRST_TOKENS, is_doubling, last_doubling


def test_stops_are_at_the_first_places_behind_each_doubling() -> None:
    for block_size in (1, 16, 48, 2000):
        stops = [place for place in range(-1, 20 * FIRST_TOKENS // block_size) if is_doubling(place, block_size)]
        assert stops == sorted({-(-(FIRST_TOKENS << n) // block_size) for n in range(5)})
        for num_places in range(-1, 20 * FIRST_TOKENS // block_size):
            before = [stop for stop in stops if stop <= num_places]
            assert last_doubling(num_places, block_size) == (before[-1] if before else 0)
