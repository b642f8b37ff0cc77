"""From a checkpoint to stages on devices: checked, planned, loaded."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ds4jax import admission, events, peers
from ds4jax.cache import capacity_for
from ds4jax.checkpoint import keys
from ds4jax.checkpoint import load as weights
from ds4jax.checkpoint.source import TensorSource
from ds4jax.compiling import Compiler, chunk_shapes, stage_programs
from ds4jax.config import ConfigError, Numerics
from ds4jax.experts import ExpertPool
from ds4jax.hosts import Hosts
from ds4jax.plan import Plan, RunPlan, plan_local
from ds4jax.report import versions
from ds4jax.run_config import RunConfig
from ds4jax.runner import Runner
from ds4jax.stages import Stage


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model on its devices.

    stages           those of this process
    plans, devices   of all stages of the run, wherever they are
    run_plan         of the whole run; None in a run of several processes
    available_bytes  memory of all devices that are used
    seconds          what checking, planning and loading took
    compiled         programs that were compiled beside it, and the seconds of each, added up
    fingerprint      of the checkpoint
    """

    stages: tuple[Stage, ...]
    plans: tuple[Plan, ...]
    devices: tuple[jax.Device, ...]
    run_plan: RunPlan | None
    available_bytes: int
    seconds: float
    compiled: tuple[int, float]
    fingerprint: str


def load_model(
    source: TensorSource,
    run_config: RunConfig,
    prompt_tokens: int | Sequence[int] | None,
    device: jax.Device | None,
    on_event: events.Observer,
    hosts: Hosts | None,
) -> Loaded:
    """Checks, plans and loads what this process has of a model; see `engine.load`."""
    began = time.perf_counter()
    model_config, numerics = source.config, run_config.numerics.resolve()
    if run_config.prefill.top_logprobs > model_config.vocab_size:
        raise ConfigError(
            f"config.prefill.top_logprobs is {run_config.prefill.top_logprobs}, expected at most "
            f"the vocabulary size {model_config.vocab_size}"
        )
    local = jax.local_devices() if device is None else [device]
    keys.check_complete(source)
    fingerprint = weights.fingerprint(source)
    prompts = [prompt_tokens] if isinstance(prompt_tokens, int) else list(prompt_tokens or ())
    capacity = capacity_for(run_config, model_config, max(prompts, default=1))
    run_plan, parts = None, None
    if hosts is None:
        run_plan = plan_local(source, run_config, local, prompts, capacity)
        plans, devices = list(run_plan.stages), [local[place] for place in run_plan.places]
        available = sum(admission.device_bytes(each) for each in set(devices))
    else:
        hosts.agree("the run", _facts(run_config, fingerprint))
        settled = hosts.settle(source, run_config, local, prompts, capacity)
        part = hosts.plan(source, settled, local, max(prompts, default=None), capacity)
        parts = hosts.share(part)
        plans = list(part.plans)
        devices = [next(each for each in local if each.id == id) for id in part.device_ids]
        available = sum(part.available_bytes for part in parts)
    _require_peers(source, run_config, plans, devices)
    total = sum(plan.price.weights_bytes for plan in plans) + keys.expert_bytes(
        model_config, source.infos()
    ) * (model_config.n_routed_experts * sum(len(plan.layers) for plan in plans))

    def on_bytes(done: int) -> None:
        on_event(events.WeightsLoaded(done, total, time.perf_counter() - began))

    with Compiler() as compiler:
        stages = load_stages(
            source, plans, devices, numerics, run_config, prompts, on_bytes, compiler
        )
        if prompts:
            on_event(events.ProgramsAwaited())
        loaded = time.perf_counter()
        compiled = compiler.wait()
        if prompts:
            on_event(events.ProgramsCompiled(*compiled, time.perf_counter() - loaded))
    if parts is not None:
        by_id = {each.id: each for each in jax.devices()}
        plans = [plan for part in parts for plan in part.plans]
        devices = [by_id[id] for part in parts for id in part.device_ids]
    seconds = time.perf_counter() - began
    if hosts is not None:
        hosts.connect(devices, run_config.pipeline)
    return Loaded(
        tuple(stages),
        tuple(plans),
        tuple(devices),
        run_plan,
        available,
        seconds,
        compiled,
        fingerprint,
    )


def _facts(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    """What all processes of a run have to have in common, but for their prompts."""
    settings = {
        f"config.{name}": values for name, values in config.to_dict().items() if name != "prompt"
    }
    return {**settings, "the checkpoint": fingerprint, **versions()}


def _require_peers(
    source: TensorSource,
    config: RunConfig,
    plans: Sequence[Plan],
    devices: Sequence[jax.Device],
) -> None:
    """Raises ConfigError or PlanError when the neighbours of `config.peer` cannot serve."""
    for plan in plans:
        peers.require_halves(plan.experts.peer, plan.experts.residency, config.prefill.chunk_tokens)
    prices = [
        (
            peers.price(
                source.config,
                config.numerics.resolve(),
                config.prefill.chunk_tokens,
                plan.experts.residency,
                plan.experts.peer,
                keys.expert_bytes(source.config, source.infos()),
                plan.experts.resolved_window,
            ),
            peers.find(plan.experts.peer.device, device),
        )
        for plan, device in zip(plans, devices, strict=True)
        if plan.experts.peer is not None
    ]
    taken: dict[jax.Device, int] = {}
    for plan, device in zip(plans, devices, strict=True):
        taken[device] = taken.get(device, 0) + plan.price.total_bytes
    peers.require_room(prices, taken)


def load_stages(
    source: TensorSource,
    plans: Sequence[Plan],
    devices: Sequence[jax.Device],
    numerics: Numerics,
    run_config: RunConfig,
    prompts: Sequence[int],
    on_bytes: Callable[[int], None],
    compiler: Compiler,
) -> list[Stage]:
    """Loads every plan onto its device; on_bytes is told the bytes that are there so far.

    Layers without a plan are not loaded. The compiler starts on what `prompts`, of so many tokens,
    need, as soon as experts are all that is left to load.
    """
    options = run_config.streaming
    shapes = chunk_shapes(prompts, run_config, source.config)
    places: list[jax.Device | None] = [None] * source.config.num_hidden_layers
    for plan, device in zip(plans, devices, strict=True):
        places[plan.layers.start : plan.layers.stop] = [device] * len(plan.layers)
    transformer = weights.load_resident(source, device=places)
    loaded = sum(plan.price.weights_bytes for plan in plans)
    on_bytes(loaded)
    runners = [Runner(transformer, numerics, plan.layers) for plan in plans]
    for plan, device, runner in zip(plans, devices, runners, strict=True):
        programs = stage_programs(source, plan, device, runner, shapes, run_config.prefill)
        compiler.add(device, programs)
    stages = []
    for plan, device, runner in zip(plans, devices, runners, strict=True):
        before = loaded

        def on_experts(done: int, before: int = before) -> None:
            nonlocal loaded
            loaded = before + done
            on_bytes(loaded)

        pool = ExpertPool(
            source,
            plan.experts,
            device,
            layers=plan.layers,
            numa=options.numa,
            reader=options.reader,
            on_bytes=on_experts,
        )
        stages.append(Stage(plan, device, runner, pool, options))
    return stages
