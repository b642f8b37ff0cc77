"""Decides before a run what stays on the device, what is streamed, and in which order.

Everything is priced in bytes before anything is allocated, and in time by the rows of `rows`; the
choice itself is `sharding.split`'s. Nothing here changes an output bit, and nothing here changes
`config.prefill.chunk_tokens`.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

import streaming
from ds4jax import activations, admission, peers
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.source import TensorSource
from ds4jax.config import ConfigError
from ds4jax.experts import ExpertPlan
from ds4jax.machine import Machine, local_machine, probed
from ds4jax.rows import Prompts, Run
from ds4jax.run_config import RunConfig
from sharding import split
from sharding.cost import PlanError, Problem
from streaming import window as arithmetic

_UNKNOWN_PROMPT_TOKENS = 131_072  # what a micro-batch is sized for when no prompt is known yet


@dataclasses.dataclass(frozen=True)
class Plan:
    """How some layers are laid out on one device.

    layers              of the model, a contiguous range
    experts             residency and streaming; its layers count from the first one
    micro_batch_tokens  tokens that pass over the experts together; chunk_tokens = chunk-major
    price               bytes by use, all of it on the device
    store_bytes         experts in host memory: all that are streamed, or the ring before a disk
    activations         where a micro-batch waits between layers: "device" or "host"
    host_activation_bytes  page-locked memory for that
    """

    layers: range
    experts: ExpertPlan
    micro_batch_tokens: int
    price: admission.Price
    store_bytes: int
    activations: str = "device"
    host_activation_bytes: int = 0

    @property
    def order(self) -> str:
        """How chunks and layers are nested."""
        return "layer_major" if self.price.micro_batch_bytes else "chunk_major"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that plans may use: of one device, and of the host for experts that it streams."""

    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a run is expected to take; seconds without compilation.

    seconds      of the whole run; compute_s and copy_s are the work of the slowest stage, bubble_s
                 what it waits while the pipeline fills and drains
    moved_bytes  streamed experts by tier; expected values where routers decide
    exact        whether every pass moves all streamed experts
    """

    seconds: float
    compute_s: float
    copy_s: float
    bubble_s: float
    moved_bytes: Mapping[str, int]
    exact: bool


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The plan of a whole run.

    stages   in the order of their layers
    places   of each stage: the index of its device in the machine that was planned for
    choice   the planner's plan: times, ties, runners-up, suggestions
    tier     of streamed experts; waves: whether slabs hold less than the share of a layer
    neighbours  what the best plan takes by what devices without a stage may do, in nanoseconds;
             empty where there is none to be asked
    """

    stages: tuple[Plan, ...]
    places: tuple[int, ...]
    choice: split.Plan
    run: Run
    tier: str
    waves: bool
    neighbours: tuple[tuple[str, int], ...] = ()

    def predict(self, prompts: Prompts) -> Prediction:
        """What reading `prompts` takes with this layout."""
        chunk = self.run.config.prefill.chunk_tokens
        problem = self.run.problem(
            prompts,
            tier=self.tier,
            waves=self.waves,
            stages=len(self.stages),
            chunks=self.stages[0].micro_batch_tokens // chunk,
            activations=self.choice.schedule.activations,
        )
        (schedule,) = problem.schedules
        priced = split.price_plan(problem, schedule, self.choice)
        slowest = max(priced.stages, key=lambda stage: stage.time_ns)
        moved = schedule.passes * sum(
            stage.host_experts + stage.peer_experts + stage.relayed_experts
            for stage in priced.stages
        )
        streamed = self._streamed()
        return Prediction(
            seconds=max(priced.objective_ns, self._shared_ns(priced)) / 1e9,
            compute_s=schedule.passes * slowest.compute_ns / 1e9,
            copy_s=schedule.passes * slowest.stream_ns / 1e9,
            bubble_s=priced.bubble_ns / 1e9,
            moved_bytes={
                tier: moved * count // sum(streamed.values()) * problem.expert_bytes
                for tier, count in streamed.items()
            },
            exact=set(schedule.distinct) == {self.run.experts},
        )

    def _streamed(self) -> dict[str, int]:
        """Streamed experts by the tier that they come from."""
        found: dict[str, int] = {}
        for plan in self.stages:
            if plan.experts.streams:
                for tier, items in plan.experts.by_tier.items():
                    found[tier] = found.get(tier, 0) + sum(map(len, items))
        return found

    def _shared_ns(self, priced: split.Plan) -> int:
        """Time of the busiest device that has several stages, which take turns on it."""
        busy: dict[int, list[int]] = {}
        for place, stage in zip(self.places, priced.stages, strict=True):
            busy.setdefault(place, []).append(max(stage.compute_ns, stage.stream_ns))
        return max(priced.schedule.passes * sum(times) for times in busy.values())


def plan_run(
    source: TensorSource,
    config: RunConfig,
    machine: Machine,
    prompts: Sequence[int],
    capacity: int,
    *,
    recommend: bool = False,
    device: jax.Device | None = None,
) -> RunPlan:
    """Plans a run: split, residency, order of work and micro-batch together.

    prompts    tokens of each; empty when they are not known yet
    capacity   tokens that the state of a sequence has room for
    recommend  whether other settings of chunk_tokens are priced, for `RunPlan.choice.suggestions`
    device     the first one, if it is here: a refusal then knows what JAX has left of it
    Raises PlanError with the missing bytes, and with settings that would fit, when nothing does.
    """
    indices = stage_indices(config, source.config.num_hidden_layers, len(machine.devices))
    idle = _idle(config, indices, range(len(machine.devices)))
    run = Run.of(source, config, machine.chosen([*indices, *idle]), capacity)
    found = _with_neighbours(run, _known(prompts), indices, idle)
    run = _alone(run, len(indices))
    if found is None:
        raise PlanError(_refusal(run, _known(prompts), device))
    if recommend:
        chunk, choice = config.prefill.chunk_tokens, found.choice
        faster = []
        for other in (chunk // 4, chunk // 2, 2 * chunk):
            changed = dataclasses.replace(
                run, config=config.replace({"prefill.chunk_tokens": max(other, 1)})
            )
            better = _search(changed, _known(prompts), places=indices)
            if better is not None and better.choice.objective_ns < choice.objective_ns:
                faster.append((better.choice.objective_ns, f"config.prefill.chunk_tokens={other}"))
        names = tuple((name, ns) for ns, name in sorted(faster))
        found = dataclasses.replace(found, choice=dataclasses.replace(choice, suggestions=names))
    return found


def plan_local(
    source: TensorSource,
    config: RunConfig,
    devices: Sequence[jax.Device],
    prompts: Sequence[int],
    capacity: int,
) -> RunPlan:
    """`plan_run` on this machine: places count `devices`, of which those that are free are used."""
    indices = stage_indices(config, source.config.num_hidden_layers, len(devices))
    known = [i for i in range(len(devices)) if i not in indices and probed(config, devices[i])]
    idle = _idle(config, indices, known)
    used = sorted({*indices, *idle})
    item = keys.expert_bytes(source.config, source.infos())
    machine = local_machine(config, [devices[i] for i in used], item)
    machine = machine.chosen([used.index(i) for i in (*indices, *idle)])
    run = Run.of(source, config, machine, capacity)
    found = _with_neighbours(run, _known(prompts), indices, idle)
    if found is None:
        run = _alone(run, len(indices))
        raise PlanError(_refusal(run, _known(prompts), devices[indices[0]]))
    return found


def plan_in_order(
    source: TensorSource,
    config: RunConfig,
    machine: Machine,
    prompts: Sequence[int],
    capacity: int,
) -> RunPlan:
    """`plan_run` where every device has a stage, as in a run of several processes."""
    run = Run.of(source, config, machine, capacity)
    found = _search(run, _known(prompts), places=range(len(machine.devices)))
    if found is None:
        raise PlanError(_refusal(run, _known(prompts), None))
    return found


def make_plan(
    source: TensorSource,
    config: RunConfig,
    device: jax.Device,
    prompt_tokens: int | None,
    capacity: int,
    layers: range | None = None,
    share: int = 1,
    memory: Memory | None = None,
) -> Plan:
    """Plans one stage on `device`; raises PlanError with the missing bytes when nothing fits.

    prompt_tokens  the longest prompt, if known
    capacity       tokens that the state has room for
    layers         those that the device has; None for all
    share          how many plans share the device's memory
    memory         of the machine that is planned for; None for what is free on this one, as far as
                   config.memory.device_bytes allows
    """
    item = keys.expert_bytes(source.config, source.infos())
    given = (None, None) if memory is None else (memory.host_bytes, memory.device_bytes)
    machine = local_machine(config, [device], item, *given).chosen([0] * share).chosen([0])
    run = Run.of(source, config, machine, capacity)
    layers = range(source.config.num_hidden_layers) if layers is None else layers
    prompts = _known([prompt_tokens] if prompt_tokens else [])
    found = _search(run, prompts, layers=layers)
    if found is None:
        raise PlanError(_refusal(run, prompts, device, layers))
    return found.stages[0]


def stage_indices(config: RunConfig, layers: int, devices: int) -> list[int]:
    """The device of each stage of a split by hand, or those that an automatic split may use."""
    options = config.pipeline
    if options.automatic:
        return options.candidates(devices)
    return options.device_indices(len(options.stages(layers)), devices)


def _idle(config: RunConfig, indices: Sequence[int], devices: Sequence[int]) -> list[int]:
    """The devices beside those of stages that the planner may ask; it divides others itself."""
    if not config.peer.automatic or config.pipeline.automatic:
        return []
    return [device for device in devices if device not in indices]


def _alone(run: Run, devices: int) -> Run:
    """The run on its first devices, which do nothing for each other."""
    machine = run.machine.chosen(range(devices)).serving(holds=False, relays=False)
    return dataclasses.replace(run, machine=machine)


# What neighbours may do, in the order in which ties are taken: (hold experts, relay them).
_NEIGHBOURS = {
    "none": (False, False),
    "memory": (True, False),
    "relay": (False, True),
    "memory and relay": (True, True),
}


def _with_neighbours(
    run: Run, prompts: Prompts, indices: Sequence[int], idle: Sequence[int]
) -> RunPlan | None:
    """The best plan with and without what neighbours may do; None if nothing fits.

    indices, idle  what the devices of `run` are called: those that may have stages, and the others
    Raises PlanError as `_search` does.
    """
    asked, refusal = run.config.peer.automatic and bool(run.machine.peers), None
    found: dict[str, RunPlan] = {}
    for name, (holds, relays) in _NEIGHBOURS.items():
        if name == "none":
            served, places = _alone(run, len(indices)), indices
        elif asked:
            machine = run.machine.serving(holds=holds, relays=relays)
            served, places = dataclasses.replace(run, machine=machine), [*indices, *idle]
        else:
            break
        try:
            plan = _search(served, prompts, places=places, stages=len(indices))
        except PlanError as error:
            refusal = refusal or error
            continue
        if plan is not None:
            found[name] = plan
    if not found:
        if refusal is not None:
            raise refusal
        return None
    times = tuple((name, plan.choice.objective_ns) for name, plan in found.items())
    best = min(found, key=lambda name: found[name].choice.objective_ns)
    if "none" in found and 100 * dict(times)[best] > 99 * dict(times)["none"]:
        best = "none"  # less than 1 % is not worth another device
    return dataclasses.replace(found[best], neighbours=times if asked else ())


def _known(prompts: Sequence[int]) -> Prompts:
    return Prompts.of(*(prompts or [_UNKNOWN_PROMPT_TOKENS]))


def _search(
    run: Run,
    prompts: Prompts,
    *,
    places: Sequence[int] = (0,),
    layers: range | None = None,
    stages: int | None = None,
) -> RunPlan | None:
    """The best plan on the devices of `run`, or of one stage that has `layers`; None if none fits.

    places  what the devices are called in the plan
    stages  how many of them may have layers; None for all
    Raises PlanError when it fits but for the host memory that config.streaming.tier asks for.
    """
    options = run.config.streaming
    most = len(places) if stages is None else stages
    divided = most > 1 or len(layers or ()) not in (0, run.model.num_hidden_layers)
    if options.activations == "host" and (divided or run.experts < run.model.n_routed_experts):
        raise PlanError(
            "config.streaming.activations is 'host' and layers or experts are divided over "
            "devices, whose micro-batches stay on the device: expected device or auto"
        )
    for tier in ("ram", "disk") if options.tier == "auto" else (options.tier,):
        found = _with_tier(run, prompts, tier, layers, places, most)
        if found is None:
            return None
        store = sum(plan.store_bytes for plan in found.stages)
        waiting = sum(plan.host_activation_bytes for plan in found.stages)
        if store + waiting <= run.machine.host_bytes:
            return found
        if tier == "ram" and options.tier == "auto":
            continue
        what, advice = "streamed experts", "set config.streaming.tier='disk' or keep more experts "
        advice += "on the device"
        if tier == "disk":
            what, advice = f"{what} on their way from disk", "lower config.streaming.slab_bytes"
        if waiting:
            what += f" and {waiting} bytes of activations"
        raise PlanError(
            f"{store} bytes of {what} do not fit in host memory, {run.machine.host_bytes} bytes "
            f"are free: {advice}"
        )
    raise AssertionError("one of the tiers was taken or refused")


def _with_tier(
    run: Run, prompts: Prompts, tier: str, layers: range | None, places: Sequence[int], most: int
) -> RunPlan | None:
    best: tuple[split.Plan, bool] | None = None
    slabs = (False, True) if run.config.streaming.slab_bytes is None else (True,)
    for waves, kept in itertools.product(slabs, _activation_places(run, most, layers)):
        if kept == "host" and best is not None and best[0].schedule.passes == 1:
            continue  # the micro-batch fits on the device
        problem = run.problem(
            prompts, tier=tier, waves=waves, layers=layers, stages=most, activations=kept
        )
        try:
            choice = _plain_order(run.config, _choose(run.config, problem, layers))
        except PlanError:
            continue
        if best is None or choice.objective_ns < best[0].objective_ns:
            best = choice, waves
        if not waves and not any(stage.slab_experts for stage in choice.stages):
            break  # nothing is streamed
    if best is None:
        return None
    choice, waves = best
    stages = []
    for number, stage in enumerate(choice.stages):
        begin = stage.range.begin + (0 if layers is None else layers.start)
        own = range(begin, begin + stage.range.end - stage.range.begin)
        neighbour = _neighbour(run, own) if layers is not None else (number, len(choice.stages))
        served = None if stage.range.peer is None else str(places[stage.range.peer])
        peer = run.config.peer.device(*neighbour) or served
        stages.append(_stage(run, choice, stage, tier, own, peer))
    at = tuple(places[stage.range.device] for stage in choice.stages)
    return RunPlan(tuple(stages), at, choice, run, tier, waves)


def _activation_places(run: Run, stages: int, layers: range | None) -> tuple[str, ...]:
    """Where the activations of micro-batches may wait; the first one wins a tie."""
    asked = run.config.streaming.activations
    if asked != "auto":
        return (asked,)
    divided = stages > 1 or len(layers or ()) not in (0, run.model.num_hidden_layers)
    whole = not divided and run.experts == run.model.n_routed_experts
    return activations.PLACES if whole and not run.machine.one_memory else ("device",)


def _neighbour(run: Run, layers: range) -> tuple[int, int]:
    """Which stage of how many has `layers`."""
    stages = run.config.pipeline.stages(run.model.num_hidden_layers)
    return (stages.index(layers), len(stages)) if layers in stages else (0, 1)


def _choose(config: RunConfig, problem: Problem, layers: range | None) -> split.Plan:
    """The planner's choice, for the split that is asked for; raises PlanError."""
    if layers is None and config.pipeline.automatic:
        return split.plan_stages(problem)
    everything = range(len(problem.layers))
    ranges = config.pipeline.stages(len(everything)) if layers is None else [everything]
    return split.price_stages(
        problem, [split.StageRange(i, each.start, each.stop) for i, each in enumerate(ranges)]
    )


def _plain_order(config: RunConfig, choice: split.Plan) -> split.Plan:
    """Chunk by chunk where one device holds everything: all orders then take the same time."""
    (first, *others) = choice.stages
    if others or first.slab_experts or config.streaming.order == "layer_major":
        return choice
    schedule = choice.problem.schedules[0]
    if schedule is choice.schedule:
        return choice
    priced = split.price_split(choice.problem, schedule, [first.range])
    return dataclasses.replace(priced, runners_up=choice.runners_up)


def _stage(
    run: Run, choice: split.Plan, stage: split.StagePlan, tier: str, layers: range, peer: str | None
) -> Plan:
    """What the engine needs to know of a stage that was planned."""
    config, item = run.config, run.item_bytes
    residency = _residency(run, layers, stage.layer_residents)
    if peer is None or config.peer.by_hand:
        shares = peers.divide(config.peer, peer, residency.streamed)
    else:
        shares = _planned_shares(stage, peer, residency.streamed)
    share, slabs, ring, store = max(map(len, residency.streamed)), None, 0, 0
    if share:
        waves = -(-share // stage.slab_experts)
        size, problem, slots = -(-share // waves), choice.problem, stage.ring.slots
        slabs = slots * item * max(size, problem.ring_least)
        if stage.range.peer is not None:
            rows = peers.slab_rows(peers.paths(residency.streamed, tier, shares), waves)
            slabs = slots * item * sum(rows.values())
        ring = (stage.ring.ahead + 1) * size * item
        # Layers with the same experts share host memory.
        kept = set(
            streaming.store.owners(residency.streamed, [run.origins[layer] for layer in layers])
        )
        held = 0 if shares is None else sum(len(shares.held[layer]) for layer in kept)
        store = (sum(len(residency.streamed[layer]) for layer in kept) - held) * item
    memory = dict(stage.memory)
    price = admission.Price(
        weights_bytes=memory["dense weights"] + memory["embedding"] + memory["head"],
        state_bytes=memory["state"],
        workspace_bytes=memory["workspace"],
        resident_bytes=residency.resident_items * item,
        slab_bytes=slabs or 0,
        micro_batch_bytes=memory["activations"],
        handoff_bytes=memory["hand-off"],
    )
    window = stage.ring.ahead if share else config.streaming.window
    plan = ExpertPlan(residency, tier, window, slabs, shares)
    tokens, kept = choice.schedule.micro_batch_tokens, choice.schedule.activations
    waiting = run.waiting_bytes(tokens) if kept == "host" else 0
    return Plan(layers, plan, tokens, price, store if tier == "ram" else ring, kept, waiting)


def _planned_shares(
    stage: split.StagePlan, peer: str, streamed: peers.Items
) -> peers.PeerShares | None:
    """The experts that the planner has a neighbour serve; None if it leaves it idle."""
    moved = stage.host_experts + stage.peer_experts + stage.relayed_experts
    count, held = sum(map(len, streamed)), stage.peer_residents
    relayed = min(-(-stage.relayed_experts * count // max(moved, 1)), count - held)
    return peers.planned(peer, streamed, held, relayed) if held or relayed else None


def _residency(run: Run, layers: range, per_layer: int) -> streaming.Residency:
    """The same number of residents in every layer; the most used by the profile."""
    model, counts, path = run.model, None, run.config.streaming.resident_profile
    experts = model.n_routed_experts
    if path is not None:
        try:
            counts = streaming.load_profile(path, model.num_hidden_layers, experts)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"config.streaming.resident_profile: {error}: expected the profile.json of a run"
            ) from None
        counts = counts[layers.start : layers.stop]
    cold = experts - run.experts
    return streaming.even(len(layers), experts, per_layer, counts, elsewhere=cold)


def binding(plan: Plan, config: RunConfig, expert_bytes: int) -> str:
    """What keeps more experts from staying on the device, in words."""
    if not plan.experts.streams:
        return "nothing: all experts stay on the device"
    options = config.streaming
    if options.resident_fraction is not None:
        text = f"config.streaming.resident_fraction = {options.resident_fraction}"
    elif options.resident_bytes is not None:
        text = f"config.streaming.resident_bytes = {options.resident_bytes}"
    else:
        text = "device memory"
    if plan.experts.tier == "disk" and options.tier == "auto":
        text += "; and host memory: the streamed experts do not fit there and come from disk"
    if plan.experts.slab_bytes is not None:
        share = max(map(len, plan.experts.residency.streamed))
        live = arithmetic.live_bound(plan.experts.resolved_window)
        most = plan.experts.slab_bytes // (live * expert_bytes)
        if most < share:
            text += f"; slabs hold {most} experts at a time, a layer's {share} come in waves"
    return text


# Refusals


def _refusal(
    run: Run, prompts: Prompts, device: jax.Device | None, layers: range | None = None
) -> str:
    """What is missing, and which settings would fit."""
    fitting, options = [], run.config.streaming
    for group in _settings(run, prompts):
        works = (each for each in group if _fits(run, prompts, each, layers))
        if (setting := next(works, None)) is not None:
            flags = (f"--config.{key}={value}" for key, value in setting.items())
            fitting.append(" ".join(flags))
    text = f"These settings would fit: {', or '.join(fitting)}" if fitting else ""
    tier, devices = "ram" if options.tier == "auto" else options.tier, run.machine.devices
    problem = run.problem(prompts, tier=tier, waves=True, layers=layers, stages=len(devices))
    if len(devices) == 1:
        available = devices[0].memory_bytes
        return admission.shortage(_least_price(problem), available, device, "this run", text)
    try:
        _choose(run.config, problem, layers)
    except PlanError as error:
        return "\n".join(filter(None, [str(error), text]))
    raise AssertionError("the search found nothing that fits")


def _least_price(problem: Problem) -> admission.Price:
    """The fewest bytes that one stage can do with."""
    prices = []
    for schedule in problem.schedules:
        residents = len(problem.layers) * (problem.layer_residents or 0)
        streams = residents < len(problem.layers) * problem.experts
        ring = min(ring.slots * max(ring.experts, problem.ring_least) for ring in problem.rings)
        prices.append(
            admission.Price(
                weights_bytes=problem.embed_bytes
                + problem.head_bytes
                + sum(layer.dense_bytes for layer in problem.layers),
                state_bytes=schedule.sequences * sum(layer.state_bytes for layer in problem.layers),
                workspace_bytes=max(schedule.workspace_bytes),
                resident_bytes=residents * problem.expert_bytes,
                slab_bytes=ring * problem.expert_bytes if streams else 0,
                micro_batch_bytes=schedule.activation_bytes,
            )
        )
    return min(prices, key=lambda price: price.total_bytes)


def _settings(run: Run, prompts: Prompts) -> Iterator[list[dict[str, Any]]]:
    """Settings that may help, in groups of which the first that fits is enough."""
    config, options = run.config, run.config.streaming
    chunk = config.prefill.chunk_tokens
    smaller = [{"prefill.chunk_tokens": 1 << n} for n in range((chunk - 1).bit_length() - 1, 6, -1)]
    yield smaller
    longest = max(start + count for start, count in prompts.spans)
    if longest < run.capacity:
        shorter = {"prefill.max_tokens": longest}
        yield [shorter, *({**shorter, **each} for each in smaller)]
    if options.micro_batch_tokens is not None or options.order == "layer_major":
        yield [{"streaming.order": "chunk_major"}]
    if options.resident_fraction is not None or options.resident_bytes is not None:
        experts = run.model.n_routed_experts
        kept = range(experts - 1, -1, -max(experts // 32, 1))
        if options.resident_fraction is None:
            layer = run.item_bytes * run.model.num_hidden_layers
            yield [{"streaming.resident_bytes": count * layer} for count in kept]
        else:
            yield [{"streaming.resident_fraction": count / experts} for count in kept]


def _fits(run: Run, prompts: Prompts, setting: Mapping[str, Any], layers: range | None) -> bool:
    changed = dataclasses.replace(
        run,
        config=run.config.replace(setting),
        capacity=setting.get("prefill.max_tokens", run.capacity),
    )
    places = range(len(run.machine.devices))
    try:
        return _search(changed, prompts, places=places, layers=layers) is not None
    except PlanError:
        return False
