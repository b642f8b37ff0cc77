"""Saved state: restored bit for bit, refused for any other run with the values that differ."""

import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache, testing
from ds4jax.checkpoint import storage
from ds4jax.checkpoint.source import CheckpointError
from ds4jax.checkpoint.state import (
    complete_state,
    is_paused,
    load_paused,
    load_state,
    save_layers,
    save_paused,
    save_state,
    saved_bytes,
)
from ds4jax.config import PRESETS

TINY = testing.tiny_config()
ORACLE = PRESETS["oracle"]
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, 2000).astype(np.int32)
WEIGHTS = "0123abcd"


def random_state(position, numerics, capacity_tokens, seed=0):
    """A state as a run leaves it: every leaf random, unused rows of entry buffers zero."""
    rng = np.random.default_rng([seed, position])

    def fill(path, leaf):
        array = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        if getattr(path[-1], "name", "") in ("compressed", "index_keys"):
            array[position // TINY.layer_ratios[path[1].idx] :] = 0
        return jnp.asarray(array)

    state = cache.empty_state(TINY, numerics, capacity_tokens)
    return dataclasses.replace(jax.tree_util.tree_map_with_path(fill, state), position=position)


def assert_same_bits(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Positions without any entry, inside blocks, at block ends.
@pytest.mark.parametrize("position", [0, 1, 3, 127, 128, 130, 1025])
@pytest.mark.parametrize("preset", ["oracle", "official"])
def test_state_comes_back_bit_for_bit(tmp_path, position, preset):
    numerics = PRESETS[preset]
    state = random_state(position, numerics, 2048)
    save_state(tmp_path / "s", state, TINY, numerics, WEIGHTS, TOKENS)
    again = load_state(tmp_path / "s", TINY, numerics, WEIGHTS, TOKENS)
    assert again.position == position
    assert_same_bits(cache.grow_state(again, TINY, 2048), state)


def test_infinite_gates_of_the_first_block_survive(tmp_path):
    state = cache.empty_state(TINY, ORACLE, 8192)
    save_state(tmp_path / "s", state, TINY, ORACLE, WEIGHTS, TOKENS)
    again = load_state(tmp_path / "s", TINY, ORACLE, WEIGHTS, TOKENS)
    assert_same_bits(cache.grow_state(again, TINY, 8192), state)
    assert jnp.isneginf(again.layers[2].carry.previous_gates).all()


def layers_of(state, layers):
    kept = tuple(layer if n in layers else None for n, layer in enumerate(state.layers))
    return dataclasses.replace(state, layers=kept)


def test_layers_that_were_saved_apart_are_one_state(tmp_path):
    state, folder = random_state(300, ORACLE, 512), tmp_path / "s"
    count = TINY.num_hidden_layers
    spans = [range(2), range(2, 3), range(3, count)]
    parts = [save_layers(folder, layers_of(state, own), TINY, own) for own in reversed(spans)]
    assert not folder.exists()
    owner = (TINY, ORACLE, WEIGHTS, TOKENS)
    for wrong in (parts[:2], parts):
        with pytest.raises(CheckpointError, match="expected all from 0 to 5 in order"):
            complete_state(folder, wrong, 300, *owner)
        assert not folder.exists()
    complete_state(folder, parts[::-1], 300, *owner)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    again = load_state(folder, *owner)
    assert_same_bits(cache.grow_state(again, TINY, 512), state)
    for own in (range(1, 4), range(0)):
        some = load_state(folder, *owner, layers=own)
        assert some.position == 300
        assert_same_bits(cache.grow_state(some, TINY, 512), layers_of(state, own))


def test_only_the_layers_that_are_asked_for_are_read(tmp_path):
    state, folder = random_state(300, ORACLE, 512), tmp_path / "s"
    spans = [range(2), range(2, TINY.num_hidden_layers)]
    parts = [save_layers(folder, layers_of(state, own), TINY, own) for own in spans]
    owner = (TINY, ORACLE, WEIGHTS, TOKENS)
    complete_state(folder, parts, 300, *owner)
    shutil.rmtree(folder / "layers2to4")
    load_state(folder, *owner, layers=range(2))
    with pytest.raises(CheckpointError, match="layers2to4 has changed since it was written"):
        load_state(folder, *owner)


def test_unused_rows_are_not_written(tmp_path):
    sizes = []
    for capacity in (2048, 65536):
        folder = tmp_path / str(capacity)
        save_state(folder, random_state(300, ORACLE, capacity), TINY, ORACLE, WEIGHTS, TOKENS)
        sizes.append(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
    assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[0]


@pytest.mark.parametrize("position", [1, 128, 1999])
@pytest.mark.parametrize("preset", ["oracle", "official"])
def test_price_of_a_saved_state_is_what_its_folder_takes(tmp_path, position, preset):
    numerics = PRESETS[preset]
    state = random_state(position, numerics, 65536)
    save_state(tmp_path / "s", state, TINY, numerics, WEIGHTS, TOKENS)
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    taken = sum(path.stat().st_size for path in files)
    # Noise compresses by a few per cent, and its bfloat16 by a few more.
    priced = saved_bytes(TINY, numerics, position)
    assert taken <= priced < 1.4 * taken
    assert priced < cache.state_bytes(TINY, numerics, 65536) / 10


@pytest.fixture
def saved(tmp_path):
    return save_state(tmp_path / "s", random_state(300, ORACLE, 512), TINY, ORACLE, WEIGHTS, TOKENS)


def problems_of(folder, config=TINY, numerics=ORACLE, weights=WEIGHTS, tokens=TOKENS):
    with pytest.raises(CheckpointError) as caught:
        load_state(folder, config, numerics, weights, tokens)
    return caught.value.problems


def test_another_model_is_refused_with_every_differing_value(saved):
    yarn = dataclasses.replace(TINY.rope_scaling, factor=4)
    other = dataclasses.replace(TINY, hidden_size=256, rope_scaling=yarn)
    assert problems_of(saved, config=other) == (
        "model.hidden_size is 128 in the state, 256 in this run",
        "model.rope_scaling.factor is 16 in the state, 4 in this run",
    )


def test_another_depth_is_refused(saved):
    other = dataclasses.replace(TINY, compress_ratios=(0, 0, 4, 128, 4, 0, 0, 0))
    assert problems_of(saved, config=other) == (
        "model.compress_ratios is [0, 0, 4, 128, 4, 0] in the state, "
        "[0, 0, 4, 128, 4, 0, 0, 0] in this run",
    )


def test_other_numerics_are_refused(saved):
    assert problems_of(saved, numerics=PRESETS["official"]) == (
        "numerics is 'float32+none' in the state, 'bfloat16+q1+q2+q3' in this run",
    )


def test_other_weights_are_refused(saved):
    assert problems_of(saved, weights="ffff") == (
        "weights is '0123abcd' in the state, 'ffff' in this run",
    )


def test_other_tokens_are_refused_and_later_ones_do_not_matter(saved):
    tokens = TOKENS.copy()
    tokens[300:] = 1
    load_state(saved, TINY, ORACLE, WEIGHTS, tokens)
    load_state(saved, TINY, ORACLE, WEIGHTS, TOKENS[:300])
    tokens[299] += 1
    (problem,) = problems_of(saved, tokens=tokens)
    assert problem.startswith("tokens_sha256 is '")


def test_position_behind_the_prompt_is_refused(saved):
    (problem,) = problems_of(saved, tokens=TOKENS[:299])
    assert "is at position 300, the prompt has 299 tokens" in problem


def test_position_that_was_altered_is_refused(saved):
    record = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**record, "position": 301}))
    (problem,) = problems_of(saved)
    assert problem.startswith("tokens_sha256 is '")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("position", None, "position is None, expected a whole number of at least 0"),
        ("position", "300", "position is '300', expected a whole number"),
        ("position", -1, "position is -1, expected a whole number"),
        ("parts", 5, "parts is 5, expected a list"),
        ("parts", [5], "parts[0] is 5, expected an object"),
        (
            "parts",
            [{"layers": [0], "folder": "arrays", "sha256": ""}],
            "parts[0].layers is [0], exp",
        ),
        ("parts", [{"layers": [0, 5], "folder": "arrays"}], "parts[0].sha256 is absent"),
        ("paused", {"layer": 1, "tokens": 3, "stream_shapes": []}, "paused.tokens is 3, expected"),
    ],
)
def test_record_that_was_altered_is_refused(saved, key, value, expected):
    record = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**record, key: value}))
    (problem,) = problems_of(saved)
    assert problem.startswith(f"{saved / 'state.json'}: {expected}")
    del record["position"]
    (saved / "state.json").write_text(json.dumps(record))
    assert "position is absent: the file was changed" in problems_of(saved)[0]


def test_record_that_is_no_file_or_no_json_is_refused(saved):
    (saved / "state.json").write_text("[" * 100_000)
    assert "state.json is not valid JSON" in problems_of(saved)[0]
    (saved / "state.json").unlink()
    (saved / "state.json").mkdir()
    assert "state.json cannot be read (Is a directory)" in problems_of(saved)[0]


def test_damaged_arrays_are_refused(saved):
    path = max((saved / "arrays").rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    (problem,) = problems_of(saved)
    assert "arrays has changed since it was written" in problem


def test_folder_without_a_state_is_refused(tmp_path, saved):
    (problem,) = problems_of(tmp_path / "nowhere")
    assert "state.json does not exist" in problem
    record = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**record, "version": 9}))
    (problem,) = problems_of(saved)
    assert "has format 'ds4jax-state' and version 9, expected 'ds4jax-state' and 2" in problem


def test_existing_folder_is_not_overwritten(saved):
    with pytest.raises(CheckpointError, match="s exists: choose another folder for the state"):
        save_state(saved, random_state(3, ORACLE, 512), TINY, ORACLE, WEIGHTS, TOKENS)


def test_an_interrupted_save_waits_for_its_threads(tmp_path, monkeypatch):
    """They would write on into a folder that is deleted, and make it again."""

    class Saving:
        """What Orbax gives for a save that another thread does."""

        waits = 0

        def result(self) -> None:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt

    saving = Saving()
    monkeypatch.setattr(storage.ocp, "save_async", lambda *args, **kwargs: saving)
    with pytest.raises(KeyboardInterrupt):
        storage.save_tree(tmp_path / "s", {"x": np.zeros(3)})
    assert saving.waits == 2


def test_a_child_that_saves_leaves_interrupts_to_its_parent():
    blocked = storage._in_child(signal.pthread_sigmask, signal.SIG_BLOCK, ())
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_interrupt_ends_the_child_that_saves(monkeypatch):
    def interrupted(future, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        storage._in_child(signal.pause)  # never ends by itself
    assert not multiprocessing.active_children()


def test_full_disk_leaves_no_state(tmp_path, monkeypatch):
    usage = collections.namedtuple("Usage", "total used free")
    state = random_state(300, ORACLE, 512)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10, 10))
        with pytest.raises(CheckpointError, match=r"s needs \d+ bytes, its disk has 10 free"):
            save_state(tmp_path / "s", state, TINY, ORACLE, WEIGHTS, TOKENS)
    assert list(tmp_path.iterdir()) == []

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.ocp, "save_async", full)
        with pytest.raises(CheckpointError, match=r"s needs \d+ bytes, its disk has"):
            save_state(tmp_path / "s", state, TINY, ORACLE, WEIGHTS, TOKENS)
    assert not (tmp_path / "s").exists()
    save_state(tmp_path / "s", state, TINY, ORACLE, WEIGHTS, TOKENS)
    assert_same_bits(load_state(tmp_path / "s", TINY, ORACLE, WEIGHTS, TOKENS), state)


def random_pass(layer, position, chunks, numerics):
    """A pass over `chunks` in front of `layer`, which the layers below have seen."""
    end, rows = position + sum(chunks), 48
    seen, unseen = (random_state(p, numerics, 2048) for p in (end, position))
    layers = seen.layers[:layer] + unseen.layers[layer:]
    rng = np.random.default_rng(7)
    shape = (rows, TINY.hc_mult, TINY.hidden_size)
    streams = tuple(jnp.asarray(rng.standard_normal(shape), numerics.dtype) for _ in chunks)
    state = cache.SequenceState(position, layers)
    return cache.PausedPass(layer, state, streams, chunks)


@pytest.mark.parametrize("layer", [1, 3, 4])
@pytest.mark.parametrize("preset", ["oracle", "official"])
def test_paused_pass_comes_back_bit_for_bit(tmp_path, layer, preset):
    """Layers below `layer` have entries of the micro-batch, the others do not."""
    numerics = PRESETS[preset]
    paused = random_pass(layer, 120, (48, 17), numerics)
    save_paused(tmp_path / "s", paused, TINY, numerics, WEIGHTS, TOKENS, 48)
    assert is_paused(tmp_path / "s")
    again = load_paused(tmp_path / "s", TINY, numerics, WEIGHTS, TOKENS, 48)
    assert (again.layer, again.tokens, again.state.position) == (layer, (48, 17), 120)
    assert_same_bits(again.streams, paused.streams)
    assert_same_bits(cache.grow_state(again.state, TINY, 2048), paused.state)


def test_paused_pass_of_another_run_is_refused(tmp_path):
    paused = random_pass(2, 96, (48, 48), ORACLE)
    save_paused(tmp_path / "s", paused, TINY, ORACLE, WEIGHTS, TOKENS, 48)
    with pytest.raises(CheckpointError, match="chunk_tokens is 48 in the state, 64 in this run"):
        load_paused(tmp_path / "s", TINY, ORACLE, WEIGHTS, TOKENS, 64)
    other = TOKENS.copy()
    other[100] += 1  # read by the pass, not yet by the state as a whole
    with pytest.raises(CheckpointError, match="tokens_sha256"):
        load_paused(tmp_path / "s", TINY, ORACLE, WEIGHTS, other, 48)
    with pytest.raises(CheckpointError, match=r"at position 192, the prompt has 191 tokens"):
        load_paused(tmp_path / "s", TINY, ORACLE, WEIGHTS, TOKENS[:191], 48)
    with pytest.raises(CheckpointError, match="weights is '0123abcd' in the state, 'ffff'"):
        load_paused(tmp_path / "s", TINY, ORACLE, "ffff", TOKENS, 48)
    with pytest.raises(CheckpointError, match="holds a pass that was stopped, expected a state"):
        load_state(tmp_path / "s", TINY, ORACLE, WEIGHTS, TOKENS)
    save_state(tmp_path / "t", random_state(9, ORACLE, 2048), TINY, ORACLE, WEIGHTS, TOKENS)
    assert not is_paused(tmp_path / "t")
    with pytest.raises(CheckpointError, match="holds a state, expected a pass that was stopped"):
        load_paused(tmp_path / "t", TINY, ORACLE, WEIGHTS, TOKENS, 48)
