"""Pallas-Mosaic kernel of the two attention operations for Hopper.

One persistent block per multiprocessor takes tokens in turn; 64 heads are the rows of every
product. A producer warpgroup fills shared memory with queries and blocks of 64 keys. Two consumer
warpgroups work on pairs of blocks: each makes the scores of one block, both exchange their row
maxima and put their probabilities into shared memory, then each multiplies all of them by its half
of the channels, which stays in its registers until the token is done.

Window and contiguous entries arrive through the tensor copy engine. A token's window starts at a
row of its own, which tiled copies cannot: they take it from one of eight copies of the window rows,
each shifted by one row more. Rows of a list arrive through per-thread asynchronous copies (`_issue`
and `_await`), which interpreters cannot run: there `_gather_plainly` stands in.

A token's keys come in a fixed order (window, then entries in steps of two blocks), so its bits
depend neither on its place in the chunk nor on its neighbours.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support

HEADS = 64  # rows of a product
KEYS = 64  # keys of a block
WIDTH = 512
HALF = WIDTH // 2
PIECE = 128  # channels of one product with the values
WINDOW = 128
SHIFTS = 8  # rows of a shared-memory tile
FLOOR = -1e30  # finite stand-in for -inf, see attention_kernel

_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def refusal(q: jax.Array, window: int) -> str | None:
    """Why the kernel cannot take this call; None when it can."""
    heads, width = q.shape[1:]
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}, the kernel multiplies bfloat16"
    if heads % HEADS or width != WIDTH or window != WINDOW:
        return (
            f"{heads} heads of {width} channels with a window of {window}, the kernel takes "
            f"multiples of {HEADS} heads of {WIDTH} channels with a window of {WINDOW}"
        )
    return None


def multiprocessors(interpret: bool) -> int:
    """Persistent blocks to start: one per multiprocessor of the default device."""
    return 2 if interpret else support.default_device().core_count


def interpreter() -> plgpu.InterpretGPUParams:
    """The interpreter that simulates shared memory, barriers and asynchronous copies."""
    return plgpu.InterpretGPUParams()


def attend(
    q: jax.Array,
    window_kv: jax.Array,
    entries: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    position: jax.Array,
    *,
    ratio: int,
    scale: float,
    multiprocessors: int,
    interpret: Any = None,
) -> jax.Array:
    """Attention of every token over its window and its entries.

    entries None: window only. indices None: the entries i < (position + t + 1) // ratio, else the
    rows that indices [T, k] names (-1 = none). Other arguments as in the doors; multiprocessors is
    the number of persistent blocks, interpret None or `plgpu.InterpretGPUParams`.
    """
    tokens, heads, _ = q.shape
    groups = heads // HEADS
    arrays = [position.reshape(1), q, sink, _shifted(window_kv, position)]
    capacity = 0 if entries is None else entries.shape[0]
    if indices is not None:
        indices = jnp.pad(
            indices, ((0, 0), (0, -indices.shape[1] % (2 * KEYS))), constant_values=-1
        )
        places = jnp.arange(indices.shape[1], dtype=jnp.int32) + 1
        used = jnp.max(jnp.where(indices >= 0, places[None, :], 0), axis=1)
        arrays += [entries, indices, used]
    elif entries is not None:
        arrays.append(_readable(entries))
    kernel = functools.partial(
        _kernel,
        items=tokens * groups,
        groups=groups,
        capacity=capacity,
        ratio=max(ratio, 1),
        factor=scale * math.log2(math.e),
        blocks=multiprocessors,
        interpreted=interpret is not None,
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types={
            "q_smem": plgpu.SMEM((2, HEADS, HALF), q.dtype, transforms=_TRANSFORMS),
            "kv_smem": plgpu.SMEM((2, 2, KEYS, HALF), q.dtype, transforms=_TRANSFORMS),
            "p_smem": plgpu.SMEM((2, HEADS, KEYS), q.dtype, transforms=_TRANSFORMS),
            "maxima": plgpu.SMEM((2, HEADS), jnp.float32),
            "sums": plgpu.SMEM((2, HEADS), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "q_free": plgpu.Barrier(num_arrivals=2),
            "kv_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "kv_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
            "met": plgpu.Barrier(num_arrivals=2),
        },
        grid=(multiprocessors,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(*arrays)


def _shifted(window_kv: jax.Array, position: jax.Array) -> jax.Array:
    """[8, rows, K]: copy s starts at row s; rows of negative position are zero."""
    rows = window_kv.shape[0]
    at = jnp.arange(rows, dtype=jnp.int32) + position - (WINDOW - 1)
    clean = jnp.where((at >= 0)[:, None], window_kv, jnp.zeros((), window_kv.dtype))
    padded = -(-rows // SHIFTS) * SHIFTS + SHIFTS
    clean = jnp.pad(clean, ((0, padded + SHIFTS - rows), (0, 0)))
    return jnp.stack([clean[shift : shift + padded] for shift in range(SHIFTS)])


def _readable(entries: jax.Array) -> jax.Array:
    """Entries in whole pairs of blocks; NaN becomes the largest finite number.

    Rows that a token does not see get weight zero and may hold NaN, which a product would spread.
    The finite stand-in vanishes there and ruins the scores of a token that does see it.
    """
    largest = jnp.asarray(jnp.finfo(entries.dtype).max, entries.dtype)
    clean = jnp.where(jnp.isnan(entries), largest, entries)
    return jnp.pad(clean, ((0, -entries.shape[0] % (2 * KEYS)), (0, 0)))


def _kernel(
    position_ref,
    q_ref,
    sink_ref,
    windows_ref,
    *refs,
    q_smem,
    kv_smem,
    p_smem,
    maxima,
    sums,
    q_full,
    q_free,
    kv_full,
    kv_free,
    met,
    items: int,
    groups: int,
    capacity: int,
    ratio: int,
    factor: float,
    blocks: int,
    interpreted: bool,
):
    *entry_refs, out_ref = refs
    has_list = len(entry_refs) == 3
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    position = position_ref[0]
    rounds = lax.div(items - block + blocks - 1, blocks)

    def item(turn):
        """Token, first head, number of entries and pairs of key blocks of a turn."""
        at = turn * blocks + block
        token = lax.div(at, groups)
        if has_list:
            count = entry_refs[2][token]
        else:
            count = jnp.minimum(lax.div(position + token + 1, ratio), capacity)
        pairs = 1 + lax.div(count + 2 * KEYS - 1, 2 * KEYS)
        return token, lax.rem(at, groups) * HEADS, count, pairs

    @pl.when(warpgroup == 2)
    def _produce():
        # The addresses of a gather need registers.
        plgpu.set_max_registers(56 if has_list else 40, action="decrease")

        def make_turn(turn, done):
            token, head, _, pairs = item(turn)
            shift = lax.rem(token, SHIFTS)
            window_row = token - shift

            def wait_free(slot, pair):
                @pl.when(done + pair > 0)
                def _():
                    plgpu.barrier_wait(kv_free.at[slot])

            def copy(source, slot):
                for part in range(2):
                    plgpu.copy_gmem_to_smem(
                        source.at[:, pl.ds(part * HALF, HALF)],
                        kv_smem.at[slot, part],
                        kv_full.at[slot],
                    )

            for slot in range(2):
                wait_free(slot, 0)
                row = pl.multiple_of(window_row + slot * KEYS, SHIFTS)
                copy(windows_ref.at[shift, pl.ds(row, KEYS)], slot)

            @pl.when(turn > 0)
            def _():
                plgpu.barrier_wait(q_free)

            for part in range(2):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[token, pl.ds(head, HEADS), pl.ds(part * HALF, HALF)],
                    q_smem.at[part],
                    q_full,
                )

            if entry_refs:

                @pl.loop(1, pairs)
                def _(pair):
                    for slot in range(2):
                        wait_free(slot, pair)
                        row = pl.multiple_of((2 * (pair - 1) + slot) * KEYS, KEYS)
                        if not has_list:
                            copy(entry_refs[0].at[pl.ds(row, KEYS)], slot)
                            continue
                        chosen = entry_refs[1].at[token, pl.ds(row, KEYS)]
                        gather = _gather_plainly if interpreted else _issue
                        gather(entry_refs[0], chosen, kv_smem.at[slot])
                    if has_list:
                        for slot in range(2):
                            if not interpreted:
                                _await(1 - slot)
                            plgpu.commit_smem()
                            for _ in range(2):
                                plgpu.barrier_arrive(kv_full.at[slot])

            return done + pairs

        lax.fori_loop(0, rounds, make_turn, 0)

        @pl.when(rounds > 0)
        def _():
            plgpu.barrier_wait(q_free)
            for slot in range(2):
                plgpu.barrier_wait(kv_free.at[slot])

    @pl.when(warpgroup < 2)
    def _consume():
        plgpu.set_max_registers(224 if has_list else 232, action="increase")

        def meet():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def splat(value):
            return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), _ROWS)

        def multiply_keys(acc_ref):
            for part in range(2):
                keys = kv_smem.at[warpgroup, part]
                plgpu.wgmma(acc_ref, q_smem.at[part], keys.transpose((1, 0)))
            return acc_ref[...]

        def multiply_values(acc_ref, columns):
            for slot in range(2):
                plgpu.wgmma(acc_ref, p_smem.at[slot], kv_smem.at[slot, warpgroup, :, columns])
            return acc_ref[...]

        def make_turn(turn, _):
            token, head, count, pairs = item(turn)
            plgpu.barrier_wait(q_full)

            def visible(pair):
                shape = (HEADS, KEYS)
                lanes = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
                row = (2 * (pair - 1) + warpgroup) * KEYS
                oldest = WINDOW - 1 - position - token - warpgroup * KEYS
                seen = lanes >= jnp.where(pair == 0, oldest, 0)
                if not has_list:
                    return seen & (lanes < jnp.where(pair == 0, KEYS, count - row))
                # The window pair looks at the list too, and takes any row of it.
                at = pl.multiple_of(jnp.maximum(row, 0), KEYS)
                chosen = plgpu.load(
                    entry_refs[1].at[token, pl.ds(at, KEYS)], layout=_COLUMNS, optimized=False
                )
                chosen = jnp.maximum(chosen, jnp.where(pair == 0, 0, -1))
                return seen & (lax.broadcast_in_dim(chosen, shape, [1]) >= 0)

            def step(pair, carry):
                highest, total, values = carry
                seen = visible(pair)
                plgpu.barrier_wait(kv_full.at[warpgroup])
                scores = pl.run_scoped(multiply_keys, plgpu.ACC((HEADS, KEYS), jnp.float32))
                scores = jnp.where(seen, scores * factor, -jnp.inf)
                maxima.at[warpgroup][...] = jnp.max(scores, axis=1)
                meet()
                new = highest
                for other in range(2):
                    new = jnp.maximum(new, plgpu.load(maxima.at[other], layout=_ROWS))
                shrink = jnp.exp2(highest - new)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new, scores.shape, [0]))
                total = total * shrink + jnp.sum(weights, axis=1)
                p_smem.at[warpgroup][...] = weights.astype(p_smem.dtype)
                plgpu.commit_smem()
                meet()
                plgpu.barrier_wait(kv_full.at[1 - warpgroup])
                new_values = []
                for piece, old in enumerate(values):
                    product = pl.run_scoped(
                        functools.partial(multiply_values, columns=pl.ds(piece * PIECE, PIECE)),
                        plgpu.ACC((HEADS, PIECE), jnp.float32),
                    )
                    old = old * lax.broadcast_in_dim(shrink, old.shape, [0])
                    new_values.append(old + product)
                for slot in range(2):
                    plgpu.barrier_arrive(kv_free.at[slot])
                return new, total, tuple(new_values)

            empty = plgpu.layout_cast(jnp.zeros((HEADS, PIECE), jnp.float32), plgpu.Layout.WGMMA)
            highest, total, values = lax.fori_loop(
                0, pairs, step, (splat(FLOOR), splat(0.0), (empty,) * (HALF // PIECE))
            )
            sums.at[warpgroup][...] = total
            meet()
            total = sum(plgpu.load(sums.at[other], layout=_ROWS) for other in range(2))
            bias = plgpu.load(sink_ref.at[pl.ds(head, HEADS)], layout=_ROWS, optimized=False)
            total += jnp.exp2(bias * math.log2(math.e) - highest)
            # Nobody reads the queries any more: they make room for the result.
            for piece, value in enumerate(values):
                value = value / lax.broadcast_in_dim(total, value.shape, [0])
                columns = pl.ds(piece * PIECE, PIECE)
                q_smem.at[warpgroup, :, columns][...] = value.astype(q_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                q_smem.at[warpgroup],
                out_ref.at[token, pl.ds(head, HEADS), pl.ds(warpgroup * HALF, HALF)],
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(q_free)

        lax.fori_loop(0, rounds, make_turn, None)
        plgpu.wait_smem_to_gmem(0)


def _gather_plainly(entries_ref, chosen_ref, slot_ref) -> None:
    """Rows chosen_ref [64] of entries_ref into slot_ref [2, 64, 256], zeros for -1."""

    @pl.loop(0, KEYS)
    def _(key):
        row = chosen_ref[key]
        for part in range(2):
            values = entries_ref[jnp.maximum(row, 0), pl.ds(part * HALF, HALF)]
            slot_ref[part, key, :] = jnp.where(row >= 0, values, jnp.zeros_like(values))


def _issue(entries_ref, chosen_ref, slot_ref) -> None:
    """Starts the copies of `_gather_plainly` as one group of 16-byte asynchronous copies.

    A warp takes half a row (512 bytes) at a time. Shared memory holds tiles of 8 rows by 128 bytes
    whose 16-byte pieces are exchanged by the row number, as wgmma expects with a 128-byte swizzle.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(_TRANSFORMS)))
    def start(ctx, entries, chosen, slot):
        del ctx
        ir, arith, llvm, nvvm = _dialects()
        i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
        utils = mgpu.utils

        def constant(value):
            return arith.constant(i32, value)

        thread = arith.remui(utils.thread_idx(), constant(128))
        lane = arith.remui(thread, constant(32))
        warp = arith.divui(thread, constant(32))
        pieces = arith.remui(lane, constant(8))
        tile = arith.muli(arith.divui(lane, constant(8)), constant(1024))
        global_space = llvm.PointerType.get(address_space=1)
        source = llvm.addrspacecast(global_space, utils.memref_ptr(entries))
        source = utils.getelementptr(source, [arith.muli(lane, constant(16))], i8)
        list_pointer = utils.getelementptr(
            utils.memref_ptr(chosen), [arith.muli(warp, constant(16))], i32
        )
        target = utils.getelementptr(
            utils.memref_ptr(slot), [arith.addi(tile, arith.muli(warp, constant(8192)))], i8
        )
        rows = [llvm.load(i32, utils.getelementptr(list_pointer, [key], i32)) for key in range(16)]
        for key, row in enumerate(rows):
            there = arith.cmpi(arith.CmpIPredicate.sge, row, constant(0))
            nbytes = arith.select(there, constant(16), constant(0))
            row = arith.select(there, row, constant(0))
            offset = arith.muli(arith.extui(i64, row), arith.constant(i64, 2 * WIDTH))
            piece = arith.muli(arith.xori(pieces, constant(key % 8)), constant(16))
            inside = key // 8 * 4096 + key % 8 * 128
            for part in range(2):
                nvvm.cp_async_shared_global(
                    utils.getelementptr(
                        target, [arith.addi(piece, constant(inside + part * KEYS * HALF * 2))], i8
                    ),
                    utils.getelementptr(
                        source, [arith.addi(offset, arith.constant(i64, part * HALF * 2))], i8
                    ),
                    16,
                    nvvm.LoadCacheModifierKind.CG,
                    cp_size=nbytes,
                )
        nvvm.cp_async_commit_group()

    start(entries_ref, chosen_ref, slot_ref)


def _await(groups: int) -> None:
    """Waits until at most `groups` of the groups that this thread has started are under way."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        _dialects()[3].cp_async_wait_group(groups)

    wait()


def _dialects() -> tuple[Any, Any, Any, Any]:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, nvvm

    return ir, arith, llvm, nvvm
