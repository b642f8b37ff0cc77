"""The steps of the Hopper kernels below the level of Pallas: FP4 to matrix-unit operands.

A weight never leaves the registers after it was decoded: each thread decodes what `wgmma` wants it
to hold of the left operand. The order of channels within a block of the contraction is free, as
long as both operands have the same one; `channel_order` is the order in which the codes that one
thread reads, 16 neighbouring bytes of a row, are those that it needs.

Codes become bytes by table look-up: `prmt` picks four of eight table bytes by four nibbles. E5M2
holds E2M1 times 2^-13 to 2^13 without subnormal numbers, so the table of a scale is that of another
one plus a constant (products of E5M2 and E4M3 run at the rate of E4M3 alone).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.mosaic_lanes import c32, i32, offset

# E8M0 bytes below the largest of a band that E5M2 tables reach: 27 steps from 2^-13 to 2^13.
BAND = 27
# An E5M2 operand is the weight times 2^(TOP - scale byte of its band's top).
TOP = 140
BF16_BYTES = range(3, 253)  # scale bytes whose weights are normal bfloat16 numbers
# Bytes of the codes 0 to 3 and 4 to 7 at step s of a band: slope * s + base.
FP8_TABLE = ((0x04040400, 0x06040000), (0x04040404, 0x0E0C0A08))
OPERAND_BYTES = 128  # of a row, per step
BLOCKS = {"fp8": 128, "bf16": 64}  # channels per step

ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT
OPERAND = plgpu.Layout.WG_STRIDED((128 * 16,), vec_size=1)
TRANSFORMS = {
    "fp8": (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)),
    "bf16": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
}
OUT_DOWN = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
OUT_GATE_UP = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))


def channel_order(kind: str) -> np.ndarray:
    """order[i] = the channel of a block that operands hold at position i."""
    if kind == "fp8":
        return np.arange(128).reshape(4, 8, 4).swapaxes(0, 1).reshape(-1)
    return np.arange(64).reshape(4, 4, 2, 2).transpose(1, 2, 0, 3).reshape(-1)


def reorder(x: jax.Array, kind: str) -> jax.Array:
    """x [..., K] with the channels of every block in `channel_order`."""
    *lead, channels = x.shape
    if kind == "fp8":
        x = x.reshape(*lead, channels // 128, 4, 8, 4)
        return jnp.swapaxes(x, -3, -2).reshape(*lead, channels)
    x = x.reshape(*lead, channels // 64, 4, 4, 2, 2)
    return jnp.moveaxis(x, -4, -2).reshape(*lead, channels)


# --- lane code ---------------------------------------------------------------------------------


def _ptx(text, *args, result=None):
    return utils.inline_ptx(text, *args, result_types=i32() if result is None else result)


def _lane():
    """warp of the warpgroup, row 0..7 and quad 0..3 of the thread."""
    thread = arith.remui(utils.thread_idx(), c32(128))
    lane = arith.remui(thread, c32(32))
    warp = arith.shrui(thread, c32(5))
    return warp, arith.shrui(lane, c32(2)), arith.andi(lane, c32(3))


def _load(type_, pointer, alignment):
    return llvm.load(type_, pointer, alignment=alignment)


def _words(codes_ref, row, quad, row_bytes):
    """The codes of the thread: row_bytes / 4 bytes of a row, as i32 words."""
    count = row_bytes // 16
    at = arith.addi(arith.muli(row, c32(row_bytes)), arith.muli(quad, c32(row_bytes // 4)))
    vector = ir.VectorType.get((count,), i32())
    loaded = _load(vector, offset(utils.memref_ptr(codes_ref), at), row_bytes // 4)
    return [llvm.extractelement(loaded, c32(i)) for i in range(count)]


def _byte(scales_ref, row, group):
    """Scale byte of `group` in a row of 16 bytes."""
    i8 = ir.IntegerType.get_signless(8)
    at = arith.addi(arith.muli(row, c32(16)), group)
    return arith.extui(i32(), _load(i8, offset(utils.memref_ptr(scales_ref), at), 1))


def _halves(word):
    """Both halves of 8 codes: a byte selector of their magnitudes, and the codes themselves."""
    magnitudes = arith.andi(word, c32(0x77777777))
    yield magnitudes, word
    yield arith.shrui(magnitudes, c32(16)), arith.shrui(word, c32(16))


def _signs(half):
    """The signs of the 4 lower codes, as the top bits of 4 bytes."""
    # Bytes 0x80, or 0xFF where the nibble has its top bit: bit 6 is the sign.
    sign = _ptx("prmt.b32 $0, $1, $1, $2;", c32(0x80808080), half)
    return arith.andi(arith.shli(sign, c32(1)), c32(0x80808080))


def _decode_fp8(words, byte, top):
    """i32 registers of four E5M2 each for 8-code words, under scale bytes of a band."""
    step = arith.addi(arith.subi(byte, top), c32(BAND))
    valid = arith.cmpi(arith.CmpIPredicate.ult, arith.subi(step, c32(1)), c32(BAND))
    low, high = (
        arith.select(valid, arith.addi(arith.muli(step, c32(slope)), c32(base)), c32(0))
        for slope, base in FP8_TABLE
    )
    registers = []
    for word in words:
        for selector, half in _halves(word):
            value = _ptx("prmt.b32 $0, $1, $2, $3;", low, high, selector)
            registers.append(arith.ori(value, _signs(half)))
    return registers


def _decode_bf16(words, byte):
    """i32 registers of two bfloat16 each, exact for scale bytes 3 to 252: below 0, above NaN."""
    base = arith.shli(byte, c32(7))
    twice = arith.ori(base, arith.shli(base, c32(16)))
    # Codes 0 and 1, a zero and half of the scale; then 2 and 3, 4 and 5, 6 and 7.
    fields = [arith.shli(arith.subi(base, c32(128)), c32(16))]
    fields += [arith.addi(twice, c32(pair)) for pair in (0x00400000, 0x00C00080, 0x01400100)]
    exact = arith.cmpi(
        arith.CmpIPredicate.ult,
        arith.subi(byte, c32(BF16_BYTES[0])),
        c32(len(BF16_BYTES)),
    )
    large = arith.cmpi(arith.CmpIPredicate.uge, byte, c32(BF16_BYTES.stop))
    beyond = arith.select(large, c32(0x7FC07FC0), c32(0))
    fields = [arith.select(exact, field, beyond) for field in fields]
    # Tables of low and high bytes.
    low = [_ptx("prmt.b32 $0, $1, $2, 0x6420;", *fields[i : i + 2]) for i in (0, 2)]
    high = [_ptx("prmt.b32 $0, $1, $2, 0x7531;", *fields[i : i + 2]) for i in (0, 2)]
    registers = []
    for word in words:
        for selector, half in _halves(word):
            lows = _ptx("prmt.b32 $0, $1, $2, $3;", *low, selector)
            highs = _ptx("prmt.b32 $0, $1, $2, $3;", *high, selector)
            highs = arith.ori(highs, _signs(half))
            registers.append(_ptx("prmt.b32 $0, $1, $2, 0x5140;", lows, highs))
            registers.append(_ptx("prmt.b32 $0, $1, $2, 0x7362;", lows, highs))
    return registers


def _descriptor(x_ref, first_row):
    """Descriptor of an operand in shared memory from `first_row` on: K-major, 128 bytes a row."""
    i64 = ir.IntegerType.get_signless(64)
    pointer = llvm.ptrtoint(i32(), utils.memref_ptr(x_ref))
    address = arith.shrui(arith.addi(pointer, c32(first_row * OPERAND_BYTES)), c32(4))
    low = arith.extui(i64, arith.andi(address, c32(0x3FFF)))
    fixed = arith.constant(i64, ir.IntegerAttr.get(i64, (1 << 62) | (64 << 32) | (1 << 16)))
    return llvm.or_(low, fixed)


def _wgmma(kind, rows, a, descriptor, accumulators):
    """One step of [64, block] x [rows, block]^T, started and committed as a group.

    accumulators   registers to add to, or None to start from zero.
    """
    f32 = ir.F32Type.get()
    count = rows // 2
    types = "f32.e5m2.e4m3" if kind == "fp8" else "f32.bf16.bf16"
    depth = 32 if kind == "fp8" else 16
    outs = ",".join(f"${i}" for i in range(count))
    first_a = count if accumulators is None else 2 * count
    first_desc = first_a + 16
    tail = "1, 1" if kind == "fp8" else "1, 1, 0"
    lines = [
        ".reg .pred zero, one; .reg .b64 desc;",
        "setp.ne.b32 zero, 0, 0; setp.eq.b32 one, 0, 0;",
    ]
    for step in range(4):
        operand = ",".join(f"${first_a + 4 * step + i}" for i in range(4))
        scale = "zero" if step == 0 and accumulators is None else "one"
        lines.append(f"add.s64 desc, ${first_desc}, {2 * step};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{rows}k{depth}.{types} "
            f"{{{outs}}}, {{{operand}}}, desc, {scale}, {tail};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    constraints = ["=f"] * count
    inputs = []
    if accumulators is not None:
        constraints += [str(i) for i in range(count)]
        inputs += accumulators
    constraints += ["r"] * 16 + ["l"]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*inputs, *a, descriptor],
        "{ " + "\n".join(lines) + " }",
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]


def _wait(groups, registers, operand):
    """Waits until at most `groups` groups are under way; the registers can be read afterwards.

    The operand's registers are named so that they stay what they are until then.
    """
    f32 = ir.F32Type.get()
    count = len(registers)
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*registers, *operand],
        f"wgmma.wait_group.sync.aligned {groups};",
        ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * len(operand)),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]


def _settled(operand):
    """The registers of an operand that was decoded while products ran, written anew after them.

    Nothing in PTX reads an operand after its products have been started, so ptxas would decode the
    next one into the same registers, for which it has every product end before anything follows
    ("C7513 ... wgmma.mma_async instructions are serialized"). An exclusive or with a zero that it
    cannot know, a coordinate that the grid does not have, keeps the registers apart.
    """
    count = len(operand)
    lines = [f"xor.b32 ${i}, ${count + i}, nothing;" for i in range(count)]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([i32()] * count),
        operand,
        "{ .reg .b32 nothing; mov.u32 nothing, %ctaid.z;\n" + "\n".join(lines) + " }",
        ",".join(["=r"] * count + ["r"] * count),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32(), result, [i]) for i in range(count)]


def _scalars(array):
    """f32 values of an accumulator array, in the order of wgmma."""
    return [llvm.extractelement(register, c32(0)) for register in array.registers.flat]


def _array(like, values):
    vector = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.empty(like.registers.shape, dtype=object)
    registers.flat = [
        llvm.insertelement(llvm.mlir_undef(vector), value, c32(0)) for value in values
    ]
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _integers(values):
    vector = ir.VectorType.get((1,), i32())
    registers = np.empty((len(values),), dtype=object)
    registers[:] = [llvm.insertelement(llvm.mlir_undef(vector), value, c32(0)) for value in values]
    return mgpu.FragmentedArray(_registers=registers, _layout=OPERAND.to_mgpu(), _is_signed=False)


def _operand_row(kind, codes_ref, scales_ref, top, row):
    """8 registers of the left operand of four products, for one of the two rows of a thread."""
    _, _, quad = _lane()
    words = _words(codes_ref, row, quad, BLOCKS[kind] // 2)
    if kind == "fp8":
        return _decode_fp8(words, _byte(scales_ref, row, quad), top.registers.flat[0])
    return _decode_bf16(words, _byte(scales_ref, row, arith.shrui(quad, c32(1))))


def _interleave(halves):
    """The registers of both rows in the order of wgmma."""
    return [register for pair in zip(*halves, strict=True) for register in pair]


def _fragment_rows(kind: str, paired: bool):
    """Rows of the weight tile whose products a thread accumulates, r and r + 8 of a warp's 16.

    paired: the same channel of w1 and of w3. The channels are in `channel_order`, so that h has it;
    FP8 tiles hold 16 neighbours of each 32 channels of a block.
    """
    warp, row, _ = _lane()
    group = arith.shrui(utils.thread_idx(), c32(7))

    def combine(*terms):
        total = c32(0)
        for term, factor in terms:
            total = arith.addi(total, arith.muli(term, c32(factor)))
        return total

    if not paired:
        first = combine((group, 64), (warp, 16), (row, 1))
        return first, arith.addi(first, c32(8))
    bits = 2 if kind == "fp8" else 1
    low = arith.andi(row, c32(2**bits - 1))
    quad = arith.shrui(row, c32(bits))
    warp_high, warp_low = arith.shrui(warp, c32(1)), arith.andi(warp, c32(1))
    if kind == "fp8":
        first = combine((warp_low, 32), (quad, 16), (group, 8), (warp_high, 4), (low, 1))
    else:
        first = combine((quad, 16), (group, 8), (warp_high, 4), (warp_low, 2), (low, 1))
    return first, arith.addi(first, c32(64))


def _promote(sums, partial, first, x_scales):
    """sums += partial * scales for the columns from `first` on; x_scales points at the quad's."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for block in range(len(partial) // 4):
        column = first + block * 8
        scales = _load(pair, offset(x_scales, c32(column * 4)), 8)
        scales = [llvm.extractelement(scales, c32(i)) for i in (0, 1)]
        for part in range(4):
            at = column // 8 * 4 + part
            sums[at] = llvm.intr_fma(partial[block * 4 + part], scales[part % 2], sums[at])


def operand(kind, codes_ref, scales_ref, top, *, paired):
    """The 64 weight rows of the warpgroup, decoded: 16 registers a thread.

    codes_ref   u8, 128 rows of a block of codes; scales_ref u8 [..., groups] in rows of 16 bytes.
    top         i32 scalar, see TOP; without meaning for "bf16".
    paired      the first rows of the tile are w1's, rows 64 to 127 are w3's: rows r and r + 8 of 16
                rows of the result belong to the same channel.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((128 * 16,), jnp.int32, OPERAND),
    )
    def run(ctx, codes_ref, scales_ref, top):
        del ctx
        rows = _fragment_rows(kind, paired)
        halves = [_operand_row(kind, codes_ref, scales_ref, top, row) for row in rows]
        return _integers(_interleave(halves))

    return run(codes_ref, scales_ref, top)


def step(kind, total, operand, x_ref, x_scale_ref, following, *, rows, chunk, under_way, paired):
    """total [64, rows] + operand @ x^T, and the next operand, decoded meanwhile.

    total        f32; for FP8 each row of x counts times its scale.
    operand      see `operand`; x_ref [rows or more, block]; x_scale_ref f32 [rows or more].
    following    the references and `top` of the next operand.
    chunk        rows of one FP8 product: its result is scaled while the next one runs.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            ACCUMULATOR,
            OPERAND,
            plgpu.RefType(TRANSFORMS[kind]),
            plgpu.RefType(),
            (plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        ),
        return_type=(
            plgpu.ShapeDtypeStruct((64, rows), jnp.float32, ACCUMULATOR),
            plgpu.ShapeDtypeStruct((128 * 16,), jnp.int32, OPERAND),
        ),
    )
    def run(ctx, total, operand, x_ref, x_scale_ref, following):
        del ctx
        a = [llvm.extractelement(register, c32(0)) for register in operand.registers.flat]
        sums = _scalars(total)
        halves = []

        def decode():
            if len(halves) < 2:
                row = _fragment_rows(kind, paired)[len(halves)]
                halves.append(_operand_row(kind, *following, row))

        if kind == "bf16":
            nvvm.wgmma_fence_aligned()
            sums = _wgmma(kind, rows, a, _descriptor(x_ref, 0), sums)
            decode()
            decode()
            sums = _wait(0, sums, a)
        else:
            _, _, quad = _lane()
            x_scales = offset(utils.memref_ptr(x_scale_ref), arith.muli(quad, c32(8)))

            def start(index):
                nvvm.wgmma_fence_aligned()
                return _wgmma(kind, chunk, a, _descriptor(x_ref, index * chunk), None)

            chunks = rows // chunk
            running = [start(0)]
            for index in range(chunks):
                if under_way == 2 and index + 1 < chunks:
                    running.append(start(index + 1))
                decode()
                if chunks == 1:
                    decode()
                oldest, *running = running
                partial = _wait(len(running), oldest, a)
                _promote(sums, partial, index * chunk, x_scales)
                if under_way == 1 and index + 1 < chunks:
                    running.append(start(index + 1))
        return _array(total, sums), _integers(_settled(_interleave(halves)))

    return run(total, operand, x_ref, x_scale_ref, following)


def _store_columns(out_ref, pairs, *, row_bytes, column_bytes):
    """Stores 8x8 blocks [channels, tokens], as registers of two tokens, transposed.

    pairs[i] are the registers of tokens 8 i .. 8 i + 7, one per 8 channels of the warp; row t of
    out_ref gets them from byte `column_bytes` on. Rows of 64 or 128 bytes are swizzled.
    """
    thread = arith.remui(utils.thread_idx(), c32(32))
    base = utils.memref_ptr(out_ref)
    matrices = [(i, j) for i, blocks in enumerate(pairs) for j in range(len(blocks))]
    per_token = len(pairs[0])
    which = arith.shrui(thread, c32(3))
    first = 0
    while first < len(matrices):
        count = min(4, len(matrices) - first)
        count = 4 if count == 4 else 2 if count >= 2 else 1
        # Lane l gives the address of row l % 8 of matrix l // 8; lanes that are not asked repeat.
        matrix = arith.addi(c32(first), arith.andi(which, c32(count - 1)))
        block = arith.divui(matrix, c32(per_token))
        part = arith.remui(matrix, c32(per_token))
        token = arith.addi(arith.muli(block, c32(8)), arith.andi(thread, c32(7)))
        at = arith.addi(
            arith.muli(token, c32(row_bytes)),
            arith.addi(column_bytes, arith.muli(part, c32(16))),
        )
        bits = 0x70 if row_bytes == 128 else 0x30
        at = arith.xori(at, arith.andi(arith.shrui(at, c32(3)), c32(bits)))
        pointer = llvm.ptrtoint(i32(), offset(base, at))
        operands = ", ".join(f"${i + 1}" for i in range(count))
        utils.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{operands}}};",
            pointer,
            *(pairs[i][j] for i, j in matrices[first : first + count]),
        )
        first += count


def _pack(low, high):
    return _ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high)


def _float(value):
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))


def store_down(total, factor, out_ref, *, first, tokens):
    """Rounds total[:, first : first + tokens] * factor into out_ref bf16 [tokens, 64]."""

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, plgpu.Layout.WG_SPLAT(()), plgpu.RefType(OUT_DOWN)),
    )
    def run(ctx, total, factor, out_ref):
        del ctx
        values = _scalars(total)
        factor = factor.registers.flat[0]
        warp, _, _ = _lane()
        pairs = []
        for block in range(first // 8, (first + tokens) // 8):
            four = [arith.mulf(value, factor) for value in values[4 * block : 4 * block + 4]]
            pairs.append([_pack(*four[:2]), _pack(*four[2:])])
        _store_columns(out_ref, pairs, row_bytes=128, column_bytes=arith.muli(warp, c32(32)))

    run(total, factor, out_ref)


def store_gate_up(total, factor, weights_ref, out_ref, *, first, tokens, limit):
    """h of total[:, first : first + tokens], paired rows, into out_ref bf16 [tokens, 32].

    weights_ref  f32 [rows]: routing weights.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            ACCUMULATOR,
            plgpu.Layout.WG_SPLAT(()),
            plgpu.RefType(),
            plgpu.RefType(OUT_GATE_UP),
        ),
    )
    def run(ctx, total, factor, weights_ref, out_ref):
        del ctx
        f32 = ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        values = _scalars(total)
        factor = factor.registers.flat[0]
        warp, _, quad = _lane()
        weights = offset(utils.memref_ptr(weights_ref), arith.muli(quad, c32(8)))
        pairs = []
        for block in range(first // 8, (first + tokens) // 8):
            two = _load(pair, offset(weights, c32(block * 32)), 8)
            h = []
            for i in range(2):
                gate = arith.mulf(values[4 * block + i], factor)
                up = arith.mulf(values[4 * block + 2 + i], factor)
                h.append(
                    utils.inline_ptx(
                        """{
                        .reg .f32 g, u, e, bound, lower;
                        .reg .b32 both;
                        mov.f32 bound, $4; neg.f32 lower, bound;
                        cvt.rn.bf16x2.f32 both, $2, $1;
                        shl.b32 g, both, 16;
                        and.b32 u, both, 0xFFFF0000;
                        min.NaN.f32 g, g, bound;
                        min.NaN.f32 u, u, bound; max.NaN.f32 u, u, lower;
                        mul.f32 e, g, 0fBFB8AA3B;
                        ex2.approx.f32 e, e;
                        add.f32 e, e, 0f3F800000;
                        div.full.f32 e, g, e;
                        mul.f32 e, e, u;
                        mul.f32 $0, e, $3;
                        }""",
                        gate,
                        up,
                        llvm.extractelement(two, c32(i)),
                        _float(limit),
                        result_types=f32,
                    )
                )
            pairs.append([_pack(*h)])
        _store_columns(out_ref, pairs, row_bytes=64, column_bytes=arith.muli(warp, c32(16)))

    run(total, factor, weights_ref, out_ref)
