"""A second device beside the one that has the layers: same bits, exact accounts by tier."""

import dataclasses
import itertools
import json
import pathlib

import jax
import numpy as np
import pytest

import ds4jax
import streaming
from ds4jax import accounts, admission, peers, testing
from ds4jax import engine as engines
from ds4jax import plan as planning
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ConfigError
from ds4jax.rows import Prompts
from ds4jax.run_config import PeerConfig, RunConfig
from ds4jax.testing import result_hash
from sharding.cost import PlanError, transfer_ns
from streaming import StreamError
from streaming.window import live_bound

# All attention kinds, three hash layers.
CONFIG = dataclasses.replace(
    testing.tiny_config(), num_hidden_layers=5, compress_ratios=(0, 4, 128, 4, 0, 0)
)
LAYERS, EXPERTS = CONFIG.num_hidden_layers, CONFIG.n_routed_experts
CHUNK = 48
IDS = np.random.default_rng(11).integers(0, CONFIG.vocab_size, 2 * CHUNK + 5).astype(np.int32)
SOURCE = SyntheticSource(CONFIG, seed=0)
ITEM = 3 * 128 * (128 // 2 + 128 // 32)


def load(**overrides) -> engines.Engine:
    keys = {"prefill.chunk_tokens": CHUNK, "prefill.logits": "all"}
    keys |= {name.replace("__", "."): value for name, value in overrides.items()}
    return ds4jax.load(SOURCE, keys, prompt_tokens=len(IDS))


@pytest.fixture(scope="module")
def reference() -> str:
    with load() as engine:
        return result_hash(engine.prefill(IDS))


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_two_owners_of_resident_experts_give_the_bits_of_one(share, reference):
    with load(peer__devices="1", peer__compute_fraction=share) as engine:
        plan = engine.plan.experts
        assert not plan.streams
        assert [len(chosen) for chosen in plan.residency.elsewhere] == [EXPERTS * share] * LAYERS
        assert engine.plan.price.resident_bytes == LAYERS * EXPERTS * (1 - share) * ITEM
        result = engine.prefill(IDS)
        assert result_hash(result) == reference
        assert result_hash(engine.prefill(IDS)) == reference


@pytest.mark.parametrize("mode", ["whole", "routed"])
@pytest.mark.parametrize("order", ["chunk_major", "layer_major"])
@pytest.mark.parametrize("slabs", [None, 3 * 2 * 4 * ITEM])
def test_two_owners_and_streamed_experts(mode, order, slabs, reference):
    with load(
        peer__devices="1",
        peer__compute_fraction=0.25,
        streaming__resident_fraction=0.25,
        streaming__mode=mode,
        streaming__order=order,
        streaming__slab_bytes=slabs,
    ) as engine:
        result = engine.prefill(IDS)
        assert result_hash(result) == reference
        for report in result.report.passes:
            (ledger,) = report.ledgers
            if mode == "whole":
                assert ledger.moved_bytes == {"ram": LAYERS * EXPERTS // 2 * ITEM}


@pytest.mark.parametrize("mode", ["whole", "routed"])
@pytest.mark.parametrize(("memory", "relay"), [(1.0, 0.0), (0.0, 0.5), (0.25, 0.5)])
def test_peer_tiers_bring_their_shares_and_nothing_else(mode, memory, relay, reference):
    with load(
        peer__devices="1",
        peer__memory_fraction=memory,
        peer__relay_fraction=relay,
        streaming__resident_fraction=0.5,
        streaming__mode=mode,
        streaming__order="layer_major",
    ) as engine:
        pool = engine._stages[0].pool
        plan, streamed = engine.plan.experts, EXPERTS // 2
        assert engine.plan.store_bytes == LAYERS * int(streamed * (1 - memory)) * ITEM
        result = engine.prefill(IDS)
        assert result_hash(result) == reference
        assert pool.streamer.violations() == []
        (report,) = result.report.passes
        (ledger,) = report.ledgers
        by_tier = peers.paths(plan.residency.streamed, plan.tier, plan.peer)
        expected = {}
        for tier, items in by_tier.items():
            for layer, chosen in enumerate(items):
                used = np.count_nonzero(report.counts[layer][list(chosen)])
                expected[tier] = expected.get(tier, 0) + (len(chosen) if mode == "whole" else used)
        assert ledger.moved_items == expected
        assert ledger.moved_bytes == {tier: count * ITEM for tier, count in expected.items()}
        assert ledger.peak_live_bytes <= ledger.budget_bytes <= plan.slab_bytes
        assert ledger.padding_bytes == 0
        if mode == "whole":
            assert ledger.predicted.exact
            assert ledger.predicted.bytes == ledger.moved_bytes
            assert set(expected) == {
                name
                for name, share in (("peer", memory), ("relay", relay), ("ram", 1 - memory - relay))
                if share
            }


def test_everything_at_once_over_two_stages(reference):
    """Each stage has a neighbour; the second one's is the device of the first."""
    with load(
        pipeline__split="2,3",
        peer__devices="2,0",
        peer__compute_fraction=0.25,
        peer__memory_fraction=0.25,
        peer__relay_fraction=0.25,
        streaming__resident_fraction=0.25,
        streaming__mode="whole",
    ) as engine:
        result = engine.prefill(IDS)
        assert result_hash(result) == reference
        first, second = accounts.plan_record(engine.plans, ["a", "b"])
        quarter, eighth = EXPERTS // 4, EXPERTS // 8
        assert first["peer"] == {
            "device": "2",
            "exchange": "copy",
            "computed_experts_per_layer": [quarter] * 2,
            "held_experts_per_layer": [eighth] * 2,
            "relayed_experts_per_layer": [eighth] * 2,
        }
        assert second["peer"]["device"] == "0"
        for report in result.report.passes:
            for ledger, layers in zip(report.ledgers, (2, 3), strict=True):
                quarter = layers * EXPERTS // 8 * ITEM
                assert ledger.moved_bytes == {"peer": quarter, "relay": quarter, "ram": 2 * quarter}


def test_cold_owner_that_fails_is_named_and_the_next_prompt_is_right(reference, monkeypatch):
    with load(peer__devices="1", peer__compute_fraction=0.5) as engine:
        runner, calls = engine._stages[0].runner, itertools.count()
        inner = runner.experts

        def failing(*arguments):
            if next(calls) == 5:
                raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
            return inner(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(runner, "experts", failing)
            with pytest.raises((MemoryError, StreamError), match="RESOURCE_EXHAUSTED"):
                engine.prefill(IDS)
        assert result_hash(engine.prefill(IDS)) == reference


def test_neighbour_without_room_is_refused(monkeypatch):
    monkeypatch.setattr(
        admission, "device_bytes", lambda device: 1 << (30 if device.id == 0 else 10)
    )
    with pytest.raises(PlanError, match=r"experts of config\.peer on .*1.* needs .* missing"):
        load(peer__devices="1", peer__compute_fraction=0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peer.devices": "0"}, r"device 0, which has the stage itself"),
        ({"peer.devices": "99"}, r"device 99, expected 'cpu' or 0\.\.7"),
        ({"peer.devices": "1,2"}, r"'1,2' for 1 stages, expected as many"),
        ({"peer.devices": "gpu"}, r"'gpu' for 1 stages"),
        ({"peer.compute_fraction": 0.5}, r"config\.peer\.devices is auto: expected the device"),
        ({"peer.devices": "none", "peer.memory_fraction": 0.5}, "devices is none: expected the"),
        (
            {"peer.devices": "1", "peer.memory_fraction": 0.7, "peer.relay_fraction": 0.4},
            "at most 1 together",
        ),
        ({"peer.devices": "1", "peer.compute_fraction": 1.5}, "expected at most 1"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        load(**values)


def test_off_switch_is_no_device():
    config = PeerConfig("none")
    assert peers.cold_experts(config, 256) == 0
    assert config.device(0, 1) is None
    assert peers.divide(config, None, ((1, 2),)) is None
    assert peers.path_count(config) == 1
    assert RunConfig().peer == PeerConfig("auto")
    assert PeerConfig().device(0, 1) is None


def test_shares_are_cut_from_the_end_and_budgets_add_up():
    config = PeerConfig("1", compute_fraction=0.29, memory_fraction=0.29, relay_fraction=0.5)
    assert peers.cold_experts(config, 100) == 29
    streamed = (tuple(range(100)), tuple(range(10)))
    shares = peers.divide(config, "1", streamed)
    assert [len(items) for items in shares.held] == [29, 2]
    assert [len(items) for items in shares.relayed] == [50, 5]
    found = peers.paths(streamed, "disk", shares)
    assert {name: list(map(len, items)) for name, items in found.items()} == {
        "peer": [29, 2],
        "relay": [50, 5],
        "disk": [21, 3],
    }
    assert sorted(itertools.chain(*(items[0] for items in found.values()))) == list(range(100))
    least = 2 * live_bound(1) * 8
    budgets = peers.budgets(found, 10_000, 8, 1)
    assert budgets == {"peer": 2_900, "relay": 5_000, "disk": 2_100}
    budgets = peers.budgets(found, 3 * least + 12, 8, 1)
    assert budgets == {"peer": least + 3, "relay": least + 7, "disk": least + 2}
    assert peers.budgets(found, 3 * least - 1, 8, 1) == dict.fromkeys(found, least)
    # In two waves a path has room for half of its experts, rounded up.
    assert peers.slab_rows(found, 2) == {"peer": 15, "relay": 25, "disk": 11}
    exact = (15 + 25 + 11) * live_bound(1) * 8
    assert peers.budgets(found, exact, 8, 1) == {"peer": 240, "relay": 400, "disk": 176}
    assert peers.budgets(found, None, 8, 1) == dict.fromkeys(found)
    assert peers.budgets({"ram": streamed}, 77, 8, 1) == {"ram": 77}


def test_price_of_a_neighbour():
    model, numerics = CONFIG, RunConfig().numerics.resolve()
    residency = streaming.even(LAYERS, EXPERTS, 0, elsewhere=4)
    shares = peers.divide(
        PeerConfig("1", memory_fraction=0.5, relay_fraction=0.25), "1", residency.streamed
    )
    price = peers.price(model, numerics, CHUNK, residency, shares, ITEM, 1)
    left = EXPERTS - 4
    assert price.resident_bytes == LAYERS * (4 + left // 2) * ITEM
    assert price.slab_bytes == live_bound(1) * (left // 4) * ITEM
    assert price.workspace_bytes == admission.workspace_bytes(model, numerics, CHUNK)


@pytest.mark.parametrize("order", ["chunk_major", "layer_major"])
def test_experts_divided_over_the_devices_of_a_stage_give_the_bits_of_one(order, reference):
    """Activations are exchanged by collectives; slots are combined in their order."""
    with load(
        peer__devices="3",
        peer__compute_fraction=0.5,
        peer__exchange="collective",
        streaming__order=order,
    ) as engine:
        pool = engine._stages[0].pool
        assert pool.resident == [None] * LAYERS
        for array in jax.tree.leaves(pool.cold._parameters):
            assert [shard.device.id for shard in array.addressable_shards] == [0, 3]
        assert result_hash(engine.prefill(IDS)) == reference
        assert result_hash(engine.prefill(IDS)) == reference


def test_collectives_of_two_stages_at_once(reference):
    with load(
        pipeline__split="2,3",
        pipeline__devices="0,1",
        peer__devices="2,3",
        peer__compute_fraction=0.5,
        peer__exchange="collective",
    ) as engine:
        assert result_hash(engine.prefill(IDS)) == reference


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peer.compute_fraction": 0.25}, r"\[12\] experts of a layer here, \[4\] on the neigh"),
        ({"peer.compute_fraction": 0.5, "prefill.chunk_tokens": 47}, "chunks of 47 tokens"),
        ({"peer.compute_fraction": 0.5, "streaming.resident_fraction": 0.25}, "20 streamed"),
    ],
)
def test_collectives_need_two_halves(values, message):
    with pytest.raises(ConfigError, match=message):
        load(**{"peer.devices": "1", "peer.exchange": "collective"} | values)


# Neighbours that the plan chooses


def machine_file(
    folder: pathlib.Path, host: float, link: float, memory: dict[int, int] | None = None
) -> str:
    """A machine of CPU devices with these links in bytes per second, on which nothing computes."""
    ids = [device.id for device in jax.local_devices()]
    products = {"bfloat16": 10**15, "float32": 10**15}
    devices = [
        {
            "id": device.id,
            "kind": device.device_kind,
            "memory_bytes": (memory or {}).get(device.id),
            "memory_bytes_per_s": 10**13,
            "matmul_flops_per_s": products,
            "host_to_device": {"pageable": [{"bytes": ITEM, "bytes_per_s": int(host)}]},
        }
        for device in jax.local_devices()
    ]
    links = [
        {"source": i, "target": j, "ladder": [{"bytes": ITEM, "bytes_per_s": int(link)}]}
        for i, j in itertools.permutations(ids, 2)
    ]
    path = folder / "machine.json"
    record = {"schema": 1, "platform": "cpu", "devices": devices, "links": links}
    path.write_text(json.dumps(record), encoding="utf-8")
    return str(path)


STREAMED = {"streaming.resident_fraction": 0.5, "streaming.order": "layer_major"}
HALF = LAYERS * EXPERTS // 2
RING = live_bound(1) * (2 + 6)  # experts of the smallest ring, which a neighbour needs as well


@pytest.mark.parametrize("mode", ["whole", "routed"])
@pytest.mark.parametrize(
    ("link", "room", "chosen", "tiers"),
    [
        # Nine of ten experts come over a link that is nine times as fast as the host's.
        (9e7, None, "memory", {"peer": HALF * 9 // 10, "ram": HALF // 10}),
        # Half come through a neighbour that holds nothing, whose link is as fast as its own.
        (1e10, RING, "relay", {"relay": HALF // 2, "ram": HALF // 2}),
        (1e10, RING + 10, "memory and relay", {"peer": 10, "relay": 15, "ram": 15}),
        (1e10, RING - 1, "none", {"ram": HALF}),
        (1e4, None, "none", {"ram": HALF}),
    ],
)
def test_the_plan_takes_the_neighbour_that_pays(
    mode, link, room, chosen, tiers, reference, tmp_path
):
    memory = {} if room is None else dict.fromkeys(range(1, 8), room * ITEM)
    path = machine_file(tmp_path, 1e7, link, memory)
    with load(machine__file=path, streaming__mode=mode, **_keys(STREAMED)) as engine:
        found, plan = engine.run_plan, engine.plan.experts
        times = dict(found.neighbours)
        assert list(times) == ["none", "memory", "relay", "memory and relay"]
        assert found.choice.objective_ns == min(times.values()) == times[chosen]
        record = accounts.neighbours(found)
        assert [row["chosen"] for row in record] == [name == chosen for name in times]
        assert (plan.peer is None) == (chosen == "none")
        if plan.peer is not None:
            assert plan.peer.device == "1"
        by_tier = peers.paths(plan.residency.streamed, plan.tier, plan.peer)
        assert {tier: sum(map(len, items)) for tier, items in by_tier.items()} == tiers
        held = tiers.get("peer", 0)
        assert engine.plan.store_bytes == (HALF - held) * ITEM
        result = engine.prefill(IDS)
        assert result_hash(result) == reference
        streamer = engine._stages[0].pool.streamer
        assert streamer.violations() == []
        (report,) = result.report.passes
        (ledger,) = report.ledgers
        assert ledger.budget_bytes == engine.plan.price.slab_bytes
        assert ledger.peak_live_bytes <= ledger.budget_bytes
        if mode == "whole":
            bytes_by_tier = {tier: count * ITEM for tier, count in tiers.items()}
            assert ledger.moved_bytes == bytes_by_tier
            assert found.predict(Prompts.of(len(IDS))).moved_bytes == bytes_by_tier


@pytest.mark.parametrize("seed", range(12))
def test_no_other_division_over_the_paths_is_faster(seed, tmp_path):
    """All numbers of experts that the neighbour could hold and relay, one by one."""
    rng = np.random.default_rng(seed)
    host, link = 10.0 ** rng.uniform(6, 8, 2)
    room = int(rng.integers(0, 100))
    path = machine_file(tmp_path, host, link, dict.fromkeys(range(1, 8), max(room, 1) * ITEM))
    values = {"machine.file": path, "streaming.mode": "whole", "prefill.chunk_tokens": CHUNK}
    config, plans = RunConfig().replace(values | STREAMED), {}
    for devices in ("auto", "none"):
        chosen = config.replace({"peer.devices": devices})
        plans[devices] = planning.plan_local(SOURCE, chosen, jax.devices()[:2], [len(IDS)], 8192)
    found, alone = plans["auto"], plans["none"]
    assert dict(found.neighbours)["none"] == alone.choice.objective_ns
    assert found.choice.objective_ns <= alone.choice.objective_ns
    (stage,) = found.choice.stages
    if stage.range.peer is None:
        assert found.choice.objective_ns == alone.choice.objective_ns
        return
    own, peer = transfer_ns(ITEM, int(host)), transfer_ns(ITEM, int(link))
    space = room - dict(stage.memory)["ring"] // ITEM
    times = [
        max((HALF - held - relayed) * own, (held + relayed) * peer, relayed * own)
        for held in range(max(min(space, HALF), 0) + 1)
        for relayed in range(HALF - held + 1 if space >= 0 else 1)
    ]
    assert stage.stream_ns == min(times)


def _keys(values):
    return {name.replace(".", "__"): value for name, value in values.items()}


@pytest.mark.parametrize("off", [{"peer__devices": "none"}, {"machine__file": None}])
def test_neighbours_are_not_asked_without_leave_or_links(off, reference, tmp_path):
    path = machine_file(tmp_path, 1e8, 1e10)
    with load(**{"machine__file": path, **_keys(STREAMED), **off}) as engine:
        assert engine.run_plan.neighbours == ()
        assert engine.plan.experts.peer is None


def test_neighbours_serve_slabs_that_are_parts_of_layers(reference, tmp_path):
    path, slabs = machine_file(tmp_path, 1e8, 1e9), 2 * (4 + 6) * ITEM
    with load(
        machine__file=path,
        streaming__slab_bytes=slabs,
        streaming__mode="whole",
        **_keys(STREAMED),
    ) as engine:
        plan = engine.plan.experts
        assert plan.peer is not None
        result = engine.prefill(IDS)
        assert result_hash(result) == reference
        streamer = engine._stages[0].pool.streamer
        assert streamer.violations() == []
        own, held = streamer.streamers[-1], streamer.streamers[0]
        assert held.wave_items == 4  # of seven or eight
        assert own.wave_items <= 2
        ((ledger,),) = (report.ledgers for report in result.report.passes)
        assert ledger.peak_live_bytes <= ledger.budget_bytes <= slabs


def test_stages_by_hand_share_the_idle_devices(reference, tmp_path):
    path = machine_file(tmp_path, 1e8, 1e10)
    with load(
        machine__file=path,
        pipeline__split="2,3",
        pipeline__devices="2,0",
        streaming__mode="whole",
        **_keys(STREAMED),
    ) as engine:
        served = [plan.experts.peer.device for plan in engine.plans]
        assert served == ["1", "3"]
        assert result_hash(engine.prefill(IDS)) == reference


def test_an_automatic_split_weighs_stages_against_neighbours(reference, tmp_path):
    """One pass has nothing to overlap: a second device is worth more as a neighbour."""
    path = machine_file(tmp_path, 1e8, 1e10)
    with load(
        machine__file=path,
        pipeline__split="auto",
        pipeline__devices="0,1",
        streaming__mode="whole",
        **_keys(STREAMED),
    ) as engine:
        (plan,) = engine.plans
        assert plan.experts.peer.device == "1"
        assert engine.run_plan.neighbours
        assert result_hash(engine.prefill(IDS)) == reference
