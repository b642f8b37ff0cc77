"""Layers split over devices: every split gives the bits of one device."""

import dataclasses
import hashlib
import itertools
import threading

import jax
import numpy as np
import pytest

from ds4jax import engine as engines
from ds4jax import events, testing
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ConfigError
from streaming import StreamError
from streaming.link import DeviceLink

CONFIG = dataclasses.replace(
    testing.tiny_config(), num_hidden_layers=6, compress_ratios=(0, 0, 4, 128, 4, 0, 0)
)
SOURCE = SyntheticSource(CONFIG, seed=0)
CHUNK = 48
IDS = np.random.default_rng(7).integers(0, CONFIG.vocab_size, 3 * CHUNK + 5).astype(np.int32)


def load(**overrides: object) -> engines.Engine:
    keys = {"prefill.chunk_tokens": CHUNK}
    keys |= {name.replace("__", "."): value for name, value in overrides.items()}
    return engines.load(SOURCE, keys, prompt_tokens=len(IDS))


def sha(result: engines.PrefillResult) -> str:
    digest = hashlib.sha256(result.logits.tobytes())
    for leaf in jax.tree.leaves(result.state):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def reference() -> str:
    with load() as engine:
        return sha(engine.prefill(IDS))


@pytest.mark.parametrize(
    ("split", "devices"),
    [("1,5", "0,0"), ("2,2,2", "0,0,0"), ("1,1,1,1,1,1", "0,0,0,0,0,0"), ("3,3", "0,1")],
)
def test_every_split_gives_the_bits_of_one_stage(split, devices, reference):
    with load(pipeline__split=split, pipeline__devices=devices) as engine:
        result = engine.prefill(IDS)
    assert sha(result) == reference
    assert result.report.tokens_read == len(IDS)
    assert not result.report.interrupted
    assert [part.tokens for part in result.report.chunks] == [48, 48, 48, 5]


def compositions(total: int, most: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of at most `most` positive terms."""
    found = []
    for parts in range(1, most + 1):
        for cuts in itertools.combinations(range(1, total), parts - 1):
            ends = (0, *cuts, total)
            found.append(tuple(b - a for a, b in itertools.pairwise(ends)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", compositions(6, 4), ids=str)
def test_every_split_over_up_to_four_devices(sizes, reference):
    with load(pipeline__split=",".join(map(str, sizes))) as engine:
        assert len(set(engine.plans)) == len(sizes)
        assert sha(engine.prefill(IDS)) == reference


@pytest.mark.slow
def test_eight_stages_on_eight_devices():
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=8, compress_ratios=(0, 0, 4, 128, 4, 128, 4, 0, 0)
    )
    source, shas = SyntheticSource(config, seed=0), set()
    for split in ("8", "1,1,1,1,1,1,1,1"):
        keys = {"prefill.chunk_tokens": CHUNK, "pipeline.split": split}
        with engines.load(source, keys, prompt_tokens=len(IDS)) as engine:
            shas.add(sha(engine.prefill(IDS)))
    assert len(shas) == 1


@pytest.mark.parametrize("length", [1, 17])
def test_prompts_shorter_than_a_chunk(length):
    shas = set()
    for split, devices in (("6", "0"), ("2,4", "0,0")):
        with load(pipeline__split=split, pipeline__devices=devices) as engine:
            shas.add(sha(engine.prefill(IDS[:length])))
    assert len(shas) == 1


def test_stages_stream_their_own_experts(reference):
    with load(
        pipeline__split="4,2",
        pipeline__devices="0,0",
        streaming__resident_fraction=0.25,
        streaming__micro_batch_tokens=2 * CHUNK,
    ) as engine:
        result = engine.prefill(IDS)
        (item,) = {stage.layout.item_bytes for stage in (s.pool for s in engine._stages)}
    assert sha(result) == reference
    # Two micro-batches; each stage moves its twelve streamed experts of every layer once in each.
    moved = [[ledger.total_bytes for ledger in part.ledgers] for part in result.report.passes]
    assert moved == [[4 * 12 * item, 2 * 12 * item]] * 2


def test_state_continues_on_another_split(reference):
    cut = 2 * CHUNK
    with load(pipeline__split="2,4", pipeline__devices="0,0") as engine:
        first = engine.prefill(IDS[:cut])
    with load(pipeline__split="5,1", pipeline__devices="0,0") as engine:
        assert sha(engine.prefill(IDS[cut:], state=first.state)) == reference


def test_several_prompts_in_one_run(reference):
    with load(pipeline__split="3,3", pipeline__devices="0,0") as engine:
        results = list(engine.prefill_many([IDS[:20], IDS, IDS[:60]]))
        assert sha(results[1]) == reference
        assert [len(r.report.chunks) for r in results] == [1, 4, 2]
        assert sha(results[0]) == sha(engine.prefill(IDS[:20]))


def test_stop_ends_between_micro_batches_and_can_be_continued():
    # Longer than all that the stages may have taken when the first chunk comes out.
    ids, stop = np.tile(IDS[:CHUNK], 16), threading.Event()

    def observe(event: events.Event) -> None:
        if isinstance(event, events.ChunkDone):
            stop.set()

    with load() as engine:
        whole = sha(engine.prefill(ids))
    with load(pipeline__split="3,3", pipeline__devices="0,0") as engine:
        part = engine.prefill(ids, stop=stop, on_event=observe)
        read = part.report.tokens_read
        assert part.report.interrupted
        assert 0 < read < len(ids)
        assert read % CHUNK == 0
        assert part.state.position == read
        assert sha(engine.prefill(ids[read:], state=part.state)) == whole


def test_an_error_in_a_stage_is_raised_and_the_next_prompt_is_right(reference, monkeypatch):
    with load(
        pipeline__split="3,3", pipeline__devices="0,0", streaming__resident_fraction=0.5
    ) as engine:
        with monkeypatch.context() as patch:

            def refuse(self, array):
                raise MemoryError("no memory on the device")

            patch.setattr(DeviceLink, "put", refuse)
            with pytest.raises(StreamError, match="no memory on the device"):
                engine.prefill(IDS)
        assert sha(engine.prefill(IDS)) == reference


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pipeline.split": "3,2"}, r"config.pipeline.split is '3,2' with 5 layers.* 6 together"),
        ({"pipeline.split": "6,0"}, r"at least 1 layer per stage"),
        ({"pipeline.split": "3;3"}, r"config.pipeline.split is '3;3', expected whole numbers"),
        (
            {"pipeline.split": "3,3", "pipeline.devices": "0"},
            r"config.pipeline.devices is 0 for 2 stages",
        ),
        (
            {"pipeline.split": "3,3", "pipeline.devices": "0,99"},
            r"expected 2 indices from 0 to 7: JAX has 8 devices",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        engines.load(SOURCE, keys)
