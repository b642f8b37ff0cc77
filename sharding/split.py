"""Exact split of layers over unequal devices, with residency, order of work and micro-batch.

A stage [begin, end) on a device needs, per pass over a micro-batch of S tokens,

    t = max(compute, upload of the experts that are not resident) + hand-off from the stage before

(with the upload ahead of the first layer and the computation of the last one, which hide behind
nothing: see `sharding.residency`)
and a run of m passes over the stages takes

    objective = sum t + (m - 1) max t,    at least    m * streamed bytes / bandwidth of a host

(the pipeline is full after one pass through all stages, then the slowest stage sets the pace).
`plan_stages` minimises it over every schedule (order and S), every choice and order of devices,
every boundary, and the residency of each stage. A device that would only slow the run down is left
out: no stage is ever empty. Ties are broken by a total order: objective, streamed bytes, sum of t,
position of the schedule, then stage by stage its end, device, peer, and ring (the largest
slabs first, then the fewest).

How it stays exact and fast: for a bound L on the slowest stage, the smallest possible sum is a
shortest path over (devices used, boundary), one vectorised sweep. The objective is the minimum of
sum(L) + (m - 1) L over the stage times L, and as sum(L) falls while L grows, whole intervals of L
are excluded by their end points. Where the bandwidth of a host decides, paths are searched with
labels (sum, max, bytes per host), of which dominated ones are dropped. Devices that can be swapped
without changing any row count as one type.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from sharding.cost import PlanError, Problem, Ring, Schedule, transfer_ns
from sharding.residency import RangeTable, ring_options
from sharding.search import Found, Search, Space, device_types, handoff_ns

KEEP = 8  # tied plans that a plan lists
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class StageRange:
    """Layers [begin, end) on `device`; `peer` is its expert tier, a device without layers."""

    device: int
    begin: int
    end: int
    peer: int | None = None


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage as planned. Experts per pass are expected values in routed-set mode.

    residents        experts kept on the device, layer_residents of each layer that has any.
    ring             slabs that the others pass through.
    slab_experts     experts per slab of it; 0 if everything is resident.
    peer_residents   experts kept in the memory of the peer.
    host_experts, peer_experts, relayed_experts   moved per pass: over the own host link, from the
                     peer's memory, from host memory through the peer.
    fill_ns, pause_ns, tail_ns of a pass: upload before the first layer, pauses of copying while the
                     ring is full, computation after the last upload.
    memory           (component, bytes) on the device; peer_memory: on the peer.
    """

    range: StageRange
    residents: int
    layer_residents: int
    ring: Ring
    slab_experts: int
    peer_residents: int
    host_experts: int
    peer_experts: int
    relayed_experts: int
    compute_ns: int
    stream_ns: int
    fill_ns: int
    pause_ns: int
    tail_ns: int
    handoff_ns: int
    memory: tuple[tuple[str, int], ...]
    peer_memory: tuple[tuple[str, int], ...] = ()

    @property
    def time_ns(self) -> int:
        """Time of one pass through the stage."""
        return max(self.computing_ns, self.uploading_ns) + self.handoff_ns

    @property
    def computing_ns(self) -> int:
        """Time of one pass if uploads after the first one took none."""
        return self.fill_ns + self.compute_ns

    @property
    def uploading_ns(self) -> int:
        """Time of one pass if the slabs are what is waited for."""
        return self.stream_ns + self.pause_ns + self.tail_ns

    @property
    def memory_bytes(self) -> int:
        """All that the plan places on the device."""
        return sum(nbytes for _, nbytes in self.memory)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another plan. With `bound`, objective_ns is a lower bound and the stages are not known."""

    objective_ns: int
    schedule: Schedule
    stages: tuple[StageRange, ...] = ()
    bound: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """The best plan of a problem; `str` gives a report for people.

    objective_ns    predicted time of the run, the larger of pipeline_ns (sum t + (m - 1) max t)
                    and host_ns (the busiest limited host).
    streamed_bytes  read from host memory in the whole run.
    tie_count       plans with this objective and schedule, this one included; devices of one type
                    count once. None: too many to count. 1 for a split by hand.
    ties            the first of them in the total order, this one first.
    runners_up      the next best: other trade-offs of total work against the slowest stage, and
                    the other schedules.
    suggestions     (setting, objective_ns) of faster settings that the caller asked about; the
                    plan does not use them.
    """

    problem: Problem
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    objective_ns: int
    pipeline_ns: int
    host_ns: int
    streamed_bytes: int
    tie_count: int | None = 1
    ties: tuple[Alternative, ...] = ()
    runners_up: tuple[Alternative, ...] = ()
    suggestions: tuple[tuple[str, int], ...] = ()

    @property
    def unused_devices(self) -> tuple[int, ...]:
        """Devices that neither own a stage nor serve one as a peer."""
        used = {s.range.device for s in self.stages} | {s.range.peer for s in self.stages}
        return tuple(i for i in range(len(self.problem.devices)) if i not in used)

    @property
    def bubble_ns(self) -> int:
        """Time for which the slowest stage waits: filling and draining the pipeline."""
        slowest = max(stage.time_ns for stage in self.stages)
        return self.pipeline_ns - self.schedule.passes * slowest

    @property
    def binding(self) -> str:
        """The resource that sets the pace."""
        if self.host_ns > self.pipeline_ns:
            return "shared host link"
        at = max(range(len(self.stages)), key=lambda i: (self.stages[i].time_ns, -i))
        stage = self.stages[at]
        what = "compute" if stage.computing_ns >= stage.uploading_ns else "expert upload"
        return f"{what} of stage {at} on {self.problem.devices[stage.range.device].name}"

    def __str__(self) -> str:
        return "\n".join(_report(self))


def plan_stages(
    problem: Problem, *, alternatives: Mapping[str, Problem] | None = None, keep: int = KEEP
) -> Plan:
    """The plan with the smallest objective; ties by the total order of this module.

    alternatives  problems that other settings would give, by setting ("prefill.chunk_tokens=2048").
                  Those that are faster are listed in `Plan.suggestions`; if `problem` has no plan,
                  those that have one are named in the error. They are never applied.
    keep          tied plans to list.

    Raises PlanError if nothing fits: with the bytes that are missing and what would fit.
    """
    plan = _solve(problem, keep)
    others = {}
    for setting, other in (alternatives or {}).items():
        found = _solve(other, 1)
        if found is not None:
            others[setting] = found.objective_ns
    if plan is None:
        raise PlanError(_refusal(problem, others))
    faster = sorted((ns, name) for name, ns in others.items() if ns < plan.objective_ns)
    return dataclasses.replace(plan, suggestions=tuple((name, ns) for ns, name in faster))


def price_split(problem: Problem, schedule: Schedule, stages: Sequence[StageRange]) -> Plan:
    """The plan of a split chosen by hand, with the fastest residency of each stage.

    Raises PlanError if the stages do not cover the layers once and in order, use a device twice or
    a peer that is none, or do not fit in memory.
    """
    _check_ranges(problem, stages)
    rings = [
        _fastest_ring(problem, schedule, stage, f"stage {i}") for i, stage in enumerate(stages)
    ]
    return _assemble(problem, schedule, stages, rings)


def price_stages(problem: Problem, stages: Sequence[StageRange]) -> Plan:
    """`price_split` with the fastest schedule and, for stages without a peer, the best peers.

    Ties by bytes, sum of t and position; in front of all others are plans without more peers.
    """
    found, refusals = [], []
    for at, schedule in enumerate(problem.schedules):
        for number, served in enumerate(_with_peers(problem, stages)):
            try:
                plan = price_split(problem, schedule, served)
            except PlanError as error:
                refusals.append(error)
                continue
            total = sum(stage.time_ns for stage in plan.stages)
            key = plan.objective_ns, number > 0, plan.streamed_bytes, total, at, number
            found.append((key, plan))
    if not found:
        raise refusals[0]
    found.sort(key=lambda row: row[0])
    runners = tuple(
        Alternative(plan.objective_ns, plan.schedule, tuple(stage.range for stage in plan.stages))
        for _, plan in found[1:]
    )
    return dataclasses.replace(found[0][1], runners_up=runners)


def _with_peers(problem: Problem, stages: Sequence[StageRange]) -> Iterator[list[StageRange]]:
    """The stages, then with every choice of peers for those without one.

    Of devices that can be swapped without changing a row the first free one is taken.
    """
    pairs = {(link.owner, link.peer) for link in problem.peers}
    types = device_types(problem) if pairs else []

    def extend(done: list[StageRange], free: Sequence[int]) -> Iterator[list[StageRange]]:
        if len(done) == len(stages):
            yield done
            return
        stage = stages[len(done)]
        choices: list[int | None] = [stage.peer]
        if stage.peer is None:
            for members in types:
                known = (peer for peer in members if peer in free and (stage.device, peer) in pairs)
                choices += [peer for peer in [next(known, None)] if peer is not None]
        for peer in choices:
            left = [each for each in free if each != peer]
            yield from extend([*done, dataclasses.replace(stage, peer=peer)], left)

    used = {stage.device for stage in stages} | {stage.peer for stage in stages}
    yield from extend([], [each for each in range(len(problem.devices)) if each not in used])


def price_plan(problem: Problem, schedule: Schedule, plan: Plan) -> Plan:
    """What another schedule takes with the stages, residents and slabs of a plan."""
    return _assemble(
        problem,
        schedule,
        [stage.range for stage in plan.stages],
        [stage.ring for stage in plan.stages],
        [stage.layer_residents for stage in plan.stages],
    )


def _solve(problem: Problem, keep: int) -> Plan | None:
    space = Space(problem)
    searches = [Search(space, problem, schedule) for schedule in problem.schedules]
    bounds = [search.lower_bound() for search in searches]
    order = sorted((bound, i) for i, bound in enumerate(bounds) if bound is not None)
    best: tuple[tuple, int, Found] | None = None
    solutions, runners = {}, []
    for bound, i in order:
        schedule = problem.schedules[i]
        if best is not None and bound > best[0][0]:
            runners.append(Alternative(bound, schedule, bound=True))
            continue
        solutions[i] = searches[i].solve(keep)
        first = solutions[i].ties[0]
        key = (first.objective_ns, first.host_bytes * schedule.passes, first.sum_ns, i)
        if best is None or key < best[0]:
            best = (key, i, first)
    if best is None:
        return None
    _, chosen, first = best
    for i, solution in solutions.items():
        plans = solution.others if i == chosen else (solution.ties[0], *solution.others)
        runners += [_alternative(space, problem.schedules[i], plan) for plan in plans]
    ties = tuple(
        _alternative(space, problem.schedules[chosen], plan) for plan in solutions[chosen].ties
    )
    plan = _assemble(
        problem,
        problem.schedules[chosen],
        ties[0].stages,
        [ring_options(problem)[ring] for _, _, _, ring in first.path],
    )
    assert plan.objective_ns == first.objective_ns, (plan.objective_ns, first)
    return dataclasses.replace(
        plan,
        tie_count=solutions[chosen].tie_count,
        ties=ties,
        runners_up=tuple(sorted(runners, key=lambda plan: plan.objective_ns)),
    )


def _alternative(space: Space, schedule: Schedule, plan: Found) -> Alternative:
    stages, begin = [], 0
    for (device, peer), step in zip(space.assign(plan.path), plan.path, strict=True):
        stages.append(StageRange(device, begin, step[0], peer))
        begin = step[0]
    return Alternative(plan.objective_ns, schedule, tuple(stages))


def _assemble(
    problem: Problem,
    schedule: Schedule,
    stages: Sequence[StageRange],
    rings: Sequence[Ring],
    residents: Sequence[int | None] | None = None,
) -> Plan:
    """Prices stages whose rings, and perhaps residents of a layer, are known."""
    rows = []
    per_host = [0] * len(problem.hosts)
    given = residents or [None] * len(stages)
    for i, (stage, ring, held) in enumerate(zip(stages, rings, given, strict=True)):
        table = RangeTable(problem, schedule, stage.device, stage.peer, ring, held)
        at = table.index(stage.begin, stage.end)
        per_host[problem.devices[stage.device].host] += int(table.own_host_bytes[at])
        if stage.peer is not None:
            per_host[problem.devices[stage.peer].host] += int(table.peer_host_bytes[at])
        before = stages[i - 1].device if i else None
        rows.append(
            StagePlan(
                range=stage,
                residents=int(table.residents[at]),
                layer_residents=int(table.share[at]),
                ring=ring,
                slab_experts=int(table.slab[at]),
                peer_residents=int(table.peer_residents[at]),
                host_experts=int(table.host_experts[at]),
                peer_experts=int(table.peer_experts[at]),
                relayed_experts=int(table.relayed[at]),
                compute_ns=int(table.compute_ns[at]),
                stream_ns=int(table.stream_ns[at]),
                fill_ns=int(table.fill_ns[at]),
                pause_ns=int(table.pause_ns[at]),
                tail_ns=int(table.tail_ns[at]),
                handoff_ns=0
                if before is None
                else handoff_ns(problem, schedule, before, stage.device),
                memory=tuple((name, int(row[at])) for name, row in table.memory.items()),
                peer_memory=()
                if stage.peer is None
                else tuple((name, int(row[at])) for name, row in table.peer_memory.items()),
            )
        )
    passes = schedule.passes
    times = [row.time_ns for row in rows]
    pipeline_ns = sum(times) + (passes - 1) * max(times)
    host_ns = max(
        transfer_ns(passes * nbytes, host.bytes_per_s) if host.bytes_per_s else 0
        for nbytes, host in zip(per_host, problem.hosts, strict=True)
    )
    return Plan(
        problem=problem,
        schedule=schedule,
        stages=tuple(rows),
        objective_ns=max(pipeline_ns, host_ns),
        pipeline_ns=pipeline_ns,
        host_ns=host_ns,
        streamed_bytes=passes * sum(per_host),
    )


def _check_ranges(problem: Problem, stages: Sequence[StageRange]) -> None:
    layers, devices = len(problem.layers), len(problem.devices)
    cuts = [0, *(stage.end for stage in stages)]
    if (
        [stage.begin for stage in stages] != cuts[:-1]
        or cuts[-1] != layers
        or not all(stage.begin < stage.end for stage in stages)
    ):
        raise PlanError(
            f"stages own layers {[(stage.begin, stage.end) for stage in stages]}, expected all of "
            f"0..{layers - 1} once, in order, and no stage without layers"
        )
    used = [stage.device for stage in stages]
    used += [stage.peer for stage in stages if stage.peer is not None]
    if len(set(used)) != len(used) or not all(0 <= device < devices for device in used):
        raise PlanError(
            f"stages use devices {used}, expected each of 0..{devices - 1} at most once"
        )
    pairs = {(link.owner, link.peer) for link in problem.peers}
    for stage in stages:
        if stage.peer is not None and (stage.device, stage.peer) not in pairs:
            raise PlanError(
                f"device {stage.peer} cannot serve device {stage.device}: the problem's peers are "
                f"{sorted(pairs)}"
            )


def _fastest_ring(problem: Problem, schedule: Schedule, stage: StageRange, name: str) -> Ring:
    """The ring of the fastest residency of a stage, then of the fewest bytes."""
    choices, needs = [], []
    for number, ring in enumerate(ring_options(problem)):
        table = RangeTable(problem, schedule, stage.device, stage.peer, ring)
        at = table.index(stage.begin, stage.end)
        needs.append(int(table.need[at]))
        if table.feasible[at]:
            choices.append((int(table.local_ns[at]), int(table.host_bytes[at]), number))
    if not choices:
        device = problem.devices[stage.device]
        raise PlanError(
            f"{name} (layers {stage.begin}..{stage.end - 1}) needs at least {min(needs)} bytes on "
            f"{device.name}, {device.memory_bytes} are usable: {min(needs) - device.memory_bytes} "
            "bytes are missing; give it fewer layers, or take a smaller micro-batch or ring"
        )
    return ring_options(problem)[min(choices)[2]]


def _refusal(problem: Problem, fitting: Mapping[str, int]) -> str:
    """Why nothing fits: the split that misses the fewest bytes, and the settings that would fit."""
    space = Space(problem)
    missing, _, plan, schedule = min(
        (found.sum_ns, i, found, schedule)
        for i, schedule in enumerate(problem.schedules)
        for found in [Search(space, problem, schedule, missing=True).least_missing()]
    )
    lines = [
        f"no plan fits: at least {missing} bytes ({missing / GIB:.2f} GiB) are missing, with "
        f"{schedule}, no resident expert and the smallest ring"
    ]
    for stage, step in zip(_alternative(space, schedule, plan).stages, plan.path, strict=True):
        device = problem.devices[stage.device]
        ring = ring_options(problem)[step[3]]
        table = RangeTable(problem, schedule, stage.device, None, ring)
        need = int(table.need[table.index(stage.begin, stage.end)])
        if need > device.memory_bytes:
            lines.append(
                f"  layers {stage.begin}..{stage.end - 1} need {need} bytes on {device.name}, "
                f"{device.memory_bytes} are usable: {need - device.memory_bytes} are missing"
            )
    if fitting:
        rows = sorted((ns, setting) for setting, ns in fitting.items())
        lines.append(
            "  these settings would fit: "
            + ", ".join(f"{setting} ({_seconds(ns)})" for ns, setting in rows)
        )
    else:
        lines.append("  add devices or memory, shorten the prompt, or lower prefill.chunk_tokens")
    return "\n".join(lines)


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.4g} s"


def _stage_list(problem: Problem, stages: Sequence[StageRange]) -> str:
    return " | ".join(
        f"{problem.devices[stage.device].name} {stage.begin}..{stage.end - 1}"
        + ("" if stage.peer is None else f" (+ {problem.devices[stage.peer].name})")
        for stage in stages
    )


def _report(plan: Plan) -> list[str]:
    problem, schedule = plan.problem, plan.schedule
    lines = [
        f"plan: {_seconds(plan.objective_ns)}, {schedule}",
        f"  binding resource: {plan.binding}",
        f"  stages: {_stage_list(problem, [stage.range for stage in plan.stages])}",
        f"  waiting of the slowest stage: {_seconds(plan.bubble_ns)}; streamed from host memory: "
        f"{plan.streamed_bytes} bytes",
    ]
    for i, stage in enumerate(plan.stages):
        lines.append(
            f"  stage {i}: {_seconds(stage.time_ns)} per pass = max(compute "
            f"{_seconds(stage.computing_ns)}, upload {_seconds(stage.uploading_ns)}, of which "
            f"{_seconds(stage.pause_ns)} waits for room) + hand-off "
            f"{_seconds(stage.handoff_ns)}; {stage.residents} experts resident, per pass "
            f"{stage.host_experts} from the host, {stage.peer_experts} from the peer, "
            f"{stage.relayed_experts} through the peer; {stage.ring.slots} "
            f"slabs of {stage.slab_experts}"
        )
    if plan.unused_devices:
        names = ", ".join(problem.devices[i].name for i in plan.unused_devices)
        lines.append(f"  left out, because it would not be faster with them: {names}")
    lines += _memory_table(plan)
    count = "too many to count" if plan.tie_count is None else str(plan.tie_count)
    lines.append(f"plans of this time: {count}")
    lines += [f"  {_stage_list(problem, tie.stages)}" for tie in plan.ties]
    lines.append("runners-up:" if plan.runners_up else "runners-up: none")
    for other in plan.runners_up:
        about = "at least " if other.bound else ""
        stages = f": {_stage_list(problem, other.stages)}" if other.stages else ""
        lines.append(f"  {about}{_seconds(other.objective_ns)}, {other.schedule}{stages}")
    for setting, ns in plan.suggestions:
        lines.append(f"would be faster, not applied: {setting} ({_seconds(ns)})")
    return lines


def _memory_table(plan: Plan) -> list[str]:
    """Bytes per component and device."""
    devices = plan.problem.devices
    columns = [(stage.range.device, stage.memory) for stage in plan.stages]
    columns += [
        (stage.range.peer, stage.peer_memory)
        for stage in plan.stages
        if stage.range.peer is not None
    ]
    rows = list(dict.fromkeys(name for _, memory in columns for name, _ in memory))
    table = [["memory in bytes", *(devices[device].name for device, _ in columns)]]
    for row in rows:
        table.append([row, *(str(dict(memory).get(row, 0)) for _, memory in columns)])
    totals = [sum(nbytes for _, nbytes in memory) for _, memory in columns]
    table.append(["total", *map(str, totals)])
    table.append(
        ["free", *(str(devices[device].memory_bytes - total)
                   for (device, _), total in zip(columns, totals, strict=True))]
    )  # fmt: skip
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  " + row[0].ljust(widths[0]) + "".join(
            "  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        )
        for row in table
    ]  # fmt: skip
