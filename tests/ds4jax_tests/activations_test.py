"""Activations that wait in host memory: same values, few on the device, ahead of their use."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.activations import AHEAD, LIVE_CHUNKS, Moved, Shelf

DEVICE = jax.devices()[0]


def tree(chunk: int, visits: int = 0) -> dict[str, jax.Array]:
    values = jnp.arange(6, dtype=jnp.float32) + jnp.float32(100 * chunk + visits)
    return {"streams": values.reshape(2, 3), "ids": jnp.full(4, chunk, jnp.int32)}


@jax.jit
def add_one(tree):
    return {"streams": tree["streams"] + 1, "ids": tree["ids"]}


def kinds(trees) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(trees)}


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_values_are_those_that_were_put(chunks, on_host):
    shelf = Shelf(chunks, DEVICE, on_host=on_host)
    for index in range(chunks):
        shelf.put(index, tree(index))
    for visit in range(3):
        for index in shelf.sweep(again=visit < 2):
            taken = shelf.take(index)
            assert kinds(taken) == {"device"}
            shelf.put(index, add_one(taken))
    for index, lying in enumerate(shelf.trees):
        assert kinds(lying) == ({"pinned_host"} if on_host else {"device"})
        expected = tree(index, 3)
        for name in expected:
            np.testing.assert_array_equal(np.asarray(lying[name]), np.asarray(expected[name]))
    size = chunks * (6 + 4) * 4
    assert shelf.moved == (Moved(4 * size, 3 * size) if on_host else Moved())


class Watched(Shelf):
    """A shelf that keeps a list of what it does."""

    def __init__(self, chunks):
        super().__init__(chunks, DEVICE, on_host=True)
        self.done, self.live, self.most = [], 0, 0

    def fetch(self, index):
        new = self.holds(index) and index not in self._coming
        super().fetch(index)
        if new:
            self.done.append(("fetch", index))
            self.live += 1
            self.most = max(self.most, self.live)

    def put(self, index, tree):
        super().put(index, tree)
        # All but the last one have left.
        assert len(self._leaving) == 1
        self.live = len(self._coming) + 1


def test_trees_come_ahead_of_their_chunk_and_few_are_on_the_device():
    chunks = 9
    shelf = Watched(chunks)
    for index in range(chunks):
        shelf.put(index, tree(index))
    shelf.live = shelf.most = 0
    for visit in range(2):
        shelf.fetch_ahead(0)
        for index in shelf.sweep(again=visit == 0):
            near = [n % chunks for n in range(index, index + 1 + AHEAD) if n < chunks or not visit]
            assert set(near) <= set(shelf._coming)
            shelf.done.append(("compute", index))
            shelf.put(index, add_one(shelf.take(index)))
    assert shelf.most <= LIVE_CHUNKS
    assert [n for what, n in shelf.done if what == "compute"] == [*range(chunks)] * 2
    # The first ones of the second visit came before the last ones of the first were computed.
    assert shelf.done.index(("fetch", 0), 1) < shelf.done.index(("compute", chunks - 1))
    assert not shelf._coming  # nothing came that nobody needed


def test_tree_that_is_kept_comes_again_without_leaving_again():
    shelf = Shelf(2, DEVICE, on_host=True)
    for index in range(2):
        shelf.put(index, tree(index))
    size = (6 + 4) * 4
    beside = shelf.beside()
    for _ in range(3):
        for index in shelf.sweep(again=False):
            shelf.take(index, keep=True)
    assert shelf.moved == Moved(2 * size, 6 * size)
    beside.put(0, tree(0))
    assert shelf.moved == beside.moved == Moved(3 * size, 6 * size)
    assert beside.holds(0)
    assert not beside.holds(1)


def test_chunk_without_a_tree_is_named():
    shelf = Shelf(3, DEVICE, on_host=False)
    with pytest.raises(RuntimeError, match="chunk 0 of 3 has nothing on the shelf"):
        shelf.take(0)
    with pytest.raises(RuntimeError, match="chunk 0 of 3 has nothing on the shelf"):
        _ = shelf.trees


def test_error_of_a_program_surfaces_when_a_later_tree_is_put():
    def fail(values):
        raise RuntimeError("the device broke")

    shelf = Shelf(3, DEVICE, on_host=True)
    broken = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((2,), jnp.float32), x))

    def put_all():
        for index in range(3):
            shelf.put(index, broken(jnp.zeros(2, jnp.float32)))

    with pytest.raises(jax.errors.JaxRuntimeError, match="the device broke"):
        put_all()


@pytest.mark.gpu1
def test_copies_hide_under_the_compute_of_other_chunks():
    """Chunks of 268 MB, about 20 ms of products each, six of them in four sweeps."""
    chunks, sweeps = 6, 4
    weight = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16) / jnp.bfloat16(64)

    @functools.partial(jax.jit, donate_argnums=0)
    def work(streams, weight):
        for _ in range(12):
            product = jnp.dot(streams, weight, preferred_element_type=jnp.float32)
            streams = product.astype(jnp.bfloat16)
        return streams

    def run(on_host: bool) -> tuple[float, list[np.ndarray]]:
        shelf = Shelf(chunks, jax.devices()[0], on_host=on_host)
        for index in range(chunks):
            start = jax.random.normal(jax.random.key(index), (4 * 8192, 4096), jnp.bfloat16)
            shelf.put(index, start)
        jax.block_until_ready(shelf.trees)
        began = time.perf_counter()
        for visit in range(sweeps):
            for index in shelf.sweep(again=visit + 1 < sweeps):
                shelf.put(index, work(shelf.take(index), weight))
        jax.block_until_ready(shelf.trees)
        return time.perf_counter() - began, [np.asarray(tree)[:4] for tree in shelf.trees]

    run(True)
    (on_device, expected), (on_host, found) = run(False), run(True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert on_host < 1.15 * on_device, (on_host, on_device)
