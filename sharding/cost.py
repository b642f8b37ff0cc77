"""Integer cost rows that the planner reads: nanoseconds and bytes, nothing else.

The rows know no model and no hardware API. Whoever fills them (from a configuration and a probed
machine) decides what a layer costs; `sharding.split` only adds and compares. All values are
integers, so that a plan does not depend on float rounding and ties are really ties.
"""

import dataclasses
from collections.abc import Callable, Sequence

WHOLE_LAYER = 1 << 30  # a ring unit larger than any layer: the ring holds whole layers


class PlanError(ValueError):
    """No plan fits, or rows contradict each other: says what is missing and what would help."""


def _check(row: object, minimum: int, /, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise PlanError(
                f"{type(row).__name__}.{name} is {value!r}, expected an integer >= {minimum}"
            )


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer >= value / divisor, for value >= 0 and divisor > 0."""
    return -(-value // divisor)


def transfer_ns(nbytes: int, bytes_per_s: int) -> int:
    """Nanoseconds to move `nbytes` at `bytes_per_s`, rounded up."""
    return ceil_div(nbytes * 1_000_000_000, bytes_per_s)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """What one layer occupies on the device that owns it.

    dense_bytes      weights that are always resident (attention, shared expert, router, norms).
    state_bytes      caches of the layer at the prompt's length.
    workspace_bytes  temporary buffers of one chunk; layers of a stage share the largest.
    experts          routed experts of the layer: 0, or the same number in every layer.
    """

    dense_bytes: int
    state_bytes: int
    workspace_bytes: int
    experts: int

    def __post_init__(self) -> None:
        _check(self, 0, **dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class HostCost:
    """One host: its devices together read at most `bytes_per_s` of host memory; 0 = no limit."""

    name: str = "host"
    bytes_per_s: int = 0

    def __post_init__(self) -> None:
        _check(self, 0, bytes_per_s=self.bytes_per_s)


@dataclasses.dataclass(frozen=True)
class DeviceCost:
    """One device.

    memory_bytes           usable device memory, everything the plan places has to fit in it.
    host_link_bytes_per_s  host-to-device bandwidth of this device alone.
    speed_permille         1000 = the speed that the compute rows were measured at; 500 = half.
    host                   index of its host in `Problem.hosts`.
    """

    name: str
    memory_bytes: int
    host_link_bytes_per_s: int
    speed_permille: int = 1000
    host: int = 0

    def __post_init__(self) -> None:
        _check(self, 0, memory_bytes=self.memory_bytes, host=self.host)
        _check(
            self,
            1,
            host_link_bytes_per_s=self.host_link_bytes_per_s,
            speed_permille=self.speed_permille,
        )


@dataclasses.dataclass(frozen=True)
class PeerLink:
    """`owner` may use the device `peer`, if that has no stage of its own, as an expert tier.

    With `holds` the peer's memory has experts that are copied over the device link at
    `bytes_per_s`; with `relays` its host link is a second path for the rest (host -> peer ->
    owner).
    """

    owner: int
    peer: int
    bytes_per_s: int
    holds: bool = True
    relays: bool = True

    def __post_init__(self) -> None:
        _check(self, 0, owner=self.owner, peer=self.peer)
        _check(self, 1, bytes_per_s=self.bytes_per_s)
        if self.owner == self.peer:
            raise PlanError(f"PeerLink of device {self.owner} to itself: expected two devices")


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slabs that streamed experts pass through.

    experts  of a slab; WHOLE_LAYER or any value above the number of experts means the streamed
             share of a whole layer.
    slots    slabs that there is memory for.
    ahead    slabs that may be copied ahead of the one that is computed.
    """

    experts: int = WHOLE_LAYER
    slots: int = 3
    ahead: int = 1

    def __post_init__(self) -> None:
        _check(self, 1, experts=self.experts, slots=self.slots)
        _check(self, 0, ahead=self.ahead)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One order of work, with the rows that depend on it.

    order                 "chunk_major" (every chunk passes all layers) or "layer_major" (all
                          chunks of a micro-batch pass a layer before the next one starts).
    micro_batch_tokens    S, tokens per pass over the layers.
    passes                m, micro-batches of the run; every pass streams its experts once.
    compute_ns            per layer, of one pass at speed 1000.
    expert_ns             of it, what the routed experts take, each of a layer as much; () = all.
    distinct              per layer, experts hit in one pass; all of them in whole-layer mode.
    activation_bytes      streams of a micro-batch that live on the device while it passes a stage.
    handoff_bytes         bytes copied between two stages per pass.
    receive_bytes         buffers of a stage that has a stage before it.
    send_bytes            buffers of a stage that has a stage after it.
    embed_ns, head_ns     added to the first and the last stage, per pass at speed 1000.
    layer_link_bytes      bytes per layer and pass that cross the host link beside the experts
                          (activations that are kept in host memory).
    activations           "device" or "host": where the streams of a micro-batch are kept.
    wave_ns               computation that every part of a layer's experts but the first adds, at
                          speed 1000: the residents are a part, and every slab is one.
    sequences             whose states are held at once; `LayerCost.state_bytes` is that of one.
    workspace_bytes       per layer, where the order of work decides; () = those of the layers.
    """

    order: str
    micro_batch_tokens: int
    passes: int
    compute_ns: tuple[int, ...]
    distinct: tuple[int, ...]
    expert_ns: tuple[int, ...] = ()
    activation_bytes: int = 0
    handoff_bytes: int = 0
    receive_bytes: int = 0
    send_bytes: int = 0
    embed_ns: int = 0
    head_ns: int = 0
    layer_link_bytes: int = 0
    activations: str = "device"
    wave_ns: int = 0
    sequences: int = 1
    workspace_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.order not in ("chunk_major", "layer_major"):
            raise PlanError(
                f"Schedule.order is {self.order!r}, expected 'chunk_major' or 'layer_major'"
            )
        if self.activations not in ("device", "host"):
            raise PlanError(
                f"Schedule.activations is {self.activations!r}, expected 'device' or 'host'"
            )
        _check(
            self,
            1,
            micro_batch_tokens=self.micro_batch_tokens,
            passes=self.passes,
            sequences=self.sequences,
        )
        _check(
            self,
            0,
            activation_bytes=self.activation_bytes,
            handoff_bytes=self.handoff_bytes,
            receive_bytes=self.receive_bytes,
            send_bytes=self.send_bytes,
            embed_ns=self.embed_ns,
            head_ns=self.head_ns,
            layer_link_bytes=self.layer_link_bytes,
            wave_ns=self.wave_ns,
        )
        for name in ("compute_ns", "distinct", "expert_ns", "workspace_bytes"):
            values = getattr(self, name)
            for value in values:
                _check(self, 0, **{name: value})
            if values and len(values) != len(self.compute_ns):
                raise PlanError(
                    f"Schedule.{name} has {len(values)} values for {len(self.compute_ns)} layers"
                )
        for part, whole in zip(self.expert_ns, self.compute_ns, strict=False):
            if part > whole:
                raise PlanError(f"Schedule.expert_ns has {part} of a layer that takes {whole}")

    def __str__(self) -> str:
        where = "" if self.activations == "device" else ", activations in host memory"
        return f"{self.order}, micro-batch {self.micro_batch_tokens} tokens x {self.passes}{where}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a plan is made from.

    link_bytes_per_s    [i][j]: bandwidth of a hand-off from device i to device j.
    link_latency_ns     added to every hand-off.
    expert_bytes        bytes of one expert as it is stored and moved.
    rings               that a stage may choose from.
    ring_least          experts that a slab has room for at least.
    upload_overhead_ns  added per slab uploaded; it is what makes small slabs cost something.
    layer_residents     experts that stay in every layer, where that was decided before; None takes
                        as many as fit.
    in_order            every device has a stage, in the order of the devices, and none is a peer;
                        otherwise devices come in any order and some may be left out.
    peer_ring_experts   added to a slab of a stage with a peer: every path rounds its part of one.
    embed_bytes         on the device that owns the first layer; head_bytes: of the last layer.
    """

    layers: tuple[LayerCost, ...]
    devices: tuple[DeviceCost, ...]
    schedules: tuple[Schedule, ...]
    expert_bytes: int
    link_bytes_per_s: tuple[tuple[int, ...], ...]
    link_latency_ns: int = 0
    rings: tuple[Ring, ...] = (Ring(),)
    ring_least: int = 1
    upload_overhead_ns: int = 0
    layer_residents: int | None = None
    peer_ring_experts: int = 0
    embed_bytes: int = 0
    head_bytes: int = 0
    hosts: tuple[HostCost, ...] = (HostCost(),)
    peers: tuple[PeerLink, ...] = ()
    in_order: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "devices", "schedules", "rings", "hosts"):
            if not getattr(self, name):
                raise PlanError(f"Problem.{name} is empty, expected at least one row")
        _check(
            self,
            1,
            expert_bytes=self.expert_bytes,
            ring_least=self.ring_least,
        )
        _check(
            self,
            0,
            link_latency_ns=self.link_latency_ns,
            upload_overhead_ns=self.upload_overhead_ns,
            peer_ring_experts=self.peer_ring_experts,
            embed_bytes=self.embed_bytes,
            head_bytes=self.head_bytes,
        )
        if self.layer_residents is not None:
            _check(self, 0, layer_residents=self.layer_residents)
            if self.layer_residents > self.experts:
                raise PlanError(
                    f"Problem.layer_residents is {self.layer_residents}, layers have "
                    f"{self.experts} experts"
                )
        counts = sorted({layer.experts for layer in self.layers if layer.experts})
        if len(counts) > 1:
            raise PlanError(f"layers have {counts} experts, expected one number (or 0)")
        for schedule in self.schedules:
            for name in ("compute_ns", "distinct"):
                row = getattr(schedule, name)
                if len(row) != len(self.layers):
                    raise PlanError(
                        f"Schedule.{name} has {len(row)} values for {len(self.layers)} layers"
                    )
            for layer, distinct in zip(self.layers, schedule.distinct, strict=True):
                if distinct > layer.experts:
                    raise PlanError(
                        f"Schedule.distinct has {distinct} for a layer of {layer.experts} experts"
                    )
        size = len(self.devices)
        if [len(row) for row in self.link_bytes_per_s] != [size] * size:
            raise PlanError(
                f"Problem.link_bytes_per_s has rows of "
                f"{[len(row) for row in self.link_bytes_per_s]} values, expected {size} x {size}"
            )
        for i, row in enumerate(self.link_bytes_per_s):
            for j, rate in enumerate(row):
                if i != j:
                    _check(self, 1, link_bytes_per_s=rate)
        for device in self.devices:
            if device.host >= len(self.hosts):
                raise PlanError(
                    f"{device.name} is on host {device.host}, but there are {len(self.hosts)} hosts"
                )
        if self.in_order and (self.peers or size > len(self.layers)):
            raise PlanError(
                f"{size} devices in order and {len(self.layers)} layers, {len(self.peers)} peers: "
                "expected at most as many devices as layers, and no peer"
            )
        pairs = [(link.owner, link.peer) for link in self.peers]
        if len(set(pairs)) != len(pairs):
            raise PlanError(f"Problem.peers names a pair twice: {sorted(pairs)}")
        for pair in pairs:
            if max(pair) >= size:
                raise PlanError(f"PeerLink of devices {pair}, but there are {size} devices")

    @property
    def experts(self) -> int:
        """Routed experts of the layers that have any; 0 if none has."""
        return max(layer.experts for layer in self.layers)


def uniform_links(devices: int, bytes_per_s: int) -> tuple[tuple[int, ...], ...]:
    """Link matrix in which every pair of devices has the same bandwidth."""
    return tuple((bytes_per_s,) * devices for _ in range(devices))


def roofline_ns(flops: int, nbytes: int, flops_per_s: int, bytes_per_s: int) -> int:
    """Time of a computation that is bound by arithmetic or by device memory, rounded up."""
    return max(ceil_div(flops * 1_000_000_000, flops_per_s), transfer_ns(nbytes, bytes_per_s))


def micro_batches(prompt_tokens: Sequence[int], chunk_tokens: int) -> tuple[tuple[int, int], ...]:
    """Candidate micro-batches as (chunks per pass, passes), smallest first.

    Prompts are cut into chunks one by one, and a micro-batch takes whole chunks, of several
    prompts if need be. Candidates are 1, 2, 4, ... chunks and all of them, each lowered to the
    fewest chunks that need the same number of passes: a short last micro-batch costs a whole pass.
    """
    if chunk_tokens < 1:
        raise PlanError(f"chunk_tokens is {chunk_tokens}, expected at least 1")
    if not prompt_tokens or min(prompt_tokens) < 1:
        raise PlanError(f"prompt_tokens is {list(prompt_tokens)}, expected lengths >= 1")
    chunks = sum(ceil_div(tokens, chunk_tokens) for tokens in prompt_tokens)
    sizes = [1 << i for i in range(chunks.bit_length()) if 1 << i < chunks] + [chunks]
    found = {}
    for size in sizes:
        passes = ceil_div(chunks, size)
        found[passes] = (ceil_div(chunks, passes), passes)
    return tuple(sorted(found.values()))


def make_schedules(
    prompt_tokens: Sequence[int],
    chunk_tokens: int,
    *,
    layers: int,
    compute_ns: Callable[[int, int], int],
    distinct: Callable[[int, int], int],
    stream_bytes: int,
    embed_ns: Callable[[int], int] = lambda tokens: 0,
    head_ns: Callable[[int, int], int] = lambda tokens, passes: 0,
    handoff_buffers: int = 1,
    activations: Sequence[str] = ("device",),
) -> tuple[Schedule, ...]:
    """Schedules of a run: every candidate micro-batch, with the rows asked from the caller.

    compute_ns(layer, tokens)   one pass of a micro-batch of `tokens`, at speed 1000.
    distinct(layer, tokens)     experts hit in it; the whole layer in whole-layer mode.
    stream_bytes                bytes per token between two layers (and two stages).
    embed_ns(tokens), head_ns(tokens, passes)   per pass.
    handoff_buffers             micro-batches that may wait on either side of a hand-off.
    activations                 "device" and/or "host"; host memory needs a micro-batch of more
                                than one chunk, and two chunks stay on the device for the copies.
    """
    rows = []
    for chunks, passes in micro_batches(prompt_tokens, chunk_tokens):
        tokens = chunks * chunk_tokens
        for place in activations:
            if place == "host" and chunks < 3:
                continue  # two chunks in flight are the whole micro-batch
            on_device = 2 * chunk_tokens if place == "host" else tokens
            rows.append(
                Schedule(
                    order="chunk_major" if chunks == 1 else "layer_major",
                    micro_batch_tokens=tokens,
                    passes=passes,
                    compute_ns=tuple(compute_ns(layer, tokens) for layer in range(layers)),
                    distinct=tuple(distinct(layer, tokens) for layer in range(layers)),
                    activation_bytes=stream_bytes * on_device,
                    handoff_bytes=stream_bytes * tokens,
                    receive_bytes=handoff_buffers * stream_bytes * on_device,
                    send_bytes=handoff_buffers * stream_bytes * on_device,
                    embed_ns=embed_ns(tokens),
                    head_ns=head_ns(tokens, passes),
                    layer_link_bytes=stream_bytes * tokens if place == "host" else 0,
                    activations=place,
                )
            )
    return tuple(rows)
