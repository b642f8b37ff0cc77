"""A pass: what it tells the streamer, what it counts, and what it refuses to let through."""

import numpy as np
import pytest

import ds4jax
import streaming
from ds4jax import passes, testing
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.experts import ExpertPool
from ds4jax.runner import Runner

CONFIG = testing.tiny_config()
CHUNK = 48
IDS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 130).astype(np.int32)


@pytest.fixture(scope="module")
def engine():
    config = {
        "numerics.preset": "oracle",
        "prefill.chunk_tokens": CHUNK,
        "streaming.resident_fraction": 0.5,
        "streaming.order": "layer_major",
        "streaming.micro_batch_tokens": 2 * CHUNK,
        "streaming.mode": "routed",
    }
    with ds4jax.load(SyntheticSource(CONFIG, seed=0), config, prompt_tokens=130) as loaded:
        yield loaded


def test_steps_of_whole_layers_need_nothing_from_the_ids(engine):
    pool = engine._stages[0].pool
    steps = passes.plan_steps(pool, "whole", 0, [IDS], {})
    assert steps == [streaming.Step(layer) for layer in range(5)]
    assert passes.plan_steps(pool, "whole", 3, [IDS], {}) == steps[3:]


def test_hash_layers_of_a_routed_pass_are_known_from_the_ids(engine):
    stage = engine._stages[0]
    tables = stage.runner.expert_tables()
    assert sorted(tables) == [0, 1, 2]
    chunks = [IDS[:3], IDS[3:5]]
    steps = passes.plan_steps(stage.pool, "routed", 1, chunks, tables)
    assert [step.layer for step in steps] == [1, 2, 3, 4]
    assert [step.mode for step in steps] == ["exact", "exact", "routed", "routed"]
    for step in steps[:2]:
        assert set(step.items) == set(tables[step.layer][IDS[:5]].reshape(-1).tolist())


def test_counts_are_those_of_real_tokens_in_every_layer(engine):
    """Padding rows choose nothing; each token chooses four experts, in hash layers by its id."""
    result = engine.prefill(IDS)
    tables = engine._stages[0].runner.expert_tables()
    first, last = result.report.passes
    for report, ids in ((first, IDS[:96]), (last, IDS[96:])):
        assert report.counts.sum(axis=1).tolist() == [4 * len(ids)] * 5
        assert report.distinct == tuple(np.count_nonzero(report.counts, axis=1))
        for layer, table in tables.items():
            wanted = np.bincount(table[ids].reshape(-1), minlength=CONFIG.n_routed_experts)
            np.testing.assert_array_equal(report.counts[layer], wanted)
    assert len(first.work_seconds) == 2
    assert len(first.layer_seconds) == 5
    assert sum(first.work_seconds) == pytest.approx(sum(first.layer_seconds))
    assert min(first.layer_seconds) >= 0


def test_expert_that_was_not_moved_is_an_error_and_not_a_wrong_answer(engine, monkeypatch):
    expected = engine.prefill(IDS)
    with monkeypatch.context() as patch:
        patch.setattr(ExpertPool, "available", lambda self, step: range(15))
        with pytest.raises(
            passes.MissingExpertError, match=r"layer \d: experts \[15\] .*holds NaN"
        ):
            engine.prefill(IDS)
    np.testing.assert_array_equal(engine.prefill(IDS).logits, expected.logits)


def test_nan_is_reported_with_its_layer(engine, monkeypatch):
    """Three tokens of the second micro-batch become NaN in front of layer 2, which hashes ids."""
    attend = Runner.attend

    def poisoned(self, layer, streams, state, chunk):
        streams, state = attend(self, layer, streams, state, chunk)
        first = int(np.asarray(chunk.position))
        return (streams.at[1:4].set(np.nan) if (layer, first) == (2, 96) else streams), state

    expected = engine.prefill(IDS)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "attend", poisoned)
        with pytest.raises(
            passes.NotANumberError, match=r"layer 2: scores of 3 of \d+ tokens are NaN"
        ):
            engine.prefill(IDS)
    np.testing.assert_array_equal(engine.prefill(IDS).logits, expected.logits)


@pytest.mark.parametrize("fraction", [0, 0.5])
def test_a_slab_is_needed_when_the_first_chunk_comes_to_its_experts(fraction, monkeypatch):
    """What waits for a slab is the first chunk of a micro-batch, after its share of residents."""
    routed, needed, computed, route = [], [], ExpertPool.computed, Runner.route

    def watch_route(self, layer, streams, chunk):
        routing = route(self, layer, streams, chunk)
        routed.append(np.asarray(routing.ids))
        return routing

    def watch_computed(self, step, wave, output, reached):
        needed.append(np.asarray(reached))
        computed(self, step, wave, output, reached)

    monkeypatch.setattr(Runner, "route", watch_route)
    monkeypatch.setattr(ExpertPool, "computed", watch_computed)
    config = {
        "numerics.preset": "oracle",
        "prefill.chunk_tokens": CHUNK,
        "streaming.resident_fraction": fraction,
        "streaming.order": "layer_major",
        "streaming.mode": "whole",
    }
    with ds4jax.load(SyntheticSource(CONFIG, seed=0), config, prompt_tokens=130) as engine:
        engine.prefill(IDS)
    assert len(needed) == CONFIG.num_hidden_layers
    for layer, reached in enumerate(needed):
        if fraction:  # one element of what the residents gave
            assert reached.shape == ()
        else:
            np.testing.assert_array_equal(reached, routed[3 * layer])


def test_copies_are_issued_then_residents_compute_then_the_slab_is_taken(engine, monkeypatch):
    """What is missing in a routed layer is on its way while the residents' share is computed."""
    order = []

    def watched(cls, name, what):
        original = getattr(cls, name)

        def call(self, *arguments, **keywords):
            order.append(what)
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(cls, name, call)

    watched(Runner, "route", "route")
    watched(ExpertPool, "routed", "issue")
    watched(Runner, "experts", "experts")
    watched(ExpertPool, "take", "take")
    engine.prefill(IDS[:CHUNK])
    # One layer that the router decides: one chunk, residents, a slab.
    assert order[-5:] == ["route", "issue", "experts", "take", "experts"]


def test_waits_for_experts_are_no_compute_when_the_mode_is_chosen(monkeypatch):
    options = {"streaming.resident_fraction": 0.5, "prefill.chunk_tokens": 128}
    noted = []
    with ds4jax.load("synthetic:tiny", options) as engine:
        (stage,) = engine._stages
        monkeypatch.setattr(stage.pool, "measured", lambda *values: noted.append(values))
        (part,) = engine.prefill(np.arange(40, dtype=np.int32)).report.passes
    ((tokens, distinct, seconds),) = noted
    assert (tokens, distinct) == (40, part.distinct)
    waited = sum(ledger.stall_s for ledger in part.ledgers)
    total = max(sum(part.work_seconds) - waited, 0.0)
    assert seconds == pytest.approx(total / len(part.distinct))


def test_time_after_the_last_router_is_the_first_chunks_or_that_of_all():
    clock = passes._StepClock()
    with clock:
        pass  # nothing to watch
    clock._began_s, clock._together = 0.0, [False, True]
    clock._times = [1.0, 3.0, 10.0, 11.0, 12.0, 20.0]  # two routers and an end for each layer
    np.testing.assert_allclose(clock.seconds(), [[8.0, 2.0], [5.0, 5.0]])
