"""Scales and offsets of groups of columns, as threads of `packed_ring` need them: those of rows, and those of words."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@gluon.jit
def of_groups(ptr, starts, inside, block, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """Load the scales, or offsets, of a block, `[ROWS, 1]`, as a tuple of one; none without `ptr`."""
    numbers = ()
    if ptr is not None:
        group = block // (GROUP // 128)
        some = gl.load(ptr + starts + group, mask=inside & (group < NUM_GROUPS), other=0.0).to(gl.float32)
        numbers = (some[:, None],)  # type: ignore[assignment]
    return numbers


@gluon.jit
def of_words(scales_ptr, offsets_ptr, starts, inside, block, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr,
             TILES: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Load scales of words of each tile of a block, `[ROWS, groups]` each, then offsets if there are any, as a tuple.

    A thread loads those of a row's groups at once.
    """
    numbers = _of_tiles(scales_ptr, starts, inside, block, NUM_GROUPS, GROUP, TILES, LAYOUT)
    if offsets_ptr is not None:
        numbers = numbers + _of_tiles(offsets_ptr, starts, inside, block, NUM_GROUPS, GROUP, TILES, LAYOUT)
    return numbers


@gluon.jit
def _of_tiles(ptr, starts, inside, block, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
              LAYOUT: gl.constexpr):  # fmt: skip
    WIDTH: gl.constexpr = 128 // TILES
    groups = gl.arange(0, WIDTH // GROUP if GROUP < WIDTH else 1, gl.SliceLayout(0, LAYOUT))
    numbers = ()
    for tile in gl.static_range(TILES):
        begin = block * TILES + tile
        if GROUP < WIDTH:
            begin *= WIDTH // GROUP
        else:
            begin //= GROUP // WIDTH
        group = (begin + groups)[None, :]
        mask = inside[:, None] & (group < NUM_GROUPS)
        numbers = numbers + (gl.load(ptr + starts[:, None] + group, mask=mask, other=0.0),)  # type: ignore[assignment]
    return numbers


@gluon.jit
def _prefetch_groups(ptr, starts, block, BLOCKS: gl.constexpr, NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """Ask for the lines of the scales, or offsets, of BLOCKS blocks; for none without `ptr`."""
    if ptr is not None:
        BYTES: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        group = block * 128 // GROUP
        LINES: gl.constexpr = (BLOCKS * 128 // GROUP * BYTES + 127) // 128 + 1
        for line in gl.static_range(LINES):
            _prefetch(ptr + starts + gl.minimum(group + line * (128 // BYTES), NUM_GROUPS - 1))


@gluon.jit
def starts_of_groups(scales_ptr, offsets_ptr, rows, n, first, SIDES: gl.constexpr, BLOCKS: gl.constexpr,
                      NUM_GROUPS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Return where each side's scales and offsets of rows begin, as a tuple, and ask for those of BLOCKS blocks."""
    starts = ()
    for side in gl.static_range(SIDES):
        start = (gl.minimum(rows, n - 1).to(gl.int64) + side * n) * NUM_GROUPS
        starts = starts + (start,)  # type: ignore[assignment]
        _prefetch_groups(scales_ptr, start, first, BLOCKS, NUM_GROUPS, GROUP)
        _prefetch_groups(offsets_ptr, start, first, BLOCKS, NUM_GROUPS, GROUP)
    return starts


@gluon.jit
def _prefetch(ptrs):
    """Ask for the lines of pointers, to be in the cache of the GPU."""
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [ptrs], dtype=gl.int32, is_pure=False, pack=1)
