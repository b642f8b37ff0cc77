"""The whole engine with streamed experts: one set of bits, exact accounts, errors that pass."""

import dataclasses
import hashlib
import itertools
import os
import threading
from typing import NamedTuple

import numpy as np
import pytest

import ds4jax
from ds4jax import engine as engines
from ds4jax import events, testing
from ds4jax.activations import Moved
from ds4jax.checkpoint.state import load_paused, save_paused
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.readings import PrefillResult
from ds4jax.testing import result_hash
from sharding.cost import PlanError
from streaming import ReadError, StreamError
from streaming.link import DeviceLink
from streaming.readers import PreadReader
from streaming.window import live_bound

# All attention kinds several times, three hash layers, experts in the published FP4 form.
CONFIG = dataclasses.replace(
    testing.tiny_config(), num_hidden_layers=8, compress_ratios=(0, 0, 4, 128, 4, 128, 4, 0, 0)
)
LAYERS, EXPERTS, TOP_K = CONFIG.num_hidden_layers, CONFIG.n_routed_experts, 4
CHUNK = 48
# Three chunks and four tokens: closes an entry of the layers with ratio 128. Of three ids only, so
# that some experts are not used.
IDS = np.random.default_rng(3).choice([7, 100, 200], 3 * CHUNK + 4).astype(np.int32)
# So many ids that the hash layers use most experts.
MANY = np.random.default_rng(4).integers(0, CONFIG.vocab_size, 18).astype(np.int32)
SOURCE = SyntheticSource(CONFIG, seed=0)
WAVE = 4  # experts of a slab where slabs are waves


class Cell(NamedTuple):
    """One way to run the prompt; none of this may change a bit."""

    percent: int
    window: int
    order: str
    mode: str
    tier: str
    waves: str
    owners: int
    notes: str = "fetch"
    activations: str = "device"


PLACES = itertools.product(
    (0, 25, 50, 95, 100),
    (0, 1, 2, 4),
    ("chunk_major", "layer_major"),
    ("whole", "routed", "auto"),
    ("ram", "disk"),
    ("layer", "small"),
    (1, 2),
)
GRID = [
    Cell(*values, notes, activations)
    for values in PLACES
    for notes in ("fetch", "callback")
    for activations in ("device", "host")
    # Chunk-major has nothing that would wait between two layers; two owners keep it on devices.
    if activations == "device" or (values[2] == "layer_major" and values[6] == 1)
]
# How counts reach the host and where activations wait take turns, and "auto" is one of the others.
FULL_GRID = [
    cells[number // 2 % len(cells)]
    for number, (key, group) in enumerate(itertools.groupby(GRID, key=lambda cell: cell[:7]))
    if (cells := list(group)) and key[3] != "auto"
]


def pairwise(grid: list[Cell]) -> list[Cell]:
    """Cells that cover every pair of values of any two settings."""

    def pairs(cell: Cell) -> set:
        return {
            ((i, cell[i]), (j, cell[j])) for i, j in itertools.combinations(range(len(cell)), 2)
        }

    missing, chosen = set().union(*map(pairs, grid)), []
    while missing:
        chosen.append(max(grid, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return testing.write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", CONFIG, seed=0)


def load(checkpoint=SOURCE, tokens: int = len(IDS), owners: int = 1, **streaming) -> engines.Engine:
    config = {"prefill.chunk_tokens": CHUNK, "prefill.logits": "all"}
    if owners == 2:  # two experts of each layer are computed elsewhere
        config |= {"peer.devices": "1", "peer.compute_fraction": 2 / EXPERTS}
    config |= {f"streaming.{key}": value for key, value in streaming.items()}
    return ds4jax.load(checkpoint, config, prompt_tokens=tokens)


@pytest.fixture(scope="module")
def reference() -> str:
    """Everything on the device, chunk by chunk: nothing of the streamer is involved."""
    with load() as engine:
        assert not engine.plan.experts.streams
        return result_hash(engine.prefill(IDS))


class Watch:
    """Reads the streamer's own record of every pass, which the next pass replaces."""

    def __init__(self, engine: engines.Engine):
        self.streamer = engine._stages[0].pool.streamer
        self.violations: list[str] = []

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.LayerDone) and self.streamer is not None:
            self.violations += self.streamer.violations()


def item_bytes(engine: engines.Engine) -> int:
    return engine._stages[0].pool.layout.item_bytes


def check_ledgers(engine: engines.Engine, result: PrefillResult) -> None:
    """Every pass moved what it was predicted to, or, where the router decides, what it used."""
    plan, size = engine.plan.experts, item_bytes(engine)
    streamed = [list(items) for items in plan.residency.streamed]
    for report in result.report.passes:
        (ledger,) = report.ledgers
        used = [np.flatnonzero(report.counts[n][items]).size for n, items in enumerate(streamed)]
        whole = sum(map(len, streamed))
        assert report.distinct == tuple(np.count_nonzero(report.counts, axis=1))
        assert ledger.complete
        if ledger.predicted.exact:
            assert ledger.moved_bytes == ledger.predicted.bytes == {plan.tier: whole * size}
        else:
            # Hash layers are known from the token ids before anything runs.
            hashed = sum(used[: CONFIG.num_hash_layers]) * size
            assert sum(ledger.predicted.bytes.values()) == hashed
            assert ledger.predicted.most_bytes == hashed + size * sum(
                map(len, streamed[CONFIG.num_hash_layers :])
            )
            assert ledger.total_bytes == sum(used) * size
            assert [row.items for row in ledger.layers] == used
        assert [row.distinct_items for row in ledger.layers] == list(report.distinct)
        assert ledger.padding_bytes == ledger.read_padding_bytes == 0
        assert ledger.file_bytes == (ledger.total_bytes if plan.tier == "disk" else 0)
        assert ledger.peak_live_units <= live_bound(plan.resolved_window)
        assert ledger.peak_live_bytes <= ledger.budget_bytes == plan.slab_bytes


def check_activations(cell: Cell, engine: engines.Engine, result: PrefillResult) -> None:
    """What left for host memory and came back, apart from the ledgers' bytes."""
    plan, moved = engine.plan, sum((r.activations for r in result.report.passes), start=Moved())
    assert plan.activations == cell.activations
    if cell.activations == "device":
        assert moved == Moved()
        return
    streams = 4 * CHUNK * CONFIG.hc_mult * CONFIG.hidden_size * engine.numerics.dtype.itemsize
    assert plan.host_activation_bytes >= streams
    if cell.waves == "layer" and cell.mode == "whole":
        assert moved == Moved((LAYERS + 1) * streams, LAYERS * streams)
    else:
        # Streams come to attend and to finish; routings and slots are on the way as well.
        assert moved.to_host >= (LAYERS + 1) * streams
        assert moved.to_device >= LAYERS * streams


def run_cell(cell: Cell, folder) -> str:
    slabs = live_bound(cell.window) * WAVE * SOURCE_ITEM_BYTES if cell.waves == "small" else None
    options = {
        "resident_fraction": cell.percent / 100,
        "slab_bytes": slabs,
        **{key: getattr(cell, key) for key in cell._fields if key not in ("percent", "waves")},
    }
    with load(folder if cell.tier == "disk" else SOURCE, **options) as engine:
        watch = Watch(engine)
        result = engine.prefill(IDS, on_event=watch)
        if not engine.plan.experts.streams:
            assert cell.percent == 100 or (cell.percent, cell.owners) == (95, 2)
            assert all(report.ledgers == () for report in result.report.passes)
            return result_hash(result)
        assert engine.plan.order == cell.order
        assert len(result.report.passes) == (1 if cell.order == "layer_major" else 4)
        assert watch.violations == []
        check_ledgers(engine, result)
        check_activations(cell, engine, result)
        if cell.mode == "routed" and cell.percent < 50:
            whole = sum(map(len, engine.plan.experts.residency.streamed)) * item_bytes(engine)
            assert all(report.ledgers[0].total_bytes < whole for report in result.report.passes)
        if cell.waves == "small" and cell.percent < 50 and cell.mode != "auto":
            assert all(report.ledgers[0].units > LAYERS for report in result.report.passes)
        return result_hash(result)


SOURCE_ITEM_BYTES = 3 * 128 * (128 // 2 + 128 // 32)  # three square matrices, codes and scales


@pytest.mark.parametrize("cell", pairwise(GRID), ids=lambda cell: "-".join(map(str, cell)))
def test_every_pair_of_settings_gives_the_same_bits(cell, folder, reference):
    assert run_cell(cell, folder) == reference


@pytest.mark.slow
@pytest.mark.parametrize(
    # With all experts resident only the order and the owners are left to vary.
    "cell",
    [
        cell
        for cell in FULL_GRID
        if cell.percent < 100 or (cell.window, *cell[3:6]) == (0, "whole", "ram", "layer")
    ],
    ids=lambda cell: "-".join(map(str, cell)),
)
def test_every_setting_gives_the_same_bits(cell, folder, reference):
    assert run_cell(cell, folder) == reference


@pytest.mark.parametrize(
    ("order", "micro_batch", "passes"),
    [("chunk_major", None, 4), ("layer_major", 2 * CHUNK, 2), ("layer_major", len(IDS), 1)],
)
def test_fewer_residents_cost_their_bytes_once_a_pass(order, micro_batch, passes, reference):
    """k experts less in every layer move k * layers * item_bytes * ceil(T / S) bytes more."""
    moved = []
    for fraction in (0.5, 0.25):
        with load(
            resident_fraction=fraction, order=order, micro_batch_tokens=micro_batch, mode="whole"
        ) as engine:
            result = engine.prefill(IDS)
            assert result_hash(result) == reference
            assert len(result.report.passes) == passes
            moved.append(sum(report.ledgers[0].total_bytes for report in result.report.passes))
            size = item_bytes(engine)
    assert size == SOURCE_ITEM_BYTES
    assert moved[1] - moved[0] == EXPERTS // 4 * LAYERS * size * passes


@pytest.mark.parametrize("mode", ["whole", "routed"])
def test_eighteen_tokens_with_as_many_slots_as_choices(mode):
    """Far more experts are asked for than a slab holds: they come in waves, none is dropped."""
    with load() as engine:
        expected = result_hash(engine.prefill(MANY))
    # A partial slab of routed experts is put together from pieces that count as well.
    slots = TOP_K if mode == "whole" else 2 * TOP_K
    budget = live_bound(1) * slots * SOURCE_ITEM_BYTES
    with load(
        tokens=len(MANY),
        resident_fraction=0,
        order="layer_major",
        mode=mode,
        window=1,
        slab_bytes=budget,
    ) as engine:
        watch = Watch(engine)
        result = engine.prefill(MANY, on_event=watch)
        check_ledgers(engine, result)
        (report,) = result.report.passes
        assert min(report.distinct) > TOP_K
        assert report.ledgers[0].units >= 2 * LAYERS
    assert watch.violations == []
    assert result_hash(result) == expected


def disjoint_tokens(tables: list[np.ndarray]) -> tuple[int, int]:
    """Two token ids that share no expert in any hash layer."""
    for a, b in itertools.combinations(range(CONFIG.vocab_size), 2):
        if not any(set(table[a]) & set(table[b]) for table in tables):
            return a, b
    raise AssertionError("no such tokens")


def test_budget_is_kept_by_two_prompts_with_disjoint_experts():
    budget = live_bound(1) * 2 * TOP_K * SOURCE_ITEM_BYTES
    with load(
        resident_fraction=0.25, order="chunk_major", mode="routed", window=1, slab_bytes=budget
    ) as engine:
        resident = engine.plan.experts.residency
        tables = list(engine._stages[0]._tables.values())
        prompts = [[token] * 18 for token in disjoint_tokens(tables)]
        watch = Watch(engine)
        results = list(engine.prefill_many(prompts, on_event=watch))
        counts = [sum(r.counts for r in result.report.passes) for result in results]
        for layer in range(CONFIG.num_hash_layers):
            assert not np.any(counts[0][layer] * counts[1][layer])
        for result in results:
            check_ledgers(engine, result)
        assert engine.plan.experts.residency == resident
    assert watch.violations == []


def test_prompts_of_one_run_share_a_pass(reference):
    """In layer-major order every streamed expert moves once for all prompts of a micro-batch."""
    prompts = [IDS, IDS[:40], IDS[5:6]]
    with load(resident_fraction=0.5, order="layer_major", micro_batch_tokens=400) as engine:
        results = list(engine.prefill_many(prompts))
        reports = {id(report): report for r in results for report in r.report.passes}
        assert len(reports) == 1
        (report,) = reports.values()
        assert report.ledgers[0].total_bytes == LAYERS * EXPERTS // 2 * item_bytes(engine)
        assert result_hash(results[0]) == reference
        alone = engine.prefill(IDS[:40])
        assert result_hash(alone) == result_hash(results[1])


class FailingReader:
    """A reader whose reads fail while `broken`."""

    def __init__(self) -> None:
        self.inner, self.broken, self.reads = PreadReader(), threading.Event(), 0

    def read(self, source, out):
        self.reads += 1
        if self.broken.is_set():
            raise OSError(5, "Input/output error")
        return self.inner.read(source, out)

    def close(self):
        self.inner.close()


@pytest.mark.parametrize("order", ["chunk_major", "layer_major"])
@pytest.mark.parametrize("mode", ["whole", "routed"])
def test_failed_read_is_named_and_the_next_prompt_has_the_right_bits(
    order, mode, folder, reference
):
    with load(folder, resident_fraction=0.25, tier="disk", order=order, mode=mode) as engine:
        ring = engine._stages[0].pool.streamer.ring
        ring._reader.close()
        ring._reader = reader = FailingReader()

        def break_after_a_layer(event: events.Event) -> None:
            # Later ones might have been read ahead already.
            if isinstance(event, events.LayerDone) and event.layer == 0:
                reader.broken.set()

        with pytest.raises(ReadError, match=r"reading \w+ of item \d+, layer \d failed"):
            engine.prefill(IDS, on_event=break_after_a_layer)
        reader.broken.clear()
        result = engine.prefill(IDS)
        check_ledgers(engine, result)
        assert result_hash(result) == reference


def test_failed_copy_surfaces_and_the_next_prompt_has_the_right_bits(reference, monkeypatch):
    copies, put = itertools.count(), DeviceLink.put

    def failing(self, array):
        if next(copies) == 21:
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
        return put(self, array)

    with load(resident_fraction=0.5, order="layer_major") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceLink, "put", failing)
            with pytest.raises((StreamError, MemoryError), match="RESOURCE_EXHAUSTED"):
                engine.prefill(IDS)
        assert result_hash(engine.prefill(IDS)) == reference


def test_observer_that_raises_ends_the_pass_and_not_the_engine(reference):
    def fail(event: events.Event) -> None:
        if isinstance(event, events.LayerDone) and event.layer == 4:
            raise KeyboardInterrupt

    with load(resident_fraction=0.5, order="layer_major", window=4) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(IDS, on_event=fail)
        assert result_hash(engine.prefill(IDS)) == reference


def test_changed_checkpoint_file_is_refused(folder, tmp_path):
    copy = testing.write_checkpoint(tmp_path / "copy", CONFIG, seed=0)
    with load(copy, resident_fraction=0, tier="disk", order="layer_major") as engine:
        engine.prefill(IDS[:20])
        os.utime(copy / "model.safetensors", (1, 1))
        with pytest.raises(ReadError, match=r"model\.safetensors changed while .* load the model"):
            engine.prefill(IDS[:20])


def test_checkpoint_file_that_changes_before_its_first_read_from_disk_is_refused(tmp_path):
    copy = testing.write_checkpoint(tmp_path / "copy", CONFIG, seed=0)
    with load(copy, resident_fraction=0, tier="disk", order="layer_major") as engine:
        os.utime(copy / "model.safetensors", (1, 1))
        with pytest.raises(ReadError, match=r"model\.safetensors changed after .* load the model"):
            engine.prefill(IDS[:20])


def test_disk_tier_needs_files():
    with pytest.raises(PlanError, match="this checkpoint has no files"):
        load(resident_fraction=0.5, tier="disk")


def stop_after(stop: threading.Event, layer: int, nth: int = 1) -> events.Observer:
    """Sets `stop` when a layer has been visited for the nth time."""
    seen = itertools.count(1)

    def observe(event: events.Event) -> None:
        if isinstance(event, events.LayerDone) and event.layer == layer and next(seen) == nth:
            stop.set()

    return observe


@pytest.mark.parametrize(("mode", "activations"), [("whole", "device"), ("routed", "host")])
@pytest.mark.parametrize(("layer", "nth"), [(0, 1), (6, 1), (3, 2)])
def test_pass_that_was_stopped_between_layers_goes_on_with_the_same_bits(
    layer, nth, mode, activations, reference
):
    options = {
        "resident_fraction": 0.5,
        "order": "layer_major",
        "micro_batch_tokens": 2 * CHUNK,
        "activations": activations,
    }
    with load(mode=mode, **options) as engine:
        stop = threading.Event()
        first = engine.prefill(IDS, on_event=stop_after(stop, layer, nth), stop=stop)
        assert first.report.interrupted
        assert first.paused.layer == layer + 1
        assert first.paused.state.position == 2 * CHUNK * (nth - 1)
        assert first.paused.tokens == ((CHUNK, CHUNK), (CHUNK, 4))[nth - 1]
        kinds = {streams.sharding.memory_kind for streams in first.paused.streams}
        assert (kinds == {"pinned_host"}) == (activations == "host")
        assert not first.report.passes[-1].ledgers[0].complete
        rest = IDS[first.paused.state.position :]
        result = engine.prefill(rest, paused=first.paused)
        assert not result.report.interrupted
        rows = [part.logits for part in (first, result) if part.logits is not None]
        assert result_hash(dataclasses.replace(result, logits=np.concatenate(rows))) == reference


@pytest.mark.parametrize(("first", "second"), [("host", "device"), ("device", "host")])
def test_a_saved_pass_goes_on_wherever_its_activations_wait(first, second, reference, tmp_path):
    options = {"resident_fraction": 0.5, "order": "layer_major", "mode": "whole"}
    with load(activations=first, **options) as engine:
        stop = threading.Event()
        result = engine.prefill(IDS, on_event=stop_after(stop, 2), stop=stop)
        owner = (engine.model_config, engine.numerics, engine.fingerprint, IDS, CHUNK)
        save_paused(tmp_path / "paused", result.paused, *owner)
    with load(activations=second, **options) as engine:
        paused = load_paused(tmp_path / "paused", *owner)
        assert paused.layer == 3
        assert result_hash(engine.prefill(IDS, paused=paused)) == reference


def test_stop_at_the_last_layer_finishes_the_micro_batch():
    with load(resident_fraction=0.5, order="layer_major", micro_batch_tokens=2 * CHUNK) as engine:
        stop = threading.Event()
        result = engine.prefill(IDS, on_event=stop_after(stop, LAYERS - 1), stop=stop)
        assert result.paused is None
        assert result.report.tokens_read == 2 * CHUNK


def test_progress_counts_steps_and_never_falls():
    seen: list[events.Event] = []
    with load(resident_fraction=0.5, order="layer_major", micro_batch_tokens=2 * CHUNK) as engine:
        engine.prefill(IDS, on_event=seen.append)
    layers = [event for event in seen if isinstance(event, events.LayerDone)]
    assert [event.layer for event in layers] == [*range(LAYERS)] * 2
    done = [event.done for event in layers]
    assert done == sorted(done)
    assert done[-1] == layers[-1].total == len(IDS) * LAYERS
    assert [event.chunks for event in layers[::LAYERS]] == [2, 2]


def test_layers_that_share_experts_share_host_memory_and_give_the_same_bits():
    shas, stores = set(), set()
    for fraction in (1.0, 0.25):
        config = {
            "prefill.chunk_tokens": 64,
            "streaming.resident_fraction": fraction,
            "streaming.mode": "whole",
            "synthetic.distinct_layers": 2,
        }
        with ds4jax.load("synthetic:tiny", config) as engine:
            result = engine.prefill(np.arange(100) % 250)
            stores.add(engine.plan.store_bytes)
            shas.add(hashlib.sha256(result.logits.tobytes()).hexdigest())
            for ledger in (each for part in result.report.passes for each in part.ledgers):
                assert ledger.total_bytes == sum(ledger.predicted.bytes.values()) > 0
                item = ledger.total_bytes // (5 * 12)
    assert len(shas) == 1
    assert stores == {0, 2 * 12 * item}


@pytest.mark.parametrize("mode", ["whole", "routed"])
def test_slabs_of_the_next_micro_batch_come_while_outputs_are_made(mode, reference):
    order: list[str] = []
    with load(resident_fraction=0.5, order="chunk_major", mode=mode) as engine:
        streamer = engine._stages[0].pool.streamer

        def sink(name: str, rows: np.ndarray) -> None:
            # Only the first layers of the next run have been issued.
            order.append("next" if streamer._run is not None else "none")
            if streamer._run is not None:
                assert streamer._uploader.issued == streamer.window + 1
                assert streamer._uploader.last_computed == -1

        engine.prefill(IDS, sink=sink)
        # The first layers of a routed pass are known from the ids.
        assert order == ["next"] * 3 + ["none"]
        assert result_hash(engine.prefill(IDS)) == reference
        assert streamer._run is None


def test_a_prompt_between_two_results_of_a_run_changes_nothing(reference):
    """The run that was begun for the next prompt is given up, and begins again."""
    with load(resident_fraction=0.5, order="chunk_major", mode="routed") as engine:
        results = engine.prefill_many([IDS[:CHUNK], IDS])
        next(results)
        assert engine._stages[0]._begun is not None
        between = result_hash(engine.prefill(IDS))
        assert result_hash(next(results)) == between == reference
        next(engine.prefill_many([IDS[:CHUNK], IDS]))  # its iterator is dropped
        assert result_hash(engine.prefill(IDS)) == reference


def test_a_stop_leaves_nothing_begun():
    with load(resident_fraction=0.5, order="chunk_major") as engine:
        stop = threading.Event()
        result = engine.prefill(IDS, on_event=stop_after(stop, LAYERS - 1), stop=stop)
        assert result.report.tokens_read == CHUNK
        assert engine._stages[0]._begun is None
        assert engine._stages[0].pool.streamer._run is None
