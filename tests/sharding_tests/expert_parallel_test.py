"""Experts divided over devices: the same bits for every division."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.expert_parallel import combine_in_slot_order, exchange_slots

TOKENS, WIDTH, EXPERTS, TOP = 16, 24, 8, 3


def toy_experts(own, inputs, ids, weights):
    """own = (matrices [m, D, D], where [E]: row of an expert in them, -1 = not here)."""
    matrices, where = own
    every = jnp.einsum("td,mde->tme", inputs, matrices, precision=jax.lax.Precision.HIGHEST)
    rows = jnp.where(ids < 0, -1, where[jnp.maximum(ids, 0)])
    slots = jnp.take_along_axis(every, jnp.maximum(rows, 0)[:, :, None], axis=1)
    slots = (slots * weights[:, :, None]).astype(inputs.dtype)
    return jnp.where(rows[:, :, None] < 0, jnp.full((), jnp.nan, inputs.dtype), slots)


def problem(dtype=jnp.float32):
    rng = np.random.default_rng(7)
    matrices = jnp.asarray(rng.standard_normal((EXPERTS, WIDTH, WIDTH)), dtype)
    inputs = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), dtype)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(TOKENS)]).astype(np.int32)
    ids[-3:] = -1  # padding rows
    weights = jnp.asarray(rng.random((TOKENS, TOP)), dtype)
    return matrices, inputs, jnp.asarray(ids), weights


def divided(owners, owner_of, matrices, rows):
    """Parameters per owner: its matrices, padded to `rows`, and its table."""
    stacks, tables = [], []
    for owner in range(owners):
        mine = np.flatnonzero(owner_of == owner)
        table = np.full(EXPERTS, -1, np.int32)
        table[mine] = np.arange(len(mine))
        pad = jnp.zeros((rows - len(mine), WIDTH, WIDTH), matrices.dtype)
        stacks.append(jnp.concatenate([matrices[mine], pad]))
        tables.append(table)
    return jnp.stack(stacks), jnp.asarray(np.stack(tables))


@functools.cache
def program(owners, experts):
    """One program per number of owners: every division of the experts runs the same one."""
    mesh = Mesh(np.asarray(jax.devices()[:owners]), ("owners",))
    return mesh, jax.jit(functools.partial(exchange_slots, experts, mesh=mesh))


combine = jax.jit(combine_in_slot_order)


def run(owners, owner_of, dtype=jnp.float32, experts=toy_experts):
    matrices, inputs, ids, weights = problem(dtype)
    mesh, call = program(owners, experts)
    parameters = divided(owners, owner_of, matrices, rows=EXPERTS)
    spread = NamedSharding(mesh, P("owners"))
    parameters, inputs, ids, weights = jax.device_put((parameters, inputs, ids, weights), spread)
    owner_of = jax.device_put(jnp.asarray(owner_of, jnp.int32), NamedSharding(mesh, P()))
    slots = call(parameters, inputs, ids, weights, owner_of)
    shared = jax.device_put(jnp.ones((TOKENS, WIDTH), dtype), spread)
    return np.asarray(slots), np.asarray(combine(slots, shared))


class ExchangeTest(parameterized.TestCase):
    @parameterized.parameters((2, jnp.bfloat16), (4, jnp.float32), (8, jnp.float32))
    def test_every_division_has_the_bits_of_one_owner(self, owners, dtype):
        slots, combined = run(1, np.zeros(EXPERTS, int), dtype)
        self.assertFalse(np.isnan(slots.astype(np.float32)).any())
        rng = np.random.default_rng(owners)
        for owner_of in (
            np.arange(EXPERTS) % owners,
            np.arange(EXPERTS) * owners // EXPERTS,
            rng.integers(0, owners, EXPERTS),
            np.full(EXPERTS, owners - 1),  # one has all of them
        ):
            got, sums = run(owners, owner_of, dtype)
            self.assertEqual(got.tobytes(), slots.tobytes())
            self.assertEqual(sums.tobytes(), combined.tobytes())

    def test_no_expert_gives_zero_and_an_expert_nobody_has_gives_nan(self):
        owner_of = np.arange(EXPERTS) % 4
        owner_of[5] = -1
        slots, combined = run(4, owner_of)
        _, _, ids, _ = problem()
        ids = np.asarray(ids)
        self.assertTrue((slots[ids < 0] == 0).all())
        self.assertTrue(np.isnan(slots[ids == 5]).all())
        self.assertFalse(np.isnan(slots[(ids != 5)]).any())
        lost = (ids == 5).any(axis=1)
        self.assertTrue(np.isnan(combined[lost]).all())
        self.assertFalse(np.isnan(combined[~lost]).any())

    def test_negative_zeros_keep_their_sign(self):
        def minus_zeros(own, inputs, ids, weights):
            return jnp.full((*ids.shape, inputs.shape[1]), -0.0, inputs.dtype)

        slots, _ = run(4, np.arange(EXPERTS) % 4, experts=minus_zeros)
        _, _, ids, _ = problem()
        routed = np.asarray(ids) >= 0
        self.assertTrue(np.signbit(slots[routed]).all())
        self.assertFalse(np.signbit(slots[~routed]).any())

    def test_combine_adds_in_slot_order_and_rounds_once(self):
        slots = np.float32([[[1e8], [1.0], [-1e8]]])
        got = combine_in_slot_order(jnp.asarray(slots), jnp.ones((1, 1)))
        self.assertEqual(float(got[0, 0]), 1.0)  # 1 + 1e8 loses the 1, in this order only
        small = jnp.asarray([[[1.0], [2**-9], [2**-9]]], jnp.bfloat16)
        got = combine_in_slot_order(small, jnp.zeros((1, 1), jnp.bfloat16))
        self.assertEqual(got.dtype, jnp.bfloat16)
        self.assertEqual(float(got[0, 0]), 1.0)  # 1 + 2**-8 is a tie: to even
        got = combine_in_slot_order(small, jnp.full((1, 1), 2**-8, jnp.bfloat16))
        self.assertEqual(float(got[0, 0]), 1.0 + 2**-7)

    def test_shapes_are_checked(self):
        matrices, inputs, ids, weights = problem()
        mesh = Mesh(np.asarray(jax.devices()[:3]), ("owners",))
        table = jnp.zeros(EXPERTS, jnp.int32)

        def call(inputs, ids, weights, **options):
            return exchange_slots(
                toy_experts, (matrices,), inputs, ids, weights, table, mesh=mesh, **options
            )

        with self.assertRaisesRegex(ValueError, "16 tokens over 3 owners"):
            call(inputs, ids, weights)
        with self.assertRaisesRegex(ValueError, "expected one named 'experts'"):
            call(inputs, ids, weights, axis="experts")
        with self.assertRaisesRegex(ValueError, r"ids \(15, 3\)"):
            call(inputs[:15], ids[:15], weights)


if __name__ == "__main__":
    absltest.main()
