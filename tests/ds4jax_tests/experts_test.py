"""The pool of routed experts: the right bytes wherever they come from, and the choice of a mode."""

import jax
import numpy as np
import pytest

import streaming
from ds4jax import experts, testing
from ds4jax.checkpoint import keys
from ds4jax.checkpoint import load as loading
from ds4jax.checkpoint.safetensors import open_checkpoint
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.experts import ExpertPlan, ExpertPool
from sharding.cost import PlanError
from streaming.readers import READERS

CONFIG = testing.tiny_config()
LAYERS, EXPERTS = CONFIG.num_hidden_layers, CONFIG.n_routed_experts
FIRST = 2  # pools of some tests begin with this layer of the model


@pytest.fixture(scope="module", params=["official", "base", "float32"])
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    with open_checkpoint(testing.write_checkpoint(folder, storage=request.param)) as opened:
        yield opened


def pool(source, per_layer: int, layers: range | None = None, **options) -> ExpertPool:
    count = LAYERS if layers is None else len(layers)
    plan = ExpertPlan(streaming.even(count, EXPERTS, per_layer), **options)
    return ExpertPool(source, plan, jax.local_devices()[0], layers=layers)


def expected(source, layer: int, expert: int, component: str) -> bytes:
    slab = loading.load_expert_slab(source, layer, [expert])
    return np.asarray(getattr(slab, component)).tobytes()


def test_items_are_the_experts_as_stored(source):
    layout = experts.slab_layout(source, 3)
    assert (layout.layers, layout.items) == (3, EXPERTS)
    assert layout.item_bytes == keys.expert_bytes(CONFIG, source.infos())


def test_store_and_files_hold_the_bytes_of_the_loader(source):
    """Both ways that streamed experts go are those of `load_expert_slab`, byte for byte."""
    layout = experts.slab_layout(source, LAYERS - FIRST)
    fill, locate = experts.store_filler(source, FIRST), experts.file_locator(source, FIRST)
    for part in layout.components:
        wanted = expected(source, FIRST + 1, 5, part.name)
        buffer = np.zeros(part.shape, part.dtype)
        fill(1, 5, part.name, buffer)
        assert buffer.tobytes() == wanted
        found = b""
        for place in locate(1, 5, part.name):
            with open(place.path, "rb") as file:
                file.seek(place.offset)
                found += file.read(place.nbytes)
        assert found == wanted


def test_experts_of_wide_scales_are_counted_on_the_device_and_in_the_store(source, monkeypatch):
    found = pool(source, 6)
    try:
        assert found.wide_experts() == 0
        monkeypatch.setattr(experts, "wide_experts", lambda slab: np.ones(slab.experts, bool))
        assert found.wide_experts() == LAYERS * EXPERTS
    finally:
        found.close()


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_residents_and_slabs_together_are_all_experts(source, tier):
    with_layers = range(FIRST, LAYERS)
    found = pool(source, 6, with_layers, tier=tier)
    try:
        steps = [streaming.Step(layer) for layer in range(len(with_layers))]
        found.start(steps)
        for number in range(len(steps)):
            found.issue_ahead(number)
            places = [found.resident[number], found.take(number, 0)]
            seen = []
            for (slab,), where in places:
                rows = np.asarray(where)
                for expert in np.flatnonzero(rows >= 0):
                    seen.append(int(expert))
                    for name in ("gate_up", "gate_up_scale", "down", "down_scale"):
                        if (array := getattr(slab, name)) is not None:
                            assert np.asarray(array)[rows[expert]].tobytes() == expected(
                                source, FIRST + number, expert, name
                            )
            assert sorted(seen) == list(range(EXPERTS))
            done = places[1][1]
            del places
            found.computed(number, 0, done, done)
        ledger = found.finish([9] * len(steps))
        assert ledger.total_bytes == len(steps) * 10 * found.layout.item_bytes
        assert [row.distinct_items for row in ledger.layers] == [9] * len(steps)
    finally:
        found.close()


@pytest.mark.parametrize("reader", ["preadv", "direct", "mmap"])
def test_disk_is_read_as_the_key_says(reader, tmp_path):
    with open_checkpoint(testing.write_checkpoint(tmp_path / "tiny")) as source:
        plan = ExpertPlan(streaming.even(LAYERS, EXPERTS, 8), tier="disk")
        found = ExpertPool(source, plan, jax.local_devices()[0], reader=reader)
    try:
        assert type(found.streamer.ring._reader) is READERS[reader]
        found.start([streaming.Step(0)])
        found.issue_ahead(0)
        (slab,), where = found.take(0, 0)
        row = int(np.asarray(where)[EXPERTS - 1])
        with open_checkpoint(tmp_path / "tiny") as again:
            wanted = loading.load_expert_slab(again, 0, [EXPERTS - 1])
        assert np.asarray(slab.down)[row].tobytes() == np.asarray(wanted.down)[0].tobytes()
    finally:
        found.close()


def test_page_tables_of_locked_memory_have_to_fit_beside_what_jax_took(monkeypatch):
    class Driver:
        def free_device_bytes(self):
            return 100_000

    nbytes = 100_000 // 8 * 4096
    experts._require_lockable(nbytes + 4096, jax.local_devices()[0])  # nothing locks on a CPU
    monkeypatch.setattr(experts, "_cuda", lambda device: (Driver(), None))
    experts._require_lockable(nbytes, jax.local_devices()[0])
    with pytest.raises(PlanError, match=r"needs 100008 bytes .* 100000 are free: lower XLA_PYTHON"):
        experts._require_lockable(nbytes + 4096, jax.local_devices()[0])


def test_loading_is_told_up_to_the_last_byte():
    seen: list[int] = []
    plan = ExpertPlan(streaming.even(LAYERS, EXPERTS, 4))
    synthetic = SyntheticSource(CONFIG, seed=0)
    found = ExpertPool(synthetic, plan, jax.local_devices()[0], on_bytes=seen.append)
    found.close()
    assert seen == sorted(seen)
    assert seen[-1] == LAYERS * EXPERTS * found.layout.item_bytes


def test_pool_without_streamed_experts_has_no_waves():
    found = pool(SyntheticSource(CONFIG, seed=0), EXPERTS)
    assert found.streamer is None
    assert found.start([streaming.Step(0)]) is None
    assert found.waves(0) == 0
    found.issue_ahead(0)
    assert found.finish([3]) is None
    assert found.abort() is None
    assert found.preferred_mode(1) == "whole"
    assert list(found.available(streaming.Step(0))) == list(range(EXPERTS))
    found.close()


def test_what_a_step_can_use_follows_from_its_mode():
    found = pool(SyntheticSource(CONFIG, seed=0), 4)
    assert sorted(found.available(streaming.Step(1))) == list(range(EXPERTS))
    assert sorted(found.available(streaming.Step(1, "routed"))) == list(range(EXPERTS))
    assert sorted(found.available(streaming.Step(1, "exact", (2, 9)))) == [0, 1, 2, 2, 3, 9]
    found.close()


def test_absent_experts_are_those_that_were_counted_and_are_not_there():
    counts = np.array([3, 0, 1, 0, 2])
    assert experts.absent_experts(counts, [0, 2, 4]) == []
    assert experts.absent_experts(counts, [1, 2]) == [0, 4]


def test_mode_follows_what_passes_of_that_size_used():
    """Routed pays while few experts are asked for and little can hide behind the compute."""
    found = pool(SyntheticSource(CONFIG, seed=0), 0)
    found.layout = streaming.SlabLayout(
        LAYERS, EXPERTS, (streaming.Component("x", (100_000_000,), np.uint8),)
    )  # an expert of 100 MB takes the link as long as a layer's compute
    assert found.preferred_mode(1) == "routed"  # four of sixteen, expected before any pass
    assert found.preferred_mode(1000) == "whole"
    found.measured(1000, [2] * LAYERS, 2e-3)  # but few are used
    assert found.preferred_mode(1000) == "routed"
    assert found.preferred_mode(600) == "routed"  # of the same power of two
    assert found.preferred_mode(5000) == "whole"
    found.measured(1000, [2] * LAYERS, 1.0)  # a compute that hides the whole share
    assert found.preferred_mode(1000) == "whole"
    found.close()


def test_experts_without_files_cannot_come_from_disk():
    with pytest.raises(PlanError, match=r"config\.streaming\.tier is 'disk', but this checkpoint"):
        pool(SyntheticSource(CONFIG, seed=0), 4, tier="disk")


def test_default_windows_are_those_of_the_tiers():
    residency = streaming.even(LAYERS, EXPERTS, 4)
    assert ExpertPlan(residency, "ram").resolved_window == 1
    assert ExpertPlan(residency, "disk").resolved_window == 2
    assert ExpertPlan(residency, "disk", window=0).resolved_window == 0
    assert ExpertPlan(residency, "disk").streams
    assert not ExpertPlan(streaming.even(LAYERS, EXPERTS, EXPERTS)).streams
