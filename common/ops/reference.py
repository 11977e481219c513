"""Definition of every operation in plain torch: the standard for kernels, and the CPU backend.

Written to be read, not to be fast. Norms, rotations, softmax and sampling are computed in fp32 and rounded once to the
input's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional

from common.kernels.base.attention_operands import AttentionWeights
from common.kernels.base.row_operands import HEAD_WORDS, RowState, RowUpdates
from common.kernels.base.sampling_operands import (
    IN_PROMPT,
    LOGPROB_WORDS,
    MAX_LOGPROBS,
    NO_CHOICE,
    AdjustmentTensors,
    GrammarMasks,
    LogprobRing,
    SamplingTensors,
    TokenRing,
)
from common.ops.base import ForwardBatch

PHILOX_ROUNDS = 10
_U32 = 0xFFFFFFFF


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply the root-mean-square norm over the last dimension (Zhang and Sennrich, 2019)."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` of `[num_tokens, 2 * inner]`, gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def rotate(x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary embedding (Su et al., 2021), halves convention, to fp32 `[num_tokens, heads, head_dim]`."""
    cos, sin = rope[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # each [num_tokens, 1, head_dim / 2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def qk_norm_rope_kv(
    qkv: Tensor,  # [num_tokens, (q_heads + 2 * kv_heads) * head_dim]
    weights: AttentionWeights,
    positions: Tensor,  # [num_tokens] int32
    slot_mapping: Tensor,  # [num_tokens] int64
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim], strided
    v_cache: Tensor,
) -> Tensor:
    """Write K and V of each token to its slot (none for slot -1); return q, normed and rotated."""
    num_q, num_kv = weights.num_q_heads, weights.num_kv_heads
    biased = qkv.float() if weights.bias is None else qkv.float() + weights.bias.float()
    heads = biased.view(qkv.shape[0], -1, weights.head_dim)
    q, k, v = heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
    if weights.q_norm is not None and weights.k_norm is not None:
        q = rms_norm(q, weights.q_norm, weights.norm_eps)
        k = rms_norm(k, weights.k_norm, weights.norm_eps)
    q, k = rotate(q, weights.rope, positions), rotate(k, weights.rope, positions)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    k_cache[slots // block_size, slots % block_size] = k[kept].to(k_cache.dtype)
    v_cache[slots // block_size, slots % block_size] = v[kept].to(v_cache.dtype)
    return q.to(qkv.dtype)


def paged_attention(
    q: Tensor,  # [num_tokens, q_heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim], strided
    v_cache: Tensor,
    block_table: Tensor,  # [num_seqs, max_blocks]
    batch: ForwardBatch,
    scale: float,
) -> Tensor:
    """Attend causally from each sequence's last tokens over its blocks: `[num_tokens, q_heads, head_dim]`."""
    out = torch.zeros_like(q)
    bounds = batch.cu_seqlens.tolist()
    for i, seq_len in enumerate(batch.seq_lens.tolist()):
        begin, end = bounds[i], bounds[i + 1]
        if seq_len == 0 or begin == end:
            continue
        blocks = block_table[i, : -(-seq_len // k_cache.shape[1])].long()
        k = k_cache[blocks].flatten(0, 1)[:seq_len].float()  # [seq_len, kv_heads, head_dim]
        v = v_cache[blocks].flatten(0, 1)[:seq_len].float()
        out[begin:end] = _attend(q[begin:end].float(), k, v, scale).to(q.dtype)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal softmax attention in fp32; the last query sees all of k: `[queries, q_heads, head_dim]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    offset = k.shape[0] - q.shape[0]
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(offset + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def gather_blocks(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy whole blocks between pools `[num_blocks, block_bytes]` uint8."""
    target[target_ids.long()] = source[source_ids.long()]


def row_slots(positions: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Return slots of rows' positions, by `block_tables [num_rows, max_blocks]`: `[num_rows]` int64, -1 for padding."""
    positions = positions.long()
    blocks = block_tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
    return torch.where(seq_lens > 0, blocks * block_size + positions % block_size, -1)


def advance(batch: ForwardBatch, tokens: Tensor) -> None:
    """Make `tokens [num_rows]` int32 the last tokens of a decode batch's rows; padding stays padding.

    A row with NO_CHOICE stays as it is. A row of length `max_seq_len` keeps this length, because the block table names
    no further block.
    """
    has_choice = tokens >= 0
    grows = (has_choice & (batch.seq_lens > 0) & (batch.seq_lens < batch.max_seq_len)).int()
    batch.token_ids.copy_(torch.where(has_choice, tokens, batch.token_ids))
    batch.positions.add_(grows)
    batch.seq_lens.add_(grows)


def land(tokens: Tensor, ring: TokenRing) -> None:
    """Leave `tokens [num_rows]` int32 where the host finds them; waits for the device."""
    turns = ring.turns[: tokens.shape[0]]
    ring.tokens_cpu[torch.arange(tokens.shape[0]), turns.cpu().long()] = tokens.cpu()
    turns.copy_((turns + 1) % ring.tokens_cpu.shape[1])


def update_rows(state: RowState, updates: RowUpdates) -> None:
    """Write the updates into the state; rows may change places."""
    num_rows, num_entries = updates.num_rows, updates.num_entries
    heads, places, words, _ = updates.words.split(
        (
            HEAD_WORDS * num_rows,
            num_entries,
            num_entries,
            updates.words.numel() - HEAD_WORDS * num_rows - 2 * num_entries,
        )
    )
    rows, sources, tokens, seq_lens = heads.view(num_rows, HEAD_WORDS).long().unbind(1)
    moved = state.token_ids[sources.clamp(min=0)]  # a copy, so rows may change places
    moved_lens = state.seq_lens[sources.clamp(min=0)]
    seq_lens = torch.where(sources >= 0, moved_lens, seq_lens.int())
    state.token_ids[rows] = torch.where(sources >= 0, moved, tokens.int())
    state.seq_lens[rows] = seq_lens
    state.positions[rows] = (seq_lens - 1).clamp(min=0)
    state.words[places.long()] = words


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
    """Return high and low 32 bits of the 64-bit product, without overflowing int64."""
    low = (a & 0xFFFF) * factor
    high = (a >> 16) * factor + (low >> 16)
    return (high >> 16) & _U32, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
