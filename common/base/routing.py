"""Rules by which a token chooses experts. Needs no torch."""

from dataclasses import dataclass
from enum import StrEnum


class Score(StrEnum):
    """Function from a router's logits to the scores of experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Route:
    """A token's choice: the experts with the highest scores; among equal scores the lowest number.

    With softmax and `renormalizes`, weights are those of a softmax over the chosen logits alone.
    """

    per_token: int
    score: Score = Score.SOFTMAX
    renormalizes: bool = True  # the weights of a token add up to `scale`
    scale: float = 1.0
    logit_scale: float = 1.0
    groups: int = 1  # equal groups of neighbouring experts
    kept_groups: int = 1  # groups that a token chooses first; its experts are among them
    group_best: int = 1  # scores of a group that are added up for the choice of groups
