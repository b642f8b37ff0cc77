"""Layers split over devices: every split gives the bits of one device."""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from ds4jax import engine as engines
from ds4jax import events, testing
from ds4jax.cache import capacity_for, state_bytes
from ds4jax.checkpoint.source import config_text
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ConfigError
from ds4jax.run_config import RunConfig
from ds4jax.stages import Stage
from ds4jax.testing import result_hash
from streaming import StreamError
from streaming.link import DeviceLink

CONFIG = dataclasses.replace(
    testing.tiny_config(), num_hidden_layers=6, compress_ratios=(0, 0, 4, 128, 4, 0, 0)
)
SOURCE = SyntheticSource(CONFIG, seed=0)
ROOT = pathlib.Path(__file__).parents[2]
CHUNK = 48
IDS = np.random.default_rng(7).integers(0, CONFIG.vocab_size, 3 * CHUNK + 5).astype(np.int32)


def load(**overrides: object) -> engines.Engine:
    keys = {"prefill.chunk_tokens": CHUNK}
    keys |= {name.replace("__", "."): value for name, value in overrides.items()}
    return engines.load(SOURCE, keys, prompt_tokens=len(IDS))


@pytest.fixture(scope="module")
def reference() -> str:
    with load() as engine:
        return result_hash(engine.prefill(IDS))


@pytest.mark.parametrize(
    ("split", "devices"),
    [
        ("1,5", "0,0"),
        ("2,2,2", "0,0,0"),
        ("1,1,1,1,1,1", "0,0,0,0,0,0"),
        ("3,3", "0,1"),
        ("2,1,1,2", "0,1,0,1"),
    ],
)
def test_every_split_gives_the_bits_of_one_stage(split, devices, reference):
    with load(pipeline__split=split, pipeline__devices=devices) as engine:
        result = engine.prefill(IDS)
    assert result_hash(result) == reference
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
        assert result_hash(engine.prefill(IDS)) == reference


@pytest.mark.parametrize(
    "devices", ["0,0,0,0,0,0,0,0", pytest.param("0,1,2,3,4,5,6,7", marks=pytest.mark.slow)]
)
def test_eight_stages(devices):
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=8, compress_ratios=(0, 0, 4, 128, 4, 128, 4, 0, 0)
    )
    source, shas = SyntheticSource(config, seed=0), set()
    for split, places in (("8", "0"), ("1,1,1,1,1,1,1,1", devices)):
        keys = {"prefill.chunk_tokens": CHUNK, "pipeline.split": split, "pipeline.devices": places}
        with engines.load(source, keys, prompt_tokens=len(IDS)) as engine:
            shas.add(result_hash(engine.prefill(IDS)))
    assert len(shas) == 1


@pytest.mark.parametrize("length", [1, 17])
def test_prompts_shorter_than_a_chunk(length):
    shas = set()
    for split, devices in (("6", "0"), ("2,4", "0,0")):
        with load(pipeline__split=split, pipeline__devices=devices) as engine:
            shas.add(result_hash(engine.prefill(IDS[:length])))
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
    assert result_hash(result) == reference
    # Two micro-batches; each stage moves its twelve streamed experts of every layer once in each.
    moved = [[ledger.total_bytes for ledger in part.ledgers] for part in result.report.passes]
    assert moved == [[4 * 12 * item, 2 * 12 * item]] * 2


def test_a_stage_streams_while_it_waits_for_its_inputs(reference, monkeypatch):
    """The first stage does not begin before the second one has copied its first window."""
    copied, put, run = threading.Event(), DeviceLink.put, Stage.run
    late: list[bool] = []

    def noted_put(self, array):
        if threading.current_thread().name == "layers 3 to 5":
            copied.set()
        return put(self, array)

    def held_run(self, *args, **kwargs):
        if self.layers.start == 0 and not late:
            late.append(not copied.wait(30))
        return run(self, *args, **kwargs)

    with load(
        pipeline__split="3,3", pipeline__devices="0,0", streaming__resident_fraction=0.5
    ) as engine:
        monkeypatch.setattr(DeviceLink, "put", noted_put)
        monkeypatch.setattr(Stage, "run", held_run)
        assert result_hash(engine.prefill(IDS)) == reference
    assert late == [False]


def test_a_stop_gives_up_what_was_streamed_ahead():
    stop = threading.Event()

    def observe(event: events.Event) -> None:
        if isinstance(event, events.ChunkDone):
            stop.set()

    with load(
        pipeline__split="3,3",
        pipeline__devices="0,0",
        streaming__resident_fraction=0.5,
        streaming__order="chunk_major",
    ) as engine:
        whole = result_hash(engine.prefill(np.tile(IDS[:CHUNK], 8)))
        part = engine.prefill(np.tile(IDS[:CHUNK], 8), stop=stop, on_event=observe)
        assert part.report.interrupted
        assert result_hash(engine.prefill(np.tile(IDS[:CHUNK], 8))) == whole


def test_state_continues_on_another_split(reference):
    cut = 2 * CHUNK
    with load(pipeline__split="2,4", pipeline__devices="0,0") as engine:
        first = engine.prefill(IDS[:cut])
    with load(pipeline__split="5,1", pipeline__devices="0,0") as engine:
        assert result_hash(engine.prefill(IDS[cut:], state=first.state)) == reference


def test_events_of_several_stages_come_on_the_calling_thread():
    seen: list[tuple[str, int, int]] = []

    def observe(event: events.Event) -> None:
        if isinstance(event, events.PromptStarted | events.ChunkDone):
            seen.append((type(event).__name__, event.prompt, threading.get_ident()))

    with load(pipeline__split="3,3", pipeline__devices="0,0") as engine:
        list(engine.prefill_many([IDS[:20], IDS[:60]], on_event=observe))
    here = threading.get_ident()
    assert seen == [
        ("PromptStarted", 0, here),
        ("ChunkDone", 0, here),
        ("PromptStarted", 1, here),
        ("ChunkDone", 1, here),
        ("ChunkDone", 1, here),
    ]


def test_several_prompts_in_one_run(reference):
    with load(pipeline__split="3,3", pipeline__devices="0,0") as engine:
        results = list(engine.prefill_many([IDS[:20], IDS, IDS[:60]]))
        assert result_hash(results[1]) == reference
        assert [len(r.report.chunks) for r in results] == [1, 4, 2]
        assert result_hash(results[0]) == result_hash(engine.prefill(IDS[:20]))


def test_stop_ends_between_micro_batches_and_can_be_continued():
    # Longer than all that the stages may have taken when the first chunk comes out.
    ids, stop = np.tile(IDS[:CHUNK], 16), threading.Event()

    def observe(event: events.Event) -> None:
        if isinstance(event, events.ChunkDone):
            stop.set()

    with load() as engine:
        whole = result_hash(engine.prefill(ids))
    with load(pipeline__split="3,3", pipeline__devices="0,0") as engine:
        part = engine.prefill(ids, stop=stop, on_event=observe)
        read = part.report.tokens_read
        assert part.report.interrupted
        assert 0 < read < len(ids)
        assert read % CHUNK == 0
        assert part.state.position == read
        assert result_hash(engine.prefill(ids[read:], state=part.state)) == whole


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
        assert result_hash(engine.prefill(IDS)) == reference


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


# Several processes


def launch(
    folder: pathlib.Path, processes: int, split: str, *flags: str
) -> tuple[dict, np.ndarray]:
    """The record and logits of the command over IDS, in `processes` processes of 8 devices."""
    model, ids, out = folder / "model.json", folder / "ids.npy", folder / "run"
    model.write_text(config_text(CONFIG, "fp4"), encoding="utf-8")
    np.save(ids, IDS)
    environ = {name: value for name, value in os.environ.items() if "SHARDING" not in name}
    done = subprocess.run(
        [
            sys.executable, "-m", "sharding.launcher", f"--processes={processes}", "--",
            sys.executable, "-m", "ds4jax.cli.prefill", f"--checkpoint=synthetic:{model}",
            f"--tokens={ids}", f"--out_dir={out}", f"--config.prefill.chunk_tokens={CHUNK}",
            f"--config.pipeline.split={split}", *flags,
        ],
        env=environ, capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == record
    return record, np.load(out / "logits.npy")


@pytest.fixture(scope="module")
def every_row() -> np.ndarray:
    """Logits of all tokens from one process."""
    with load(prefill__logits="all") as engine:
        return engine.prefill(IDS).logits


def test_two_processes_give_the_bits_of_one_and_one_account(every_row, tmp_path):
    record, logits = launch(
        tmp_path,
        2,
        "4,2",
        "--config.prefill.logits=all",
        "--config.streaming.resident_fraction=0.25",
        f"--config.streaming.micro_batch_tokens={2 * CHUNK}",
    )
    np.testing.assert_array_equal(logits, every_row)
    assert [(part["first_layer"], part["layers"]) for part in record["plan"]] == [(0, 4), (4, 2)]
    assert (record["status"], record["tokens_read"]) == ("complete", len(IDS))
    # Two micro-batches; each stage moves its twelve streamed experts of every layer once in each.
    assert record["streaming"]["moved_experts"] == {"ram": 2 * 12 * 6}
    assert [row["layer"] for row in record["streaming"]["layers"]] == [*range(6)]
    assert record["plan_error"]["moved_error_bytes"] == 0
    (prompt,) = record["prompts"]
    capacity = capacity_for(RunConfig(), CONFIG, len(IDS))
    numerics = RunConfig().numerics.resolve()
    assert prompt["state_bytes"] == state_bytes(CONFIG, numerics, capacity)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    layers = [json.loads(line) for line in lines if "layer_index" in line]
    assert [line["layer_index"] for line in layers] == [*range(6)] * 2
    assert (tmp_path / "run" / "profile.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "split", "flags"),
    [
        (1, "6", ()),
        (4, "1,2,2,1", ()),
        (2, "2,1,1,2", ()),
        (2, "1,1,2,2", ("--config.pipeline.devices=0,0,0,0",)),
        (2, "3,3", ("--config.pipeline.handoff=permute",)),
        (4, "1,2,2,1", ("--config.pipeline.handoff=permute",)),
        (2, "3,3", ("--config.pipeline.handoff=device_put",)),
        (4, "1,2,2,1", ("--config.pipeline.handoff=socket",)),
        (2, "auto", ("--config.pipeline.devices=0,1",)),
        (4, "auto", ("--config.pipeline.devices=0",)),
    ],
)
def test_processes_give_the_bits_of_one(processes, split, flags, every_row, tmp_path):
    every = "--config.prefill.logits=all"
    record, logits = launch(tmp_path, processes, split, every, *flags)
    np.testing.assert_array_equal(logits, every_row)
    assert len(record["plan"]) == 4 if split == "auto" else split.count(",") + 1


@pytest.mark.slow
def test_processes_read_several_prompts_of_any_length(tmp_path):
    prompts = [IDS[:1], IDS[:17], IDS]
    lines = [json.dumps({"tokens": part.tolist()}) for part in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    flags = ("--tokens=", f"--prompts_file={tmp_path / 'prompts.jsonl'}")
    record, logits = launch(tmp_path, 2, "3,3", *flags)
    assert [part["tokens_read"] for part in record["prompts"]] == [1, 17, len(IDS)]
    with load() as engine:
        wanted = [engine.prefill(part).logits[0] for part in prompts]
    np.testing.assert_array_equal(logits, wanted)
