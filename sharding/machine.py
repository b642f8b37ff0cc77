"""The machine file: what `sharding.probe` measured, and the planner's rows made from it."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sharding import schema
from sharding.cost import DeviceCost, HostCost, PeerLink, PlanError, transfer_ns, uniform_links

# Rates closer than this are taken as equal, at the lowest of them: devices of one kind are then one
# type for the planner, and its choice does not follow the noise of a measurement.
_NOISE = 1.1
_SHARED = 0.95  # devices that together reach less than this share of their sum share a limit

_LADDER = [
    {
        "bytes": schema.RATE,
        "bytes_per_s": schema.RATE,
        "in_flight_bytes_per_s?": schema.RATE,
    }
]
# What is read of a machine file; the rest of it is for people.
_FORM = {
    "platform": schema.TEXT,
    "devices": [
        {
            "id": schema.COUNT,
            "kind?": schema.TEXT,
            "memory_bytes?": schema.RATE,
            "memory_bytes_per_s?": schema.RATE,
            "matmul_flops_per_s": {"*?": schema.RATE},
            "host_to_device?": {"*?": _LADDER},
        }
    ],
    "links": [{"source": schema.COUNT, "target": schema.COUNT, "ladder": _LADDER}],
    "host_to_all_devices?": {"*?": {"bytes_per_s": schema.RATE}},
    "disk?": {"cold_bytes_per_s?": schema.RATE},
}


@dataclasses.dataclass(frozen=True)
class MachineRows:
    """Rows of `sharding.cost.Problem` that describe the machine.

    flops_per_s, memory_bytes_per_s   of the fastest device, to which speeds are relative.
    notes   what was assumed because it was not measured.
    """

    devices: tuple[DeviceCost, ...]
    hosts: tuple[HostCost, ...]
    link_bytes_per_s: tuple[tuple[int, ...], ...]
    peers: tuple[PeerLink, ...]
    upload_overhead_ns: int
    flops_per_s: int
    memory_bytes_per_s: int
    notes: tuple[str, ...]


def read_machine(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a machine file; raises PlanError if it is none."""
    where = os.fspath(path)
    advice = "make it with python -m ds4jax.cli.probe --out=FILE"
    try:
        with open(path, encoding="utf-8") as file:
            machine = json.load(file)
    except FileNotFoundError:
        raise PlanError(f"{where} does not exist: {advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{where} cannot be read as a machine file ({error}): {advice}") from None
    version = machine.get("schema") if isinstance(machine, dict) else None
    if version != 1:
        raise PlanError(f"{where} has schema {version!r}, expected 1: {advice}")
    missing = [key for key in ("devices", "links", "platform") if key not in machine]
    if missing or not machine["devices"]:
        raise PlanError(f"{where} has no {missing or ['devices']}: {advice}")
    wrong = schema.problem(machine, _FORM)
    ids = [row["id"] for row in machine["devices"]] if wrong is None else []
    if len(set(ids)) < len(ids):
        wrong = f"devices have the ids {ids}, expected different ones"
    if wrong is not None:
        raise PlanError(f"{where}: {wrong}: mend it, or {advice}")
    return machine


def machine_rows(
    machine: Mapping[str, Any],
    *,
    memory_bytes: Sequence[int] | None = None,
    expert_bytes: int,
    dtype: str = "bfloat16",
) -> MachineRows:
    """Planner rows of all devices of a probed machine, which is one host.

    memory_bytes  usable bytes per device; what the backend reported by default. Take off what the
                  run-time needs for itself.
    expert_bytes  size of an upload, which decides what a small upload costs beside its bytes.
    dtype         of the products that speeds are compared by.

    Raises PlanError if the memory of a device is not known, or its products were not measured.
    """
    notes: list[str] = []
    rows = machine["devices"]
    if memory_bytes is None:
        memory_bytes = [int(row.get("memory_bytes") or 0) for row in rows]
    if len(memory_bytes) != len(rows) or min(memory_bytes) < 1:
        raise PlanError(
            f"memory of the {len(rows)} devices is {list(memory_bytes)}, expected a size for each: "
            "give memory_bytes where the backend does not report it"
        )
    flops = [int(row["matmul_flops_per_s"].get(dtype) or 0) for row in rows]
    memory_rates = [int(row.get("memory_bytes_per_s") or 0) for row in rows]
    if min(flops) < 1 or min(memory_rates) < 1:
        raise PlanError(
            f"{dtype} products and memory rates of the devices are {flops} and {memory_rates}: "
            "probe the machine again, both have to be measured"
        )
    ladders = [_upload_ladder(row, notes) for row in rows]
    links = _level([max(_rate(step) for step in ladder) for ladder in ladders])
    flops = _level(flops)
    devices = tuple(
        DeviceCost(
            name=f"{machine['platform']}:{row['id']}",
            memory_bytes=nbytes,
            host_link_bytes_per_s=link,
            speed_permille=max(1, round(1000 * rate / max(flops))),
        )
        for row, nbytes, link, rate in zip(rows, memory_bytes, links, flops, strict=True)
    )
    together = machine.get("host_to_all_devices") or {}
    together = together.get("registered") or together.get("pageable")
    limit = 0
    if together is not None and together["bytes_per_s"] < _SHARED * sum(links):
        limit = int(together["bytes_per_s"])
    matrix, peers = _links(machine, expert_bytes, notes)
    overheads = [_overhead_ns(ladder, expert_bytes) for ladder in ladders]
    return MachineRows(
        devices=devices,
        hosts=(HostCost("host", limit),),
        link_bytes_per_s=matrix,
        peers=peers,
        upload_overhead_ns=max(overheads),
        flops_per_s=max(flops),
        memory_bytes_per_s=max(memory_rates),
        notes=tuple(dict.fromkeys(notes)),
    )


def _level(rates: Sequence[int]) -> list[int]:
    """The same rates with those that differ by noise made equal."""
    levels: dict[int, int] = {}
    lowest = 0
    for rate in sorted(rates):
        if rate > lowest * _NOISE:
            lowest = rate
        levels[rate] = lowest
    return [levels[rate] for rate in rates]


def _rate(step: Mapping[str, Any]) -> int:
    # Whole, whatever an edited file has: rows of the planner are integers.
    return int(step.get("in_flight_bytes_per_s") or step["bytes_per_s"])


def _upload_ladder(row: Mapping[str, Any], notes: list[str]) -> list[dict[str, int]]:
    measured = row.get("host_to_device") or {}
    for kind in ("registered", "pageable"):
        if measured.get(kind):
            if kind == "pageable":
                notes.append("uploads are priced from pageable memory: nothing else was measured")
            return measured[kind]
    notes.append("uploads are priced at the memory rate of the device: no host link was measured")
    return [{"bytes": 1 << 30, "bytes_per_s": row["memory_bytes_per_s"]}]


def _overhead_ns(ladder: Sequence[Mapping[str, Any]], nbytes: int) -> int:
    """What one upload of about `nbytes` takes longer than its bytes do at the best rate."""
    step = min(ladder, key=lambda step: abs(step["bytes"] - nbytes))
    best = max(_rate(step) for step in ladder)
    size = int(step["bytes"])
    return transfer_ns(size, _rate(step)) - transfer_ns(size, best)


def _links(
    machine: Mapping[str, Any], expert_bytes: int, notes: list[str]
) -> tuple[tuple[tuple[int, ...], ...], tuple[PeerLink, ...]]:
    """Hand-offs at the best rate of a link, experts at the rate of their size."""
    ids = [row["id"] for row in machine["devices"]]
    if len(ids) == 1:
        return uniform_links(1, 1), ()
    ladders = {(link["source"], link["target"]): link["ladder"] for link in machine["links"]}
    pairs = [(i, j) for i in range(len(ids)) for j in range(len(ids)) if i != j]
    found = {pair: ladders.get((ids[pair[0]], ids[pair[1]])) for pair in pairs}
    known = [pair for pair in pairs if found[pair]]
    for i, j in pairs:
        if not found[i, j]:
            notes.append(f"link {ids[i]} to {ids[j]} was not measured: priced at 1 GB/s")
    best = _level([max(_rate(step) for step in found[pair] or ()) for pair in known])
    at_size = _level(
        [
            _rate(min(found[pair] or (), key=lambda step: abs(step["bytes"] - expert_bytes)))
            for pair in known
        ]
    )
    rates = dict(zip(known, best, strict=True))
    matrix = tuple(
        tuple(1 if i == j else rates.get((i, j), 1_000_000_000) for j in range(len(ids)))
        for i in range(len(ids))
    )
    # Experts that a peer holds travel from the peer to the owner.
    peers = tuple(
        PeerLink(owner=target, peer=source, bytes_per_s=rate)
        for (source, target), rate in zip(known, at_size, strict=True)
    )
    return matrix, peers
