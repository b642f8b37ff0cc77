"""Pallas-Mosaic kernel of the two attention operations for Hopper.

One persistent block per multiprocessor takes tokens in turn; 64 heads are the rows of every
product. A producer warpgroup fills shared memory with queries and blocks of 64 keys. Each of two
consumer warpgroups makes all scores of a block and multiplies the probabilities, which never leave
its registers, by its half of the channels. To make the scores twice costs half as many products
again, but the two then have nothing to exchange: one multiplies while the other exponentiates.

A token's keys come in a fixed order, its window and then its entries, so its bits depend neither on
its place in the chunk nor on its neighbours.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import attention_sm90_lanes, attention_sm90_plain, mosaic, rotary, support
from pallas_kernels.attention_kernel import FLOOR
from pallas_kernels.attention_sm90_lanes import THREADS, TRANSFORMS

HEADS = 64  # rows of a product
KEYS = 64  # keys of a block
PIECE = 64  # channels that are rounded, rotated and stored at a time
STAGES = 2  # blocks of keys in shared memory
CONSUMERS = 2
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def refusal(q: jax.Array, rope: rotary.Table | None = None) -> str | None:
    """Why the kernel cannot take these queries [T, H, K] and angles; None when it can."""
    heads, width = q.shape[1:]
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}, the kernel multiplies bfloat16"
    if heads % HEADS or width not in (128, 256, 512):
        return (
            f"{heads} heads of {width} channels, the kernel takes multiples of {HEADS} heads of "
            "128, 256 or 512 channels"
        )
    if rope is not None and 2 * rope[0].shape[1] > PIECE:
        return f"{rope[0].shape[1]} channel pairs turn, the kernel turns up to {PIECE // 2}"
    return None


def attend(
    q: jax.Array,
    window_kv: jax.Array,
    entries: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    position: jax.Array,
    *,
    ratio: int,
    window: int,
    scale: float,
    norm_eps: float | None = None,
    rope: rotary.Table | None = None,
    interpret: bool,
    blocks: int | None = None,
) -> jax.Array:
    """As `attention_kernel.attend`.

    blocks run at a time; None: as many as the default device has multiprocessors.
    """
    if blocks is None:
        blocks = mosaic.blocks_at_a_time(support.default_device())
    tokens, heads, width = q.shape
    half = width // 2
    arrays = {"position": position.reshape(1), "q": q, "sink": sink, "window": window_kv}
    if entries is not None and entries.shape[0] and (indices is None or indices.shape[1]):
        arrays["entries"] = entries
        if indices is not None:
            arrays |= _for_threads(indices)
    if rope is not None:
        arrays["rope"] = _turns(rope)
    hardware = attention_sm90_plain if interpret else attention_sm90_lanes
    scratch = {
        "q_smem": plgpu.SMEM((2, HEADS, half), q.dtype, transforms=TRANSFORMS),
        "kv_smem": plgpu.SMEM((STAGES, 2, KEYS, half), q.dtype, transforms=TRANSFORMS),
        "bias_smem": plgpu.SMEM((STAGES, KEYS), jnp.float32),
        "out_smem": plgpu.SMEM((CONSUMERS, HEADS, PIECE), q.dtype, transforms=TRANSFORMS),
        "sums": plgpu.SMEM((CONSUMERS, HEADS), jnp.float32),
        "rope_smem": plgpu.SMEM((2, CONSUMERS, 2, PIECE // 2), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=2 if rope is None else 3),
        "q_free": plgpu.Barrier(num_arrivals=CONSUMERS),
        "full": plgpu.Barrier(num_barriers=2 * STAGES),
        "free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2 * STAGES),
        "go": plgpu.Barrier(num_barriers=CONSUMERS),
        "met": plgpu.Barrier(num_arrivals=CONSUMERS),
    }
    run = mosaic.kernel(
        functools.partial(
            _kernel,
            names=tuple(arrays),
            tokens=tokens,
            groups=heads // HEADS,
            ratio=max(ratio, 1),
            window=window,
            factor=scale * math.log2(math.e),
            norm_eps=norm_eps,
            blocks=blocks,
            hardware=hardware,
        ),
        "window_attention" if indices is None else "sparse_attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        blocks=blocks,
        warpgroups=CONSUMERS + 1,
        interpret=interpret,
        approx_math=True,
    )
    return run(*arrays.values())


def _for_threads(indices: jax.Array) -> dict[str, jax.Array]:
    """The list in blocks of keys, the row that each thread of the producer holds; blocks in use."""
    listed = jnp.pad(indices, ((0, 0), (0, -indices.shape[1] % KEYS)), constant_values=-1)
    places = jnp.arange(listed.shape[1], dtype=jnp.int32) // KEYS + 1
    used = jnp.max(jnp.where(listed >= 0, places, 0), axis=1)
    # A warp copies 16 keys of a block: its lanes hold them twice.
    lanes = listed.reshape(-1, KEYS // 16, 1, 16)
    lanes = jnp.broadcast_to(lanes, (lanes.shape[0], KEYS // 16, 2, 16))
    return {"listed": lanes.reshape(*indices.shape[:1], -1), "used": used}


def _turns(rope: rotary.Table) -> jax.Array:
    """f32 [T, 2, 2, 32]: cos and sin of the last piece of each half; the first half stays."""
    cos, sin = rope
    free = ((0, 0), (PIECE // 2 - cos.shape[1], 0))
    last = jnp.stack([jnp.pad(cos, free, constant_values=1), jnp.pad(sin, free)], axis=1)
    first = jnp.stack([jnp.ones_like(last[:, 0]), jnp.zeros_like(last[:, 1])], axis=1)
    return jnp.stack([first, last], axis=1)


def _kernel(
    *refs,
    q_smem,
    kv_smem,
    bias_smem,
    out_smem,
    sums,
    rope_smem,
    q_full,
    q_free,
    full,
    free,
    go,
    met,
    names: tuple[str, ...],
    tokens: int,
    groups: int,
    ratio: int,
    window: int,
    factor: float,
    norm_eps: float | None,
    blocks: int,
    hardware,
):
    *refs, out = refs
    inputs = dict(zip(names, refs, strict=True))
    half = q_smem.shape[2]
    block = lax.axis_index(mosaic.BLOCK_AXIS)
    group = lax.axis_index(mosaic.WARPGROUP_AXIS)
    position = inputs["position"][0]
    window_blocks = pl.cdiv(window, KEYS)
    turns = lax.div(jnp.maximum(tokens * groups - block, 0) + (blocks - 1), blocks)

    def item(turn):
        """Token and first head of a turn, entries that a token sees, blocks of keys."""
        at = turn * blocks + block
        token = lax.div(at, groups)
        seen = jnp.int32(0)
        if "used" in inputs:
            entry_blocks = inputs["used"][token]
        elif "entries" in inputs:
            seen = jnp.minimum(lax.div(position + token + 1, ratio), inputs["entries"].shape[0])
            entry_blocks = lax.div(seen + (KEYS - 1), KEYS)
        else:
            entry_blocks = jnp.int32(0)
        return token, (at - token * groups) * HEADS, seen, window_blocks + entry_blocks

    @pl.when(group == CONSUMERS)
    def _():
        plgpu.set_max_registers(56, action="decrease")
        # The key of a block that a thread holds the row of.
        thread = plgpu.layout_cast(lax.iota(jnp.int32, 128), THREADS)
        key = (thread >> 5) * 16 + (thread & 15)

        def load(step, source, rows):
            """Rows [128] of a source, -1 for none, into the next buffer."""
            slot = lax.rem(step, STAGES)
            for part in range(2):
                mosaic.claim(free, 2 * step + part)
                if part == 0:
                    hardware.store_bias(rows, bias_smem.at[slot])
                hardware.copy_rows(source, rows, kv_smem.at[slot, part], part * half)
            for part in range(2):
                hardware.await_copies(1 - part)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot * 2 + part])

        def make_turn(turn, step):
            token, head, seen, steps = item(turn)

            def listed(index):
                at = jnp.minimum(index, inputs["listed"].shape[1] // 128 - 1) * 128
                return plgpu.load(
                    inputs["listed"].at[token, pl.ds(pl.multiple_of(at, 128), 128)],
                    layout=THREADS,
                )

            # On its way while the window is copied.
            rows = listed(0) if "listed" in inputs else None
            for index in range(window_blocks):
                at = key + index * KEYS
                there = (at < window) & (at >= window - 1 - position - token)
                load(step + index, inputs["window"], jnp.where(there, token + at, -1))
                if index == 0:

                    @pl.when(turn > 0)
                    def _():
                        plgpu.barrier_wait(q_free)

                    for part in range(2):
                        plgpu.copy_gmem_to_smem(
                            inputs["q"].at[token, pl.ds(head, HEADS), pl.ds(part * half, half)],
                            q_smem.at[part],
                            q_full,
                        )
                    if "rope" in inputs:
                        plgpu.copy_gmem_to_smem(
                            inputs["rope"].at[token], rope_smem.at[lax.rem(turn, 2)], q_full
                        )
            if "listed" in inputs:

                def load_listed(index, rows):
                    following = listed(index + 1)
                    load(step + window_blocks + index, inputs["entries"], rows)
                    return following

                lax.fori_loop(0, steps - window_blocks, load_listed, rows)
            elif "entries" in inputs:

                @pl.loop(0, steps - window_blocks)
                def _(index):
                    at = key + index * KEYS
                    rows = jnp.where(at < seen, at, -1)
                    load(step + window_blocks + index, inputs["entries"], rows)

            return step + steps

        steps = lax.fori_loop(0, turns, make_turn, jnp.int32(0))

        @pl.when(turns > 0)
        def _():
            plgpu.barrier_wait(q_free)

        mosaic.drain(free, 2 * steps)

    @pl.when(group < CONSUMERS)
    def _():
        plgpu.set_max_registers(224, action="increase")
        pieces = half // PIECE

        @pl.when(group == 1)
        def _():
            plgpu.barrier_arrive(go.at[0])

        def meet():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def across(rows, width):
            return lax.broadcast_in_dim(rows, (HEADS, width), [0])

        def splat(value):
            return plgpu.layout_cast(jnp.full((HEADS,), value, jnp.float32), _ROWS)

        def columns(piece):
            return pl.ds(piece * PIECE, PIECE)

        def turned(value, turn, sign):
            return hardware.turn(value, rope_smem.at[lax.rem(turn, 2), group], sign)

        def prepare(turn):
            """Norm and rotation of the half of the queries that this warpgroup changes."""
            parts = [
                q_smem[group, :, columns(piece)].astype(jnp.float32) for piece in range(pieces)
            ]
            if norm_eps is not None:
                squares = [jnp.sum(_rounded(part * part), axis=1) for part in parts]
                sums.at[group][...] = sum(squares[1:], squares[0])
                meet()
                total = [plgpu.load(sums.at[side], layout=_ROWS) for side in range(2)]
                mean = _rounded((total[0] + total[1]) * (1 / (2 * half)))
                scaling = _rounded(lax.rsqrt(_rounded(mean + norm_eps)))
                parts = [_rounded(part * across(scaling, PIECE)) for part in parts]
            if "rope" in inputs:
                parts[-1] = turned(parts[-1], turn, 1.0)
            for piece, part in enumerate(parts):
                q_smem[group, :, columns(piece)] = part.astype(q_smem.dtype)
            plgpu.commit_smem()
            meet()

        def make_turn(turn, first):
            token, head, _, steps = item(turn)
            plgpu.barrier_wait(q_full)
            if norm_eps is not None or "rope" in inputs:
                prepare(turn)

            def add_block(index, running):
                highest, total, values = running
                slot = lax.rem(first + index, STAGES)

                for part in range(2):
                    plgpu.barrier_wait(full.at[2 * slot + part])
                # The warpgroups take turns: the other one has time for its exponentials meanwhile.
                plgpu.barrier_wait(go.at[group])
                scores = hardware.scores(q_smem, kv_smem.at[slot])
                plgpu.barrier_arrive(go.at[1 - group])
                bias = plgpu.load(bias_smem.at[slot], layout=_COLUMNS)
                # Of the other half nothing else is needed.
                plgpu.barrier_arrive(free.at[2 * slot + 1 - group])

                @pl.when(index == steps - 1)
                def _():
                    plgpu.barrier_arrive(q_free)

                scores = scores * factor + lax.broadcast_in_dim(bias, scores.shape, [1])
                new = jnp.maximum(highest, jnp.max(scores, axis=1))
                weights = jnp.exp2(scores - across(new, KEYS))
                shrink = jnp.exp2(highest - new)
                total = total * shrink + jnp.sum(weights, axis=1)
                values = tuple(value * across(shrink, PIECE) for value in values)
                values = hardware.add_products(values, weights, kv_smem.at[slot, group])
                plgpu.barrier_arrive(free.at[2 * slot + group])
                return new, total, values

            empty = plgpu.layout_cast(jnp.zeros((HEADS, PIECE), jnp.float32), plgpu.Layout.WGMMA)
            highest, total, values = lax.fori_loop(
                0, steps, add_block, (splat(FLOOR), splat(0.0), (empty,) * pieces)
            )
            bias = plgpu.load(inputs["sink"].at[pl.ds(head, HEADS)], layout=_ROWS, optimized=False)
            total = total + jnp.exp2(bias * math.log2(math.e) - highest)
            share = 1.0 / total
            for piece, value in enumerate(values):
                value = value * across(share, PIECE)
                if "rope" in inputs and piece == pieces - 1:
                    value = turned(_rounded(value), turn, -1.0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[group] = value.astype(out_smem.dtype)
                plgpu.commit_smem()
                at = pl.multiple_of(group * half + piece * PIECE, PIECE)
                plgpu.copy_smem_to_gmem(
                    out_smem.at[group],
                    out.at[token, pl.ds(head, HEADS), pl.ds(at, PIECE)],
                )
            return first + steps

        lax.fori_loop(0, turns, make_turn, jnp.int32(0))

        @pl.when(group == 0)
        def _():
            plgpu.barrier_wait(go.at[0])

        plgpu.wait_smem_to_gmem(0)


def _rounded(value):
    return value.astype(jnp.bfloat16).astype(jnp.float32)
