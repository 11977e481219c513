"""Tiles of packed codes and of tokens, as threads hold them for products of the matrix unit, and their loads.

A tile has a block for each warp, 128 columns of 4 bits or 64 of 8. For each side of a sixteen of rows it has 8 rows. A
quad of threads has a row of a block in its four chunks of 16 bytes. Tensors `[8, chunks, 4]` have a thread's four
registers last.
"""

from functools import cache
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Layouts(NamedTuple):
    """Layouts of a tile in words, of a lone token beside it, and of outputs of 8 rows and 8 tokens."""

    tile: gl.DistributedLinearLayout  # [8, chunks, 4]
    token: gl.DistributedLinearLayout  # [blocks, chunk of a block, 4, two or one, two]: groups of 32 columns last
    out: gl.DistributedLinearLayout  # [8, 8]


@cache
def layouts(warps: int, bits: int) -> Layouts:
    """Return layouts in which a thread of a quad has a chunk of a block, and a quad a row, and a warp a block."""
    powers = [1 << i for i in range(warps.bit_length() - 1)]
    eight = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    tile = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]],
        lane_bases=[[0, 1, 0], [0, 2, 0], *eight],
        warp_bases=[[0, 4 * power, 0] for power in powers],
        block_bases=[],
        shape=[8, 4 * warps, 4],
    )
    groups = [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]] if bits == 4 else [[0, 0, 0, 0, 1]]
    token = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], *groups],
        lane_bases=[[0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0] * 5, [0] * 5, [0] * 5],
        warp_bases=[[power, 0, 0, 0, 0] for power in powers],
        block_bases=[],
        shape=[warps, 4, 4, 2 if bits == 4 else 1, 2],
    )
    out = gl.DistributedLinearLayout(
        reg_bases=[[0, 1]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0] for _ in powers],
        block_bases=[],
        shape=[8, 8],
    )
    return Layouts(tile, token, out)


@gluon.jit
def rows_of_sides(row, n, eight, SIXTEENS: gl.constexpr, GATED: gl.constexpr):
    """Return the rows of each side, `[8, 1, 1]`, and whether they are inside, as tuples.

    The lower side of a sixteen has the next 8 rows, or up's rows beside those of the gate.
    """
    sides, insides = (), ()
    for side in gl.static_range(2 * SIXTEENS):
        rows = row + side // 2 * (8 if GATED else 16) + eight
        if side % 2 == 1 and not GATED:
            rows += 8
        insides = insides + ((rows < n)[:, None, None],)  # type: ignore[assignment]
        if side % 2 == 1 and GATED:
            rows += n
        sides = sides + (rows.to(gl.int64)[:, None, None],)  # type: ignore[assignment]
    return sides, insides


@gluon.jit
def starts_of(ptr, sides, within, WIDTH: gl.constexpr):
    """Return pointers to each side's elements `within` rows of WIDTH elements, as a tuple; none without `ptr`."""
    starts = ()
    if ptr is not None:
        for side in gl.static_range(len(sides)):
            starts = starts + (ptr + sides[side] * WIDTH + within,)  # type: ignore[assignment]
    return starts


@gluon.jit
def load_tile(ptrs, insides, blocks_left, INDEX: gl.constexpr, BLOCKS: gl.constexpr, EVEN: gl.constexpr):
    """Load the tile INDEX of each side's rows, `[8, chunks, 4]` words, as a tuple; blocks outside are zeros.

    They are read once, so evicted first.
    """
    tile = ()
    for side in gl.static_range(len(ptrs)):
        ptr = ptrs[side] + INDEX * (BLOCKS * 16)
        if EVEN:
            some = gl.load(ptr, eviction_policy="evict_first")
        else:
            inside = insides[side] & (blocks_left > INDEX * BLOCKS)
            some = gl.load(ptr, mask=inside, other=0, eviction_policy="evict_first")
        tile = tile + (some,)  # type: ignore[assignment]
    return tile


@gluon.jit
def load_scales(ptrs, insides, blocks_left, blocks, words, INDEX: gl.constexpr, BLOCKS: gl.constexpr,
                BLOCK: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Load each side's scales of the tile INDEX, as a tuple: of blocks, or of words, `[8, chunks, 1 or 4]`."""
    if GROUP < BLOCK:
        group = blocks * (BLOCK // GROUP) + (words // (GROUP * 4 // BLOCK))[None, None, :]
    elif GROUP == BLOCK:
        group = blocks
    else:
        group = (blocks + INDEX * BLOCKS) // (GROUP // BLOCK)
    scales = ()
    for side in gl.static_range(len(ptrs)):
        ptr = ptrs[side] + group
        if GROUP <= BLOCK:
            ptr += INDEX * (BLOCKS * BLOCK // GROUP)
        inside = insides[side] & (blocks_left > INDEX * BLOCKS)
        some = gl.load(ptr) if EVEN else gl.load(ptr, mask=inside, other=0.0)
        scales = scales + (some,)  # type: ignore[assignment]
    return scales


@gluon.jit
def share_token(x_ptr, norms, eps, columns, k, TILES: gl.constexpr, COLUMNS: gl.constexpr, HAS_NORM: gl.constexpr,
                SUMS: gl.constexpr, LAYOUT: gl.constexpr, TILE_LAYOUT: gl.constexpr):  # fmt: skip
    """Return a lone token times the norm's weights in shared memory, its sums, and the norm's scale of products.

    Of the token, k columns are read. Token and sums are tuples, tile by tile; without SUMS of a block there are none.
    fp16 might not hold the token before it is scaled.
    """
    xs, token, sums = (), (), ()
    for i in gl.static_range(TILES):
        xs = xs + (gl.load(x_ptr + i * COLUMNS + columns, mask=columns < k - i * COLUMNS, other=0.0),)  # type: ignore[assignment]
    NARROW: gl.constexpr = HAS_NORM and x_ptr.dtype.element_ty == gl.float16
    scale = 1.0
    if NARROW:
        scale = _scale_of_norm(xs, eps, k, COLUMNS, LAYOUT)
    for i in gl.static_range(TILES):
        x = xs[i]  # type: ignore[var-annotated]
        if HAS_NORM:
            x = (x.to(gl.float32) * norms[i].to(gl.float32) * scale).to(x.dtype)
        some = gl.allocate_shared_memory(x.dtype, [COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        eights = gl.permute(gl.reshape(x, [COLUMNS // 32, 4, 4, 2]), [0, 2, 1, 3])  # a chunk's pairs side by side
        some.store(gl.reshape(eights, [COLUMNS]))
        token = token + (some,)  # type: ignore[assignment]
        if SUMS > 0:
            sums = sums + (_sums_of_groups(x, SUMS, COLUMNS // 128, TILE_LAYOUT),)  # type: ignore[assignment]
    scale = 1.0
    if HAS_NORM and not NARROW:  # behind the stores, so that no thread waits twice
        scale = _scale_of_norm(xs, eps, k, COLUMNS, LAYOUT)
    return token, sums, scale


@gluon.jit
def _sums_of_groups(x, SUMS: gl.constexpr, BLOCKS: gl.constexpr, TILE_LAYOUT: gl.constexpr):
    """Return sums of a lone token's tile over blocks, or over each of their four groups, `[1, chunks, 1]`, as a tuple.

    A warp has sums of its own block, so none passes through shared memory.
    """
    EACH: gl.constexpr = gl.BlockedLayout([1, 1, SUMS], [1, 32, 1], [BLOCKS, 1, 1], [2, 1, 0])  # a chunk a thread
    CHUNKS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, TILE_LAYOUT))
    of_groups = gl.sum(gl.reshape(x.to(gl.float32), [BLOCKS, SUMS, 128 // SUMS]), axis=2)
    row = gl.convert_layout(of_groups, gl.SliceLayout(1, EACH))[:, None, :]
    each = gl.broadcast(row, gl.zeros([BLOCKS, 4, SUMS], gl.float32, EACH))[0]
    if SUMS == 1:
        sums = (_beside_codes(gl.reshape(each, [4 * BLOCKS]), CHUNKS),)
    else:
        even, odd = gl.split(gl.reshape(each, [4 * BLOCKS, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        sums = (
            _beside_codes(first, CHUNKS),
            _beside_codes(second, CHUNKS),
            _beside_codes(third, CHUNKS),
            _beside_codes(fourth, CHUNKS),
        )  # type: ignore[assignment]
    return sums


@gluon.jit
def _beside_codes(numbers, LAYOUT: gl.constexpr):
    """Lay a number of each chunk out as `[1, chunks, 1]`."""
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(numbers, LAYOUT), 0), 2)


@gluon.jit
def _scale_of_norm(xs, eps, k, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the inverse root of the mean square of a token of k columns."""
    squares = gl.zeros([COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(len(xs)):
        squares += xs[i].to(gl.float32) * xs[i].to(gl.float32)
    return gl.rsqrt(gl.sum(squares, axis=0) / k + eps)


@gluon.jit
def shared_operands(token, TOKEN_LAYOUT: gl.constexpr, TILE_LAYOUT: gl.constexpr, BLOCKS: gl.constexpr,
                    BLOCK: gl.constexpr):  # fmt: skip
    """Load a tile of a lone token as operands, `[1, chunks, 4]` pairs of each 32 columns, the same for all 8 tokens."""
    FRAGMENT: gl.constexpr = gl.SliceLayout(0, TILE_LAYOUT)
    shape: gl.constexpr = [BLOCKS, BLOCK // 64, 2, 4, 4]
    pairs = token._reinterpret(gl.int32, shape, gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))
    even, odd = gl.split(pairs.permute((0, 3, 4, 1, 2)).load(TOKEN_LAYOUT))
    if BLOCK == 64:
        operands = (_operand(even, FRAGMENT, BLOCKS), _operand(odd, FRAGMENT, BLOCKS))
    else:
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        operands = (
            _operand(first, FRAGMENT, BLOCKS),
            _operand(second, FRAGMENT, BLOCKS),
            _operand(third, FRAGMENT, BLOCKS),
            _operand(fourth, FRAGMENT, BLOCKS),
        )  # type: ignore[assignment]
    return operands


@gluon.jit
def _operand(pairs, FRAGMENT: gl.constexpr, BLOCKS: gl.constexpr):
    """Lay pairs of blocks, four of each chunk, out as `[1, chunks, 4]`, beside codes."""
    return gl.expand_dims(gl.convert_layout(gl.reshape(pairs, [BLOCKS * 4, 4]), FRAGMENT), 0)


@gluon.jit
def loaded_operands(pairs_ptr, inside, BLOCK: gl.constexpr, EVEN: gl.constexpr):
    """Load a tile of 8 tokens as operands: `[8, chunks, 4]` pairs of each 32 columns of a block.

    The pairs of a thread are 4 apart.
    """
    x = ()
    for group in gl.static_range(BLOCK // 32):
        ptr = pairs_ptr + 16 * group
        some = gl.load(ptr) if EVEN else gl.load(ptr, mask=inside, other=0)
        x = x + (some,)  # type: ignore[assignment]
    return x
