"""The plan of whole runs: within every memory, never slower with more of it, always the same."""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from ds4jax import accounts, testing
from ds4jax import engine as engines
from ds4jax import plan as planning
from ds4jax.cache import capacity_for
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ConfigError, ModelConfig
from ds4jax.machine import Machine, local_machine, planned_machine
from ds4jax.rows import Prompts
from ds4jax.run_config import RunConfig
from sharding.cost import PlanError, uniform_links

MODELS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FLASH = ModelConfig.from_json(MODELS / "flash.json")
# Full widths, so that bytes and times are those of a real run; few layers, so that plans are quick.
CUT = SyntheticSource(
    dataclasses.replace(FLASH, num_hidden_layers=8, compress_ratios=(*FLASH.layer_ratios[:8], 0)),
    seed=0,
)
TINY = SyntheticSource(testing.tiny_config(), seed=0)
GB = 10**9


def machine(memory_gb: tuple[float, ...], link_gb: float = 25, host_gb: float = 400) -> Machine:
    """GPUs of one kind with these memories."""
    config = RunConfig().replace({"memory.device_bytes": GB})
    found = planned_machine(config, keys.expert_bytes(FLASH), len(memory_gb), int(host_gb * GB))
    return dataclasses.replace(
        found,
        devices=tuple(
            dataclasses.replace(
                device, memory_bytes=int(gb * GB), host_link_bytes_per_s=int(link_gb * GB)
            )
            for device, gb in zip(found.devices, memory_gb, strict=True)
        ),
        link_bytes_per_s=uniform_links(len(memory_gb), 50 * GB),
    )


def plan(
    memory_gb: tuple[float, ...], prompts: tuple[int, ...], *, source=CUT, link_gb=25, **options
) -> planning.RunPlan:
    values = {"pipeline.split": "auto"} | {k.replace("__", "."): v for k, v in options.items()}
    config = RunConfig().replace(values)
    capacity = capacity_for(config, source.config, max(prompts))
    return planning.plan_run(source, config, machine(memory_gb, link_gb), prompts, capacity)


memories = st.lists(st.floats(3, 60), min_size=1, max_size=3).map(tuple)
lengths = st.lists(st.integers(1, 100_000), min_size=1, max_size=3).map(tuple)
settings = st.fixed_dictionaries(
    {},
    optional={
        "prefill__chunk_tokens": st.sampled_from([1024, 4096, 8192]),
        "streaming__mode": st.sampled_from(["whole", "routed", "auto"]),
        "streaming__order": st.sampled_from(["auto", "chunk_major", "layer_major"]),
        "streaming__window": st.integers(0, 3),
        "streaming__resident_fraction": st.floats(0, 1),
        "streaming__micro_batch_tokens": st.integers(1, 200_000),
        "link_gb": st.sampled_from([5, 25, 50]),
    },
)


def check_fits(found: planning.RunPlan, memory_gb: tuple[float, ...]) -> None:
    """Every buffer that is priced fits; the table of the planner has the same bytes."""
    used: dict[int, int] = {}
    for stage, place, chosen in zip(found.stages, found.places, found.choice.stages, strict=True):
        used[place] = used.get(place, 0) + stage.price.total_bytes
        assert stage.price.total_bytes <= chosen.memory_bytes
        assert sum(len(kept) for kept in stage.experts.residency.resident) == chosen.residents
    assert all(used[place] <= memory_gb[place] * GB for place in used)
    assert sum(stage.store_bytes for stage in found.stages) <= found.run.machine.host_bytes
    layers = [layer for stage in found.stages for layer in stage.layers]
    assert layers == list(range(found.run.model.num_hidden_layers))


@hypothesis.given(memories, lengths, settings)
@hypothesis.settings(max_examples=20, deadline=None)
def test_a_plan_never_exceeds_any_memory(memory_gb, prompts, options):
    try:
        found = plan(memory_gb, prompts, **options)
    except PlanError:
        return
    check_fits(found, memory_gb)


@hypothesis.given(memories, lengths, settings, st.data())
@hypothesis.settings(max_examples=20, deadline=None)
def test_more_memory_never_makes_a_plan_slower(memory_gb, prompts, options, data):
    more = tuple(gb + data.draw(st.floats(0, 30)) for gb in memory_gb)
    try:
        small = plan(memory_gb, prompts, **options)
    except PlanError:
        return
    large = plan(more, prompts, **options)
    # Times are summed up in whole nanoseconds per pass.
    rounding = 1_000 * small.choice.schedule.passes
    assert large.choice.objective_ns <= small.choice.objective_ns + rounding


def test_a_hundred_plans_are_one_plan():
    memory_gb = (0.0706, 0.0705, 0.0704)
    first = plan(memory_gb, (300, 5000), source=TINY, prefill__chunk_tokens=64)
    assert len(first.stages) > 1
    for _ in range(100):
        again = plan(memory_gb, (300, 5000), source=TINY, prefill__chunk_tokens=64)
        assert (again.stages, again.places) == (first.stages, first.places)
        assert again.choice.ties == first.choice.ties


def test_a_card_that_only_slows_the_run_down_is_left_out():
    found = plan((60, 3), (8192,))
    assert found.places == (0,)
    assert not found.stages[0].experts.streams


def test_small_cards_share_the_layers_by_their_memory():
    found = plan((20, 10, 10), (65_536,))
    layers = [len(stage.layers) for stage in found.stages]
    assert layers[found.places.index(0)] == max(layers)
    check_fits(found, (20, 10, 10))


def test_time_of_a_plan_follows_prompt_and_rates():
    found = plan((60,), (8192,))
    one, four = (found.predict(Prompts.of(tokens)).seconds for tokens in (8192, 32_768))
    # Four chunks, of which later ones see more context.
    assert 4 * one < four < 5 * one
    again = found.predict(Prompts(((24_576, 8192),))).seconds
    assert one < again < 1.3 * one
    # Layers of each kind alone (docs/measurements/2026-11-30/layers_h200.md): 2 SWA,
    # 3 CSA and 3 HCA.
    assert one == pytest.approx(2 * 8.56e-3 + 3 * 10.46e-3 + 3 * 8.98e-3, rel=0.1)


def test_streamed_bytes_are_those_that_are_not_resident():
    item = keys.expert_bytes(FLASH)
    for tokens, passes in ((8192, 1), (65_536, 4)):
        found = plan(
            (20,),
            (tokens,),
            streaming__mode="whole",
            streaming__micro_batch_tokens=16_384 if passes > 1 else 8192,
        )
        (stage,) = found.stages
        missing = sum(map(len, stage.experts.residency.streamed))
        moved = found.predict(Prompts.of(tokens)).moved_bytes
        assert moved == {"ram": passes * missing * item}


def test_more_residents_save_their_bytes_in_every_pass():
    """k experts taken from residency add k * item bytes for each of ceil(T / S) passes."""
    item, tokens, micro_batch = keys.expert_bytes(FLASH), 100_000, 24_576
    moved = []
    for kept in (100, 90):
        found = plan(
            (40,),
            (tokens,),
            streaming__mode="whole",
            streaming__micro_batch_tokens=micro_batch,
            streaming__resident_fraction=kept / 256,
        )
        (count,) = found.predict(Prompts.of(tokens)).moved_bytes.values()
        moved.append(count)
    assert item == 13_369_344
    assert moved[1] - moved[0] == 8 * 10 * item * math.ceil(tokens / micro_batch)


# Runs on CPU devices whose memory a machine file limits

CHUNK = 48
SIX = dataclasses.replace(
    testing.tiny_config(), num_hidden_layers=6, compress_ratios=(0, 0, 4, 128, 4, 0, 0)
)
SOURCE = SyntheticSource(SIX, seed=0)
IDS = np.random.default_rng(7).integers(0, SIX.vocab_size, 3 * CHUNK + 5).astype(np.int32)


def machine_file(folder: pathlib.Path, memory: dict[int, int]) -> str:
    """A machine file of this machine's CPU devices, some of them with little memory."""
    devices = [
        {
            "id": device.id,
            "kind": device.device_kind,
            "memory_bytes": memory.get(device.id),
            "memory_bytes_per_s": 10 * GB,
            "matmul_flops_per_s": {"bfloat16": 50 * GB, "float32": 100 * GB},
        }
        for device in jax.local_devices()
    ]
    path = folder / "machine.json"
    path.write_text(json.dumps({"schema": 1, "platform": "cpu", "devices": devices, "links": []}))
    return str(path)


def read(ids: np.ndarray = IDS, **options: object) -> tuple[str, engines.Engine]:
    values = {"prefill.chunk_tokens": CHUNK} | {
        name.replace("__", "."): value for name, value in options.items()
    }
    with engines.load(SOURCE, values, prompt_tokens=[len(ids)]) as engine:
        result = engine.prefill(ids)
        digest = hashlib.sha256(result.logits.tobytes())
        for leaf in jax.tree.leaves(result.state):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest(), engine


@functools.cache
def one_device() -> tuple[str, int]:
    sha, engine = read()
    return sha, engine.plan.price.total_bytes


def test_the_split_that_is_chosen_runs_and_gives_the_bits_of_one_by_hand(tmp_path):
    sha, whole = one_device()
    limit = whole - 1
    chosen, engine = read(
        machine__file=machine_file(tmp_path, {0: limit, 1: limit}),
        pipeline__split="auto",
        pipeline__devices="0,1",
    )
    assert chosen == sha
    assert len(engine.plans) == 2
    assert sorted(engine.run_plan.places) == [0, 1]
    assert all(plan.price.total_bytes <= limit for plan in engine.plans)
    sizes = ",".join(str(len(plan.layers)) for plan in engine.plans)
    places = ",".join(map(str, engine.run_plan.places))
    by_hand, again = read(pipeline__split=sizes, pipeline__devices=places)
    assert by_hand == sha
    assert [plan.layers for plan in again.plans] == [plan.layers for plan in engine.plans]


def test_ledgers_move_what_the_plan_says_and_residents_save_it_in_every_pass():
    """Residency and passes decide the bytes: k more residents of a layer save k of them a pass."""
    moved, item = [], 3 * 128 * (128 // 2 + 128 // 32)
    for kept in (0.5, 0.375):
        values = {
            "prefill.chunk_tokens": CHUNK,
            "streaming.mode": "whole",
            "streaming.resident_fraction": kept,
            "streaming.micro_batch_tokens": 2 * CHUNK,
        }
        with engines.load(SOURCE, values, prompt_tokens=[len(IDS)]) as engine:
            report = engine.prefill(IDS).report
        error = accounts.plan_error(
            engine.plans,
            report.passes,
            None,
            run_plan=engine.run_plan,
            spans=[(0, len(IDS))],
            seconds=report.seconds,
        )
        assert error["moved_error_bytes"] == 0
        ledgers = [ledger for part in report.passes for ledger in part.ledgers]
        assert error["predicted_moved_bytes"] == sum(each.total_bytes for each in ledgers)
        moved.append(error["moved_bytes"])
    passes = math.ceil(len(IDS) / (2 * CHUNK))
    assert passes == len(report.passes) == 2
    assert moved[1] - moved[0] == 6 * (8 - 6) * item * passes


def test_a_machine_file_of_another_machine_is_refused(tmp_path):
    path = pathlib.Path(machine_file(tmp_path, {}))
    record = json.loads(path.read_text())
    record["devices"][0]["kind"] = "NVIDIA H200"
    path.write_text(json.dumps(record))
    device = jax.local_devices()[0]
    with pytest.raises(ConfigError, match=r"config.machine.file: .*H200.* probe it"):
        local_machine(RunConfig().replace({"machine.file": str(path)}), [device], 1000)
    with pytest.raises(PlanError, match="does not exist: make it with"):
        local_machine(RunConfig().replace({"machine.file": "none.json"}), [device], 1000)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("0,0", r"config.pipeline.devices is 0,0 with config.pipeline.split auto, expected differ"),
        ("0,99", r"expected different indices from 0 to 7"),
    ],
)
def test_devices_of_an_automatic_split_are_checked(devices, message):
    with pytest.raises(ConfigError, match=message):
        read(pipeline__split="auto", pipeline__devices=devices)
