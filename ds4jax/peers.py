"""What a neighbour device does for a stage: how many experts go which way.

It can own experts of every layer and compute them (see `owners`), hold some of the streamed ones
in its memory, and pass others on from host memory over its own host link: as `config.peer` says,
or, the last two, where the plan expects less time. None of this changes a bit on devices of one
kind.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction

import jax

import streaming
from ds4jax import admission
from ds4jax.config import ConfigError, ModelConfig, Numerics
from ds4jax.run_config import PeerConfig
from streaming.window import live_bound

Items = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class PeerShares:
    """What a neighbour brings to a stage, beside the experts that it computes.

    device      its index among JAX's local devices, or "cpu"
    held        streamed experts of each layer in its memory; relayed: those from host memory that
                come over its host link
    collective  whether both devices compute in one program
    """

    device: str
    held: Items
    relayed: Items
    collective: bool = False

    @property
    def held_experts(self) -> int:
        """Experts in the neighbour's memory that are copied from there."""
        return sum(map(len, self.held))


def cold_experts(config: PeerConfig, experts: int) -> int:
    """How many experts of every layer the neighbour computes; rounds down."""
    return _share(config.compute_fraction, experts) if config.by_hand else 0


def divide(config: PeerConfig, device: str | None, streamed: Items) -> PeerShares | None:
    """Which streamed experts come by way of the neighbour; the first ones of a layer do not."""
    if device is None:
        return None
    held, relayed = [], []
    for items in streamed:
        end = len(items)
        middle = end - _share(config.memory_fraction, end)
        begin = middle - _share(config.relay_fraction, end)
        held.append(items[middle:])
        relayed.append(items[begin:middle])
    return PeerShares(device, tuple(held), tuple(relayed), config.exchange == "collective")


def planned(device: str, streamed: Items, held: int, relayed: int) -> PeerShares:
    """As many experts as were planned, spread over the layers; the first ones of a layer stay."""
    held_counts = _spread(held, [len(items) for items in streamed])
    rest = [len(items) - count for items, count in zip(streamed, held_counts, strict=True)]
    relayed_counts = _spread(relayed, rest)
    ends = [end - count for end, count in zip(rest, relayed_counts, strict=True)]
    return PeerShares(
        device,
        tuple(items[middle:] for items, middle in zip(streamed, rest, strict=True)),
        tuple(items[end:middle] for items, end, middle in zip(streamed, ends, rest, strict=True)),
    )


def _spread(total: int, limits: Sequence[int]) -> list[int]:
    """`total` over places as evenly as their limits allow; more goes to higher limits."""
    given = [0] * len(limits)
    for done, at in enumerate(sorted(range(len(limits)), key=lambda at: (limits[at], at))):
        given[at] = min(limits[at], total // (len(limits) - done))
        total -= given[at]
    return given


def paths(streamed: Items, tier: str, shares: PeerShares | None) -> dict[str, Items]:
    """The streamed experts of each layer by tier, those tiers that have any."""
    if shares is None:
        return {tier: streamed}
    apart = [set(a) | set(b) for a, b in zip(shares.held, shares.relayed, strict=True)]
    own = tuple(
        tuple(item for item in items if item not in others)
        for items, others in zip(streamed, apart, strict=True)
    )
    found = {
        streaming.PEER_TIER: shares.held,
        streaming.RELAY_TIER: shares.relayed,
        tier: own,
    }
    return {name: items for name, items in found.items() if any(items)}


def path_count(config: PeerConfig) -> int:
    """Over how many paths streamed experts can come."""
    if not config.by_hand:
        return 1
    return 1 + bool(config.memory_fraction) + bool(config.relay_fraction)


def slab_rows(by_tier: Mapping[str, Items], waves: int) -> dict[str, int]:
    """Experts that slabs of each path have room for, with layers in so many waves."""
    # A partial slab is put together from pieces that are alive beside it.
    return {tier: max(-(-max(map(len, items)) // waves), 2) for tier, items in by_tier.items()}


def budgets(
    by_tier: Mapping[str, Items], slab_bytes: int | None, item_bytes: int, window: int
) -> dict[str, int | None]:
    """The slab budget of each path: that of the fewest waves, and its share of what is left."""
    if slab_bytes is None or len(by_tier) == 1:
        return dict.fromkeys(by_tier, slab_bytes)
    sizes = {tier: max(map(len, items)) for tier, items in by_tier.items()}
    live, largest = live_bound(window) * item_bytes, max(sizes, key=lambda tier: sizes[tier])
    waves = next(
        (n for n in range(1, sizes[largest]) if sum(slab_rows(by_tier, n).values()) * live
         <= slab_bytes),
        sizes[largest],
    )  # fmt: skip
    found = {tier: rows * live for tier, rows in slab_rows(by_tier, waves).items()}
    left = max(slab_bytes - sum(found.values()), 0)
    more = {tier: left * size // sum(sizes.values()) for tier, size in sizes.items()}
    more[largest] += left - sum(more.values())
    return {tier: nbytes + more[tier] for tier, nbytes in found.items()}


def find(device: str, home: jax.Device) -> jax.Device:
    """The neighbour of a stage on `home`; raises ConfigError when there is none like it."""
    local = jax.local_devices()
    if device == "cpu":
        found = jax.local_devices(backend="cpu")[0]
    elif int(device) < len(local):
        found = local[int(device)]
    else:
        raise ConfigError(
            f"config.peer.devices names the device {device}, expected 'cpu' or 0..{len(local) - 1}:"
            f" JAX has {len(local)} devices here"
        )
    if found == home:
        raise ConfigError(
            f"config.peer.devices names the device {device}, which has the stage itself: expected "
            "another one"
        )
    return found


def price(
    model: ModelConfig,
    numerics: Numerics,
    rows: int,
    residency: streaming.Residency,
    shares: PeerShares,
    item_bytes: int,
    window: int,
) -> admission.Price:
    """Bytes that a stage needs on its neighbour."""
    cold = sum(map(len, residency.elsewhere))
    relayed = max(map(len, shares.relayed), default=0)
    return admission.Price(
        weights_bytes=0,
        state_bytes=0,
        workspace_bytes=admission.workspace_bytes(model, numerics, rows) if cold else 0,
        resident_bytes=(cold + shares.held_experts) * item_bytes,
        slab_bytes=live_bound(window) * relayed * item_bytes,
    )


def require_halves(
    shares: PeerShares | None, residency: streaming.Residency, chunk_tokens: int
) -> None:
    """Raises ConfigError unless a collective exchange has two equal parts to work on."""
    if shares is None or not shares.collective:
        return
    here = {len(items) for items in residency.resident}
    there = {len(items) for items in residency.elsewhere}
    if any(residency.streamed) or here != there or chunk_tokens % 2:
        raise ConfigError(
            f"config.peer.exchange is 'collective' with {sorted(here)} experts of a layer here, "
            f"{sorted(there) or 0} on the neighbour, {sum(map(len, residency.streamed))} streamed "
            f"and chunks of {chunk_tokens} tokens: expected two halves "
            "(config.peer.compute_fraction=0.5), none streamed, and an even number of tokens"
        )


def require_room(
    prices: Sequence[tuple[admission.Price, jax.Device]], taken: Mapping[jax.Device, int]
) -> None:
    """Raises PlanError when neighbours lack memory; `taken` are bytes that stages need there."""
    for device in dict.fromkeys(device for _, device in prices):
        parts = [part for part, place in prices if place == device]
        names = [field.name for field in dataclasses.fields(admission.Price)]
        whole = admission.Price(**{n: sum(getattr(part, n) for part in parts) for n in names})
        free = admission.device_bytes(device) - taken.get(device, 0)
        admission.require(whole, free, device, f"the experts of config.peer on {device}")


def _share(fraction: float, count: int) -> int:
    # Decimal fractions are meant as written: 0.29 of 100 experts are 29, not 28.
    return int(Fraction(str(float(fraction))) * count)
