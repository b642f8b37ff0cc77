"""Decides before a run what stays on the device, what is streamed, and in which order.

Everything is priced in bytes before anything is allocated. Nothing here changes an output bit, and
nothing here changes `config.prefill.chunk_tokens`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

import streaming
from ds4jax import admission, peers
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.source import TensorSource
from ds4jax.config import ConfigError, ModelConfig, Numerics
from ds4jax.experts import ExpertPlan, all_resident, default_window
from ds4jax.run_config import RunConfig
from sharding.cost import PlanError
from streaming.window import live_bound

# Streams of a micro-batch may take this share of the memory that experts could have. Beyond it the
# residents that they displace cost more traffic than a longer micro-batch saves.
_ACTIVATION_SHARE = 0.25
_ANY_DEVICES = 1 << 16
_UNKNOWN_PROMPT_TOKENS = 131_072  # what a micro-batch is sized for when no prompt is known yet


@dataclasses.dataclass(frozen=True)
class Plan:
    """How some layers are laid out on one device.

    layers              of the model, a contiguous range
    experts             residency and streaming; its layers count from the first one
    micro_batch_tokens  tokens that pass over the experts together; chunk_tokens = chunk-major
    price               bytes by use, all of it on the device
    store_bytes         experts in host memory
    """

    layers: range
    experts: ExpertPlan
    micro_batch_tokens: int
    price: admission.Price
    store_bytes: int

    @property
    def order(self) -> str:
        """How chunks and layers are nested."""
        return "layer_major" if self.price.micro_batch_bytes else "chunk_major"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that plans may use: of one device, and of the host for experts that it streams."""

    device_bytes: int
    host_bytes: int


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
    """Plans a run on `device`; raises PlanError with the missing bytes when nothing fits.

    prompt_tokens  the longest prompt, if known
    capacity       tokens that the state has room for
    layers         those that the device has; None for all
    share          how many plans share the device's memory
    memory         of the machine that is planned for; None for what is free on this one, as far as
                   config.memory.device_bytes allows
    """
    model, numerics = source.config, config.numerics.resolve()
    infos = source.infos()
    item = keys.expert_bytes(model, infos)
    layers = range(model.num_hidden_layers) if layers is None else layers
    base = admission.price(
        model,
        numerics,
        weights_bytes=keys.resident_bytes(model, infos, layers),
        rows=config.prefill.chunk_tokens,
        capacity_tokens=capacity,
        layers=layers,
    )
    budget = config.memory.device_bytes
    if memory is None:
        free = admission.device_bytes(device)
        memory = Memory(free if budget is None else min(free, budget), admission.host_bytes())
    available = memory.device_bytes // share
    cold = peers.cold_experts(config.peer, model.n_routed_experts)
    everything = dataclasses.replace(
        base, resident_bytes=len(layers) * (model.n_routed_experts - cold) * item
    )
    stages = config.pipeline.stages(model.num_hidden_layers)
    neighbour = config.peer.device(
        stages.index(layers) if layers in stages else 0, max(len(stages), 1)
    )
    options = config.streaming
    asked = options.resident_fraction is not None or options.resident_bytes is not None
    if not asked and options.order != "layer_major" and everything.total_bytes <= available:
        whole = all_resident(model, len(layers), cold)
        whole = dataclasses.replace(
            whole, peer=peers.divide(config.peer, neighbour, whole.residency.streamed)
        )
        return Plan(layers, whole, config.prefill.chunk_tokens, everything, 0)
    if device.platform == "cpu" and not asked and budget is None:
        # Host and device memory are one: streaming would not make anything fit.
        admission.require(everything, available, device, "this run")
    room = available - base.total_bytes
    if room < 0:
        admission.require(base, available, device, "this run without routed experts")
    return _with_streaming(
        model,
        numerics,
        config,
        layers,
        base,
        room,
        memory.host_bytes,
        item,
        prompt_tokens or _UNKNOWN_PROMPT_TOKENS,
        neighbour,
        [source.expert_origin(layer) for layer in layers],
    )


def plan_stages(
    source: TensorSource,
    config: RunConfig,
    device: jax.Device,
    prompt_tokens: int,
    capacity: int,
    memory: Memory,
) -> list[Plan]:
    """The plans of all stages on devices like `device`, each with `memory`."""
    split = config.pipeline.stages(source.config.num_hidden_layers)
    # Only which stages share a device counts here: the devices themselves need not exist.
    places = config.pipeline.device_indices(len(split), _ANY_DEVICES)
    return [
        make_plan(
            source, config, device, prompt_tokens, capacity, layers, places.count(place), memory
        )
        for layers, place in zip(split, places, strict=True)
    ]


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
        live = live_bound(plan.experts.resolved_window)
        most = plan.experts.slab_bytes // (live * expert_bytes)
        if most < share:
            text += f"; slabs hold {most} experts at a time, a layer's {share} come in waves"
    return text


def _with_streaming(
    model: ModelConfig,
    numerics: Numerics,
    config: RunConfig,
    layers: range,
    base: admission.Price,
    room: int,
    host: int,
    item: int,
    prompt_tokens: int,
    neighbour: str | None,
    origins: Sequence[int],
) -> Plan:
    options, experts = config.streaming, model.n_routed_experts
    cold = peers.cold_experts(config.peer, experts)
    per_layer, counts = None, None
    if options.resident_fraction is not None or options.resident_bytes is not None:
        per_layer = streaming.resident_per_layer(
            model.num_hidden_layers,
            experts,
            item,
            fraction=options.resident_fraction,
            total_bytes=options.resident_bytes,
        )
        per_layer = min(per_layer, experts - cold)
    if options.resident_profile is not None:
        try:
            counts = streaming.load_profile(
                options.resident_profile, model.num_hidden_layers, experts
            )[layers.start : layers.stop]
        except (OSError, ValueError) as error:
            raise ConfigError(f"config.streaming.resident_profile: {error}") from None
    tokens, activations = _micro_batch(model, numerics, config, prompt_tokens, room)
    tier = options.tier
    for attempt in ("ram", "disk") if tier == "auto" else (tier,):
        window = default_window(attempt) if options.window is None else options.window
        residency, slabs = choose_residency(
            len(layers),
            experts,
            item,
            room - activations,
            window=window,
            slab_bytes=options.slab_bytes,
            per_layer=per_layer,
            counts=counts,
            cold=cold,
            paths=peers.path_count(config.peer),
        )
        shares = peers.divide(config.peer, neighbour, residency.streamed)
        # Layers with the same experts share host memory.
        kept = set(streaming.store.owners(residency.streamed, origins))
        held = 0 if shares is None else sum(len(shares.held[layer]) for layer in kept)
        streamed = (sum(len(residency.streamed[layer]) for layer in kept) - held) * item
        store = streamed if attempt == "ram" else 0
        if attempt == "ram" and store > host and tier == "auto":
            continue
        if store > host:
            raise PlanError(
                f"{store} bytes of streamed experts do not fit in host memory, {host} bytes are "
                "free: set config.streaming.tier='disk' or keep more experts on the device"
            )
        price = dataclasses.replace(
            base,
            resident_bytes=residency.resident_items * item,
            slab_bytes=slabs or 0,
            micro_batch_bytes=activations if tokens > config.prefill.chunk_tokens else 0,
        )
        plan = ExpertPlan(residency, attempt, options.window, slabs, shares)
        return Plan(layers, plan, tokens, price, store)
    raise AssertionError("one of the tiers was taken")


def _micro_batch(
    model: ModelConfig, numerics: Numerics, config: RunConfig, prompt_tokens: int, room: int
) -> tuple[int, int]:
    """Tokens of a micro-batch, and the bytes that they take between layers."""
    chunk, options = config.prefill.chunk_tokens, config.streaming
    if options.order == "chunk_major":
        return chunk, 0
    # Streams, and beside them the normed inputs and the slots where slabs come in waves.
    rows = model.hc_mult + 1 + model.num_experts_per_tok
    token_bytes = rows * model.hidden_size * numerics.dtype.itemsize
    wanted = options.micro_batch_tokens
    if wanted is None:
        wanted = max(min(prompt_tokens, int(room * _ACTIVATION_SHARE) // token_bytes), chunk)
        wanted = max(wanted // chunk, 1) * chunk if wanted < prompt_tokens else wanted
    chunks = -(-wanted // chunk)
    return chunks * chunk, chunks * chunk * token_bytes if chunks > 1 else 0


def choose_residency(
    layers: int,
    experts: int,
    item_bytes: int,
    room_bytes: int,
    *,
    window: int,
    slab_bytes: int | None = None,
    per_layer: int | None = None,
    counts: np.ndarray | None = None,
    cold: int = 0,
    paths: int = 1,
) -> tuple[streaming.Residency, int | None]:
    """Residents that leave room for the slabs of the window, and the bytes left for slabs.

    room_bytes  device memory for experts: residents and slabs on their way
    slab_bytes  limit of the slabs; None lets the residents leave what whole shares need, or a few
                experts at a time if there is room for no more
    per_layer   number of residents of every layer; None takes as many as fit
    counts      integers [layers, experts]: how often each was used; None keeps the lowest ids
    cold        experts of every layer that another owner keeps
    paths       that slabs come over; each needs room for its own
    return      the residency and the slab budget (None when everything is resident)
    Raises PlanError with the missing bytes when it does not fit.
    """
    live, own = live_bound(window), experts - cold

    def slabs(residents: int) -> int:
        whole = live * (own - residents) * item_bytes
        return whole if slab_bytes is None else min(slab_bytes, whole)

    if per_layer is None:
        fitting = (
            n for n in range(own, -1, -1) if layers * n * item_bytes + slabs(n) <= room_bytes
        )
        # Without room for whole shares nothing is resident and slabs come in waves.
        per_layer = next(fitting, 0)
    residency = streaming.even(layers, experts, per_layer, counts, elsewhere=cold)
    resident = layers * per_layer * item_bytes
    if per_layer == own:
        if resident > room_bytes:
            raise _no_room(resident, room_bytes, "all experts on the device")
        return residency, None
    # A partial slab is put together from pieces that are alive beside it.
    smallest = 2 * live * item_bytes * paths
    left = room_bytes - resident
    budget = left if slab_bytes is None else slab_bytes
    if budget > left or budget < smallest:
        raise _no_room(
            resident + max(smallest, slab_bytes or 0),
            room_bytes,
            f"{per_layer} resident experts per layer and slabs for {live} experts in flight",
        )
    return residency, min(budget, 2 * live * max(own - per_layer, paths) * item_bytes)


def _no_room(needed: int, room: int, what: str) -> PlanError:
    return PlanError(
        f"{what} need {needed} bytes, {room} are left for experts, {needed - room} are missing: "
        "lower config.streaming.resident_fraction (or resident_bytes), config.streaming.slab_bytes "
        "or config.prefill.chunk_tokens"
    )
