"""Merges of a SentencePiece vocabulary, which has scores in their place."""

from collections.abc import Mapping


def merges_of_scores(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, those of the best score first.

    Pairs of equal score are in the order that tokenizers converted by transformers have.

    Args:
        scores: of tokens that merges may make, by text.
        ids: of these tokens and all others, by text.
    """
    found = []
    for text, score in scores.items():
        places = range(1, len(text))
        pairs = [(text[:at], text[at:]) for at in places if text[:at] in scores and text[at:] in scores]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, pair) for pair in pairs]
    found.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [pair for _, pair in found]
