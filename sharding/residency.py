"""What every layer range costs on one device: residents, ring, memory, and time of a pass."""

from collections.abc import Iterable

import numpy as np

from sharding.cost import Problem, Schedule, transfer_ns


def ring_units(problem: Problem) -> tuple[int, ...]:
    """The ring units of a problem that differ, in experts per slab, largest first."""
    cap = max(problem.experts, 1)
    return tuple(sorted({min(unit, cap) for unit in problem.ring_units}, reverse=True))


class RangeTable:
    """Costs of all layer ranges [begin, end) on `device`, one int64 array entry per range.

    Residents: all experts if they fit, else the largest R with

        R + slots * min(unit, E - R // layers) <= room

    in experts: the ring holds `slots` slabs, and a slab holds at most `unit` experts and at most
    the streamed share of a layer (but at least `Problem.ring_least`). R is spread evenly over the
    layers of the range, the first R % layers have one more. With `Problem.layer_residents`, or
    `residents` for the range, R is given instead of found.

    A layer computes when its experts are there, and the next layer's arrive meanwhile: the first
    slab of a pass hides behind nothing, and nothing is left to move beside the last layer.

    With a peer, the experts that are streamed come over three paths at once: from host memory over
    the own link, from the peer's memory, and from host memory through the peer. The division makes
    the slowest path as fast as possible, then reads as little host memory as possible.

    feasible         whether the range fits.
    local_ns         max(fill_ns + compute_ns, stream_ns + tail_ns): a pass without hand-off.
                     fill_ns is the first slab's time, tail_ns that of the last layer if it streams.
    host_experts, peer_experts, relayed    experts moved per pass, by path.
    own_host_bytes, peer_host_bytes        read per pass from the two hosts.
    memory           component -> bytes on the device; peer_memory: on the peer.
    need             smallest number of bytes with which the range would fit.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        device: int,
        peer: int | None,
        unit: int,
        residents: int | None = None,
    ) -> None:
        n = len(problem.layers)
        row = problem.devices[device]
        self._more = 0 if peer is None else problem.peer_ring_experts
        begin, end = np.triu_indices(n)
        end = end + 1
        self.begin, self.end, self.unit = begin, end, unit
        self._first = np.cumsum([0, *range(n, 0, -1)])

        def total(values: Iterable[int]) -> np.ndarray:
            sums = np.cumsum([0, *values], dtype=np.int64)
            return sums[end] - sums[begin]

        work = total(schedule.compute_ns)
        work += np.where(begin == 0, schedule.embed_ns, 0)
        work += np.where(end == n, schedule.head_ns, 0)
        space = np.array([layer.workspace_bytes for layer in problem.layers], np.int64)
        self.memory = {
            "dense weights": total(layer.dense_bytes for layer in problem.layers),
            "state": total(layer.state_bytes for layer in problem.layers) * schedule.sequences,
            "embedding": np.where(begin == 0, problem.embed_bytes, 0),
            "head": np.where(end == n, problem.head_bytes, 0),
            "workspace": np.concatenate([np.maximum.accumulate(space[i:]) for i in range(n)]),
            "activations": np.full(len(begin), schedule.activation_bytes, np.int64),
            "hand-off": np.where(begin > 0, schedule.receive_bytes, 0)
            + np.where(end < n, schedule.send_bytes, 0),
        }
        fixed = np.sum(list(self.memory.values()), axis=0)
        layers = total(int(layer.experts > 0) for layer in problem.layers)
        room = (row.memory_bytes - fixed) // problem.expert_bytes
        if residents is None and problem.layer_residents is None:
            self._place(problem, layers, room)
            ring = problem.ring_slots * (max(unit, problem.ring_least) + self._more)
            least = np.minimum(layers * problem.experts, ring)
        else:
            given = layers * (problem.layer_residents or 0)
            if residents is not None:
                given = np.full_like(layers, residents)
            self._take(problem, layers, room, given)
            least = self.residents + self.ring
        self.need = fixed + least * problem.expert_bytes
        self.memory["resident experts"] = self.residents * problem.expert_bytes
        self.memory["ring"] = self.ring * problem.expert_bytes
        more = self._stream(problem, schedule, layers, device, peer)
        self.compute_ns = -(-(work + more * schedule.wave_ns) * 1000 // row.speed_permille)
        last = np.array(schedule.compute_ns, np.int64)[end - 1]
        last += np.where(end == n, schedule.head_ns, 0)
        self.tail_ns = np.where(self.last_streams, -(-last * 1000 // row.speed_permille), 0)
        self.local_ns = np.maximum(self.fill_ns + self.compute_ns, self.stream_ns + self.tail_ns)

    def index(self, begin: int, end: int) -> int:
        """Position of the range [begin, end) in the arrays."""
        return int(self._first[begin]) + end - begin - 1

    def _place(self, problem: Problem, layers: np.ndarray, room: np.ndarray) -> None:
        count, slots, unit = problem.experts, problem.ring_slots, self.unit
        everything = layers * count
        fits = everything <= room
        room = np.where(fits, room, room - slots * self._more)
        # While more than `unit` experts of a layer are streamed, slabs have the full unit.
        full = np.minimum(room - slots * unit, (count - unit) * layers + np.maximum(layers, 1) - 1)
        # Beyond, slabs shrink as residents grow: q per layer leaves room for q * layers + slots *
        # (count - q). That grows with q only if there are more layers than slots.
        wide = layers > slots
        q = (room - slots * count) // np.where(wide, layers - slots, 1)
        shrunk = q * layers + np.minimum(layers - 1, room - q * layers - slots * (count - q))
        some = np.where(wide & (q > count - unit), shrunk, full)
        some = np.minimum(some, room - slots * problem.ring_least)
        self.feasible = (room >= 0) & (fits | (some >= 0))
        self.residents = np.where(fits, everything, np.maximum(some, 0))
        self._hold_slabs(problem, layers, fits)

    def _take(
        self, problem: Problem, layers: np.ndarray, room: np.ndarray, residents: np.ndarray
    ) -> None:
        """Residents that were decided before."""
        self.residents = np.minimum(residents, layers * problem.experts)
        self._hold_slabs(problem, layers, self.residents == layers * problem.experts)
        self.feasible = (room >= 0) & (self.residents + self.ring <= room)

    def _hold_slabs(self, problem: Problem, layers: np.ndarray, everything: np.ndarray) -> None:
        share = self.residents // np.maximum(layers, 1)
        slab = np.minimum(self.unit, problem.experts - share)
        self.slab = np.where(everything, 0, np.maximum(slab, problem.ring_least))
        self.ring = problem.ring_slots * np.where(everything, 0, self.slab + self._more)

    def _stream(
        self,
        problem: Problem,
        schedule: Schedule,
        layers: np.ndarray,
        device: int,
        peer: int | None,
    ) -> np.ndarray:
        """Sets what moves and how long it takes; returns the slabs beyond one per layer."""
        count = max(problem.experts, 1)
        hits = [
            hit for hit, layer in zip(schedule.distinct, problem.layers, strict=True)
            if layer.experts
        ]  # fmt: skip
        # moved[q, i]: experts of layer i that a pass moves if q of it are resident. All others in
        # whole-layer mode; in routed-set mode the expected share of the hits, for residents chosen
        # without statistics.
        streamed = np.arange(count, -1, -1, dtype=np.int64)
        moved = -(-streamed[:, None] * np.array(hits, np.int64)[None] // count)
        uploads = -(-moved // self.unit)
        before = np.cumsum([0, *(int(layer.experts > 0) for layer in problem.layers)])
        first, last = before[self.begin], before[self.end]
        share = self.residents // np.maximum(layers, 1)
        middle = first + self.residents % np.maximum(layers, 1)

        def over_layers(table: np.ndarray) -> np.ndarray:
            sums = np.zeros((count + 1, len(hits) + 1), np.int64)
            np.cumsum(table, axis=1, out=sums[:, 1:])
            more = np.minimum(share + 1, count)
            return sums[more, middle] - sums[more, first] + sums[share, last] - sums[share, middle]

        experts = over_layers(moved)
        row = problem.devices[device]
        # A time per expert, rounded up: sums stay exact and small.
        own_ns = transfer_ns(problem.expert_bytes, row.host_link_bytes_per_s)
        span = self.end - self.begin
        extra_ns = span * transfer_ns(schedule.layer_link_bytes, row.host_link_bytes_per_s)
        if peer is None:
            self.peer_experts = np.zeros_like(experts)
            self.relayed = np.zeros_like(experts)
            self.peer_residents = np.zeros_like(experts)
            busy_ns = experts * own_ns + extra_ns
        else:
            apart = layers * problem.experts - self.residents
            busy_ns = self._divide(problem, experts, apart, own_ns, extra_ns, device, peer)
        self.stream_ns = busy_ns + over_layers(uploads) * problem.upload_overhead_ns
        # The first layer of the range with experts has one resident more if any layer has.
        most = np.minimum(share + (middle > first), count)
        width = max(len(hits), 1)
        at_first = moved[most, np.minimum(first, width - 1)] if hits else np.zeros_like(experts)
        begins = np.where(last > first, np.minimum(at_first, self.unit), 0)
        self.fill_ns = begins * own_ns
        if peer is not None:
            together = -(-begins * busy_ns // np.maximum(experts, 1))
            self.fill_ns = np.minimum(self.fill_ns, together)
        self.fill_ns += (begins > 0) * problem.upload_overhead_ns
        at_last = moved[share, np.maximum(last - 1, 0)] if hits else np.zeros_like(experts)
        has_experts = np.array([layer.experts > 0 for layer in problem.layers])
        self.last_streams = (last > first) & has_experts[self.end - 1] & (at_last > 0)
        self.host_experts = experts - self.peer_experts - self.relayed
        self.own_host_bytes = (
            self.host_experts * problem.expert_bytes + span * schedule.layer_link_bytes
        )
        self.peer_host_bytes = self.relayed * problem.expert_bytes
        self.host_bytes = self.own_host_bytes + self.peer_host_bytes
        self.peer_memory = {
            "peer experts": self.peer_residents * problem.expert_bytes,
            "relay ring": np.where(self.relayed > 0, self.ring, 0) * problem.expert_bytes,
        }
        return over_layers(np.maximum(uploads - 1, 0))

    def _divide(
        self,
        problem: Problem,
        experts: np.ndarray,
        apart: np.ndarray,
        own_ns: int,
        extra_ns: np.ndarray,
        device: int,
        peer: int,
    ) -> np.ndarray:
        """Sets the experts per path; returns the time of the slowest path."""
        link = {(link.owner, link.peer): link for link in problem.peers}[device, peer]
        peer_ns = transfer_ns(problem.expert_bytes, link.bytes_per_s)
        row = problem.devices[peer]
        relay_ns = transfer_ns(problem.expert_bytes, row.host_link_bytes_per_s)
        space = row.memory_bytes // problem.expert_bytes - self.ring
        relays, space = link.relays & (space >= 0), np.maximum(space, 0)
        held = np.minimum(space, apart) if link.holds else np.zeros_like(apart)
        # Of the experts that a pass moves, the share that the peer can hold.
        kept = np.where(apart > 0, experts * held // np.maximum(apart, 1), 0)

        def slowest(through: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            own = (experts - through) * own_ns + extra_ns
            relay = np.maximum(through - kept, 0) * relay_ns
            return own, np.maximum(through * peer_ns, relay)

        low, high = np.zeros_like(experts), np.where(relays, experts, kept)
        for _ in range(int(experts.max(initial=1)).bit_length()):
            middle = (low + high) // 2
            own, other = slowest(middle)
            high = np.where(other >= own, middle, high)
            low = np.where(other >= own, low, np.minimum(middle + 1, high))
        best = np.maximum(*slowest(high))
        best = np.minimum(best, np.maximum(*slowest(np.maximum(high - 1, 0))))
        self.peer_experts = np.minimum(kept, best // peer_ns)
        needed = np.clip(-(-(experts * own_ns + extra_ns - best) // own_ns), 0, experts)
        self.relayed = np.maximum(needed - self.peer_experts, 0)
        share = -(-self.peer_experts * apart // np.maximum(experts, 1))
        self.peer_residents = np.minimum(share, held)
        return best
