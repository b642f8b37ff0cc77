"""The steps of the Hopper attention kernel below the level of Pallas: copies of rows, rotation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.mosaic_lanes import c32, i32, offset

TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
THREADS = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
TILE_BYTES = 8 * 128  # of shared memory: 8 rows of 64 channels


def _lane():
    """warp of the warpgroup, lane of the warp."""
    thread = arith.andi(utils.thread_idx(), c32(127))
    return arith.shrui(thread, c32(5)), arith.andi(thread, c32(31))


def _value(array):
    """The i32 that a thread holds of an array [128]."""
    return llvm.extractelement(array.registers.flat[0], c32(0))


def store_bias(rows: jax.Array, bias_ref) -> None:
    """bias_ref f32 [64] = 0 where a key has a row, -inf elsewhere; rows as in `copy_rows`."""

    @plgpu.inline_mgpu(arg_types=(THREADS, plgpu.RefType()))
    def run(ctx, rows, bias_ref):
        del ctx
        f32 = ir.F32Type.get()
        warp, lane = _lane()
        zero, low = (
            arith.constant(f32, ir.FloatAttr.get(f32, value)) for value in (0.0, -float("inf"))
        )
        there = arith.cmpi(arith.CmpIPredicate.sge, _value(rows), c32(0))
        key = arith.addi(arith.muli(warp, c32(16)), arith.andi(lane, c32(15)))
        pointer = offset(utils.memref_ptr(bias_ref), arith.muli(key, c32(4)))
        llvm.store(arith.select(there, zero, low), pointer)

    run(rows, bias_ref)


def copy_rows(source_ref, rows: jax.Array, slot_ref, first: int) -> None:
    """Starts copies of channels from `first` on of 64 rows of a source; zeros where there is none.

    source_ref  [N, K] in device memory.
    rows        i32 [128]: lanes l and l + 16 of warp w hold the row of key 16 w + l, or -1.
    slot_ref    [64, C] in shared memory.

    Shared memory holds tiles of 8 rows by 128 bytes whose 16-byte pieces are exchanged by the row
    number, as wgmma expects with a 128-byte swizzle.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), THREADS, plgpu.RefType(TRANSFORMS)))
    def run(ctx, source, rows, slot):
        del ctx
        i64 = ir.IntegerType.get_signless(64)
        row_tiles, column_tiles, _, _ = slot.type.shape
        lanes = column_tiles * 8  # of a row, 16 bytes each
        row_bytes = source.type.shape[1] * 2
        own = _value(rows)
        warp, lane = _lane()
        part = arith.andi(lane, c32(lanes - 1))
        among = arith.divui(lane, c32(lanes))  # the rows that a warp copies at a time
        pieces = arith.andi(part, c32(7))
        tile = arith.muli(arith.shrui(part, c32(3)), c32(TILE_BYTES))
        space = llvm.PointerType.get(address_space=1)
        base = llvm.addrspacecast(space, utils.memref_ptr(source))
        base = offset(base, arith.addi(arith.muli(part, c32(16)), c32(2 * first)))
        assert row_tiles == 8
        target = llvm.ptrtoint(i32(), utils.memref_ptr(slot))
        target = arith.addi(target, arith.muli(warp, c32(2 * column_tiles * TILE_BYTES)))
        target = arith.addi(target, tile)
        for key in range(0, 16, 32 // lanes):
            at = arith.addi(among, c32(key))
            row = utils.inline_ptx(
                "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
                own,
                at,
                result_types=i32(),
                convergent=True,
            )
            there = arith.cmpi(arith.CmpIPredicate.sge, row, c32(0))
            nbytes = arith.select(there, c32(16), c32(0))
            row = arith.select(there, row, c32(0))
            row_start = arith.muli(
                arith.extui(i64, row), arith.constant(i64, ir.IntegerAttr.get(i64, row_bytes))
            )
            low = arith.andi(at, c32(7))
            inside = arith.addi(
                arith.muli(arith.shrui(at, c32(3)), c32(column_tiles * TILE_BYTES)),
                arith.addi(
                    arith.muli(low, c32(128)),
                    arith.muli(arith.xori(pieces, low), c32(16)),
                ),
            )
            utils.inline_ptx(
                "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                arith.addi(target, inside),
                offset(base, row_start),
                nbytes,
                has_side_effects=True,
            )
        nvvm.cp_async_commit_group()

    run(source_ref, rows, slot_ref)


def await_copies(under_way: int) -> None:
    """Waits until at most `under_way` of the calls of `copy_rows` have copies under way."""

    @plgpu.inline_mgpu()
    def run(ctx):
        del ctx
        nvvm.cp_async_wait_group(under_way)

    run()


def _descriptor(ref, fields):
    """Descriptor of an operand in shared memory: its address, strides and the 128-byte swizzle."""
    i64 = ir.IntegerType.get_signless(64)
    address = arith.shrui(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), c32(4))
    address = arith.extui(i64, arith.andi(address, c32(0x3FFF)))
    between_columns, between_rows = fields
    fixed = (1 << 62) | (between_rows >> 4 << 32) | (between_columns >> 4 << 16)
    return llvm.or_(address, arith.constant(i64, ir.IntegerAttr.get(i64, fixed)))


def _multiply(lines, sums, count, operands, constraints):
    """Runs `lines`, a group of products, and waits for it; `count` registers of f32 come back.

    sums      registers that are added to, which the results take the place of; or none.
    operands  what `lines` name after them.
    """
    f32 = ir.F32Type.get()
    text = [
        ".reg .pred zero, one; .reg .b64 left, right;",
        "setp.ne.b32 zero, 0, 0; setp.eq.b32 one, 0, 0;",
        *lines,
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
    ]
    nvvm.wgmma_fence_aligned()
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*sums, *operands],
        "{ " + "\n".join(text) + " }",
        ",".join(["=f"] * count + [str(i) for i in range(len(sums))] + constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]


def _named(first, count):
    return "{" + ",".join(f"${i}" for i in range(first, first + count)) + "}"


def _array(values, shape):
    """The f32 values of a thread, in the order of wgmma, as an array."""
    layout = plgpu.Layout.WGMMA.to_mgpu()
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i, index in enumerate(np.ndindex(registers.shape)):
        vector = llvm.insertelement(llvm.mlir_undef(pair), values[2 * i], c32(0))
        registers[index] = llvm.insertelement(vector, values[2 * i + 1], c32(1))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _scalars(array):
    return [
        llvm.extractelement(register, c32(i)) for register in array.registers.flat for i in range(2)
    ]


def scores(q_ref, keys_ref) -> jax.Array:
    """f32 [64, 64] = q @ keys^T, both bf16 [2, 64, C] in shared memory: two halves of channels.

    A product waits for the one before it on the same sum. So each half has a sum of its own, and
    their products take turns.
    """
    _, rows, channels = q_ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(TRANSFORMS), plgpu.RefType(TRANSFORMS)),
        return_type=plgpu.ShapeDtypeStruct((rows, rows), jnp.float32, plgpu.Layout.WGMMA),
    )
    def run(ctx, q, keys):
        del ctx
        row_tile = channels // 64 * TILE_BYTES
        operands = [_descriptor(ref, (16, row_tile)) for ref in (q, keys)]
        lines = []
        for step in range(channels // 16):
            for part in range(2):
                at = part * 8 * row_tile + step // 4 * TILE_BYTES + step % 4 * 32
                lines += [
                    f"add.s64 left, $64, {at >> 4}; add.s64 right, $65, {at >> 4};",
                    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                    f"{_named(32 * part, 32)}, left, right, {'one' if step else 'zero'}, "
                    "1, 1, 0, 0;",
                ]
        sums = _multiply(lines, [], 64, operands, ["l", "l"])
        return _array(list(map(arith.addf, sums[:32], sums[32:])), (rows, rows))

    return run(q_ref, keys_ref)


def add_products(sums, weights: jax.Array, keys_ref) -> tuple[jax.Array, ...]:
    """The sums, f32 [64, 64] each, plus weights @ keys; weights f32 [64, 64] are rounded to bf16.

    keys_ref  bf16 [64, C] in shared memory; sums[i] are of the channels from 64 i on.
    """
    wgmma = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(sums[0].shape, jnp.float32, wgmma)

    @plgpu.inline_mgpu(
        arg_types=((wgmma,) * len(sums), wgmma, plgpu.RefType(TRANSFORMS)),
        return_type=(result,) * len(sums),
    )
    def run(ctx, sums, weights, keys):
        del ctx
        registers = [value for part in sums for value in _scalars(part)]
        count = len(registers)
        rounded = [
            utils.inline_ptx(
                "cvt.rn.bf16x2.f32 $0, $2, $1;",
                *(llvm.extractelement(register, c32(i)) for i in range(2)),
                result_types=i32(),
            )
            for register in weights.registers.flat
        ]
        row_tile = len(sums) * TILE_BYTES
        lines = []
        for step in range(4):
            lines += [
                f"add.s64 right, ${2 * count + 16}, {step * 2 * row_tile >> 4};",
                f"wgmma.mma_async.sync.aligned.m64n{64 * len(sums)}k16.f32.bf16.bf16 "
                f"{_named(0, count)}, {_named(2 * count + 4 * step, 4)}, right, one, 1, 1, 1;",
            ]
        operands = [*rounded, _descriptor(keys, (TILE_BYTES, row_tile))]
        values = _multiply(lines, registers, count, operands, ["r"] * 16 + ["l"])
        return tuple(
            _array(values[i : i + 32], part.shape)
            for i, part in zip(range(0, count, 32), sums, strict=True)
        )

    return run(tuple(sums), weights, keys_ref)


def turn(value: jax.Array, rope_ref, sign: float) -> jax.Array:
    """f32 [64, 64] with neighbouring channels turned by sign times the angles of rope_ref [2, 32].

    rope_ref  cos and sin, f32 in shared memory.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(value.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def run(ctx, value, rope):
        del ctx
        f32 = ir.F32Type.get()
        _, lane = _lane()
        base = offset(utils.memref_ptr(rope), arith.muli(arith.andi(lane, c32(3)), c32(4)))
        registers = np.empty_like(value.registers)
        # Registers of two neighbouring channels: first by 8 channels, then by the two rows.
        for index, register in np.ndenumerate(value.registers):
            block = index[1]
            cos, sin = (llvm.load(f32, offset(base, c32(16 * block + side))) for side in (0, 128))
            if sign < 0:
                sin = arith.negf(sin)
            even, odd = (llvm.extractelement(register, c32(i)) for i in range(2))
            first = arith.subf(arith.mulf(even, cos), arith.mulf(odd, sin))
            second = arith.addf(arith.mulf(even, sin), arith.mulf(odd, cos))
            register = llvm.insertelement(llvm.mlir_undef(register.type), first, c32(0))
            registers[index] = llvm.insertelement(register, second, c32(1))
        return mgpu.FragmentedArray(_registers=registers, _layout=value.layout, _is_signed=None)

    return run(value, rope_ref)
