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
from ds4jax import testing
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ConfigError, ModelConfig
from ds4jax.engine import capacity_tokens
from ds4jax.plan import Memory, choose_residency
from ds4jax.run_config import RunConfig
from sharding.cost import PlanError

MODELS = pathlib.Path(__file__).parents[2] / "configs" / "models"
TINY = SyntheticSource(testing.tiny_config(), seed=0)
FLASH = SyntheticSource(ModelConfig.from_json(MODELS / "flash.json"), seed=0)
ITEM = 1000  # bytes of an expert in the tests of the arithmetic
GB = 10**9


def plan(source=FLASH, prompt_tokens=8192, device_bytes=128 * GB, host_bytes=256 * GB, **options):
    values = {key.replace("__", "."): value for key, value in options.items()}
    config = RunConfig().replace({"memory.device_bytes": device_bytes, **values})
    capacity = capacity_tokens(config, source.config, prompt_tokens)
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
    assert found.price.total_bytes <= device_gb * GB
    residents = {len(chosen) for chosen in found.experts.residency.resident}
    (per_layer,) = residents  # spread evenly: no layer's copies are left without cover
    item = keys.expert_bytes(FLASH.config, FLASH.infos())
    assert found.price.resident_bytes == 43 * per_layer * item
    streamed = sum(map(len, found.experts.residency.streamed))
    assert streamed == 43 * (256 - per_layer)
    assert found.store_bytes == streamed * item
    if device_gb == 180:
        assert (found.experts.streams, found.order) == (False, "chunk_major")
        return
    spare = device_gb * GB - found.price.total_bytes + found.price.slab_bytes
    live = streaming.window.live_bound(1)
    assert spare < 43 * item + live * (256 - per_layer - 1) * item


def test_more_memory_never_keeps_fewer_experts():
    residents = [
        plan(device_bytes=gb * GB).experts.residency.resident_items for gb in range(20, 180, 20)
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


def test_micro_batch_leaves_room_for_experts():
    """A million tokens between layers would displace more residents than they save traffic."""
    found = plan(prompt_tokens=1_000_000, device_bytes=64 * GB)
    room = 64 * GB - found.price.weights_bytes - found.price.state_bytes
    assert found.micro_batch_tokens % 8192 == 0
    assert 8192 < found.micro_batch_tokens < 1_000_000
    assert found.price.micro_batch_bytes <= room // 4


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
    assert found.store_bytes == 0
    item = keys.expert_bytes(FLASH.config, FLASH.infos())
    by_bytes = plan(streaming__resident_bytes=43 * 100 * item + 42 * item)
    assert {len(chosen) for chosen in by_bytes.experts.residency.resident} == {100}


def test_experts_go_to_disk_when_host_memory_is_small():
    assert plan(host_bytes=256 * GB).experts.tier == "ram"
    small = plan(host_bytes=GB)
    assert (small.experts.tier, small.experts.resolved_window) == ("disk", 2)
    with pytest.raises(PlanError, match=r"do not fit in host memory, 1000000000 bytes are free"):
        plan(host_bytes=GB, streaming__tier="ram")


def test_what_does_not_fit_is_refused_with_the_missing_bytes():
    with pytest.raises(PlanError, match="this run without routed experts needs"):
        plan(device_bytes=10 * GB)
    with pytest.raises(PlanError, match=r"all experts on the device need 147169738752 bytes"):
        plan(streaming__resident_fraction=1.0)
    with pytest.raises(PlanError, match=r"250 resident experts per layer .* are missing"):
        plan(streaming__resident_fraction=250 / 256)


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
    config = RunConfig().replace({"memory.device_bytes": GB, "pipeline.split": "2,3"})
    arguments = (jax.local_devices()[0], 100, 8192, Memory(GB, GB))
    own = planning.plan_stages(TINY, config, *arguments)
    assert [list(found.layers) for found in own] == [[0, 1], [2, 3, 4]]
    config = config.replace({"pipeline.devices": "0,0", "streaming.order": "layer_major"})
    shared = planning.plan_stages(TINY, config, *arguments)
    assert sum(found.price.total_bytes for found in shared) <= GB
    whole = plan(TINY, 100, GB)
    for part in ("weights_bytes", "state_bytes", "resident_bytes"):
        assert sum(getattr(p.price, part) for p in own) == getattr(whole.price, part)


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("room", [64, 100, 333, 640])
def test_residents_leave_room_for_whole_slabs(window, room):
    """8 layers of 10 experts; room in experts."""
    live = streaming.window.live_bound(window)
    found, slabs = choose_residency(8, 10, ITEM, room * ITEM, window=window)
    per_layer = len(found.resident[0])
    best = max(
        (n for n in range(11) if 8 * n + live * (10 - n) <= room),
        default=0,
    )
    assert per_layer == best
    used = found.resident_items * ITEM + (slabs or 0)
    assert used <= room * ITEM
    assert (slabs is None) == (per_layer == 10)


def test_slabs_of_a_few_experts_when_there_is_room_for_no_more():
    found, slabs = choose_residency(8, 10, ITEM, 7 * ITEM, window=1)
    assert found.resident_items == 0
    assert slabs == 7 * ITEM
    with pytest.raises(PlanError, match=r"6000 bytes, 5000 are left for experts, 1000 are missing"):
        choose_residency(8, 10, ITEM, 5 * ITEM, window=1)
    with pytest.raises(PlanError, match="are missing"):
        choose_residency(8, 10, ITEM, 100 * ITEM, window=1, per_layer=5, slab_bytes=61 * ITEM)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_bytes": 180 * GB}, "nothing: all experts stay on the device"),
        ({}, "device memory"),
        ({"streaming__resident_fraction": 0.5}, "config.streaming.resident_fraction = 0.5"),
        ({"streaming__resident_bytes": GB}, "config.streaming.resident_bytes = 1000000000"),
        ({"host_bytes": GB}, "device memory; and host memory: .* come from disk"),
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
    rows = FLASH.config.hc_mult + 1 + FLASH.config.num_experts_per_tok
    assert found.price.micro_batch_bytes == 131_072 * rows * FLASH.config.hidden_size * 2
    assert math.isclose(found.price.weights_bytes, 8.84e9, rel_tol=0.01)
