"""Where the routed experts are while a model runs, and how they reach the device.

Some experts of every layer stay on the device (`residency`), the others are streamed ahead of the
layer that needs them, from host memory or from the checkpoint's files. `ExpertPool` holds both and
gives every step of a run the slabs that its programs take.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import streaming
from ds4jax import admission, peers
from ds4jax.checkpoint import keys, synthetic_device
from ds4jax.checkpoint import load as loading
from ds4jax.checkpoint.converted import ConvertedSource
from ds4jax.checkpoint.safetensors import SafetensorsSource
from ds4jax.checkpoint.source import CheckpointError, TensorSource
from ds4jax.moe import LayerSlabs
from ds4jax.owners import ColdOwner, ParallelOwners
from pallas_kernels.routed_experts import ExpertSlab, wide_experts
from sharding.cost import PlanError
from streaming import streamer as streamers
from streaming import window as arithmetic
from streaming.numa import POLICIES
from streaming.readers import READERS

log = logging.getLogger(__name__)

# Until they are measured: the rate of a PCIe 5.0 x16 link, and the time of a layer on few rows.
LINK_BYTES_PER_S = 55e9
LAYER_SECONDS = 2e-3
MADE_EXPERTS = 64  # synthetic experts that are made at once on their way to the host

_MATRICES = {"gate_up": ("w1", "w3"), "down": ("w2",)}


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """How the experts of a run are kept.

    residency   experts of every layer that stay on the device
    tier        where the others are: "ram" or "disk"
    window      units that are copied ahead; None takes the tier's default
    slab_bytes  device memory for slabs on their way; None for as much as the window takes
    peer        what a neighbour device brings, if there is one
    """

    residency: streaming.Residency
    tier: str = "ram"
    window: int | None = None
    slab_bytes: int | None = None
    peer: peers.PeerShares | None = None

    @property
    def resolved_window(self) -> int:
        """Units copied ahead: `window`, or what suits the tier."""
        return default_window(self.tier) if self.window is None else self.window

    @property
    def streams(self) -> bool:
        """Whether any expert is streamed."""
        return any(self.residency.streamed)

    @property
    def by_tier(self) -> dict[str, peers.Items]:
        """The streamed experts of each layer by the tier that they come from."""
        return peers.paths(self.residency.streamed, self.tier, self.peer)


def default_window(tier: str) -> int:
    """Units copied ahead unless told otherwise; the jitter of a disk needs one more."""
    return streamers.RAM_WINDOW if tier == "ram" else streamers.DISK_WINDOW


def slab_sizes(plan: ExpertPlan, item_bytes: int) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Of every layer: the experts of its resident slab, 0 for none, and of the slabs of each wave.

    Of whole layers; the slabs of a wave come over one path each.
    """
    collective = plan.peer is not None and plan.peer.collective
    residents = [0 if collective else len(items) for items in plan.residency.resident]
    if not plan.streams:
        return [(count, []) for count in residents]
    by_tier, window = plan.by_tier, plan.resolved_window
    budgets = peers.budgets(by_tier, plan.slab_bytes, item_bytes, window)
    paths = []
    for tier, streamed in by_tier.items():
        most = arithmetic.wave_items(max(map(len, streamed)), item_bytes, window, budgets[tier])
        ranges = [arithmetic.wave_ranges(len(items), most) for items in streamed]
        paths.append([[end - begin for begin, end in waves] for waves in ranges])
    return [
        (count, [tuple(n for n in wave if n is not None) for wave in itertools.zip_longest(*waves)])
        for count, *waves in zip(residents, *paths, strict=True)
    ]


def slab_layout(source: TensorSource, layers: int) -> streaming.SlabLayout:
    """The routed experts of `layers` layers as items; components are the fields of `ExpertSlab`."""
    slab = loading.empty_expert_slab(source.config, keys.expert_format(source), 1)
    return streaming.SlabLayout(
        layers,
        source.config.n_routed_experts,
        tuple(
            streaming.Component(name, np.asarray(array).shape[1:], np.asarray(array).dtype)
            for name, array in _fields(slab)
        ),
    )


def _fields(slab: ExpertSlab) -> list[tuple[str, jax.Array]]:
    names = ("gate_up", "gate_up_scale", "down", "down_scale")
    return [(name, getattr(slab, name)) for name in names if getattr(slab, name) is not None]


def tensor_names(layer: int, expert: int, component: str) -> list[str]:
    """Published names of the tensors that make up a component, in their order in it."""
    field, part = component.removesuffix("_scale"), "weight"
    if component.endswith("_scale"):
        part = "scale"
    prefix = keys.expert_prefix(layer, expert)
    return [f"{prefix}{matrix}.{part}" for matrix in _MATRICES[field]]


def layer_maker(
    maker: synthetic_device.DeviceMaker, first_layer: int, driver: streaming.CudaDriver | None
) -> Callable[[int, Sequence[int], Sequence[np.ndarray]], None]:
    """Makes the experts of a layer on a device, as `streaming.HostStore.fill_layers` wants it.

    driver  copies straight into the store; None takes JAX's way, through another host array
    """

    def fill(layer: int, items: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        for begin in range(0, len(items), MADE_EXPERTS):
            # The last group goes over experts of the one before, so that shapes stay few.
            first = min(begin, max(len(items) - MADE_EXPERTS, 0))
            chosen = items[first : first + MADE_EXPERTS]
            slab = maker.slab(first_layer + layer, chosen)
            for (_, made), array in zip(_fields(slab), arrays, strict=True):
                rows = array[first : first + len(chosen)]
                if driver is None or not _read_device(driver, made, rows):
                    np.copyto(rows, np.asarray(made))

    return fill


def _read_device(driver: streaming.CudaDriver, made: jax.Array, rows: np.ndarray) -> bool:
    """Copies a device array into `rows`; False when the driver refused."""
    jax.block_until_ready(made)
    try:
        driver.read(rows.ctypes.data, made.unsafe_buffer_pointer(), rows.nbytes)
    except streaming.PinError as error:
        log.warning("experts: copied through another host array (%s)", error)
        return False
    return True


def store_filler(
    source: TensorSource, first_layer: int
) -> Callable[[int, int, str, np.ndarray], None]:
    """Reads a component of an expert, as `streaming.HostStore.fill` wants it."""

    def fill(layer: int, item: int, component: str, buffer: np.ndarray) -> None:
        names = tensor_names(first_layer + layer, item, component)
        parts = np.split(buffer, len(names))
        for name, part in zip(names, parts, strict=True):
            data = part.reshape(-1).view(np.uint8)
            source.read_into(name, data)
            if component.endswith("_scale"):
                loading.require_numbers(name, part)

    return fill


def file_locator(
    source: TensorSource, first_layer: int
) -> Callable[[int, int, str], list[streaming.FileRange]]:
    """Where a component of an expert is in files, as `streaming.DiskRing` wants it.

    Raises PlanError for a source without files.
    """
    if not isinstance(source, SafetensorsSource | ConvertedSource):
        raise PlanError(
            "config.streaming.tier is 'disk', but this checkpoint has no files: expected a "
            "checkpoint folder, or config.streaming.tier='ram'"
        )

    extent, stamps = source.extent, source.files.stamps

    def locate(layer: int, item: int, component: str) -> list[streaming.FileRange]:
        places = map(extent, tensor_names(first_layer + layer, item, component))
        return [
            streaming.FileRange(place.path, place.offset, place.nbytes, stamps[place.path])
            for place in places
        ]

    return locate


def scale_checker(
    source: SafetensorsSource | ConvertedSource,
) -> Callable[[str, streaming.FileRange, np.ndarray], None]:
    """Refuses NaN scales in what was read from files, as `streaming.DiskRing` wants it.

    Raises CheckpointError. Serves a source that has been closed, too.
    """

    def check(component: str, place: streaming.FileRange, data: np.ndarray) -> None:
        if not component.endswith("_scale") or data.max(initial=0) != loading.E8M0_NAN:
            return
        found = place.offset + int(np.argmax(data == loading.E8M0_NAN))
        for name, info in source.infos().items():
            if ".ffn.experts." not in name or not name.endswith(".scale"):
                continue
            extent = source.extent(name)
            if extent.path == place.path and 0 <= found - extent.offset < extent.nbytes:
                position = [int(i) for i in np.unravel_index(found - extent.offset, info.shape)]
                raise CheckpointError(
                    f"{name}{position} is NaN (byte 255): expected powers of two, fetch the "
                    "checkpoint again"
                )

    return check


class ExpertPool:
    """The routed experts of consecutive layers of a loaded model.

    Between `start` and `finish` the steps of a run are visited in order: `issue_ahead` before
    anything of a step is dispatched, `take` for each of its `waves`, `computed` when the last
    program that uses a wave has been dispatched. A pool without streamed experts has no waves.

    layers    which ones; layers of the plan and of steps count from the first of them
    reader    how experts are read from disk, a name of `streaming.readers.READERS`
    on_bytes  is told the bytes of experts that have been loaded so far
    """

    def __init__(
        self,
        source: TensorSource,
        plan: ExpertPlan,
        device: jax.Device,
        *,
        layers: range | None = None,
        numa: str = "auto",
        reader: str = "preadv",
        on_bytes: Callable[[int], None] = lambda done: None,
    ):
        self._reader = reader
        self.plan, self.device = plan, device
        self.layers = range(source.config.num_hidden_layers) if layers is None else layers
        self.layout = slab_layout(source, len(self.layers))
        self._format = keys.expert_format(source)
        self._per_token = source.config.num_experts_per_tok
        # Distinct experts and seconds of a layer, by the power of two of a pass's tokens.
        self._measured: dict[int, tuple[float, float]] = {}
        self._loaded_bytes = 0
        self._on_bytes = on_bytes
        self.resident = [
            self._load_resident(source, layer, chosen, device)
            for layer, chosen in enumerate(plan.residency.resident)
        ]
        self.peer = peers.find(plan.peer.device, device) if plan.peer is not None else None
        self.cold: ColdOwner | ParallelOwners | None = None
        if self.peer is not None and any(plan.residency.elsewhere):
            self.cold = self._load_cold(source, self.peer)
        self.streamer: streaming.Streamer | streaming.Tiers | None = None
        self.stores: list[streaming.HostStore | streaming.PeerStore] = []
        self.pinner: streaming.Pinner | None = None
        if plan.streams:
            self._open_streamers(source, numa)

    def _load_cold(self, source: TensorSource, peer: jax.Device) -> ColdOwner | ParallelOwners:
        """The neighbour's share; with collectives the residents become a part of it."""
        slabs = [
            self._load_resident(source, layer, chosen, peer)
            for layer, chosen in enumerate(self.plan.residency.elsewhere)
        ]
        colds = [slab for slab in slabs if slab]
        if self.plan.peer is None or not self.plan.peer.collective:
            return ColdOwner(colds, peer, self.device)
        hots = [slab for slab in self.resident if slab]
        self.resident = [None] * len(self.layers)
        return ParallelOwners([hots, colds], [self.device, peer])

    def _load_resident(
        self, source: TensorSource, layer: int, chosen: Sequence[int], device: jax.Device
    ) -> LayerSlabs | None:
        if not chosen:
            return None
        slab = loading.place_expert_slab(source, self.layers[layer], chosen, device)
        where = np.full(self.layout.items, -1, np.int32)
        where[list(chosen)] = np.arange(len(chosen), dtype=np.int32)
        self._count(len(chosen))
        return (slab,), jax.device_put(where, device)

    def _open_streamers(self, source: TensorSource, numa: str) -> None:
        """One streamer for every path that experts come by."""
        driver, node = _cuda(self.device)
        self.pinner = streaming.Pinner(driver)
        window = self.plan.resolved_window
        by_tier = self.plan.by_tier
        budgets = peers.budgets(by_tier, self.plan.slab_bytes, self.layout.item_bytes, window)
        streamers = []
        for tier, streamed in by_tier.items():
            store, ring, link = None, None, None
            if tier == streaming.PEER_TIER:
                store = self._peer_store(source, streamed)
            elif tier == "disk":
                ring = self._disk_ring(source, streamed, budgets[tier], numa, node)
            else:
                near = node if tier == "ram" else _cuda(self._neighbour())[1]
                store = self._host_store(source, streamed, numa, near)
            if tier in (streaming.PEER_TIER, streaming.RELAY_TIER):
                link = streaming.PeerLink(self.device, self._neighbour())
            streamers.append(
                streaming.Streamer(
                    self.layout,
                    streamed,
                    self.device,
                    store=store,
                    ring=ring,
                    window=window,
                    budget_bytes=budgets[tier],
                    tier=tier,
                    link=link,
                )
            )
        self.streamer = streamers[0] if len(streamers) == 1 else streaming.Tiers(streamers)

    def _neighbour(self) -> jax.Device:
        assert self.peer is not None  # the plan has its shares
        return self.peer

    def _peer_store(self, source: TensorSource, streamed: peers.Items) -> streaming.PeerStore:
        blocks = []
        for layer, chosen in enumerate(streamed):
            slab = self._load_resident(source, layer, chosen, self._neighbour())
            blocks.append([] if slab is None else [array for _, array in _fields(slab[0][0])])
        store = streaming.PeerStore(self.layout, streamed, blocks)
        self.stores.append(store)
        return store

    def _host_store(
        self, source: TensorSource, streamed: peers.Items, numa: str, node: int | None
    ) -> streaming.HostStore:
        store = streaming.HostStore(
            self.layout,
            streamed,
            origins=[source.expert_origin(layer) for layer in self.layers],
            policy=next(policy for policy in POLICIES if policy == numa),
            device_node=node,
            pinner=self.pinner,
        )
        self.stores.append(store)
        _require_lockable(store.nbytes, self.device)

        def on_layer(layer: int) -> None:
            self._count(len(streamed[layer]))

        try:
            if made := synthetic_device.maker(source, self.device):
                driver, _ = _cuda(self.device)
                store.fill_layers(layer_maker(made, self.layers.start, driver), on_layer=on_layer)
            else:
                store.fill(store_filler(source, self.layers.start), on_layer=on_layer)
        except streaming.StreamError as error:
            if isinstance(error.__cause__, CheckpointError):
                raise error.__cause__ from None
            raise
        return store

    def _disk_ring(
        self,
        source: TensorSource,
        streamed: peers.Items,
        budget: int | None,
        numa: str,
        node: int | None,
    ) -> streaming.DiskRing:
        window = self.plan.resolved_window
        rows = arithmetic.wave_items(
            max(map(len, streamed)), self.layout.item_bytes, window, budget
        )
        locate = file_locator(source, self.layers.start)
        assert isinstance(source, SafetensorsSource | ConvertedSource)
        ring = streaming.DiskRing(
            self.layout,
            locate,
            rows=rows,
            slots=window + 1,
            reader=streaming.open_reader(next(kind for kind in READERS if kind == self._reader)),
            pinner=self.pinner,
            check=scale_checker(source),
            policy=next(policy for policy in POLICIES if policy == numa),
            device_node=node,
        )
        self._count(sum(map(len, streamed)))
        return ring

    def _count(self, experts: int) -> None:
        self._loaded_bytes += experts * self.layout.item_bytes
        self._on_bytes(self._loaded_bytes)

    def wide_experts(self) -> int:
        """Experts on the device and in host memory whose FP8 products take several passes.

        See `routed_experts.wide_experts`; experts that are only on disk or at a neighbour are not
        looked at.
        """
        slabs = [slab for layer in self.resident if layer for slab in layer[0]]
        names = [component.name for component in self.layout.components]
        for store in self.stores:
            if isinstance(store, streaming.HostStore):
                for layer, items in enumerate(store.order):
                    for piece in store.pieces(layer, items):
                        slabs.append(self._slab(dict(zip(names, piece.arrays, strict=True))))
        return sum(int(wide_experts(slab).sum()) for slab in slabs)

    def start(self, steps: Sequence[streaming.Step]) -> streaming.Prediction | None:
        """Begins a run that visits `steps`; None when nothing is streamed."""
        return self.streamer.start(steps) if self.streamer is not None else None

    def prefetch(self) -> None:
        """Issues the first copies of a run that has been started, while the device is idle."""
        if self.streamer is not None:
            self.streamer.prefetch()

    def preferred_mode(self, tokens: int) -> str:
        """ "routed" where moving only what the router asks for is expected to be faster.

        Goes by the distinct experts and times that passes of about as many tokens were measured to
        have; before the first one by what independent uniform routing would use.
        """
        if self.streamer is None:
            return "whole"
        share = max(map(len, self.plan.residency.streamed))
        distinct, compute_s = self._measured.get(
            tokens.bit_length(), (self._uniform_distinct(tokens), LAYER_SECONDS)
        )
        routed = streaming.prefer_routed(
            distinct_misses=distinct * share / self.layout.items,
            share=share,
            item_bytes=self.layout.item_bytes,
            link_bytes_per_s=LINK_BYTES_PER_S,
            compute_s=compute_s,
        )
        return "routed" if routed else "whole"

    def _uniform_distinct(self, tokens: int) -> float:
        return self.layout.items * (1 - (1 - self._per_token / self.layout.items) ** tokens)

    def measured(self, tokens: int, distinct: Sequence[int], layer_seconds: float) -> None:
        """Keeps what a pass over `tokens` tokens used, for `preferred_mode`."""
        self._measured[tokens.bit_length()] = (float(np.mean(distinct)), layer_seconds)

    def issue_ahead(self, step: int, wave: int = 0) -> None:
        """Issues the copies that have to be under way before a step computes."""
        if self.streamer is not None:
            self.streamer.issue_ahead(step, wave)

    def routed(self, step: int, ids: np.ndarray) -> None:
        """Tells which experts a step of mode "routed" needs: ids of any shape, -1 for none."""
        assert self.streamer is not None
        self.streamer.routed(step, ids)

    def waves(self, step: int) -> int:
        """In how many slabs the streamed experts of a step come."""
        return self.streamer.waves(step) if self.streamer is not None else 0

    def take(self, step: int, wave: int) -> LayerSlabs:
        """The slabs of a wave, one per path, for programs that are dispatched next."""
        assert self.streamer is not None
        taken = self.streamer.take(step, wave)
        slabs = [taken] if isinstance(taken, streaming.Slab) else taken
        experts = tuple(self._slab(slab.arrays) for slab in slabs)
        if len(slabs) == 1:
            return experts, slabs[0].where
        rows = tuple(slab.rows for slab in slabs)
        return experts, _joined_where(tuple(slab.where for slab in slabs), rows)

    def _slab(self, arrays: Mapping[str, jax.Array]) -> ExpertSlab:
        return ExpertSlab(
            arrays["gate_up"],
            arrays.get("gate_up_scale"),
            arrays["down"],
            arrays.get("down_scale"),
            self._format,
        )

    def computed(self, step: int, wave: int, output: jax.Array, reached: jax.Array) -> None:
        """All programs that use a wave have been dispatched; see `streaming.Streamer.computed`."""
        assert self.streamer is not None
        self.streamer.computed(step, output, wave, reached=reached)

    def available(self, step: streaming.Step) -> Sequence[int]:
        """Experts that a step can use: residents, the cold owner's and what the step moves."""
        if step.mode == "routed":
            return range(self.layout.items)
        residency = self.plan.residency
        moved = residency.streamed[step.layer] if step.mode == "whole" else step.items
        cold = residency.elsewhere[step.layer] if residency.elsewhere else ()
        return (*residency.resident[step.layer], *cold, *moved)

    def finish(self, distinct: Sequence[int]) -> streaming.Ledger | None:
        """Ends a run; `distinct` has the distinct experts that each step used."""
        if self.streamer is None:
            return None
        for step, count in enumerate(distinct):
            self.streamer.observed(step, count)
        return self.streamer.finish()

    def abort(self) -> streaming.Ledger | None:
        """Ends a run early and accounts for what ran; afterwards the pool can be used again."""
        return self.streamer.abort() if self.streamer is not None else None

    def close(self) -> None:
        """Lets go of all experts."""
        if self.streamer is not None:
            self.streamer.close()
        for store in self.stores:
            store.close()
        if self.pinner is not None:
            self.pinner.close()
        if self.cold is not None:
            self.cold.close()
        self.resident = []


@functools.partial(jax.jit, static_argnums=1)
def _joined_where(tables: tuple[jax.Array, ...], rows: tuple[int, ...]) -> jax.Array:
    """i32 [E]: the row of each expert in the concatenation of slabs of `rows` rows."""
    joined, before = jnp.full(tables[0].shape, -1, jnp.int32), 0
    for table, count in zip(tables, rows, strict=True):
        joined = jnp.where(table >= 0, table + jnp.int32(before), joined)
        before += count
    return joined


def _cuda(device: jax.Device) -> tuple[streaming.CudaDriver | None, int | None]:
    """What page-locks memory for a device, and the NUMA node it is attached to."""
    if device.platform not in ("gpu", "cuda"):
        return None, None
    try:
        driver = streaming.CudaDriver(device.local_hardware_id or 0)
        return driver, streaming.device_node(driver.pci_address())
    except streaming.PinError as error:
        log.warning(
            "experts: host memory stays pageable (%s); copies run several times slower and do not "
            "run beside the compute",
            error,
        )
        return None, None


def _require_lockable(nbytes: int, device: jax.Device) -> None:
    """Raises PlanError unless the device has room for the page tables of locked host memory.

    They lie outside of what JAX has taken; without them copies would be many times slower.
    """
    driver, _ = _cuda(device)
    if driver is None:
        return
    needed, free = admission.locking_bytes(nbytes), driver.free_device_bytes()
    if needed > free:
        raise PlanError(
            f"page-locking {nbytes} bytes of host memory needs {needed} bytes of the device's "
            f"memory that JAX has not taken, {free} are free: lower XLA_PYTHON_CLIENT_MEM_FRACTION"
        )


def absent_experts(counts: np.ndarray, available: Sequence[int]) -> list[int]:
    """Experts with a count above 0 that are not among `available`."""
    allowed = np.zeros(len(counts), bool)
    allowed[list(available)] = True
    return np.flatnonzero((counts > 0) & ~allowed).tolist()
