"""Programs that known prompts need are compiled while weights load, those and no others."""

import collections
import contextlib
import threading

import jax
import numpy as np
import pytest

import ds4jax
from ds4jax import compiling, events, runner, testing
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.run_config import RunConfig

CHUNK = 40
# Filled states, counted notes, and the bytes that experts come in: made by others than the runner.
OF_LAYERS = {
    f"jit({function.__name__})"
    for function in (
        runner._embed,
        runner._attend,
        runner._route,
        runner._experts,
        runner._finish,
        runner._tick,
        runner._logits,
        runner._row,
        runner._logprobs,
    )
}


@contextlib.contextmanager
def compiled():
    """Counts programs of the runner by name while the block runs."""
    found, going = collections.Counter(), [True]

    def observe(event, seconds, fun_name="", **_):
        if going and event.endswith("backend_compile_duration") and fun_name in OF_LAYERS:
            found[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(observe)
    yield found
    going.clear()


def prompt(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, testing.BYTE_VOCAB, tokens)


def source() -> SyntheticSource:
    return SyntheticSource(testing.tiny_config(), seed=0)


LAYOUTS = {
    "resident": {},
    "streamed": {"streaming.resident_fraction": 0.0},
    "both": {"streaming.resident_fraction": 0.5, "streaming.order": "layer_major"},
    "waves": {"streaming.resident_fraction": 0.25, "streaming.slab_bytes": 900_000},
    "host activations": {
        "streaming.resident_fraction": 0.5,
        "streaming.order": "layer_major",
        "streaming.activations": "host",
    },
    "all logits": {"prefill.logits": "all"},
    "log-probabilities": {"prefill.logits": "logprobs", "numerics.preset": "oracle"},
    "neighbour": {
        "streaming.resident_fraction": 0.25,
        "streaming.slab_bytes": 1_200_000,
        "peer.devices": "1",
        "peer.memory_fraction": 0.25,
        "peer.relay_fraction": 0.5,
    },
    "two stages": {"pipeline.split": "3,2", "pipeline.devices": "0,1"},
}


@pytest.mark.parametrize(
    "name",
    [name if name == "both" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_prompts_that_were_announced_compile_no_layer(name):
    chunk = 71 + list(LAYOUTS).index(name)  # a row shape of its own: no other test has compiled it
    config = {"prefill.chunk_tokens": chunk, "streaming.mode": "whole", **LAYOUTS[name]}
    prompts = [prompt(2 * chunk + 7), prompt(5)]
    told = []
    with compiled() as loading:
        engine = ds4jax.load(
            source(), config, prompt_tokens=[len(ids) for ids in prompts], on_event=told.append
        )
    with engine, compiled() as reading:
        list(engine.prefill_many(prompts))
    assert not reading
    (event,) = [each for each in told if isinstance(each, events.ProgramsCompiled)]
    assert event.programs == loading.total() == engine.load_compiled[0] > 0
    assert told.index(event) > max(
        place for place, each in enumerate(told) if isinstance(each, events.WeightsLoaded)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"streaming.resident_fraction": 0.5},
        {"peer.devices": "1", "peer.compute_fraction": 0.5, "peer.exchange": "collective"},
    ],
    ids=["streamed", "collective"],
)
def test_every_compiled_program_is_used(layout):
    jax.clear_caches()
    config = {"prefill.chunk_tokens": CHUNK, "streaming.mode": "whole", **layout}
    with compiled() as loading:
        engine = ds4jax.load(source(), config, prompt_tokens=2 * CHUNK + 7)
    engine.close()
    jax.clear_caches()
    with ds4jax.load(source(), config) as engine, compiled() as reading:
        engine.prefill(prompt(2 * CHUNK + 7))
    assert loading
    assert loading <= reading


def test_nothing_is_compiled_for_prompts_that_nobody_told():
    with compiled() as loading:
        ds4jax.load(source(), {"prefill.chunk_tokens": 81}).close()
    assert not loading


@pytest.mark.parametrize(
    ("prompts", "max_tokens", "expected"),
    [
        ([], None, []),
        ([1], None, [(128, 8192)]),
        ([2000, 4096, 4097], None, [(2048, 8192), (128, 8192)]),
        ([8193, 100], None, [(2048, 32768), (128, 32768), (128, 8192)]),
        ([5000], 9000, [(2048, 9000), (1024, 9000)]),
    ],
)
def test_shapes_are_those_of_whole_chunks_and_of_the_rest(prompts, max_tokens, expected):
    config = RunConfig().replace({"prefill.chunk_tokens": 2048, "prefill.max_tokens": max_tokens})
    assert compiling.chunk_shapes(prompts, config, testing.tiny_config()) == expected


def test_a_program_that_cannot_be_made_ends_the_loading(monkeypatch):
    def fail(*args, **kwargs):
        raise NotImplementedError("rows of 40")

    monkeypatch.setattr(runner.Runner, "layer_programs", fail)
    with pytest.raises(NotImplementedError, match="rows of 40"):
        ds4jax.load(source(), {"prefill.chunk_tokens": CHUNK}, prompt_tokens=50)
    assert not _compiling()


def test_loading_that_fails_leaves_no_compilation(monkeypatch):
    reached, lowered = threading.Event(), []
    lower = runner.Program.lower

    def slowly(program):
        lowered.append(program)
        reached.wait()
        return lower(program)

    def fail(*args, **kwargs):
        reached.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.Program, "lower", slowly)
    monkeypatch.setattr("ds4jax.loading.ExpertPool", fail)
    with pytest.raises(KeyboardInterrupt):
        ds4jax.load(source(), {"prefill.chunk_tokens": CHUNK}, prompt_tokens=50)
    assert len(lowered) <= 2
    assert not _compiling()


def _compiling() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("lowering", "compiling"))]
