"""The plan of a run: within the memory, as many residents as fit, refusals with numbers."""

import dataclasses
import math
import pathlib
import re

import jax
import numpy as np
import pytest

import streaming
from ds4jax import plan as planning
from ds4jax import rows, testing
from ds4jax.activations import LIVE_CHUNKS
from ds4jax.cache import capacity_for
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ConfigError, ModelConfig
from ds4jax.machine import planned_machine
from ds4jax.plan import Memory
from ds4jax.rows import Prompts
from ds4jax.run_config import RunConfig
from sharding.cost import PlanError

MODELS = pathlib.Path(__file__).parents[2] / "configs" / "models"
TINY = SyntheticSource(testing.tiny_config(), seed=0)
FLASH = SyntheticSource(ModelConfig.from_json(MODELS / "flash.json"), seed=0)
ITEM = 1000  # bytes of an expert in the tests of the arithmetic
GB = 10**9


def run_plan(
    source=FLASH, prompt_tokens=8192, device_bytes=128 * GB, host_bytes=256 * GB, **options
):
    """The plan of a run on as many devices as the options name."""
    values = {key.replace("__", "."): value for key, value in options.items()}
    config = RunConfig().replace({"memory.device_bytes": device_bytes, **values})
    capacity = capacity_for(config, source.config, prompt_tokens)
    item = keys.expert_bytes(source.config, source.infos())
    machine = planned_machine(config, item, 4, host_bytes)
    return planning.plan_run(source, config, machine, [prompt_tokens], capacity)


def plan(source=FLASH, prompt_tokens=8192, device_bytes=128 * GB, host_bytes=256 * GB, **options):
    values = {key.replace("__", "."): value for key, value in options.items()}
    config = RunConfig().replace({"memory.device_bytes": device_bytes, **values})
    capacity = capacity_for(config, source.config, prompt_tokens)
    return planning.make_plan(
        source,
        config,
        jax.local_devices()[0],
        prompt_tokens,
        capacity,
        memory=Memory(device_bytes, host_bytes),
    )


@pytest.mark.parametrize("device_gb", [24, 48, 96, 128, 180])
@pytest.mark.parametrize("prompt_tokens", [512, 8192, 131_072])
def test_price_is_within_the_memory_and_one_more_resident_is_not(device_gb, prompt_tokens):
    found = plan(prompt_tokens=prompt_tokens, device_bytes=device_gb * GB)
    price, item = found.price, keys.expert_bytes(FLASH.config, FLASH.infos())
    assert price.total_bytes <= device_gb * GB
    counts = [len(chosen) for chosen in found.experts.residency.resident]
    # The same number: layers share programs, and none's copies are left without cover.
    assert len(set(counts)) == 1
    assert price.resident_bytes == sum(counts) * item
    streamed = sum(map(len, found.experts.residency.streamed))
    assert streamed == 43 * 256 - sum(counts)
    assert found.store_bytes == streamed * item
    if device_gb == 180:
        assert (found.experts.streams, found.order) == (False, "chunk_major")
        return
    # An expert a layer more would not fit; waves are equal, which may leave a few experts unused.
    live = streaming.window.live_bound(found.experts.resolved_window)
    assert device_gb * GB - price.total_bytes < (43 + live * 64) * item


def test_more_memory_never_keeps_fewer_experts():
    residents = [
        plan(device_bytes=gb * GB, streaming__order="chunk_major").experts.residency.resident_items
        for gb in range(20, 180, 20)
    ]
    assert residents == sorted(residents)
    assert residents[-1] > residents[0]


@pytest.mark.parametrize(
    ("prompt_tokens", "order", "micro_batch"),
    [
        (100, "chunk_major", 8192),
        (8192, "chunk_major", 8192),
        (8193, "layer_major", 16384),
        (131_072, "layer_major", 131_072),
    ],
)
def test_micro_batch_is_the_prompt_in_whole_chunks(prompt_tokens, order, micro_batch):
    found = plan(prompt_tokens=prompt_tokens)
    assert (found.order, found.micro_batch_tokens) == (order, micro_batch)


def test_micro_batch_that_would_displace_all_experts_is_cut():
    """With 24 GB the streams of a million tokens do not fit beside slabs."""
    found = plan(prompt_tokens=1_000_000, device_bytes=24 * GB)
    assert found.micro_batch_tokens % 8192 == 0
    assert 8192 < found.micro_batch_tokens < 1_000_000
    streams = found.micro_batch_tokens * FLASH.config.hc_mult * FLASH.config.hidden_size * 2
    assert found.price.micro_batch_bytes >= streams


@pytest.mark.parametrize("device_gb", [24, 32, 48, 128])
@pytest.mark.parametrize("prompt_tokens", [8192, 131_072, 1_000_000])
def test_activations_wait_where_the_run_takes_less_time(device_gb, prompt_tokens):
    options = {
        "prompt_tokens": prompt_tokens,
        "device_bytes": device_gb * GB,
        "streaming__order": "layer_major",
    }
    found, device, host = (
        run_plan(streaming__activations=place, **options) for place in ("auto", "device", "host")
    )
    assert device.stages[0].activations == "device"
    if device.choice.schedule.passes == 1:
        assert found.stages == device.stages
        return
    assert host.stages[0].activations == "host"
    best = min((device, host), key=lambda plan: plan.choice.objective_ns)
    assert found.stages == best.stages
    assert found.predict(Prompts.of(prompt_tokens)).seconds == pytest.approx(
        best.choice.objective_ns / 1e9
    )


def test_price_of_activations_on_the_host_is_that_of_their_way():
    """A schedule moves the streams of all rows to the device once a layer, twice in parts."""
    run = rows.Run.of(
        FLASH,
        RunConfig(),
        planned_machine(
            RunConfig().replace({"memory.device_bytes": 32 * GB}), 13_369_344, 1, 256 * GB
        ),
        131_072,
    )
    streams, beside = 4 * 4096 * 2, (1 + 6) * 4096 * 2
    for waves, to_device in ((False, streams), (True, 2 * streams + 2 * beside)):
        problem = run.problem(Prompts.of(131_072), waves=waves, activations="host")
        first, *others = problem.schedules
        assert (first.order, first.activations, first.layer_link_bytes) == (
            "chunk_major",
            "device",
            0,
        )
        assert {schedule.activations for schedule in others} == {"host"}
        for schedule in others:
            assert schedule.layer_link_bytes == 131_072 // schedule.passes * to_device
        held = [schedule.activation_bytes for schedule in others]
        chunks = [schedule.micro_batch_tokens // 8192 for schedule in others]
        assert chunks == [2, 4, 8, 16]
        # Slots of experts cross between parts, so they take time where there are several.
        parts = [schedule.wave_ns for schedule in others]
        alone = [count * first.wave_ns for count in chunks]
        assert all(map(int.__gt__, parts, alone)) if waves else parts == alone
        # No more than four chunks are on the device.
        assert held[0] < held[1] == held[2] == held[3]


def test_activations_on_the_host_leave_the_device_to_the_experts():
    options = {"prompt_tokens": 262_144, "device_bytes": 32 * GB}
    device = plan(streaming__activations="device", streaming__micro_batch_tokens=65_536, **options)
    host = plan(streaming__activations="host", streaming__micro_batch_tokens=262_144, **options)
    assert host.micro_batch_tokens == 262_144
    assert host.host_activation_bytes == 262_144 * (4 + 1 + 6) * 4096 * 2
    assert host.price.micro_batch_bytes < device.price.micro_batch_bytes
    assert host.price.total_bytes <= 32 * GB
    assert LIVE_CHUNKS * 8192 < 65_536
    # What waits there and the experts share the host's memory.
    with pytest.raises(PlanError, match=r"\d+ bytes of activations do not fit in host memory"):
        plan(
            streaming__activations="host",
            streaming__tier="ram",
            streaming__micro_batch_tokens=262_144,
            host_bytes=host.store_bytes + 10 * GB,
            **options,
        )


def test_stages_keep_their_activations_on_the_device():
    options = {
        "prompt_tokens": 131_072,
        "device_bytes": 40 * GB,
        "pipeline__split": "22,21",
        "pipeline__devices": "0,1",
    }
    assert {each.activations for each in run_plan(**options).stages} == {"device"}
    for divided in (options, {"peer__devices": "1", "peer__compute_fraction": 0.25}):
        with pytest.raises(PlanError, match="activations is 'host' and layers or experts are div"):
            run_plan(streaming__activations="host", **divided)


def test_keys_decide_where_they_are_given():
    found = plan(
        prompt_tokens=100_000,
        streaming__order="layer_major",
        streaming__micro_batch_tokens=20_000,
        streaming__resident_fraction=0.25,
        streaming__window=3,
        streaming__tier="disk",
    )
    assert found.micro_batch_tokens == 3 * 8192  # rounded up to whole chunks
    assert {len(chosen) for chosen in found.experts.residency.resident} == {64}
    assert (found.experts.resolved_window, found.experts.tier) == (3, "disk")
    assert found.store_bytes == found.price.slab_bytes  # the ring before the disk
    item = keys.expert_bytes(FLASH.config, FLASH.infos())
    by_bytes = plan(streaming__resident_bytes=43 * 100 * item + 42 * item)
    assert {len(chosen) for chosen in by_bytes.experts.residency.resident} == {100}


def test_experts_go_to_disk_when_host_memory_is_small():
    assert plan(host_bytes=256 * GB).experts.tier == "ram"
    small = plan(host_bytes=10 * GB)
    assert (small.experts.tier, small.experts.resolved_window) == ("disk", 2)
    with pytest.raises(PlanError, match=r"do not fit in host memory, 1000000000 bytes are free"):
        plan(host_bytes=GB, streaming__tier="ram")
    with pytest.raises(PlanError, match=r"on their way from disk do not fit in host memory"):
        plan(host_bytes=1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_bytes": 10 * GB}, r"this run needs \d+\.\d+ GiB .* are missing"),
        ({"streaming__resident_fraction": 1.0}, r"weights 145\.\d+ GiB .* are missing"),
        ({"streaming__resident_fraction": 250 / 256}, r"weights 142\.\d+ GiB .* are missing"),
        ({"streaming__slab_bytes": 10_000}, r"slab_bytes is 10000, slabs of 2 x 2 experts"),
        (
            {"device_bytes": 6 * GB, "pipeline__split": "22,21"},
            r"stage 0 \(layers 0\.\.21\) needs at least \d+ bytes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_missing_bytes(options, message):
    with pytest.raises(PlanError, match=message):
        run_plan(**options)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"device_bytes": 10_200_000_000}, "config.prefill.chunk_tokens"),
        ({"device_bytes": 11 * GB, "prompt_tokens": 140_000, "prefill__chunk_tokens": 1024},
         "config.prefill.max_tokens"),
        ({"streaming__resident_fraction": 250 / 256}, "config.streaming.resident_fraction"),
        ({"streaming__resident_bytes": 140 * GB}, "config.streaming.resident_bytes"),
        ({"device_bytes": 13 * GB, "prompt_tokens": 100_000, "prefill__chunk_tokens": 2048,
          "streaming__micro_batch_tokens": 100_000,
              "streaming__activations": "device"}, "config.streaming.order"),
    ],
)  # fmt: skip
def test_a_setting_that_is_said_to_fit_fits(options, setting):
    with pytest.raises(PlanError, match=r"These settings would fit: --config") as refused:
        run_plan(**options)
    lines = re.findall(r"((?:--config\S+=[\w.]+ ?)+)", str(refused.value))
    assert any(setting in line for line in lines), lines
    for line in lines:
        pairs = [flag.removeprefix("--config.").split("=") for flag in line.split()]
        values = {key: text if text.isalpha() or "_" in text else number(text)
                  for key, text in pairs}  # fmt: skip
        assert run_plan(**{**options, **{k.replace(".", "__"): v for k, v in values.items()}})


def number(text: str) -> float | int:
    return float(text) if "." in text else int(text)


def test_without_a_budget_a_cpu_streams_nothing_by_itself():
    """Host and device memory are one there; with a budget, or when asked, it streams."""
    config = RunConfig().replace({"prefill.chunk_tokens": 64})
    device, capacity = jax.local_devices()[0], 8192
    assert not planning.make_plan(TINY, config, device, 100, capacity).experts.streams
    base = planning.make_plan(TINY, config, device, 100, capacity).price
    budget = base.total_bytes - base.resident_bytes // 2
    less = config.replace({"memory.device_bytes": budget})
    found = planning.make_plan(TINY, less, device, 100, capacity)
    assert found.experts.streams
    assert found.price.total_bytes <= budget
    memory = Memory(base.total_bytes - 1, 1 << 40)
    with pytest.raises(PlanError, match="this run needs"):
        planning.make_plan(TINY, config, device, 100, capacity, memory=memory)


def test_profile_chooses_the_residents(tmp_path):
    counts = np.zeros((5, 16), np.int64)
    counts[:, [3, 9]] = 7
    counts[2, 11] = 9
    streaming.save_profile(tmp_path / "p.json", counts)
    options = {"streaming__resident_fraction": 2 / 16, "device_bytes": GB}
    found = plan(TINY, 100, streaming__resident_profile=str(tmp_path / "p.json"), **options)
    assert found.experts.residency.resident == ((3, 9), (3, 9), (3, 11), (3, 9), (3, 9))
    with pytest.raises(ConfigError, match=r"config.streaming.resident_profile: .*none\.json"):
        plan(TINY, 100, streaming__resident_profile=str(tmp_path / "none.json"), **options)


def test_stages_share_a_device_or_have_their_own():
    keys_given = {"source": TINY, "prompt_tokens": 100, "device_bytes": GB}
    own = run_plan(**keys_given, pipeline__split="2,3")
    assert [list(found.layers) for found in own.stages] == [[0, 1], [2, 3, 4]]
    assert own.places == (0, 1)
    shared = run_plan(**keys_given, pipeline__split="2,3", pipeline__devices="0,0")
    assert shared.places == (0, 0)
    assert sum(found.price.total_bytes for found in shared.stages) <= GB
    whole = plan(TINY, 100, GB)
    for part in ("weights_bytes", "state_bytes", "resident_bytes"):
        assert sum(getattr(p.price, part) for p in own.stages) == getattr(whole.price, part)
    # Two stages on one device take turns: no faster than one, however many passes there are.
    long = {"source": TINY, "prompt_tokens": 40_000, "device_bytes": GB}
    one, two = (
        run_plan(**long, **split).predict(Prompts.of(40_000)).seconds
        for split in ({}, {"pipeline__split": "2,3", "pipeline__devices": "0,0"})
    )
    assert two >= one * 0.999


def test_one_stage_is_planned_as_the_whole_run_is():
    """What a process of many plans for its own stage."""
    config = RunConfig().replace({"memory.device_bytes": 60 * GB, "pipeline.split": "20,23"})
    both = run_plan(device_bytes=60 * GB, pipeline__split="20,23", prompt_tokens=8192)
    for stage in both.stages:
        alone = planning.make_plan(
            FLASH, config, jax.local_devices()[0], 8192, 8192, stage.layers,
            memory=Memory(60 * GB, 256 * GB),
        )  # fmt: skip
        for part in ("weights_bytes", "state_bytes", "workspace_bytes"):
            assert getattr(alone.price, part) == getattr(stage.price, part)


def test_slabs_come_in_waves_where_whole_layers_do_not_fit():
    found = plan(prompt_tokens=8192, device_bytes=14 * GB)
    item = keys.expert_bytes(FLASH.config, FLASH.infos())
    live = streaming.window.live_bound(found.experts.resolved_window)
    assert found.experts.slab_bytes % (live * item) == 0
    assert 2 <= found.experts.slab_bytes // (live * item) < 256
    assert found.price.slab_bytes == found.experts.slab_bytes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_bytes": 180 * GB}, "nothing: all experts stay on the device"),
        ({}, "device memory"),
        ({"streaming__resident_fraction": 0.5}, "config.streaming.resident_fraction = 0.5"),
        ({"streaming__resident_bytes": GB}, "config.streaming.resident_bytes = 1000000000"),
        ({"host_bytes": 10 * GB}, "device memory; and host memory: .* come from disk"),
        ({"streaming__slab_bytes": GB}, r"; slabs hold \d+ experts at a time, .* in waves"),
    ],
)
def test_what_binds_is_said(options, text):
    found = plan(**options)
    keys_given = {k.replace("__", "."): v for k, v in options.items() if "__" in k}
    config = RunConfig().replace(keys_given)
    item = keys.expert_bytes(FLASH.config, FLASH.infos())
    said = planning.binding(found, config, item)
    assert re.search(text, said), said


def test_price_of_a_plan_is_that_of_its_parts():
    found = plan(prompt_tokens=131_072)
    assert found.price.total_bytes == sum(dataclasses.astuple(found.price))
    streams = 131_072 * FLASH.config.hc_mult * FLASH.config.hidden_size * 2
    assert found.price.micro_batch_bytes == streams
    # Beside the streams: the temporaries of attention, which were measured.
    assert 1.1e9 < found.price.workspace_bytes < 1.8e9
    # All chunks keep what they were routed to while slabs of a part of the experts visit them.
    waves = plan(prompt_tokens=32_768, device_bytes=24 * GB)
    assert 0 < waves.experts.slab_bytes < 5e9
    kept = 32_768 * 7 * FLASH.config.hidden_size * 2
    assert waves.price.micro_batch_bytes == streams // 4
    assert kept < waves.price.workspace_bytes < kept + 1.5e9
    assert math.isclose(found.price.weights_bytes, 8.84e9, rel_tol=0.01)
