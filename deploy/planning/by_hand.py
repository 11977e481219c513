"""Rates from a few figures measured with other tools."""

from dataclasses import replace

from common.base.errors import ConfigError
from deploy.planning.step_times.rates import MOST_MS, Points, Rates

MOST_POINTS = 1000
FORMS = {1: "TOKENS:MS", 2: "ROWSxTOKENS:MS"}
LARGEST = 1 << 24


def parse_points(text: str, num_places: int) -> Points:
    """Parse `1024:13.3,8192:123`, or with two places `1x1024:2.3,64x1024:5.1`; raises ConfigError for other text."""
    points = []
    for part in text.split(","):
        place, _, ms = part.partition(":")
        try:
            point = (*map(float, map(int, place.split("x"))), float(ms))
        except ValueError:
            point = ()
        is_sound = len(point) == num_places + 1 and 0 < point[-1] <= MOST_MS
        if not is_sound or not all(1 <= x <= LARGEST for x in point[:-1]):
            raise ConfigError(f"{part!r}: {FORMS[num_places]}, tokens and rows 1 to {LARGEST}, milliseconds above 0")
        points.append(point)
    if len(points) > MOST_POINTS or len({point[:-1] for point in points}) < len(points):
        raise ConfigError(f"{text[:100]!r}: at most {MOST_POINTS} points, each place once")
    return tuple(sorted(points))


def rates_by_hand(rates: Rates, prompts: Points, steps: Points) -> Rates:
    """Return rates with these prompts and steps; interference, copies and messages stay as in `rates`.

    A prompt with a share of the GPU is slower by the factor of the known prompt.
    """
    known = {share: ms for tokens, share, ms in rates.prompts if tokens == 1024}
    shares = {share: ms / known[100.0] for share, ms in known.items()}
    contexts = {context for _, context, _ in steps}
    if len({rows for rows, _, _ in steps}) * len(contexts) != len(steps):
        raise ConfigError("--step-ms: the same numbers of tokens for each number of rows")
    return replace(
        rates,
        prompts=tuple(sorted((tokens, share, ms * more) for tokens, ms in prompts for share, more in shares.items())),
        steps=tuple((rows, context, ms, 0.0) for rows, context, ms in steps),
        origin=("prompts and steps by hand, the rest: ", *rates.origin),
    )
