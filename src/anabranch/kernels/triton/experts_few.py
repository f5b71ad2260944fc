"""Experts with quantised weights for a few tokens, by matrix units.

T tokens, D hidden width, K experts per token, I expert width (`inner`), W warps of a program, R = 16 rows of weights,
pair p = t · K + k.

Numbers of 8 or 4 bits cost 6 to 11 instructions each if every one is converted and multiplied by itself (see
experts_small); a matrix unit takes them as bf16, eight of a thread at once. A warp has R rows and a part of their
inputs, and loads all of it, 16 bytes a thread, before it uses any. A product has eight columns: column c is the part of
the inputs that warp c has, so of the product of warp c only that column counts. Which input a number in a register
belongs to is free as long as weights and inputs agree: threads keep what they have loaded.

The programs of gate and up have 8 rows of each, so that a thread has both. Those of down have R rows of every expert of
a token, and sum these: no atomics, the same bits every time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.compiling.gluon_names import barrier
from anabranch.kernels.triton.gated import activate

# fmt: off


@gluon.jit
def unpack_int4(words):
    """Of four bytes: two times two lower halves, then two times two upper ones, minus 8, in bf16."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, some, one, less;
        mov.b32 some, 0x000F000F;
        mov.b32 one, 0x43004300;
        mov.b32 less, 0xC308C308;
        prmt.b32 a, $8, 0, 0x3120;
        shr.b32 b, a, 8;
        shr.b32 c, a, 4;
        shr.b32 d, a, 12;
        lop3.b32 a, a, some, one, 0xEA;
        lop3.b32 b, b, some, one, 0xEA;
        lop3.b32 c, c, some, one, 0xEA;
        lop3.b32 d, d, some, one, 0xEA;
        add.rn.bf16x2 a, a, less;
        add.rn.bf16x2 b, b, less;
        add.rn.bf16x2 c, c, less;
        add.rn.bf16x2 d, d, less;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=[gl.bfloat16] * 8, is_pure=True, pack=1,
    )


@gluon.jit
def unpack_fp4(words, scale):
    """The same of MXFP4, times scale · 2⁻⁶⁴: see experts_hopper_unpack.unpack_scaled. Sign and other bits are moved to
    where bf16 has them."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, s, w, sign;
        mov.b32 s, {$9, $9};
        mov.b32 sign, 0x80008000;
        prmt.b32 w, $8, 0, 0x3120;
        shl.b32 a, w, 6;
        shr.b32 b, w, 2;
        shl.b32 c, w, 2;
        shr.b32 d, w, 6;
        and.b32 a, a, 0x01C001C0;
        and.b32 b, b, 0x01C001C0;
        and.b32 c, c, 0x01C001C0;
        and.b32 d, d, 0x01C001C0;
        lop3.b32 d, w, sign, d, 0xEA;
        shl.b32 w, w, 4;
        lop3.b32 b, w, sign, b, 0xEA;
        shl.b32 w, w, 4;
        lop3.b32 c, w, sign, c, 0xEA;
        shl.b32 w, w, 4;
        lop3.b32 a, w, sign, a, 0xEA;
        mul.bf16x2 a, a, s;
        mul.bf16x2 b, b, s;
        mul.bf16x2 c, c, s;
        mul.bf16x2 d, d, s;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        mov.b32 {$4, $5}, c;
        mov.b32 {$6, $7}, d;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h", [words, scale], dtype=[gl.bfloat16] * 8, is_pure=True, pack=1,
    )


@gluon.jit
def unpack_fp8(words):
    """Of four bytes: two times two numbers. See quantized.fp8_to_bf16."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, w, up, none;
        mov.b32 up, 0x7B807B80;
        mov.b32 none, 0x80008000;
        prmt.b32 w, $4, 0, 0x3120;
        shl.b32 a, w, 4;
        shr.b32 b, w, 4;
        and.b32 a, a, 0x07F007F0;
        and.b32 b, b, 0x07F007F0;
        lop3.b32 b, w, none, b, 0xEA;
        shl.b32 w, w, 8;
        lop3.b32 a, w, none, a, 0xEA;
        fma.rn.bf16x2 a, a, up, none;
        fma.rn.bf16x2 b, b, up, none;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }
        """,
        "=h,=h,=h,=h,r", [words], dtype=[gl.bfloat16] * 4, is_pure=True, pack=1,
    )


@gluon.constexpr_function
def words_layout(warps):
    """Which thread has which four bytes: a row's 64 bytes are 16 each of four threads."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]], lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << bit, 0] for bit in range(warps.bit_length() - 1)], block_bases=[], shape=[16 * warps, 16],
    )


@gluon.constexpr_function
def inputs_layout(warps, halves):
    """Which thread has which inputs of 64 bytes, of which column: those of its bytes."""
    upper = [[64, 0]] if halves == 2 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0], *upper], lane_bases=[[16, 0], [32, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 0]] * (warps.bit_length() - 1), block_bases=[], shape=[64 * halves, 8],
    )


@gluon.constexpr_function
def scales_layout(warps):
    """Which thread has which words once more, [rows, threads, words]: scales of MXFP4 have no words."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16 << bit, 0, 0] for bit in range(warps.bit_length() - 1)], block_bases=[],
        shape=[16 * warps, 4, 4],
    )


@gluon.constexpr_function
def scaled_rows(kind, warps):
    """Of which rows a thread has the scales: of those whose weights it has, or whose sums."""
    if kind == "fp4":
        return gl.SliceLayout(1, gl.SliceLayout(2, scales_layout(warps)))
    return gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8]))


@gluon.jit
def operands(words, inputs, factor, KIND: gl.constexpr, W: gl.constexpr):
    """64 bytes of each row, and the inputs of these bytes, as operands: ordered by word of a thread, pair, half, thread
    and number of a pair."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    words = gl.convert_layout(gl.reshape(words, [16 * W, 4, 4]), scales_layout(W), assert_trivial=True)
    if KIND == "fp8":
        a, b, c, d = unpack_fp8(words)
        numbers = gl.join(gl.join(a, b), gl.join(c, d))  # row, thread, word, number, pair
        left = gl.reshape(gl.permute(numbers, [0, 2, 4, 1, 3]), [16 * W, 64])
        right = gl.reshape(gl.permute(gl.reshape(inputs, [4, 4, 2, 2, 8]), [1, 2, 0, 3, 4]), [64, 8])
    else:
        if KIND == "int4":
            a, b, c, d, e, f, g, h = unpack_int4(words)
        else:
            a, b, c, d, e, f, g, h = unpack_fp4(words, gl.expand_dims(factor, 2))
        numbers = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))  # and half
        left = gl.reshape(gl.permute(numbers, [0, 2, 4, 5, 1, 3]), [16 * W, 128])
        right = gl.reshape(gl.permute(gl.reshape(inputs, [2, 4, 4, 2, 2, 8]), [2, 3, 0, 1, 4, 5]), [128, 8])
    left = gl.convert_layout(left, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    return left, gl.convert_layout(right, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def load_words(weight, begin, own, width, CHUNKS: gl.constexpr, W: gl.constexpr):
    """CHUNKS times 64 bytes of each row. `begin`: where rows of the warps begin, `own`: whether they are read, and
    `width`: words of theirs from there on."""
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, words_layout(W)))
    words = ()
    for c in gl.static_range(CHUNKS):
        inside = own[:, None] & (c * 16 + word[None, :] < width[:, None])
        words = words + (gl.load(weight + begin[:, None] + (c * 16 + word)[None, :], mask=inside, other=0),)
    return words


@gluon.jit
def load_scales(scale, first, group, own, num_groups, CHUNKS: gl.constexpr, KIND: gl.constexpr, INPUTS: gl.constexpr):
    """Of each row and chunk, in fp32; of MXFP4, for each thread, as unpack_fp4 takes them. `first`: where a row's are,
    `group`: the first of its first chunk."""
    found = ()
    if KIND == "fp4":
        thread = gl.arange(0, 4, layout=gl.SliceLayout(0, first.type.layout.parent))
        for c in gl.static_range(CHUNKS):
            at = group[:, None] + (c * 4 + thread)[None, :]
            code = gl.load(scale + first[:, None] + at, mask=own[:, None] & (at < num_groups), other=0)
            bits = (gl.minimum(code.to(gl.int32), 193) + 62) << 7
            found = found + (bits.to(gl.int16).to(gl.bfloat16, bitcast=True),)
    else:
        PER_CHUNK: gl.constexpr = 128 if KIND == "int4" else 64
        for c in gl.static_range(CHUNKS):
            at = (group + c * PER_CHUNK) // INPUTS
            found = found + (gl.load(scale + first + at, mask=own & (at < num_groups), other=0.0).to(gl.float32),)
    return found


@gluon.jit
def multiply(words, scales, inputs, begin, own, depth, CHUNKS: gl.constexpr, KIND: gl.constexpr, W: gl.constexpr):
    """[16 W] sums of each row of the warps. `begin`: where inputs of each column begin, `own`: whether they are read,
    and `depth`: how many there are from there on."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])
    HALVES: gl.constexpr = 1 if KIND == "fp8" else 2
    f = gl.arange(0, 64 * HALVES, layout=gl.SliceLayout(1, inputs_layout(W, HALVES)))
    if KIND == "fp4":  # 32 inputs have 16 bytes
        f = f // 16 % 4 * 32 + f // 64 * 16 + f % 16
    acc = gl.zeros([16 * W, 8], gl.float32, mma)
    for c in gl.static_range(CHUNKS):
        place = f + c * (64 * HALVES)
        inside = own[None, :] & (place[:, None] < depth[None, :])
        x = gl.load(inputs + begin[None, :] + place[:, None], mask=inside, other=0.0)
        left, right = operands(words[c], x, scales[c], KIND, W)
        if KIND == "fp4":
            acc = mma_v2(left, right, acc)
        else:
            acc += mma_v2(left, right, gl.zeros([16 * W, 8], gl.float32, mma)) * scales[c][:, None]
    row = gl.arange(0, 16 * W, layout=gl.SliceLayout(1, mma))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, mma))
    sums = gl.sum(gl.where((row // 16)[:, None] == column[None, :], acc, 0.0), 1)
    if KIND == "fp4":
        sums *= 18446744073709551616.0  # 2⁶⁴, see unpack_fp4
    return sums


@gluon.jit
def gate_up_rows(r, inner):
    """Rows of weights of a program's rows: of 16, gate rows are the first 8. Those after the last one repeat it."""
    return gl.where(r % 16 < 8, 0, inner) + gl.minimum(gl.program_id(1) * 8 + r % 8, inner - 1)


@gluon.jit(do_not_specialize=["num_groups"])
def gate_up_few(
    x_TD, x_stride, expert_N, gate_up_EFD, scale, bias_EF, h_NI, D, inner, width, num_groups,
    K: gl.constexpr, W: gl.constexpr, CHUNKS: gl.constexpr, ACTIVATION: gl.constexpr, DEPENDENT: gl.constexpr,
    KIND: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr,
):
    """Eight columns of h of one pair; each warp has a part of the inputs. `width`: of a row of weights, in pieces of 16
    bytes, so that the compiler knows where rows begin."""
    width = width * 4  # words
    HALVES: gl.constexpr = 1 if KIND == "fp8" else 2
    pair = gl.program_id(0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    e = gl.load(expert_N + pair).to(gl.int64)
    if e >= 0:
        r = gl.arange(0, 16 * W, layout=gl.SliceLayout(1, words_layout(W)))
        skipped = r // 16 * (CHUNKS * 16)
        begin = (e * (2 * inner) + gate_up_rows(r, inner)) * width + skipped
        words = load_words(gate_up_EFD, begin, r >= 0, width - skipped, CHUNKS, W)
        q = gl.arange(0, 16 * W, layout=scaled_rows(KIND, W))
        first = (e * gl.cdiv(2 * inner, OUTPUTS) + gate_up_rows(q, inner) // OUTPUTS) * num_groups
        group = q // 16 * (CHUNKS * (4 if KIND == "fp4" else 64 * HALVES))
        scales = load_scales(scale, first, group, q >= 0, num_groups, CHUNKS, KIND, INPUTS)
        barrier()  # issue all loads before the first is used; without this the assembler saves registers instead
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, inputs_layout(W, HALVES)))
        part = column * (CHUNKS * 64 * HALVES)
        x = x_TD + (pair // K).to(gl.int64) * x_stride
        sums = multiply(words, scales, x, part, column < W, D - part, CHUNKS, KIND, W)
        both = gl.sum(gl.reshape(sums, [W, 16]), 0)
        if bias_EF is not None:
            row = gate_up_rows(gl.arange(0, 16, layout=both.type.layout), inner)
            both += gl.load(bias_EF + e * (2 * inner) + row).to(gl.float32)
        gate, up = gl.split(gl.permute(gl.reshape(both, [2, 8]), [1, 0]))
        h = activate(gate, up, ACTIVATION)
        out = gl.program_id(1) * 8 + gl.arange(0, 8, layout=gate.type.layout)
        gl.store(h_NI + pair * inner + out, h.to(h_NI.dtype.element_ty), mask=out < inner)


@gluon.jit(do_not_specialize=["num_groups"])
def down_few(
    weight_TK, expert_TK, h_NI, down_EDI, scale, bias_ED, y_TD, scaling, D, inner, width, num_groups,
    K: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, CHUNKS: gl.constexpr, DEPENDENT: gl.constexpr,
    KIND: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr,
):
    """16 outputs of one token; each warp has an expert, or one of PARTS parts of its inputs. `width`: as above."""
    width = width * 4
    HALVES: gl.constexpr = 1 if KIND == "fp8" else 2
    t = gl.program_id(0)
    r = gl.arange(0, 16 * W, layout=gl.SliceLayout(1, words_layout(W)))
    k = r // 16 // PARTS
    e = gl.load(expert_TK + t * K + gl.minimum(k, K - 1)).to(gl.int64)
    row = gl.minimum(gl.program_id(1) * 16 + r % 16, D - 1)
    skipped = r // 16 % PARTS * (CHUNKS * 16)
    begin = (e * D + row) * width + skipped
    words = load_words(down_EDI, begin, (e >= 0) & (k < K), width - skipped, CHUNKS, W)
    q = gl.arange(0, 16 * W, layout=scaled_rows(KIND, W))
    k = q // 16 // PARTS
    e = gl.load(expert_TK + t * K + gl.minimum(k, K - 1)).to(gl.int64)
    row = gl.minimum(gl.program_id(1) * 16 + q % 16, D - 1)
    first = (e * gl.cdiv(D, OUTPUTS) + row // OUTPUTS) * num_groups
    group = q // 16 % PARTS * (CHUNKS * (4 if KIND == "fp4" else 64 * HALVES))
    scales = load_scales(scale, first, group, (e >= 0) & (k < K), num_groups, CHUNKS, KIND, INPUTS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, inputs_layout(W, HALVES)))
    k = column // PARTS
    # An expert that is elsewhere: its h was not written.
    own = (k < K) & (column < W) & (gl.load(expert_TK + t * K + gl.minimum(k, K - 1)) >= 0)
    part = column % PARTS * (CHUNKS * 64 * HALVES)
    sums = multiply(words, scales, h_NI, (t * K + k) * inner + part, own, inner - part, CHUNKS, KIND, W)
    q = gl.arange(0, 16 * W, layout=sums.type.layout)
    k = q // 16 // PARTS
    own = k < K
    weight = gl.load(weight_TK + t * K + k, mask=own, other=0.0).to(gl.float32) * scaling
    if bias_ED is not None:
        e = gl.load(expert_TK + t * K + k, mask=own, other=-1).to(gl.int64)
        row = gl.minimum(gl.program_id(1) * 16 + q % 16, D - 1)
        sums += gl.load(bias_ED + e * D + row, mask=(e >= 0) & (q // 16 % PARTS == 0), other=0.0).to(gl.float32)
    y = gl.sum(gl.reshape(sums * weight, [W, 16]), 0)
    out = gl.program_id(1) * 16 + gl.arange(0, 16, layout=y.type.layout)
    gl.store(y_TD + t.to(gl.int64) * D + out, y.to(y_TD.dtype.element_ty), mask=out < D)
