"""Shortest paths over (devices used, last device, boundary) for the objective of `sharding.split`.

`Space` numbers the sets of devices: devices that can be swapped without changing any row form one
type, and a set is a count per type. `Search` holds the stage times of one schedule and finds its
best plans. A path is a tuple of steps (end, owner type, peer type or -1, ring); tuples
compare in the order in which ties are broken.
"""

import bisect
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sharding.cost import PlanError, Problem, Schedule, transfer_ns
from sharding.residency import RangeTable, rank, ring_options

INFINITE = 1 << 60  # two of them still fit in 64 bits
MAX_STATES = 1 << 14  # sets of devices: 14 devices of which no two are alike
RUNNERS_UP = 2  # other corners that are searched for; each costs time
MAX_LABELS = 20_000  # labels kept while ties are counted under a limited host link

Step = tuple[int, int, int, int]
Path = tuple[Step, ...]
Node = tuple[int, int, int]  # set of devices, type of the last owner, boundary


class Found(NamedTuple):
    """A plan, compared in the total order. Bytes are per pass."""

    objective_ns: int
    host_bytes: int
    sum_ns: int
    path: Path


@dataclasses.dataclass(frozen=True)
class Solution:
    """The tied best plans in their order (the first `keep`), how many there are, and the next best.

    tie_count is None if they were too many to count.
    """

    ties: tuple[Found, ...]
    tie_count: int | None
    others: tuple[Found, ...]


def device_types(problem: Problem) -> list[tuple[int, ...]]:
    """Groups of devices of which any two can be swapped without changing a row."""
    links, peers = problem.link_bytes_per_s, {dataclasses.astuple(p) for p in problem.peers}

    def alike(i: int, j: int) -> bool:
        rows = [dataclasses.replace(problem.devices[k], name="") for k in (i, j)]
        if rows[0] != rows[1] or links[i][j] != links[j][i]:
            return False
        others = [k for k in range(len(links)) if k not in (i, j)]
        if any(links[i][k] != links[j][k] or links[k][i] != links[k][j] for k in others):
            return False
        swap = {i: j, j: i}
        return {(swap.get(o, o), swap.get(p, p), *link) for o, p, *link in peers} == peers

    types: list[tuple[int, ...]] = []
    for device in range(len(problem.devices)):
        for at, members in enumerate(types):
            if alike(members[0], device):
                types[at] = (*members, device)
                break
        else:
            types.append((device,))
    return types


def handoff_ns(problem: Problem, schedule: Schedule, sender: int, receiver: int) -> int:
    """Time to copy the streams of a micro-batch from one device to another."""
    rate = problem.link_bytes_per_s[sender][receiver]
    return problem.link_latency_ns + transfer_ns(schedule.handoff_bytes, rate)


class Space:
    """Device types and the sets of devices that a pipeline may have used."""

    def __init__(self, problem: Problem) -> None:
        self.in_order = problem.in_order
        if self.in_order:  # the devices that were used are the first ones
            devices = range(len(problem.devices))
            self.types = [(device,) for device in devices]
            self.strides, self.states = [1 for _ in devices], len(devices) + 1
            self.used = np.array([[device < used for used in range(self.states)]
                                  for device in devices], np.int64)  # fmt: skip
            self.free = 1 - self.used
            self.levels = [np.array([used]) for used in range(self.states)]
            return
        self.types = device_types(problem)
        counts = np.array([len(members) for members in self.types])
        self.strides = [math.prod((counts[:i] + 1).tolist()) for i in range(len(counts))]
        self.states = math.prod((counts + 1).tolist())
        if self.states > MAX_STATES:
            raise PlanError(
                f"{len(self.types)} types of devices give {self.states} sets of devices, expected "
                f"at most {MAX_STATES}: leave devices out, or round their rows so that types agree"
            )
        sizes, strides = (counts + 1)[:, None], np.array(self.strides)[:, None]
        self.used = np.arange(self.states)[None] // strides % sizes
        self.free = counts[:, None] - self.used
        level = self.used.sum(axis=0)
        self.levels = [np.flatnonzero(level == i) for i in range(int(counts.sum()) + 1)]

    def assign(self, path: Path) -> list[tuple[int, int | None]]:
        """(device, peer) of every step: the members of a type in turn."""
        free = [iter(members) for members in self.types]
        return [
            (next(free[owner]), next(free[peer]) if peer >= 0 else None)
            for _, owner, peer, _ in path
        ]


class _Kind:
    """Stages owned by one device type with one peer type (or none): grids over [begin, end]."""

    def __init__(
        self,
        space: Space,
        problem: Problem,
        owner: int,
        peer: int,
        tables: list[RangeTable],
        rivals: list[RangeTable],
        missing: bool,
    ) -> None:
        """The best of `tables`, one per ring, where none of `rivals` beats them."""
        self.owner, self.peer = owner, peer
        uses = [owner] if peer < 0 else [owner, peer]
        self.offset = sum(space.strides[i] for i in uses)
        needs = np.bincount(uses, minlength=len(space.types))[:, None]
        self.may_follow = (space.free >= needs).all(axis=0)
        self.may_end = (space.used >= needs).all(axis=0)
        if space.in_order:
            self.may_follow = np.arange(space.states) == owner
            self.may_end = np.arange(space.states) == owner + 1
        size = len(problem.layers) + 1
        memory = problem.devices[space.types[owner][0]].memory_bytes
        # Of several rings the fastest, then the fewest bytes, then the first.
        ranks = [
            (
                np.maximum(table.need - memory, 0)
                if missing
                else np.where(_beaten(table, rivals), INFINITE, table.local_ns),
                table.host_bytes,
            )
            for table in tables
        ]
        ranges = np.arange(len(tables[0].begin))
        chosen = np.zeros_like(ranges)
        best_time, best_bytes = ranks[0]
        for at, (time, nbytes) in enumerate(ranks[1:], start=1):
            better = (time < best_time) | ((time == best_time) & (nbytes < best_bytes))
            chosen = np.where(better, at, chosen)
            best_time = np.where(better, time, best_time)
            best_bytes = np.where(better, nbytes, best_bytes)

        def grid(values: Iterable[np.ndarray], fill: int = 0) -> np.ndarray:
            full = np.full((size, size), fill, np.int64)
            full[tables[0].begin, tables[0].end] = np.stack(list(values))[chosen, ranges]
            return full

        self.time = grid((time for time, _ in ranks), INFINITE)
        if space.in_order:
            # The first device begins, the last one ends.
            self.time[:1] = np.where(owner, INFINITE, self.time[:1])
            last = owner == len(space.types) - 1
            self.time[:, -1:] = np.where(last, self.time[:, -1:], INFINITE)
        self.bytes = grid(nbytes for _, nbytes in ranks)
        own = problem.devices[space.types[owner][0]].host
        other = problem.devices[space.types[peer][0]].host
        own_bytes = grid(table.own_host_bytes for table in tables)
        peer_bytes = grid(table.peer_host_bytes for table in tables)
        self.limited = [
            own_bytes * (own == h) + peer_bytes * (other == h)
            for h, host in enumerate(problem.hosts)
            if host.bytes_per_s
        ]
        if len(self.limited) > 1:
            self.limited.append(np.sum(self.limited, axis=0))
        options = ring_options(problem)
        self.ring = grid(np.full_like(chosen, options.index(table.option)) for table in tables)

    def step(self, begin: int, end: int) -> Step:
        """Entry of a path for the stage [begin, end)."""
        return end, self.owner, self.peer, int(self.ring[begin, end])

    def limited_at(self, begin: int, end: int) -> tuple[int, ...]:
        """Bytes per pass that the stage reads from each limited host."""
        return tuple(int(grid[begin, end]) for grid in self.limited)


def _beaten(table: RangeTable, rivals: list[RangeTable]) -> np.ndarray:
    """Where a range does not fit, or a rival is at least as good in time and bytes of each host.

    Of equal ones the first ring stays.
    """
    beaten = ~table.feasible
    for rival in rivals:
        if rival.option == table.option:
            continue
        no_worse = rival.feasible.copy()
        better = np.zeros_like(no_worse) | (rank(rival.option) < rank(table.option))
        for name in ("local_ns", "own_host_bytes", "peer_host_bytes"):
            no_worse &= getattr(rival, name) <= getattr(table, name)
            better |= getattr(rival, name) < getattr(table, name)
        beaten |= no_worse & better
    return beaten


def _make_kinds(
    space: Space, problem: Problem, schedule: Schedule, missing: bool
) -> Iterator[_Kind]:
    """All kinds of stages: each device type alone and with each type of peer it may use."""
    pairs = sorted((link.owner, link.peer) for link in problem.peers)
    limited = any(host.bytes_per_s for host in problem.hosts)
    for owner, members in enumerate(space.types):
        peers: list[tuple[int, int | None]] = [(-1, None)]
        for peer, others in enumerate(space.types):
            peers += [(peer, j) for i, j in pairs if i == members[0] and j in others][:1]
        for peer, device in peers:
            tables = [
                RangeTable(problem, schedule, members[0], device, ring)
                for ring in ring_options(problem)
            ]
            # Where a host's link is limited, fewer bytes may be worth a slower stage.
            if limited and not missing:
                for table in tables:
                    yield _Kind(space, problem, owner, peer, [table], tables, missing)
            else:
                yield _Kind(space, problem, owner, peer, tables, [], missing)


class Search:
    """Best plans of one schedule.

    With `missing`, the stage times are replaced by the bytes that each stage misses, hand-offs cost
    nothing, and every range is feasible: `least_missing` tells how far a problem is from fitting.
    """

    def __init__(
        self, space: Space, problem: Problem, schedule: Schedule, *, missing: bool = False
    ) -> None:
        self.space, self.problem, self.schedule, self.missing = space, problem, schedule, missing
        self.layers = len(problem.layers)
        self.kinds = list(_make_kinds(space, problem, schedule, missing))
        types = range(len(space.types))
        # The stage that receives pays for the hand-off. Senders of one cost form a group.
        self.handoff = [[self._handoff_ns(last, owner) for last in types] for owner in types]
        self.senders = [
            [(ns, [last for last in types if row[last] == ns]) for ns in sorted(set(row))]
            for row in self.handoff
        ]
        self.limits = [host.bytes_per_s for host in problem.hosts if host.bytes_per_s]
        if len(self.limits) > 1:
            # All limited hosts together are one more limit. It follows from the others, and keeps
            # lower bounds useful: the least bytes of each host alone are those of not using it.
            self.limits.append(sum(self.limits))

    def _handoff_ns(self, last: int, owner: int) -> int:
        if self.missing:
            return 0
        senders, receivers = self.space.types[last], self.space.types[owner]
        pairs = [(i, j) for i in senders for j in receivers if i != j]
        return handoff_ns(self.problem, self.schedule, *pairs[0]) if pairs else 0

    def pipeline_ns(self, sum_ns: int, max_ns: int) -> int:
        """Time of all passes through stages of this sum and this maximum."""
        return sum_ns + (self.schedule.passes - 1) * max_ns

    def host_ns(self, host_bytes: tuple[int, ...]) -> int:
        """Time of the busiest limited host, from the bytes per pass of each."""
        passes = self.schedule.passes
        return max(
            (
                transfer_ns(passes * nbytes, rate)
                for nbytes, rate in zip(host_bytes, self.limits, strict=True)
            ),
            default=0,
        )

    # Sweeps

    def sweep(self, slowest_ns: int, combine: Callable = np.add) -> np.ndarray:
        """[set, last owner, boundary]: least sum (or maximum) of stage times from layer 0 on.

        Stages slower than `slowest_ns`, hand-off included, are not used.
        """
        space, n = self.space, self.layers
        reach = np.full((space.states, len(space.types), n + 1), INFINITE, np.int64)
        steps = []
        for kind in self.kinds:
            start = np.where(kind.time[0] <= slowest_ns, kind.time[0], INFINITE)
            into = reach[kind.offset, kind.owner]
            np.minimum(into, start, out=into)
            for ns, lasts in self.senders[kind.owner]:
                time = kind.time[1:n] + ns
                time = np.where(time <= slowest_ns, time, INFINITE)
                if (time < INFINITE).any():
                    steps.append((kind, lasts, time))
        for level in space.levels[1:]:
            for kind, lasts, time in steps:
                sets = level[kind.may_follow[level]]
                if len(sets):
                    before = reach[sets][:, lasts, 1:n].min(axis=1)
                    after = combine(before[:, :, None], time[None]).min(axis=1)
                    sets = sets + kind.offset
                    reach[sets, kind.owner] = np.minimum(reach[sets, kind.owner], after)
        return reach

    def _sweep_back(self, slowest_ns: int, values: Callable, combine: Callable) -> np.ndarray:
        """[set, last owner, boundary]: least combination of `values` from there to the end."""
        space, n = self.space, self.layers
        rest = np.full((space.states, len(space.types), n + 1), INFINITE, np.int64)
        rest[:, :, n] = 0
        for level in reversed(space.levels[:-1]):
            for kind in self.kinds:
                sets = level[kind.may_follow[level]]
                if not len(sets):
                    continue
                after = rest[sets + kind.offset, kind.owner][:, None, :]
                for ns, lasts in self.senders[kind.owner]:
                    time = kind.time + ns
                    cost = np.where(time <= slowest_ns, values(kind, time), INFINITE)
                    least = combine(after, cost[None]).min(axis=2)
                    at = np.ix_(sets, lasts)
                    rest[at] = np.minimum(rest[at], least[:, None])
        return rest

    def _sweep_back_bytes(self, slowest_ns: int) -> list[np.ndarray]:
        """`_sweep_back` of the bytes from each limited host."""
        return [
            self._sweep_back(slowest_ns, lambda kind, time, i=i: kind.limited[i], np.add)
            for i in range(len(self.limits))
        ]

    def _stage_times(self) -> list[int]:
        found = set()
        for kind in self.kinds:
            found.update(kind.time[0].tolist())
            for ns, _ in self.senders[kind.owner]:
                found.update((kind.time[1:] + ns).ravel().tolist())
        return sorted(time for time in found if time < INFINITE)

    # Best plans

    def lower_bound(self) -> int | None:
        """At most the objective of every plan of this schedule; None if there is no plan."""
        self._least_ns = int(self.sweep(INFINITE - 1)[:, :, -1].min())
        if self._least_ns >= INFINITE:
            return None
        self._fastest_ns = int(self.sweep(INFINITE - 1, np.maximum)[:, :, -1].min())
        loads = tuple(int(left[0, 0, 0]) for left in self._sweep_back_bytes(INFINITE - 1))
        self._bound = max(self.pipeline_ns(self._least_ns, self._fastest_ns), self.host_ns(loads))
        return self._bound

    def least_missing(self) -> Found:
        """The split that misses the fewest bytes; they are its `sum_ns`."""
        return self._tied(INFINITE - 1, INFINITE, 1)[0][0]

    def solve(self, keep: int) -> Solution:
        """The best plans. Only after `lower_bound` has found that there is one."""
        corners = self._corners()
        objective = corners[0][0]
        # In a single pass the maximum does not matter: all paths of least sum tie.
        slowest = [INFINITE - 1] if self.schedule.passes == 1 else [
            ns for value, ns in corners if value == objective
        ]  # fmt: skip
        tied = [self._tied(ns, objective, keep) for ns in slowest]
        ties = sorted(plan for plans, count in tied if count for plan in plans)
        if not ties:  # every one of them reads more than a limited host delivers in this time
            return self._solve_limited(tied[0][0][0], keep)
        others = [self._tied(ns, value, 1)[0][0] for value, ns in corners if value > objective]
        return Solution(
            tuple(ties[:keep]),
            sum(count for _, count in tied),
            tuple(
                plan._replace(objective_ns=max(plan.objective_ns, self._host_ns_of(plan.path)))
                for plan in others
            ),
        )

    def _corners(self) -> list[tuple[int, int]]:
        """(pipeline time, slowest stage) of the best RUNNERS_UP + 1 corners of sum over slowest.

        A corner is a stage time at which the least sum drops. Between two stage times with equal
        least sums there is none; elsewhere the sum at the slower end and the maximum at the faster
        end bound what lies between, and the interval with the lowest bound is halved first.
        """
        times = self._stage_times()
        rest = self.schedule.passes - 1
        low, high = bisect.bisect_left(times, self._fastest_ns), len(times) - 1
        sums = {high: self._least_ns}

        def least_sum(at: int) -> int:
            if at not in sums:
                sums[at] = int(self.sweep(times[at])[:, :, -1].min())
            return sums[at]

        corners = [(self.pipeline_ns(least_sum(low), times[low]), times[low])]
        while rest:
            # A stage slower than this costs 5 % more than the first corner, whatever the sum.
            cap = (corners[0][0] * 21 // 20 - least_sum(high)) // rest
            lower = max(bisect.bisect_right(times, cap) - 1, low)
            if lower >= high:
                break
            high = lower
        heap = [(self.pipeline_ns(least_sum(high), times[min(low + 1, high)]), low, high)]
        while heap:
            bound, low, high = heapq.heappop(heap)
            if len(corners) > RUNNERS_UP and bound > corners[RUNNERS_UP][0]:
                break
            if high == low or least_sum(low) == least_sum(high):
                continue
            if high - low == 1:
                bisect.insort(corners, (bound, times[high]))
                continue
            middle = (low + high) // 2
            for a, b in ((low, middle), (middle, high)):
                heapq.heappush(heap, (self.pipeline_ns(least_sum(b), times[a + 1]), a, b))
        cut = corners[min(RUNNERS_UP, len(corners) - 1)][0]
        return [corner for corner in corners if corner[0] <= cut]

    def _tied(self, slowest_ns: int, objective_ns: int, keep: int) -> tuple[list[Found], int]:
        """The first `keep` paths of least sum under `slowest_ns`, and how many there are.

        Where hosts are limited, paths whose bytes take longer than `objective_ns` are left out. If
        that leaves nothing, the count is 0 and one of them is returned.
        """
        reach = self.sweep(slowest_ns)
        total = int(reach[:, :, -1].min())
        ends = [(int(s), int(last), self.layers) for s, last in
                np.argwhere(reach[:, :, -1] == total)]  # fmt: skip
        arrivals = self._arrivals(reach, slowest_ns, ends)
        # Per node and bytes of the limited hosts: number of paths, and the first of them.
        none = (0,) * len(self.limits)
        best: dict[Node, dict[tuple[int, ...], tuple[int, list[tuple[int, Path]]]]] = {}
        level = self.space.used.sum(axis=0)
        for node in sorted(arrivals, key=lambda node: (level[node[0]], node)):
            merged: dict[tuple[int, ...], tuple[int, list[tuple[int, Path]]]] = {}
            for before, kind in arrivals[node]:
                begin = before[2] if before else 0
                add, end = int(kind.bytes[begin, node[2]]), node[2]
                limited = kind.limited_at(begin, end)
                step = kind.step(begin, end)
                for key, (count, paths) in (
                    best[before] if before else {none: (1, [(0, ())])}
                ).items():
                    new_key = tuple(x + y for x, y in zip(key, limited, strict=True))
                    had = merged.get(new_key, (0, []))
                    new = [(nbytes + add, (*path, step)) for nbytes, path in paths]
                    merged[new_key] = (had[0] + count, sorted(had[1] + new)[:keep])
            best[node] = merged
        groups = [(key, *group) for node in ends for key, group in best[node].items()]
        good = [group for group in groups if self.host_ns(group[0]) <= objective_ns]
        plans = [
            Found(objective_ns, nbytes, total, path)
            for _, _, paths in good or groups
            for nbytes, path in paths
        ]
        return sorted(plans)[: keep if good else 1], sum(count for _, count, _ in good)

    def _arrivals(
        self, reach: np.ndarray, slowest_ns: int, ends: list[Node]
    ) -> dict[Node, list[tuple[Node | None, _Kind]]]:
        """The last steps of all shortest paths to `ends`: node -> (node before or None, kind)."""
        arrivals: dict[Node, list[tuple[Node | None, _Kind]]] = {}
        open_nodes = list(ends)
        while open_nodes:
            node = open_nodes.pop()
            if node in arrivals:
                continue
            used, owner, end = node
            value, found = reach[node], []
            for kind in self.kinds:
                if kind.owner != owner or not kind.may_end[used]:
                    continue
                before = used - kind.offset
                if before == 0:
                    if kind.time[0, end] == value and value <= slowest_ns:
                        found.append((None, kind))
                    continue
                for last, ns in enumerate(self.handoff[owner]):
                    time = kind.time[:end, end] + ns
                    exact = (reach[before, last, :end] + time == value) & (time <= slowest_ns)
                    found += [((before, last, int(a)), kind) for a in np.flatnonzero(exact)]
            arrivals[node] = found
            open_nodes += [before for before, _ in found if before is not None]
        return arrivals

    # Limited hosts

    def _host_bytes_of(self, path: Path) -> tuple[int, ...]:
        total, begin = (0,) * len(self.limits), 0
        for step in path:
            kind = next(
                kind for kind in self.kinds
                if kind.step(begin, step[0]) == step and kind.time[begin, step[0]] < INFINITE
            )  # fmt: skip
            add = kind.limited_at(begin, step[0])
            total = tuple(x + y for x, y in zip(total, add, strict=True))
            begin = step[0]
        return total

    def _host_ns_of(self, path: Path) -> int:
        return self.host_ns(self._host_bytes_of(path))

    def _solve_limited(self, known: Found, keep: int) -> Solution:
        """The best plans where the bandwidth of a host decides.

        `known` is any plan, with an objective that takes no host into account. Searches with a low
        bound are fast and find nothing, so the bound is raised until one finds the best plan.
        """
        low = max(known.objective_ns, self._bound)
        high = max(known.objective_ns, self._host_ns_of(known.path))
        step = 0
        while not (found := self._label_search(min(low + step, high), dominate=True)):
            step = max(4 * step, (high - low) // 1024 + 1)
        best = min(found)
        every = self._label_search(best.objective_ns, dominate=False)
        if every is None:
            return Solution((best,), None, ())
        return Solution(tuple(sorted(every)[:keep]), len(every), ())

    def _label_search(self, bound: int, *, dominate: bool) -> list[Found] | None:
        """Plans with an objective of at most `bound`.

        Without `dominate` all of them, or None if there are too many. With it the best one is
        among them: a label is dropped when another one at its node beats it.
        """
        rest = self.schedule.passes - 1
        slowest = min((bound - self._least_ns) // rest if rest else INFINITE, INFINITE - 1)
        sums = self._sweep_back(slowest, lambda kind, time: time, np.add)
        peaks = self._sweep_back(slowest, lambda kind, time: time, np.maximum)
        loads = self._sweep_back_bytes(slowest)
        labels: dict[Node, list[_Label]] = {(0, 0, 0): [_Label.start(len(self.limits))]}
        found: list[Found] = []
        kept = 0
        level = self.space.used.sum(axis=0).tolist()
        for now in range(len(self.space.levels)):
            for node in [node for node in labels if level[node[0]] == now]:
                for new_node, new in self._extend(node, labels[node], slowest):
                    if sums[new_node] >= INFINITE:
                        continue
                    load = zip(new.limited, (int(left[new_node]) for left in loads), strict=True)
                    peak = max(new.max_ns, int(peaks[new_node]))
                    value = max(
                        self.pipeline_ns(new.sum_ns + int(sums[new_node]), peak),
                        self.host_ns(tuple(have + left for have, left in load)),
                    )
                    if value > bound:
                        continue
                    if new_node[2] == self.layers:
                        found.append(Found(value, new.host_bytes, new.sum_ns, new.path))
                    else:
                        here = labels.setdefault(new_node, [])
                        if dominate:
                            if any(old.beats(new) for old in here):
                                continue
                            here[:] = [old for old in here if not new.beats(old)]
                        here.append(new)
                    kept += 1
                    if kept > MAX_LABELS and not dominate:
                        return None
        return found

    def _extend(
        self, node: Node, labels: list["_Label"], slowest_ns: int
    ) -> Iterator[tuple[Node, "_Label"]]:
        used, last, begin = node
        many = self.schedule.passes > 1  # the maximum does not matter in a single pass
        for kind in self.kinds:
            if not kind.may_follow[used]:
                continue
            time = kind.time[begin] + (self.handoff[kind.owner][last] if begin else 0)
            for end in np.flatnonzero(time <= slowest_ns).tolist():
                after = (used + kind.offset, kind.owner, end)
                limited = kind.limited_at(begin, end)
                for label in labels:
                    yield (
                        after,
                        label.then(
                            int(time[end]),
                            int(time[end]) * many,
                            int(kind.bytes[begin, end]),
                            limited,
                            kind.step(begin, end),
                        ),
                    )


class _Label(NamedTuple):
    """A path to a node: sums of its stages, per pass."""

    sum_ns: int
    max_ns: int
    host_bytes: int
    limited: tuple[int, ...]
    path: Path

    @classmethod
    def start(cls, limits: int) -> "_Label":
        return cls(0, 0, 0, (0,) * limits, ())

    def then(
        self, time_ns: int, max_ns: int, nbytes: int, limited: tuple[int, ...], step: Step
    ) -> "_Label":
        return _Label(
            self.sum_ns + time_ns,
            max(self.max_ns, max_ns),
            self.host_bytes + nbytes,
            tuple(x + y for x, y in zip(self.limited, limited, strict=True)),
            (*self.path, step),
        )

    def beats(self, other: "_Label") -> bool:
        """Whether no continuation of `other` can be better than the same one of this label.

        A smaller maximum alone may still end in a tie, which the path decides; fewer bytes or a
        smaller sum win it.
        """
        return (
            self.sum_ns <= other.sum_ns
            and self.max_ns <= other.max_ns
            and self.host_bytes <= other.host_bytes
            and all(x <= y for x, y in zip(self.limited, other.limited, strict=True))
            and (
                self.sum_ns < other.sum_ns
                or self.host_bytes < other.host_bytes
                or self.path < other.path
            )
        )
