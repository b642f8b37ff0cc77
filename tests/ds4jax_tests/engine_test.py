"""The engine as a user sees it: any split, any output mode, state in and out."""

import json
import pathlib
import threading

import jax
import numpy as np
import pytest

import ds4jax
from ds4jax import engine as engines
from ds4jax import events, testing
from ds4jax.cache import PausedPass, SequenceState, capacity_for
from ds4jax.checkpoint.open import open_source
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.checks import check_paused
from ds4jax.config import ConfigError
from ds4jax.costs import row_shapes
from ds4jax.run_config import RunConfig
from ds4jax.text import PromptError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CHUNK = 48
LIMIT = 2e-5  # float32 against float32 in another order; logits are near one
IDS = np.random.default_rng(0).integers(0, testing.BYTE_VOCAB, 150).astype(np.int32)


def load(**overrides) -> engines.Engine:
    values = {"numerics.preset": "oracle", "prefill.chunk_tokens": CHUNK, "prefill.logits": "all"}
    source = SyntheticSource(testing.tiny_config(), seed=0)
    return ds4jax.load(source, values | {k.replace("__", "."): v for k, v in overrides.items()})


@pytest.fixture(scope="module")
def engine():
    with load() as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(engine):
    return engine.prefill(IDS)


def assert_states_agree(found, expected):
    assert found.position == expected.position
    found, expected = (jax.tree_util.tree_leaves_with_path(s.layers) for s in (found, expected))
    for (path, a), (_, b) in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), atol=LIMIT, rtol=LIMIT, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("split", [[101, 49], [3, 1, 5, 2, 139], [16, 1, 133], [50, 50, 50]])
def test_any_split_of_a_prompt_gives_the_same_logits_and_state(engine, whole, split):
    state, rows = None, []
    for ids in np.split(IDS, np.cumsum(split)[:-1]):
        result = engine.prefill(ids, state)
        assert result.report.tokens_reused == (state.position if state else 0)
        state = result.state
        rows.append(result.logits)
    np.testing.assert_allclose(np.concatenate(rows), whole.logits, atol=LIMIT)
    assert_states_agree(state, whole.state)


def test_chunk_size_changes_nothing_beyond_the_float_limit(whole):
    with load(prefill__chunk_tokens=7) as engine:
        result = engine.prefill(IDS)
    np.testing.assert_allclose(result.logits, whole.logits, atol=LIMIT)
    assert len(result.report.chunks) == 22
    assert_states_agree(result.state, whole.state)


def test_same_prompt_gives_the_same_bits_twice(engine, whole):
    again = engine.prefill(IDS)
    np.testing.assert_array_equal(again.logits, whole.logits)


def test_state_stays_usable_after_it_was_continued(engine):
    state = engine.prefill(IDS[:60]).state
    first = engine.prefill(IDS[60:90], state)
    engine.prefill(IDS[90:], state)
    again = engine.prefill(IDS[60:90], state)
    np.testing.assert_array_equal(first.logits, again.logits)


def test_donated_state_is_consumed(engine):
    state = engine.prefill(IDS[:60]).state
    engine.prefill(IDS[60:90], state, donate_state=True)
    assert state.layers[0].window.is_deleted()


def test_mode_last_is_the_last_row_of_all_and_none_is_nothing(whole):
    with load(prefill__logits="last") as engine:
        np.testing.assert_array_equal(engine.prefill(IDS).logits, whole.logits[-1:])
    with load(prefill__logits="none") as engine:
        result = engine.prefill(IDS)
        assert result.logits is None
        assert result.logprobs is None
        assert_states_agree(result.state, whole.state)


def test_logprobs_are_those_of_the_logits(whole):
    with load(prefill__logits="logprobs", prefill__top_logprobs=3) as engine:
        found = engine.prefill(IDS).logprobs
    expected = np.asarray(jax.nn.log_softmax(whole.logits.astype(np.float64)))
    rows = np.arange(len(IDS) - 1)
    np.testing.assert_allclose(found.next_token[:-1], expected[rows, IDS[1:]], atol=1e-5)
    assert np.isnan(found.next_token[-1])  # what follows the prompt is not known
    order = np.argsort(-expected, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(found.tokens, order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, 1), atol=1e-5)


def test_several_prompts_are_read_alone_and_in_order(engine, whole):
    prompts = [IDS[:1], IDS, IDS[30:83]]
    seen: list[events.Event] = []
    results = list(engine.prefill_many(prompts, names=["a", "b", "c"], on_event=seen.append))
    assert [result.report.name for result in results] == ["a", "b", "c"]
    np.testing.assert_array_equal(results[1].logits, whole.logits)
    np.testing.assert_array_equal(results[2].logits, engine.prefill(prompts[2]).logits)
    chunks = [event for event in seen if isinstance(event, events.ChunkDone)]
    done = [event.done for event in chunks]
    assert done == sorted(done)
    assert done[-1] == sum(len(ids) for ids in prompts)
    assert {event.total for event in chunks} == {done[-1]}
    starts = [event for event in seen if isinstance(event, events.PromptStarted)]
    assert [(event.prompt, event.prompts, event.tokens) for event in starts] == [
        (0, 3, 1),
        (1, 3, 150),
        (2, 3, 53),
    ]


def test_sink_takes_the_rows_of_every_chunk(engine, whole):
    parts: list[np.ndarray] = []
    result = engine.prefill(IDS, sink=lambda name, rows: parts.append(rows))
    assert result.logits is None
    assert [len(part) for part in parts] == [48, 48, 48, 6]
    np.testing.assert_array_equal(np.concatenate(parts), whole.logits)


def test_generate_continues_with_the_most_likely_tokens(engine):
    found = engine.generate(IDS[:40], 5)
    ids = IDS[:40]
    for i, token in enumerate(found.tokens):
        logits = engine.prefill(ids).logits[-1]
        np.testing.assert_allclose(found.logits[i], logits, atol=LIMIT)
        assert token == np.argmax(logits)
        ids = np.append(ids, token)
    assert found.state.position == 44  # the last token has been chosen, not read
    more = engine.generate(found.tokens[-1:], 1, found.state)
    np.testing.assert_allclose(more.logits[0], engine.prefill(ids).logits[-1], atol=LIMIT)


def test_golden_prompt_and_greedy_tokens_come_out_of_the_engine():
    """The case `decode`, through the same door as a user: folder in, logits and tokens out."""
    folder = GOLDEN / "decode"
    meta = json.loads((folder / "meta.json").read_text())
    expected, ids = np.load(folder / "expected.npz"), np.load(folder / "tokens.npy")
    limit = meta["tolerance"]["float32_compute"]["max_abs"]
    config = {"numerics.preset": "oracle", "prefill.chunk_tokens": 128, "prefill.logits": "all"}
    with ds4jax.load(folder / meta["checkpoint"], config) as engine:
        logits = engine.prefill(ids).logits[expected["logit_positions"]]
        np.testing.assert_allclose(logits, expected["logits"], atol=limit, rtol=0)
        for i, length in enumerate(expected["prompt_lengths"]):
            found = engine.generate(ids[:length], expected["greedy_tokens"].shape[1])
            np.testing.assert_array_equal(found.tokens, expected["greedy_tokens"][i])
            np.testing.assert_allclose(
                found.logits, expected["greedy_logits"][i], atol=limit, rtol=0
            )


def test_stop_ends_after_the_chunk_at_hand(engine):
    stop = threading.Event()

    def observe(event: events.Event) -> None:
        if isinstance(event, events.ChunkDone) and event.chunk == 1:
            stop.set()

    result = engine.prefill(IDS, on_event=observe, stop=stop)
    assert result.report.interrupted
    assert result.report.tokens_read == result.state.position == 2 * CHUNK
    assert len(list(engine.prefill_many([IDS, IDS], stop=stop))) == 1


def test_report_names_the_setting_and_adds_up(engine, whole):
    report = whole.report
    assert report.numerics == "float32+none"
    assert report.tokens_read == sum(chunk.tokens for chunk in report.chunks) == len(IDS)
    assert [chunk.position for chunk in report.chunks] == [0, 48, 96, 144]
    assert report.seconds == pytest.approx(sum(chunk.seconds for chunk in report.chunks))
    assert report.state_bytes == engine.plan.price.state_bytes
    assert not report.interrupted


def test_state_grows_when_a_sequence_outgrows_it():
    with load(prefill__max_tokens=100) as small, load() as large:
        state = small.prefill(IDS[:100]).state
        assert state.layers[2].compressed.shape[0] < 200
        result = large.prefill(IDS[100:], state)
        assert result.state.layers[2].compressed.shape[0] == 2048
        np.testing.assert_allclose(result.logits, large.prefill(IDS).logits[100:], atol=LIMIT)


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [(1, (1,)), (128, (128,)), (129, (128, 129)), (8192, (128, 1024, 8192))],
)
def test_row_shapes_are_few_and_end_with_the_chunk(chunk, expected):
    assert row_shapes(chunk) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1, 8192), (8192, 8192), (8193, 32768), (600_000, 1 << 20)]
)
def test_capacities_are_few_and_end_with_the_positions_of_the_model(tokens, expected):
    assert capacity_for(RunConfig(), testing.tiny_config(), tokens) == expected


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], "prompt has no tokens: expected at least one"),
        ([[1]], r"int64 of shape \[1, 1\], expected whole numbers in one dimension"),
        ([0.5], "float64"),
        ([3, testing.BYTE_VOCAB], "token 1 has the id 264, expected 0 to 263"),
        ([-1], "token 0 has the id -1"),
        (np.zeros((1 << 20) + 1, np.int8), r"ends at position 1048577, expected at most 1048576"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(engine, ids, expected):
    with pytest.raises(PromptError, match=expected):
        engine.prefill(ids)


def test_length_counts_what_the_state_has_read_and_what_will_be_generated(engine):
    with load(prefill__max_tokens=100) as small:
        state = small.prefill(IDS[:90]).state
        with pytest.raises(PromptError, match=r"position 101, .* 100 \(config.prefill.max_tokens"):
            small.prefill(IDS[:11], state)
        with pytest.raises(PromptError, match="position 101"):
            small.generate(IDS[:10], 2, state)
    with pytest.raises(PromptError, match="number of tokens to generate is 0"):
        engine.generate(IDS, 0)


def test_all_prompts_are_checked_before_the_first_is_read(engine):
    with pytest.raises(PromptError, match="bad has no tokens"):
        engine.prefill_many([IDS, []], names=["good", "bad"])
    with pytest.raises(PromptError, match="there are no prompts"):
        engine.prefill_many([])


def test_state_of_another_numerics_setting_is_refused(engine, whole):
    with (
        load(numerics__preset="bfloat16") as other,
        pytest.raises(ConfigError, match=r"layers\[0\]\.window is float32.*expected .*bfloat16"),
    ):
        other.prefill(IDS, whole.state)


def test_stopped_pass_of_another_chunk_size_is_refused():
    streams = np.zeros((CHUNK, 4, 128), np.float32)
    paused = PausedPass(1, SequenceState(0, ()), (streams,), (CHUNK,))
    config = RunConfig().replace({"prefill.chunk_tokens": 200})
    with pytest.raises(ConfigError, match=r"\[48\] tokens have \[48\] rows, expected \[128\]"):
        check_paused(paused, len(IDS), testing.tiny_config(), config, 1)


def test_state_with_other_layers_is_refused(engine, whole):
    fewer = type(whole.state)(whole.state.position, whole.state.layers[:4])
    with pytest.raises(ConfigError, match=r"in 4 layers, expected .* in 5"):
        engine.prefill(IDS, fewer)


@pytest.mark.parametrize(
    "use",
    [
        lambda engine, state: engine.prefill(IDS),
        lambda engine, state: engine.prefill(IDS[CHUNK:], state),
        lambda engine, state: engine.prefill_many([IDS]),
        lambda engine, state: engine.generate(IDS[CHUNK:], 1, state),
        lambda engine, state: engine.layers,
    ],
)
def test_closed_engine_says_so(use):
    engine = load()
    state = engine.prefill(IDS[:CHUNK]).state
    other = engine.reconfigured(engine.config)
    engine.close()
    for each in (engine, other):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            use(each, state)
        each.close()  # once more does no harm


@pytest.mark.parametrize("split", [None, "3,2"])
def test_engine_that_is_closed_between_two_results_says_so(split):
    engine = load(pipeline__split=split, pipeline__devices=split and "0,0")
    results = engine.prefill_many([IDS[:5], IDS])
    next(results)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        next(results)


@pytest.mark.parametrize("kind", [events.PromptStarted, events.LayerDone, events.ChunkDone])
def test_engine_that_is_closed_by_an_observer_says_so(kind):
    engine = load()

    def observe(event: events.Event) -> None:
        if isinstance(event, kind):
            engine.close()

    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.prefill(IDS, on_event=observe)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"streaming__order": "layer_major", "streaming__micro_batch_tokens": 4 * CHUNK},
        {"pipeline__split": "3,2", "pipeline__devices": "0,0"},
    ],
    ids=["chunk_major", "layer_major", "stages"],
)
def test_engine_serves_other_calls_between_two_results(options, whole):
    with load(**options) as engine:
        results = engine.prefill_many([IDS[:5], IDS])
        first = next(results)
        assert len(engine.generate(IDS[5:9], 2, first.state).tokens) == 2
        (second,) = results
    np.testing.assert_array_equal(second.logits, whole.logits)


def test_sources_are_found_by_what_the_checkpoint_argument_says(tmp_path):
    with open_source("synthetic:flash") as source:
        assert source.config.num_hidden_layers == 43
    with pytest.raises(ConfigError, match="synthetic:flsh names no model config, expected"):
        open_source("synthetic:flsh")
    with pytest.raises(ConfigError, match=r"no\.json does not exist"):
        open_source(f"synthetic:{tmp_path / 'no.json'}")


def test_configuration_comes_in_four_forms(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[prefill]\nchunk_tokens = 3\n")
    expected = RunConfig().replace({"prefill.chunk_tokens": 3})
    for form in (path, str(path), {"prefill.chunk_tokens": 3}, expected):
        assert engines.as_run_config(form) == expected
    assert engines.as_run_config(None) == RunConfig()


def test_more_top_logprobs_than_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"top_logprobs is 265, expected at most .* 264"):
        load(prefill__top_logprobs=265)


def test_weights_serve_another_configuration():
    """Roundings and the mode of streaming change without loading; the rest is refused."""
    config = RunConfig().replace({"prefill.chunk_tokens": 128})
    with ds4jax.load("synthetic:tiny", config) as engine:
        ids = np.arange(20)
        first = engine.prefill(ids).logits
        changed = config.replace({"numerics.preset": "bfloat16"})
        other = engine.reconfigured(changed)
        logits = other.prefill(ids).logits
        np.testing.assert_array_equal(engine.prefill(ids).logits, first)
        refused = config.replace({"prefill.chunk_tokens": 64})
        assert not engine.can_run(refused)
        with pytest.raises(ConfigError, match=r"differs in config\.numerics\.compute, "):
            engine.reconfigured(refused)
        assert not engine.can_run(config.replace({"numerics.preset": "oracle"}))
    with ds4jax.load("synthetic:tiny", changed) as fresh:
        np.testing.assert_array_equal(fresh.prefill(ids).logits, logits)
    assert not np.array_equal(first, logits)
