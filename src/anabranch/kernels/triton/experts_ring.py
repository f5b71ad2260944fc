"""The ring buffer of stages in shared memory between experts_hopper's loading and multiplying warps.

N rows, M tiles. Loading warps fill a stage and arrive at its barrier `full`, multiplying warps arrive at `empty` when
they have used it; both go through the stages in the same order and count steps. A stage holds 64 rows of each slab
(a_ring), the weights of all columns (b_ring) and, with EXTRA, extra rows (x_ring), BK deep; `tile_info` holds the
column block, the row range and the expert of the tile that begins in it. `ring` is all of these, as `make_ring` returns
them. WHO is the index of a multiplying warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anabranch.kernels.compiling.gluon_names import barrier

# Long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def make_ring(
    w_desc, SLABS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, EXTRA: gl.constexpr, ARRIVALS: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * SLABS, 64, BK], w_desc.layout)
    b_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    # Without extra rows it is not used.
    x_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, EXTRA, BK], w_desc.layout) if EXTRA else a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    tile_info = gl.allocate_shared_memory(gl.int32, [STAGES, 4], plain)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return a_ring, b_ring, x_ring, full, empty, tile_info


@gluon.jit
def locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND: gl.constexpr):
    """(column block, expert, begin, end) of a work item: BAND tiles go through all columns together.

    An index after the last item gives the last one, so that the next item can always be loaded ahead of time. Where
    there are no tiles, nothing is read: the memory is not initialised.
    """
    index = gl.maximum(gl.minimum(index, num_tiles * num_blocks - 1), 0)
    band = index // (BAND * num_blocks)
    within = index % (BAND * num_blocks)
    tiles = gl.maximum(gl.minimum(num_tiles - band * BAND, BAND), 1)
    tile = band * BAND + within % tiles
    real = num_tiles > 0
    return (
        within // tiles, gl.load(tile_3M + tile, mask=real, other=0),
        gl.load(tile_3M + max_tiles + tile, mask=real, other=0),
        gl.load(tile_3M + 2 * max_tiles + tile, mask=real, other=0),
    )


@gluon.jit
def publish_tile(tile_info, empty, step, block, begin, end, expert):
    """Write which tile begins in this step, for the multiplying warps; block −1: there are no more."""
    STAGES: gl.constexpr = empty.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    what = gl.arange(0, 4, layout)
    mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
    values = gl.where(what == 0, block, gl.where(what == 1, begin, gl.where(what == 2, end, expert)))
    tile_info.index(step % STAGES).store(values)
    barrier()


@gluon.jit
def read_tile(tile_info, full, step):
    """(column block, begin, end, expert) of the tile that begins in this step, as the loading warps wrote it."""
    STAGES: gl.constexpr = full.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    what = gl.arange(0, 4, layout)
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    values = tile_info.index(step % STAGES).load(layout)
    return (
        gl.sum(gl.where(what == 0, values, 0), 0), gl.sum(gl.where(what == 1, values, 0), 0),
        gl.sum(gl.where(what == 2, values, 0), 0), gl.sum(gl.where(what == 3, values, 0), 0),
    )


@gluon.jit
def wait_for_stage(full, step, GATHERED: gl.constexpr):
    """The stage of this step, once it is full. GATHERED: rows were written by threads, not by the copy engine."""
    STAGES: gl.constexpr = full.shape[0]
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    if GATHERED:
        fence_async_shared()
    return stage


@gluon.jit
def multiply_slab(
    ring, step, num_rows, WHO: gl.constexpr, WIDTH: gl.constexpr, DEPTH: gl.constexpr, GATHERED: gl.constexpr,
):
    """The first WIDTH columns of a warpgroup's first slab in one tile, and the next step."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SLABS: gl.constexpr = a_ring.shape[0] // STAGES
    BK: gl.constexpr = a_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    acc = gl.zeros([64, WIDTH], gl.float32, layout)
    if num_rows > WHO * 64:
        for k in range(0, DEPTH, BK):
            stage = wait_for_stage(full, step, GATHERED)
            b = b_ring.index(stage).slice(0, WIDTH, dim=0).permute([1, 0])
            acc = warpgroup_mma(a_ring.index(stage * SLABS + WHO), b, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The previous product is complete, so its stage is free.
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    else:  # no rows: free the stages
        for _ in range(0, DEPTH, BK):
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(empty.index(step % STAGES), count=1)
            step += 1
    return acc, step


@gluon.jit
def multiply_two(
    ring, step, WHO: gl.constexpr, GROUPS: gl.constexpr, DEPTH: gl.constexpr, GATHERED: gl.constexpr,
):
    """Like multiply_slab, for a warpgroup that has rows in both of its slabs."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SLABS: gl.constexpr = a_ring.shape[0] // STAGES
    BK: gl.constexpr = a_ring.shape[2]
    width: gl.constexpr = b_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    first = gl.zeros([64, width], gl.float32, layout)
    second = gl.zeros([64, width], gl.float32, layout)
    for k in range(0, DEPTH, BK):
        stage = wait_for_stage(full, step, GATHERED)
        b = b_ring.index(stage).permute([1, 0])
        first = warpgroup_mma(a_ring.index(stage * SLABS + WHO), b, first, use_acc=k > 0, is_async=True)
        second = warpgroup_mma(a_ring.index(stage * SLABS + GROUPS + WHO), b, second, use_acc=k > 0, is_async=True)
        first, second = warpgroup_mma_wait(2, deps=[first, second])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return first, second, step


@gluon.jit
def multiply_extra(
    ring, step, WHO: gl.constexpr, WIDTH: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, DEPTH: gl.constexpr,
    GATHERED: gl.constexpr,
):
    """Like multiply_slab, and the extra rows times 64 weight rows from LEFT and 64 from RIGHT on, transposed."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SLABS: gl.constexpr = a_ring.shape[0] // STAGES
    EXTRA: gl.constexpr = x_ring.shape[1]
    BK: gl.constexpr = a_ring.shape[2]
    acc = gl.zeros([64, WIDTH], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    x_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EXTRA, 16])
    left = gl.zeros([64, EXTRA], gl.float32, x_layout)
    right = gl.zeros([64, EXTRA], gl.float32, x_layout)
    for k in range(0, DEPTH, BK):
        stage = wait_for_stage(full, step, GATHERED)
        weights = b_ring.index(stage)
        b = weights.slice(0, WIDTH, dim=0).permute([1, 0])
        x = x_ring.index(stage).permute([1, 0])
        acc = warpgroup_mma(a_ring.index(stage * SLABS + WHO), b, acc, use_acc=k > 0, is_async=True)
        left = warpgroup_mma(weights.slice(LEFT, 64, dim=0), x, left, use_acc=k > 0, is_async=True)
        right = warpgroup_mma(weights.slice(RIGHT, 64, dim=0), x, right, use_acc=k > 0, is_async=True)
        acc, left, right = warpgroup_mma_wait(3, deps=[acc, left, right])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    acc, left, right = warpgroup_mma_wait(0, deps=[acc, left, right])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc, left, right, step
