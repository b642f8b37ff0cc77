"""The routed experts of one MoE layer: expert weights applied to the rows routed to them.

Every call writes its own slots of a [T, k, D] buffer, and one combine adds the k slots of a token
in slot order: results do not depend on which call, buffer or device an expert was in.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import codecs, mosaic, support
from pallas_kernels.routed_experts import portable, reference, sm90, tiling
from pallas_kernels.routed_experts.arrange import fresh_slots
from pallas_kernels.routed_experts.slab import ExpertSlab, with_scale_range

__all__ = [
    "ExpertSlab",
    "combine_slots",
    "expert_slots",
    "preferred",
    "refusal",
    "wide_experts",
    "with_scale_range",
]

# Routed rows per expert from which the Hopper kernels are taken, without and with `quantize_input`.
SM90_ROWS = (96, 24)

wide_experts = sm90.wide_experts


def expert_slots(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    slabs: tuple[ExpertSlab, ...],
    where: jax.Array,
    *,
    limit: float,
    quantize_input: bool,
    slots: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Outputs of the experts in `slabs` for the rows routed to them, one slot per routed row.

    x         bf16 or f32 [T, D].
    ids       i32 [T, k]: expert of each slot, distinct in a row, -1 for none.
    weights   f32 [T, k]: routing weights.
    slabs     expert weights, any number of buffers of any size; they are read where they are (FP4
              buffers between 2 and 4 GiB excepted, see `portable.addressable`).
    where     i32 [E]: row of the expert in the concatenation of the slabs, -1 when it is in none.
    limit     bound of the activations before SiLU.
    quantize_input  rounds the inputs of both products to E4M3 with one power-of-two scale per 128
              channels, as the published inference code does.
    slots     the result of an earlier call for other experts of the same rows, to be completed
              (donate it: it is updated in place).
    return    [T, k, D] of x.dtype, T * k * D * itemsize bytes. Slots of experts that are not in
              this call keep their content; without `slots` that is NaN, and 0 where the id is -1.
              So an expert that no call served shows as NaN.

    With g = round(x @ w1^T) and u = round(x @ w3^T), a slot is
    round(round(silu(min(g, limit)) * clip(u, -limit, limit) * weight) @ w2^T), rounding to x.dtype
    and computing in float32, as the published inference code does.
    The bits of a slot depend on its token's x, its weight, the expert's weights, T and the
    implementation; not on other rows, nor on how experts are divided over slabs and calls.

    implementation None takes "sm90" on Hopper GPUs for FP4 slabs with D and F multiples of 512, if
    tokens * k is at least `SM90_ROWS` times the experts in `where`; else "portable" on GPUs where
    it can run (bfloat16 x; FP4 or bfloat16 slabs, D and F multiples of 64); "reference" elsewhere.
    `refusal` tells why not. With `quantize_input`, "sm90" multiplies E4M3 codes on the FP8 units,
    which add up 128 products less exactly than float32; the others multiply in bfloat16 or float32.

    Raises ValueError for shapes or dtypes that do not fit, NotImplementedError when the
    implementation asked for cannot run here.
    """
    _check(x, ids, weights, slabs, where, slots)
    slabs_present = tuple(slab for slab in slabs if slab.experts)
    if not slabs_present or ids.size == 0:
        return fresh_slots(x, ids) if slots is None else slots
    device = support.default_device()
    if implementation is None:
        implementation = preferred(x, ids, slabs, where, device, quantize_input=quantize_input)
    support.require(implementation, refusal(implementation, x, slabs, device, interpret=interpret))
    operands = (x, ids, weights, slabs_present, where)
    if implementation == "reference":
        slots = fresh_slots(x, ids) if slots is None else slots
        return reference.expert_slots(*operands, slots, limit=limit, quantize_input=quantize_input)
    if implementation == "sm90":
        kind = "fp8" if quantize_input else "bf16"
        return sm90.expert_slots(
            *operands,
            slots,
            limit=limit,
            quantize_input=quantize_input,
            schedule=tiling.schedule(device.device_kind, x.shape[1], slabs[0].width, kind),
            blocks=mosaic.blocks_at_a_time(device),
            interpret=interpret,
        )
    blocks = tiling.choose(
        device.device_kind, x.shape[1], slabs[0].width, *ids.shape, experts=where.size
    )
    return portable.expert_slots(
        *operands,
        slots,
        limit=limit,
        quantize_input=quantize_input,
        tiling=blocks,
        interpret=interpret,
    )


def preferred(
    x: jax.Array,
    ids: jax.Array,
    slabs: tuple[ExpertSlab, ...],
    where: jax.Array,
    device: jax.Device,
    *,
    quantize_input: bool,
) -> str:
    """The implementation that `expert_slots` takes for these operands when none is asked for."""
    many = ids.size >= SM90_ROWS[quantize_input] * where.size
    kernels = ("sm90", "portable") if many else ("portable",)
    able = [name for name in kernels if refusal(name, x, slabs, device) is None]
    return (*able, "reference")[0]


def refusal(
    implementation: str,
    x: jax.Array,
    slabs: tuple[ExpertSlab, ...],
    device: jax.Device,
    *,
    interpret: bool = False,
) -> str | None:
    """Why `implementation` cannot run these operands of `expert_slots` on `device`, or None."""
    reason = support.unsupported(implementation, device, interpret=interpret)
    if reason is None and implementation != "reference":
        kernels = sm90 if implementation == "sm90" else portable
        reason = kernels.unsupported(x, slabs)
    return reason


def combine_slots(slots: jax.Array, shared: jax.Array) -> jax.Array:
    """Sum over the slots of each token, in slot order, plus the shared expert; one rounding.

    slots   [T, k, D], as written by `expert_slots`.
    shared  [T, D] of the same dtype.
    return  [T, D]; additions are float32.
    """
    if slots.ndim != 3 or not slots.shape[1]:
        raise ValueError(f"slots has shape {list(slots.shape)}, expected [T, k, D] with k >= 1")
    tokens, k, hidden = slots.shape
    if shared.shape != (tokens, hidden) or shared.dtype != slots.dtype:
        raise ValueError(
            f"shared is {shared.dtype}{list(shared.shape)}, expected "
            f"{slots.dtype}{[tokens, hidden]} for slots {list(slots.shape)}"
        )
    total = slots[:, 0].astype(jnp.float32)
    for slot in range(1, k):
        total += slots[:, slot].astype(jnp.float32)
    return codecs.round_to(total + shared.astype(jnp.float32), slots.dtype)


def _check(x, ids, weights, slabs, where, slots):
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x is {x.dtype}{list(x.shape)}, expected bfloat16 or float32 [T, D]")
    tokens, hidden = x.shape
    if ids.ndim != 2 or ids.shape[0] != tokens or ids.dtype != jnp.int32:
        raise ValueError(f"ids is {ids.dtype}{list(ids.shape)}, expected int32 [{tokens}, k]")
    if weights.shape != ids.shape or weights.dtype != jnp.float32:
        raise ValueError(
            f"weights is {weights.dtype}{list(weights.shape)}, expected float32{list(ids.shape)}"
        )
    if where.ndim != 1 or not where.size or where.dtype != jnp.int32:
        raise ValueError(
            f"where is {where.dtype}{list(where.shape)}, expected int32 [E] with E >= 1"
        )
    for index, slab in enumerate(slabs):
        slab.check()
        if slab.hidden != hidden or slab.width != slabs[0].width:
            raise ValueError(
                f"slab {index} has D={slab.hidden}, F={slab.width}: expected D={hidden} (x) and "
                f"F={slabs[0].width} (slab 0)"
            )
    shape = (*ids.shape, hidden)
    if slots is not None and (slots.shape != shape or slots.dtype != x.dtype):
        raise ValueError(
            f"slots is {slots.dtype}{list(slots.shape)}, expected {x.dtype}{list(shape)}"
        )
