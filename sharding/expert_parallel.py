"""Experts of one layer divided over the devices of a stage, with activations exchanged.

Every owner computes the experts it has, for all tokens, with the same function that a single
device would call: rows of other experts carry the id -1. What an owner writes for a (token, slot)
is moved to the device that keeps the token and selected there, never added to anything. So each
slot has the bits its owner computed, -0 and NaN included, and combining the slots in their order
gives the same bits for every division of the experts.

Only the exchange is spread over tokens. Dense layers around it should see all rows of a chunk, as
on one device: products of fewer rows may have other bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

ExpertFunction = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


def exchange_slots(
    expert_function: ExpertFunction,
    parameters: Any,
    inputs: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    owner_of: jax.Array,
    *,
    mesh: Mesh,
    axis: str = "owners",
) -> jax.Array:
    """Slots of all routed experts, computed by their owners.

    expert_function(own parameters, inputs [T, D], ids [T, k] i32, weights [T, k]) -> slots
                  [T, k, D]; rows must not depend on each other. Ids of experts of other owners are
                  -1 and what is written there is not used.
    parameters    pytree; every leaf [n, ...] holds one entry per owner. Owners with fewer experts
                  have theirs padded.
    inputs        [T, D], ids [T, k] i32 (-1 = no expert), weights [T, k]; T a multiple of n, the
                  size of the mesh axis. Tokens are spread over the axis.
    owner_of      [E] i32: owner of each expert on the axis, -1 = nobody has it.
    return        [T, k, D] in the dtype of the function, tokens spread over the axis. 0 where the
                  id is -1, NaN where nobody has the expert.

    Per device (n - 1) / n * T * D values of inputs arrive and (n - 1) / n * T * k * D values of
    slots leave and arrive. Raises ValueError if T is no multiple of n or the axis does not exist.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"the mesh has axes {mesh.axis_names}, expected one named {axis!r}")
    owners = mesh.shape[axis]
    if inputs.shape[0] % owners:
        raise ValueError(f"{inputs.shape[0]} tokens over {owners} owners: expected a multiple")
    if ids.shape != weights.shape or ids.shape[:1] != inputs.shape[:1]:
        raise ValueError(
            f"ids {ids.shape} and weights {weights.shape} for inputs {inputs.shape}: expected "
            "[T, k] twice and [T, D]"
        )
    body = functools.partial(_exchange, expert_function, owners, axis)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(axis), P(axis), P(axis), P(axis), P()),
        out_specs=P(axis),
        check_vma=False,  # expert_function may be a kernel without replication rules
    )(parameters, inputs, ids, weights, owner_of)


def _exchange(
    expert_function: ExpertFunction,
    owners: int,
    axis: str,
    parameters: Any,
    inputs: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    owner_of: jax.Array,
) -> jax.Array:
    own = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), parameters)
    with jax.named_scope("gather_tokens"):
        all_inputs, all_ids, all_weights = (
            jax.lax.all_gather(x, axis, tiled=True) for x in (inputs, ids, weights)
        )
    mine = _owners(owner_of, all_ids) == jax.lax.axis_index(axis)
    slots = expert_function(own, all_inputs, jnp.where(mine, all_ids, -1), all_weights)
    with jax.named_scope("return_slots"):
        parts = slots.reshape(owners, -1, *slots.shape[1:])
        parts = jax.lax.all_to_all(parts, axis, split_axis=0, concat_axis=0)
    owner = _owners(owner_of, ids)
    chosen = jnp.take_along_axis(parts, jnp.maximum(owner, 0)[None, :, :, None], axis=0)[0]
    nobody = jnp.where(ids < 0, jnp.zeros((), slots.dtype), jnp.full((), jnp.nan, slots.dtype))
    return jnp.where((owner >= 0)[:, :, None], chosen, nobody[:, :, None])


def _owners(owner_of: jax.Array, ids: jax.Array) -> jax.Array:
    """Owner of every id, -1 for no expert and for experts that nobody has."""
    return jnp.where(ids < 0, -1, owner_of[jnp.maximum(ids, 0)])


def combine_in_slot_order(slots: jax.Array, shared: jax.Array) -> jax.Array:
    """[T, D] in the dtype of `shared`: slots [T, k, D] added in f32 in slot order, then shared.

    One rounding at the end. Placement of tokens is kept.
    """
    total = slots[:, 0].astype(jnp.float32)
    for slot in range(1, slots.shape[1]):
        total = total + slots[:, slot].astype(jnp.float32)
    return (total + shared.astype(jnp.float32)).astype(shared.dtype)
