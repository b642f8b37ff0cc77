"""Plain JAX: one expert after another, only those that were hit, in tiles of a fixed row count.

The tile makes the bits of a row independent of the other rows: a product with one row differs in
its last bits from the same row inside a larger product, so every product has the same shape.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import codecs
from pallas_kernels.routed_experts.ordering import order_rows
from pallas_kernels.routed_experts.slab import ExpertSlab

TILE_ROWS = 16


def expert_slots(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    slabs: tuple[ExpertSlab, ...],
    where: jax.Array,
    slots: jax.Array,
    *,
    limit: float,
    quantize_input: bool,
) -> jax.Array:
    """See the door. Weights are decoded to float32 and products are float32 throughout."""
    tokens, k, _ = slots.shape
    order = order_rows(ids, where, sum(slab.experts for slab in slabs))
    counts = jnp.diff(order.starts)
    hit = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    if quantize_input:
        x = codecs.fake_quant_fp8(x, 128)
    flat_weights = weights.reshape(-1)
    lanes = jnp.arange(TILE_ROWS, dtype=jnp.int32)

    def run_expert(index, out):
        expert = hit[index]
        gate_up, down = _decode(slabs, expert)
        start, count = order.starts[expert], counts[expert]

        def run_tile(tile, out):
            offset = tile * TILE_ROWS + lanes
            valid = offset < count
            row = order.rows[jnp.minimum(start + offset, tokens * k - 1)]
            inputs = jnp.where(valid[:, None], x[row // k], jnp.zeros((), x.dtype))
            weight = jnp.where(valid, flat_weights[row], 0.0)
            y = _expert(inputs, weight, gate_up, down, limit, quantize_input)
            return out.at[jnp.where(valid, row, tokens * k)].set(y, mode="drop")

        return lax.fori_loop(0, (count + TILE_ROWS - 1) // TILE_ROWS, run_tile, out)

    out = lax.fori_loop(0, jnp.sum(counts > 0), run_expert, slots.reshape(tokens * k, -1))
    return out.reshape(slots.shape)


def _decode(slabs: tuple[ExpertSlab, ...], expert: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 weights of row `expert` of the concatenated slabs."""
    branches, first, which = [], 0, jnp.int32(0)
    for slab in slabs:
        branches.append(lambda row, slab=slab, first=first: slab.decode(row - first, jnp.float32))
        first += slab.experts
        which += (expert >= first).astype(jnp.int32)
    return lax.switch(which, branches, expert)


def _expert(x, weight, gate_up, down, limit, quantize_input):
    """One expert on x [rows, D] with routing weights [rows]; the result has x's dtype."""
    products = codecs.round_to(_product(x, gate_up), x.dtype).astype(jnp.float32)
    gate, up = jnp.split(products, 2, axis=1)
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    h = codecs.round_to(jax.nn.silu(gate) * up * weight[:, None], x.dtype)
    if quantize_input:
        h = codecs.fake_quant_fp8(h, 128)
    return codecs.round_to(_product(h, down), x.dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [rows, K] @ w [N, K]^T in float32; exact products for bfloat16 inputs of x."""
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(jnp.float32), w, dimensions, precision=lax.Precision.HIGHEST)
