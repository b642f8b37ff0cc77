"""What a run needs in memory, priced before anything large is allocated, and the refusal.

Prices are exact for weights and state. The workspace is an upper estimate from the sizes of the
largest activations; it does not know what a kernel keeps for itself.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from ds4jax.cache import state_bytes
from ds4jax.config import ModelConfig, Numerics
from sharding.cost import PlanError

HEAD_ROWS = 128  # rows of logits that are made at a time

# Without this much the runtime's own buffers (collectives, compiled code) already fail.
_RUNTIME_BYTES = 64 * 2**20
_DEFAULT_FRACTION = 0.75  # of a GPU's memory that JAX takes for itself unless told otherwise


@dataclasses.dataclass(frozen=True)
class Price:
    """Bytes that a run needs on its device.

    weights_bytes      everything but the routed experts
    resident_bytes     routed experts that stay; slab_bytes those on their way
    state_bytes        what layers remember of one sequence
    micro_batch_bytes  activations of the chunks that pass through the layers together
    workspace_bytes    activations within a layer
    handoff_bytes      micro-batches that wait before and behind a stage
    """

    weights_bytes: int
    state_bytes: int
    workspace_bytes: int
    resident_bytes: int = 0
    slab_bytes: int = 0
    micro_batch_bytes: int = 0
    handoff_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(dataclasses.astuple(self))


def price(
    config: ModelConfig,
    numerics: Numerics,
    *,
    weights_bytes: int,
    rows: int,
    capacity_tokens: int,
    layers: range | None = None,
) -> Price:
    """Prices chunks of `rows` rows of one sequence with room for `capacity_tokens` tokens.

    layers  those that the device has; None for all
    """
    return Price(
        weights_bytes,
        state_bytes(config, numerics, capacity_tokens, layers),
        workspace_bytes(config, numerics, rows),
    )


def workspace_bytes(
    config: ModelConfig,
    numerics: Numerics,
    rows: int,
    chunks: int = 1,
    temporaries: Mapping[str, int] | None = None,
    *,
    in_parts: bool = False,
) -> int:
    """Activation bytes of the most demanding layer part with `rows` rows.

    chunks       of a micro-batch on the device; several have their streams apart from the workspace
    temporaries  what the programs of attend, route, experts and finish allocate, where it is known;
                 an upper estimate from the sizes of the largest activations without
    in_parts     whether a layer's experts come in several slabs, each of which visits all chunks:
                 then all of these keep what they were routed to
    """
    width = numerics.dtype.itemsize
    streams = rows * config.hc_mult * config.hidden_size * width
    slots = rows * config.num_experts_per_tok * config.hidden_size * width
    # Normed inputs; ids and weights; what the hyper-connection needs to finish.
    maps = config.hc_mult * (config.hc_mult + 1)
    routing = rows * (config.hidden_size * width + config.num_experts_per_tok * 8 + maps * 4)
    temp = {**estimated_temporaries(config, numerics, rows), **(temporaries or {})}
    held = chunks if in_parts else 1
    parts = (
        temp["attend"] + (held - 1) * routing,
        temp["route"] + held * routing,
        max(temp["experts"], temp["finish"]) + held * (routing + slots),
        min(rows, HEAD_ROWS) * config.vocab_size * 4,
    )
    return (streams if chunks == 1 else 0) + max(parts) + _RUNTIME_BYTES


def estimated_temporaries(config: ModelConfig, numerics: Numerics, rows: int) -> dict[str, int]:
    """At most what the programs of attend, route, experts and finish allocate for `rows` rows."""
    width = numerics.dtype.itemsize
    heads = rows * config.num_attention_heads * config.head_dim * width
    # Queries, rotated queries and outputs. One matrix at a time is expanded to the compute dtype.
    matrix = config.num_attention_heads * config.head_dim * config.q_lora_rank * width
    return {
        "attend": 7 * heads // 2 + matrix,
        "route": 2 * rows * config.n_routed_experts * 4,
        # Gate, up and hidden of every slot.
        "experts": 3 * rows * config.num_experts_per_tok * config.moe_intermediate_size * 4,
        "finish": rows * config.hc_mult * config.hidden_size * width,
    }


def locking_bytes(host_bytes: int) -> int:
    """Device memory that page-locking so much host memory takes: 8 bytes a page of 4 KiB.

    Measured on an H200: 73 MB for 37.4 GB. It comes from what JAX has not taken for itself.
    """
    return -(-host_bytes // 4096) * 8


def device_bytes(device: jax.Device) -> int:
    """Bytes that this process can still allocate on `device`."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return host_bytes()


def host_bytes() -> int:
    """Bytes of host memory that are free for this process: the system's and its cgroup's view."""
    views = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            views = [int(line.split()[1]) * 1024]
    group = Path("/sys/fs/cgroup")
    limit = "".join(_lines(group / "memory.max")).strip()
    used = "".join(_lines(group / "memory.current")).strip()
    if limit.isdigit() and used.isdigit():
        cached = [
            int(line.split()[1])
            for line in _lines(group / "memory.stat")
            if line.startswith("inactive_file ")
        ]
        views.append(int(limit) - int(used) + sum(cached))
    return max(min(views), 0)


def admit(needed: Price, device: jax.Device, what: str) -> int:
    """Returns the bytes available on `device`; raises PlanError when `needed` exceeds them."""
    available = device_bytes(device)
    require(needed, available, device, what)
    return available


def require(needed: Price, available: int, device: jax.Device, what: str) -> None:
    """Raises PlanError when `needed` exceeds `available` bytes."""
    if needed.total_bytes > available:
        raise PlanError(shortage(needed, available, device, what))


def shortage(
    needed: Price, available: int, device: jax.Device | None, what: str, settings: str = ""
) -> str:
    """What to say where `needed` exceeds `available` bytes.

    When JAX's own share of the GPU is what is too small, the message says how to raise it.

    device    None where it is not of this machine
    settings  that would fit, in words; general advice without them
    """
    missing = needed.total_bytes - available
    kind = "the device"
    if device is not None:
        kind = "this machine's memory" if device.platform == "cpu" else device.device_kind
    parts = {
        "weights": needed.weights_bytes + needed.resident_bytes,
        "state": needed.state_bytes,
        "workspace": needed.workspace_bytes
        + needed.micro_batch_bytes
        + needed.handoff_bytes
        + needed.slab_bytes,
    }
    listed = ", ".join(f"{name} {_size(count)}" for name, count in parts.items())
    return (
        f"{what} needs {_size(needed.total_bytes)} ({listed}); {kind} has {_size(available)} free: "
        f"{_size(missing)} are missing. " + _remedy(needed, available, device, settings, os.environ)
    )


def _remedy(
    needed: Price,
    available: int,
    device: jax.Device | None,
    settings: str,
    environment: Mapping[str, str],
) -> str:
    if device is not None and device.platform != "cpu":
        fraction = float(environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _DEFAULT_FRACTION))
        whole = int(device.memory_stats()["bytes_limit"] / fraction)
        if needed.total_bytes <= whole * 0.95:
            share = min(0.99, round(needed.total_bytes / whole + 0.03, 2))
            return (
                f"JAX has taken {fraction:.0%} of the GPU's {_size(whole)}: set "
                f"XLA_PYTHON_CLIENT_MEM_FRACTION={share} (and end other programs on this GPU)"
            )
    if settings:
        return settings
    if needed.weights_bytes + needed.resident_bytes > available:
        return "The weights alone do not fit: use a device with more memory or a smaller model"
    return (
        "Lower config.prefill.chunk_tokens (smaller workspace) or config.prefill.max_tokens "
        "(smaller state)"
    )


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not this kind of system, or not allowed to look
        return []


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB ({count} bytes)"
