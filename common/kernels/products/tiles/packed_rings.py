"""Rings of packed codes and of tokens, and a lone token that is normed beside them: parts of `packed_ring`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def make_rings(
    x_desc, weight_desc, STAGES: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr, TOKEN_STAGES: gl.constexpr,
    TOKEN_TILES: gl.constexpr, TOKEN_BYTES: gl.constexpr,
):  # fmt: skip
    """Return a ring of codes and one of tokens, whose slots have so many tiles, and the barriers of their slots.

    A barrier awaits so many bytes; that of a lone token's slot, which threads fill, none.
    """
    x_shape: gl.constexpr = [TOKEN_STAGES * TOKEN_TILES, x_desc.block_shape[0], x_desc.block_shape[1]]
    shape: gl.constexpr = [STAGES * TILES, weight_desc.block_shape[0], weight_desc.block_shape[1]]
    ring = gl.allocate_shared_memory(weight_desc.dtype, shape, weight_desc.layout)
    token_ring = gl.allocate_shared_memory(x_desc.dtype, x_shape, x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tokens_arrived = gl.allocate_shared_memory(gl.int64, [TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    for slot in gl.static_range(TOKEN_STAGES):
        mbarrier.init(tokens_arrived.index(slot), count=1)
    fence_async_shared()
    for slot in gl.static_range(STAGES):
        mbarrier.expect(arrived.index(slot), BYTES)
    for slot in gl.static_range(TOKEN_STAGES if TOKEN_BYTES > 0 else 0):
        mbarrier.expect(tokens_arrived.index(slot), TOKEN_BYTES)
    return ring, token_ring, arrived, tokens_arrived


@gluon.jit
def load_codes(weight_desc, ring, barrier, slot, row, n, block, BLOCKS: gl.constexpr, SIDES: gl.constexpr,
               TILES: gl.constexpr):  # fmt: skip
    """Begin loading a slot's codes, from the block of columns `block` on; a block is TILES tiles."""
    for i in gl.static_range(BLOCKS):
        for side in gl.static_range(SIDES):
            for tile in gl.static_range(TILES):
                place = ring.index(((slot * BLOCKS + i) * SIDES + side) * TILES + tile)
                start = (block + i) * (32 * TILES) + tile * 32
                tma.async_copy_global_to_shared(weight_desc, [side * n + row, start], barrier, place)


@gluon.jit
def load_tokens(x_desc, ring, barrier, slot, token, block, BLOCKS: gl.constexpr):
    """Begin loading a slot's tokens, from the block of columns `block` on."""
    for i in gl.static_range(BLOCKS):
        tma.async_copy_global_to_shared(x_desc, [token, (block + i) * 128], barrier, ring.index(slot * BLOCKS + i))


@gluon.jit
def _scale_of_norm(x_ptr, eps, K: gl.constexpr, num_warps: gl.constexpr):
    """Return the inverse root of the mean square of a token."""
    COLUMNS: gl.constexpr = 256 * num_warps
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    columns = gl.arange(0, COLUMNS, layout)
    squares = gl.zeros([COLUMNS], gl.float32, layout)
    for i in gl.static_range((K + COLUMNS - 1) // COLUMNS):
        x = gl.load(x_ptr + i * COLUMNS + columns, mask=columns < K - i * COLUMNS, other=0.0).to(gl.float32)
        squares += x * x
    return gl.rsqrt(gl.sum(squares, axis=0) / K + eps)


@gluon.jit
def norms_of(norm_ptr, COUNT: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the norm's weights of COUNT tiles of tokens, as a tuple."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    norms = ()
    for i in gl.static_range(COUNT):
        norm = gl.load(norm_ptr + i * WIDTH + columns, mask=columns < K - i * WIDTH, other=0.0)
        norms = norms + (norm,)  # type: ignore[assignment]
    return norms


@gluon.jit
def _store_normed(ring, x_ptr, norms, scale, K: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a token times the norm's weights, and `scale`, in all rows of the tiles of a ring."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    for i in gl.static_range(len(norms)):
        x = gl.load(x_ptr + i * WIDTH + columns, mask=columns < K - i * WIDTH, other=0.0)
        y = (x.to(gl.float32) * norms[i].to(gl.float32) * scale).to(x.dtype)
        ring.index(i).store(gl.broadcast(y[None, :], gl.zeros([8, WIDTH], x.dtype, LAYOUT))[0])
    fence_async_shared()


@gluon.jit
def share_token(ring, x_ptr, norms, eps, K: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
                 num_warps: gl.constexpr):  # fmt: skip
    """Store a lone token times the norm's weights in a ring; return the norm's scale of products."""
    scale = 1.0
    if x_ptr.dtype.element_ty == gl.float16:  # which might not hold the token before it is scaled
        scale = _scale_of_norm(x_ptr, eps, K, num_warps)
    _store_normed(ring, x_ptr, norms, scale, K, WIDTH, LAYOUT)
    scale = 1.0
    if x_ptr.dtype.element_ty != gl.float16:
        scale = _scale_of_norm(x_ptr, eps, K, num_warps)
    return scale
