"""What every layer range costs on one device: residents, ring, memory, and time of a pass."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from sharding.cost import Problem, Ring, Schedule, transfer_ns


def ring_options(problem: Problem) -> tuple[Ring, ...]:
    """The rings of a problem that differ: the largest slabs first, then the fewest."""
    cap = max(problem.experts, 1)
    found = {dataclasses.replace(ring, experts=min(ring.experts, cap)) for ring in problem.rings}
    return tuple(sorted(found, key=rank))


def rank(ring: Ring) -> tuple[int, int, int]:
    """What rings are ordered by where they are equally good."""
    return -ring.experts, ring.slots, ring.ahead


class RangeTable:
    """Costs of all layer ranges [begin, end) on `device`, one int64 array entry per range.

    Residents: all experts if they fit, else the same number q in every layer, the largest with

        layers * q + slots * min(unit, E - q) <= room

    in experts: the ring holds `slots` slabs, and a slab holds at most `unit` experts and at most
    the streamed share of a layer (but at least `Problem.ring_least`). Layers with equal numbers
    share programs; what is left over is less than an expert per layer. With
    `Problem.layer_residents`, or `held`, q is given instead of found.

    A layer computes when its experts are there, and the next layer's arrive meanwhile: the first
    slab of a pass hides behind nothing, and nothing is left to move beside the last layer. Where
    the experts of a layer come in more slabs than may be ahead, copying pauses before each layer:
    everything but its streamed experts is computed while no more than ahead + 1 slabs may come, and
    beside the first and the last slab's computation nothing is left to copy. A time that would grow
    with the residents counts as at the most of them, so that more memory is never slower. With a
    peer such pauses are not known.

    With a peer, the experts that are streamed come over three paths at once: from host memory over
    the own link, from the peer's memory, and from host memory through the peer. The division makes
    the slowest path as fast as possible, then reads as little host memory as possible.

    feasible         whether the range fits.
    local_ns         max(fill_ns + compute_ns, stream_ns + pause_ns + tail_ns): a pass without
                     hand-off. fill_ns is the first slab's time, pause_ns that for which copying
                     waits for room in the ring, tail_ns that of the last layer if it streams.
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
        ring: Ring,
        held: int | None = None,
    ) -> None:
        n = len(problem.layers)
        row = problem.devices[device]
        self._more = 0 if peer is None else problem.peer_ring_experts
        begin, end = np.triu_indices(n)
        end = end + 1
        self.begin, self.end = begin, end
        self.option = ring
        self._slots, self._unit, self._ahead = ring.slots, ring.experts, ring.ahead
        self._first = np.cumsum([0, *range(n, 0, -1)])

        def total(values: Iterable[int]) -> np.ndarray:
            sums = np.cumsum([0, *values], dtype=np.int64)
            return sums[end] - sums[begin]

        work = total(schedule.compute_ns)
        work += np.where(begin == 0, schedule.embed_ns, 0)
        work += np.where(end == n, schedule.head_ns, 0)
        space = schedule.workspace_bytes or [layer.workspace_bytes for layer in problem.layers]
        space = np.array(space, np.int64)
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
        held = problem.layer_residents if held is None else held
        if held is None:
            self._place(problem, layers, room)
            slab = max(self._unit, problem.ring_least) + self._more
            least = np.minimum(layers * problem.experts, self._slots * slab)
        else:
            self._hold(problem, layers, np.full_like(layers, min(held, problem.experts)))
            self.feasible = (room >= 0) & (self.residents + self.ring <= room)
            least = self.residents + self.ring
        self.need = fixed + least * problem.expert_bytes
        self.memory["resident experts"] = self.residents * problem.expert_bytes
        self.memory["ring"] = self.ring * problem.expert_bytes
        parts = self._stream(problem, schedule, layers, device, peer)
        self.compute_ns = -(-(work + parts * schedule.wave_ns) * 1000 // row.speed_permille)
        last = np.array(schedule.compute_ns, np.int64)[end - 1]
        last += np.where(end == n, schedule.head_ns, 0)
        self.tail_ns = np.where(self.last_streams, -(-last * 1000 // row.speed_permille), 0)
        self.local_ns = np.maximum(
            self.fill_ns + self.compute_ns, self.stream_ns + self.pause_ns + self.tail_ns
        )

    def index(self, begin: int, end: int) -> int:
        """Position of the range [begin, end) in the arrays."""
        return int(self._first[begin]) + end - begin - 1

    def _place(self, problem: Problem, layers: np.ndarray, room: np.ndarray) -> None:
        count, least, slots = problem.experts, problem.ring_least, self._slots
        fits = layers * count <= room
        room = room - slots * self._more
        each = np.maximum(layers, 1)
        # While more than a slab of a layer is streamed, slabs are full.
        found = np.minimum((room - slots * max(self._unit, least)) // each, count - self._unit)
        # Beyond, slabs shrink as residents grow: q per layer leaves room for q * layers + slots *
        # (count - q). That grows with q only if there are more layers than slots.
        wide = layers > slots
        shrunk = (room - slots * count) // np.where(wide, layers - slots, 1)
        shrunk = np.minimum(shrunk, count - least)
        found = np.where(wide & (shrunk > count - self._unit), shrunk, found)
        # At last slabs are as small as they may be.
        small = np.minimum((room - slots * least) // each, count - 1)
        found = np.where((small >= count - least) | (self._unit <= least), small, found)
        self.feasible = fits | ((room >= 0) & (found >= 0))
        self._hold(problem, layers, np.where(fits, count, np.maximum(found, 0)))

    def _hold(self, problem: Problem, layers: np.ndarray, share: np.ndarray) -> None:
        """Takes `share` residents in every layer."""
        self.share, self.residents = share, layers * share
        streams = self.residents < layers * problem.experts
        slab = np.minimum(self._unit, problem.experts - share)
        self.slab = np.where(streams, np.maximum(slab, problem.ring_least), 0)
        self.ring = self._slots * np.where(streams, self.slab + self._more, 0)

    def _stream(
        self,
        problem: Problem,
        schedule: Schedule,
        layers: np.ndarray,
        device: int,
        peer: int | None,
    ) -> np.ndarray:
        """Sets what moves and how long it takes; returns the parts beyond one per layer."""
        count, share = max(problem.experts, 1), self.share
        chosen = [i for i, layer in enumerate(problem.layers) if layer.experts]
        # moved[q, i]: experts of layer i that a pass moves if q of it are resident. All others in
        # whole-layer mode; in routed-set mode the expected share of the hits, for residents chosen
        # without statistics.
        streamed = np.arange(count, -1, -1, dtype=np.int64)[:, None]
        moved = -(-streamed * np.array(schedule.distinct, np.int64)[chosen] // count)
        uploads = -(-moved // self._unit)
        before = np.cumsum([0, *(int(layer.experts > 0) for layer in problem.layers)])
        first, last = before[self.begin], before[self.end]

        def over_layers(table: np.ndarray) -> np.ndarray:
            sums = np.zeros((count + 1, len(chosen) + 1), np.int64)
            np.cumsum(table, axis=1, out=sums[:, 1:])
            return sums[share, last] - sums[share, first]

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
        self.pause_ns = np.zeros_like(experts)
        more = _never_growing(uploads - 1 + ((uploads > 0) & (streamed < count)))
        if peer is None and (uploads > self._ahead + 1).any():
            copied = moved * own_ns + uploads * problem.upload_overhead_ns
            part_ns = np.array(schedule.expert_ns or schedule.compute_ns, np.int64)[chosen]
            other_ns = np.array(schedule.compute_ns, np.int64)[chosen] - part_ns
            held_ns = -(-part_ns * (count - streamed) // count)
            held_ns += np.where(streamed < count, schedule.wave_ns, 0)
            slab = -(-moved // np.maximum(uploads, 1))
            slab_ns = -(-part_ns * slab // count) + schedule.wave_ns
            alone = -(-(other_ns + held_ns + 2 * slab_ns) * 1000 // row.speed_permille)
            alone += (moved - (self._ahead + 1) * slab) * own_ns
            alone += (uploads - 1 - self._ahead) * problem.upload_overhead_ns
            alone = np.where(uploads > self._ahead + 1, alone, 0)
            self.pause_ns = over_layers(np.maximum(_never_growing(alone) - copied, 0))
        width = max(len(chosen), 1)
        at_first = moved[share, np.minimum(first, width - 1)] if chosen else np.zeros_like(experts)
        begins = np.where(last > first, np.minimum(at_first, self._unit), 0)
        self.fill_ns = begins * own_ns
        if peer is not None:
            together = -(-begins * busy_ns // np.maximum(experts, 1))
            self.fill_ns = np.minimum(self.fill_ns, together)
        self.fill_ns += (begins > 0) * problem.upload_overhead_ns
        at_last = moved[share, np.maximum(last - 1, 0)] if chosen else np.zeros_like(experts)
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
        return over_layers(np.maximum(more, 0))

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


def _never_growing(table: np.ndarray) -> np.ndarray:
    """Every value [q, i] as large as those of more residents at least."""
    return np.maximum.accumulate(table[::-1])[::-1]
