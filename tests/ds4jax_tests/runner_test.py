"""Layer parts: experts may come in parts, and a row of logits stands alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache, runner, testing
from ds4jax.checkpoint import load
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import PRESETS

CONFIG, NUMERICS, ROWS = testing.tiny_config(), PRESETS["oracle"], 48
IDS = np.random.default_rng(2).integers(0, testing.BYTE_VOCAB, 2 * ROWS).astype(np.int32)


@pytest.fixture(scope="module")
def parts():
    source = SyntheticSource(CONFIG, seed=0)
    where = jnp.arange(CONFIG.n_routed_experts, dtype=jnp.int32)
    slabs = [
        ((jax.device_put(load.load_expert_slab(source, layer, range(where.size))),), where)
        for layer in range(CONFIG.num_hidden_layers)
    ]
    return runner.Runner(load.load_resident(source), NUMERICS), slabs


def chunks() -> list[cache.Chunk]:
    return [cache.make_chunk(IDS[at : at + ROWS], at, ROWS) for at in (0, ROWS)]


def test_experts_may_arrive_in_several_slabs(parts):
    run, slabs = parts
    chunk = chunks()[0]
    streams, _ = run.attend(
        0, run.embed(chunk), cache.empty_state(CONFIG, NUMERICS, 8192).layers[0], chunk
    )
    routing = run.route(0, streams, chunk)
    ((slab,), where) = slabs[0]
    halves = tuple(jax.tree.map(lambda leaf, h=h: leaf[h::2], slab) for h in (0, 1))
    places = where // 2 + where % 2 * (where.size // 2)
    whole, split = run.experts(routing, slabs[0]), run.experts(routing, (halves, places))
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(split))


def test_logits_of_a_row_do_not_depend_on_the_rows_asked_for(parts):
    run, _ = parts
    rng = np.random.default_rng(3)
    shape = (300, CONFIG.hc_mult, CONFIG.hidden_size)
    streams = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    rows = np.concatenate([run.logits(streams, *tile) for tile in runner.tiles(300)])
    assert rows.shape == (300, CONFIG.vocab_size)
    for row in (0, 127, 128, 255, 299):
        np.testing.assert_array_equal(run.logits(streams, row, row + 1)[0], rows[row])


def test_tiles_cover_all_rows_once():
    assert runner.tiles(1) == [(0, 1)]
    assert runner.tiles(128) == [(0, 128)]
    assert runner.tiles(300) == [(0, 128), (128, 256), (256, 300)]


def test_compilations_are_counted():
    measured = runner.COMPILED.measure()
    jax.jit(lambda x: x * 3 + 41)(np.float32(1.5)).block_until_ready()
    programs, seconds = measured()
    assert programs == 1
    assert seconds > 0
