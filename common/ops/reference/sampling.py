"""Law of sampling: logits are adjusted, filtered and drawn from in fp32."""

import torch
from torch import Tensor

from common.kernels.base.sampling_operands import (
    IN_PROMPT,
    LOGPROB_WORDS,
    MAX_LOGPROBS,
    NO_CHOICE,
    AdjustmentTensors,
    GrammarMasks,
    LogprobRing,
    SamplingTensors,
)

PHILOX_ROUNDS = 10
_U32 = 0xFFFFFFFF


def adjust_logits(
    logits: Tensor,  # [num_rows, vocab] fp32, changed in place
    params: SamplingTensors,
    slots: Tensor,  # [num_rows] int32
    adjustments: AdjustmentTensors,
    token_ids: Tensor,  # [num_rows] int32
    next_positions: Tensor,  # [num_rows] int32
    grammars: GrammarMasks | None = None,
) -> None:
    """Change the logits of rows with a slot, and count the last tokens of these rows, -1 for none.

    The changes, in order:

        1. Biases are added.
        2. Banned tokens become -inf: banned up to a position, completing a bad word with the latest outputs, or masked.
        3. Tokens in prompt or outputs: positive logits are divided by `repetition_penalty`, others multiplied.
        4. Tokens in outputs lose `frequency_penalty` for each occurrence, and `presence_penalty` once.

    A row whose grammar mask for `next_positions` is missing loses all logits and counts nothing.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    for row in (slots >= 0).nonzero().flatten().tolist():
        counts, mask, edits, num_edits, place, words, num_words, recent = (
            tensor[int(slots[row])] for tensor in adjustments.columns()
        )
        if grammars is not None and place >= 0:
            if grammars.positions_cpu[int(place)] != next_positions[row]:
                logits[row] = float("-inf")
                continue
            mask = mask & grammars.masks_cpu[int(place)].to(mask.device)
        x, last = logits[row], int(token_ids[row])
        edited, values, ends = edits[:, : int(num_edits)].unbind()
        values, is_ban = values.view(torch.float32), values.view(torch.float32) == float("-inf")
        x[edited[~is_ban].long()] += values[~is_ban]
        x[edited[is_ban & (next_positions[row] < ends)].long()] = float("-inf")
        x.masked_fill_((mask[tokens // 32] >> (tokens % 32)) & 1 == 0, float("-inf"))
        if last >= 0:
            counts[last] += 1
        if num_words > 0:
            _ban_words(x, words[:, : int(num_words)], recent, last, int(next_positions[row]))
        num_outputs, repetition = counts & (IN_PROMPT - 1), params.repetition_penalty[row]
        x.copy_(torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x))
        x -= params.frequency_penalty[row] * num_outputs
        x -= params.presence_penalty[row] * (num_outputs > 0)


def _ban_words(x: Tensor, words: Tensor, recent: Tensor, last: int, next_position: int) -> None:
    """Ban the last token, `words[0]`, of each column whose other tokens are the latest outputs; record `last`."""
    if last >= 0:
        recent[(next_position - 1) % len(recent)] = last
    latest = recent[(next_position - torch.arange(1, len(recent), device=x.device)) % len(recent)]
    is_next = ((words[1:] < 0) | (words[1:] == latest.unsqueeze(1))).all(dim=0) & (words[0] < len(x))
    x[words[0][is_next].long()] = float("-inf")


def sample(logits: Tensor, params: SamplingTensors, positions: Tensor) -> Tensor:
    """Return the next token of each row of fp32 `logits [num_rows, vocab]`: `[num_rows]` int32.

    Greedy rows take the largest logit, ties to the lowest id. Other rows take the largest of logit / temperature +
    Gumbel noise among the tokens passing the filters. The result is a draw from the softmax of these tokens (Gumbel-max
    trick). The noise of token t is a function of (seed, positions[row], t). NaN is never chosen over a number; a row of
    nothing but NaN and -inf gives NO_CHOICE.
    """
    scores = logits.masked_fill(logits.isnan(), float("-inf"))
    drawn = (params.temperature > 0).nonzero().flatten()  # noise costs a CPU more than all else
    if len(drawn):
        chosen = SamplingTensors(*(column[drawn] for column in params.columns()))
        scaled = scores[drawn] / chosen.temperature.unsqueeze(1)
        kept = scaled >= filter_threshold(scaled, chosen).unsqueeze(1)
        noisy = scaled + gumbel(chosen.seed, positions[drawn], logits.shape[1])
        scores[drawn] = noisy.masked_fill(~kept, float("-inf"))
    return torch.where(scores.amax(dim=-1) > float("-inf"), scores.argmax(dim=-1), NO_CHOICE).int()


def logprobs(logits: Tensor, num_wanted: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities of rows of fp32 `logits [num_rows, vocab]`: `[num_rows, LOGPROB_WORDS]` int32.

    The first of `num_wanted` entries is for `tokens[row]`, the others are for the likeliest tokens, ties by id. Tokens
    of probability 0 are left out. A row with `num_wanted` 0 has 0 entries; the words behind are unspecified.
    """
    logits = logits.masked_fill(logits.isnan(), float("-inf"))
    totals = logits.logsumexp(dim=-1)
    words = torch.zeros((len(logits), LOGPROB_WORDS), dtype=torch.int32, device=logits.device)
    for row in num_wanted.nonzero().flatten().tolist():
        likeliest = _likeliest(logits[row], min(int(num_wanted[row]) - 1, logits.shape[1]))
        entries = torch.cat((tokens[row : row + 1].clamp(min=0).long(), likeliest))
        values = (logits[row, entries] - totals[row]).nan_to_num(float("-inf"), float("inf"), float("-inf"))
        words[row, 0] = len(entries)
        words[row, 1 : 1 + len(entries)] = entries.int()
        words[row, MAX_LOGPROBS + 2 : MAX_LOGPROBS + 2 + len(entries)] = values.view(torch.int32)
    return words


def _likeliest(x: Tensor, count: int) -> Tensor:
    """Return ids of the `count` largest of `x [vocab]`, ties by id, -inf left out."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    least = x.topk(count).values[-1]
    ids = ((x >= least) & (x > float("-inf"))).nonzero().flatten()
    return ids[x[ids].sort(descending=True, stable=True).indices][:count]


def land_logprobs(words: Tensor, ring: LogprobRing) -> None:
    """Leave `words [num_rows, LOGPROB_WORDS]` beside the tokens just landed; waits for the device."""
    num_slots = ring.words_cpu.shape[1]
    slots = (ring.turns[: len(words)].cpu().long() - 1) % num_slots
    ring.words_cpu[torch.arange(len(words)), slots] = words.cpu()


def filter_threshold(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Return the smallest scaled logit that passes top-k, then top-p, then min-p: `[num_rows]` fp32.

    Top-p keeps the smallest set of most likely tokens whose probability, renormalized after top-k, reaches top_p.
    Tokens tied with the last token kept are kept as well.
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab = scaled.shape[1]
    num_kept = torch.where(params.top_k > 0, params.top_k, vocab).clamp(max=vocab).long()
    by_rank = ordered.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    probs = ordered.masked_fill(ordered < by_rank.unsqueeze(1), float("-inf")).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of all likelier tokens
    num_kept = ((before < params.top_p.unsqueeze(1)) & (probs > 0)).sum(dim=-1).clamp(min=1)
    by_mass = torch.where(params.top_p < 1, ordered.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1), by_rank)
    by_min_p = torch.where(params.min_p > 0, ordered[:, 0] + params.min_p.log(), float("-inf"))
    return torch.maximum(torch.maximum(by_rank, by_mass), by_min_p)


def gumbel(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return standard Gumbel noise `[num_rows, vocab]` fp32 by (seed, position), a Philox word for each token id."""
    zero = torch.zeros_like(seed)
    low, high, _, _ = philox(positions.long(), zero, seed & _U32, (seed >> 32) & _U32)
    fours = torch.arange(-(-vocab // 4), device=seed.device).expand(seed.shape[0], -1)
    words = philox(fours, torch.zeros_like(fours), low.unsqueeze(1), high.unsqueeze(1))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab]
    return -exponential(bits).log()


def exponential(bits: Tensor) -> Tensor:
    """Return `-log(u)` of uniform numbers `u = 1 - (bits + 1/2) / 2^32`, to a rounding error of fp32 for all u.

    The largest noise, which decides most draws, comes from u near 1, where fp32 has only steps of 2^-24. So u is held
    by its distance to the nearer end. The loss of `1 - distance` by rounding is added to the logarithm, at first order,
    because the loss is at most 2^-25.
    """
    is_upper = bits < 1 << 31
    distance = (torch.where(is_upper, bits, _U32 - bits).float() + 0.5) * 2.0**-32  # at most 1/2
    rest = 1.0 - distance
    lost = distance - (1.0 - rest)
    return torch.where(is_upper, lost, 0.0) - torch.where(is_upper, rest, distance).log()


def philox(counter: Tensor, counter_1: Tensor, key_0: Tensor, key_1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox 4x32-10 (Salmon et al., 2011) of counters (c0, c1, 0, 0), as int64 holding 32-bit words."""
    c0, c1 = counter & _U32, counter_1 & _U32
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        high_a, low_a = _mul_32(c0, 0xD2511F53)
        high_b, low_b = _mul_32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ key_0, low_b, high_a ^ c3 ^ key_1, low_a
        key_0, key_1 = (key_0 + 0x9E3779B9) & _U32, (key_1 + 0xBB67AE85) & _U32
    return c0, c1, c2, c3


def _mul_32(a: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of the unsigned 64-bit product; int64 wraps, which keeps the bits."""
    product = a * factor
    return (product >> 32) & _U32, product & _U32
