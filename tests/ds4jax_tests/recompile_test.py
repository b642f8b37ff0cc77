"""A prompt of any length compiles a bounded number of programs; the next length compiles none."""

import numpy as np
import pytest

import ds4jax
from ds4jax import runner, testing
from ds4jax.checkpoint.synthetic import SyntheticSource

# Embedding, three attention kinds, two routers, experts, finish, head.
PROGRAMS = 9


def prompt(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, testing.BYTE_VOCAB, tokens)


def cached_programs() -> int:
    jits = (
        runner._embed,
        runner._attend,
        runner._route,
        runner._experts,
        runner._finish,
        runner._logits,
    )
    return sum(jit._cache_size() for jit in jits)


@pytest.mark.parametrize(
    ("chunk", "shapes"), [(40, 1), pytest.param(136, 2, marks=pytest.mark.slow)]
)
def test_second_prompt_of_another_length_compiles_nothing(chunk, shapes):
    config = {"numerics.preset": "oracle", "prefill.chunk_tokens": chunk}
    source, before = SyntheticSource(testing.tiny_config(), seed=0), cached_programs()
    with ds4jax.load(source, config) as engine:
        assert len(engine.row_shapes) == shapes
        # Two whole chunks and a short one: every row shape is seen.
        first = engine.prefill(prompt(2 * chunk + 20))
        assert cached_programs() - before == PROGRAMS * shapes
        # Besides these there are a few one-off programs that fill the first empty state.
        assert first.report.compiled[0] <= PROGRAMS * shapes + 8
        for tokens in (1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 7):
            again = engine.prefill(prompt(tokens))
            assert again.report.compiled == (0, 0.0), tokens
        list(engine.prefill_many([prompt(9), prompt(chunk + 4)]))
        # Continuing copies the caller's state first: one program per shape of its arrays.
        state = again.state
        engine.prefill(prompt(33), state)
        measured = runner.COMPILED.measure()
        engine.prefill(prompt(21), state)
        engine.generate(prompt(5), 3)
        assert measured() == (0, 0.0)
        assert cached_programs() - before == PROGRAMS * shapes


@pytest.mark.parametrize("mode", ["whole", "routed"])
@pytest.mark.parametrize("notes", ["fetch", "callback"])
def test_passes_share_the_programs_of_their_notes(notes, mode):
    config = {
        "prefill.chunk_tokens": 40,
        "streaming.resident_fraction": 0.5,
        "streaming.order": "chunk_major",
        "streaming.mode": mode,
        "streaming.notes": notes,
    }
    with ds4jax.load(SyntheticSource(testing.tiny_config(), seed=0), config) as engine:
        first = engine.prefill(prompt(100))
        assert len(first.report.passes) == 3
        # The first pass of a size compiles; where the router decides what moves, which pieces a
        # slab is put together from differs by pass.
        assert engine.prefill(prompt(100)).report.compiled[0] == 0
        assert engine._stages[0]._notes._send._cache_size() == (notes == "callback") * (
            1 + (mode == "routed")
        )


def test_activations_in_host_memory_need_no_programs_of_their_own():
    config = {
        "prefill.chunk_tokens": 40,
        "streaming.resident_fraction": 0.5,
        "streaming.order": "layer_major",
        "streaming.mode": "whole",
    }
    source = SyntheticSource(testing.tiny_config(), seed=0)
    with ds4jax.load(source, config | {"streaming.activations": "device"}) as engine:
        engine.prefill(prompt(200))
    with ds4jax.load(source, config | {"streaming.activations": "host"}) as engine:
        assert engine.plan.activations == "host"
        before = cached_programs()
        engine.prefill(prompt(200))
        assert cached_programs() == before
