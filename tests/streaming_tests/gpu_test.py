"""What only a GPU shows: locked memory, copies beside compute, refills while copies run."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streaming import (
    Component,
    CudaDriver,
    DiskRing,
    HostStore,
    Pinner,
    SlabLayout,
    Step,
    Streamer,
    even,
    testing,
)

pytestmark = pytest.mark.gpu1

LAYERS, ITEMS = 8, 16
LAYOUT = SlabLayout(
    LAYERS,
    ITEMS,
    (
        Component("codes", (1024, 2048), np.dtype(np.uint8)),
        Component("scales", (1024, 128), np.dtype(np.uint8)),
    ),
)


@jax.jit
def read(arrays, where, x):
    """Sums of the rows of each item, -1 for items that are not here, after some work."""
    for _ in range(8):
        x = jnp.dot(x, x, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
    sums = sum(array.astype(jnp.int32).sum((1, 2)) for array in arrays.values())
    return jnp.where(where >= 0, sums[where], -1), x[0, 0]


@pytest.fixture(scope="module")
def contents():
    """Sums [layers, items] of what `filler` stores."""
    return np.array(
        [
            [
                sum(int(testing.content(LAYOUT, n, i, p.name).sum()) for p in LAYOUT.components)
                for i in range(ITEMS)
            ]
            for n in range(LAYERS)
        ]
    )


@pytest.mark.parametrize("mode", ["whole", "routed"])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_every_item_arrives_whole_from_locked_memory(tier, mode, tmp_path, contents):
    residency = even(LAYERS, ITEMS, 4)
    with contextlib.ExitStack() as stack:
        pinner = stack.enter_context(contextlib.closing(Pinner(CudaDriver())))
        store = ring = None
        if tier == "ram":
            store = HostStore(LAYOUT, residency.streamed, pinner=pinner)
            stack.enter_context(contextlib.closing(store))
            store.fill(testing.filler(LAYOUT))
        else:
            locate = testing.write_files(LAYOUT, tmp_path)
            ring = DiskRing(LAYOUT, locate, rows=ITEMS, slots=3, pinner=pinner, poison=True)
        assert pinner.wait().errors == ()
        x = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16) / jnp.bfloat16(64)
        steps = [Step(layer, mode) for _ in range(3) for layer in range(LAYERS)]
        found, ledgers = [], []
        with Streamer(LAYOUT, residency.streamed, store=store, ring=ring) as streamer:
            # The faults of a first run are also those of programs that are read from storage.
            for _ in range(2):
                streamer.start(steps)
                for number in range(len(steps)):
                    streamer.issue_ahead(number)
                    if mode == "routed":
                        streamer.routed(number, np.arange(number % 3, ITEMS, 3))
                    slab = streamer.take(number)
                    sums, done = read(dict(slab.arrays), slab.where, x)
                    found.append(sums)
                    streamer.computed(number, done)
                ledgers.append(streamer.finish())
                assert streamer.violations() == []
        assert [ledger.pageable_bytes for ledger in ledgers] == [0, 0]
        assert ledgers[1].major_faults == 0 or tier == "disk"
        for number, (step, sums) in enumerate(zip(steps * 2, found, strict=True)):
            here = np.isin(np.arange(ITEMS), residency.streamed[step.layer])
            if mode == "routed":
                here &= np.arange(ITEMS) % 3 == number % 3
            wanted = np.where(here, contents[step.layer], -1)
            np.testing.assert_array_equal(np.asarray(sums), wanted)
