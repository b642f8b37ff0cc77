"""The machine that a run is planned for: from the machine file, or from what is known without one.

The file is what `python -m ds4jax.cli.probe` writes. Without it rates are those of an H200 and a
PCIe 5.0 link, which orders plans well and predicts times badly on anything else.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ds4jax import admission, costs
from ds4jax.config import ConfigError
from ds4jax.experts import LINK_BYTES_PER_S
from ds4jax.run_config import RunConfig
from sharding import schema
from sharding.cost import DeviceCost, HostCost, PeerLink, PlanError, uniform_links
from sharding.machine import machine_rows, read_machine

_DISK_BYTES_PER_S = 2_000_000_000  # of a file that is not in the page cache, until it is measured
_UPLOAD_NS = 50_000  # of an upload, beside its bytes, until it is measured
_PEER_BYTES_PER_S = 50_000_000_000  # between devices of one host, until it is measured
_NETWORK_BYTES_PER_S = 10_000_000_000  # between hosts

_PART = {
    "median_s": schema.POSITIVE,
    "temp_bytes?": schema.COUNT,
    "matrix_flops": schema.AMOUNT,
    "float32_flops": schema.AMOUNT,
    "nbytes": schema.POSITIVE,
}
# What is read of the layers of a machine file.
_LAYERS = {
    "device": schema.TEXT,
    "numerics?": schema.TEXT,
    "rates": {field.name: schema.RATE for field in dataclasses.fields(costs.Rates)},
    "widths": {"*": schema.COUNT},
    "rows": [
        {
            "kind": schema.TEXT,
            "tokens": schema.ONE_OR_MORE,
            "position": schema.COUNT,
            "numerics?": schema.TEXT,
            "parts": dict.fromkeys(costs.PARTS, _PART),
        }
    ],
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What plans know of a machine; all devices are of one host.

    devices       with the memory that a run may use; indices count these
    host_bytes    of host memory for streamed experts
    rates, table  of devices with speed 1000
    one_memory    host and devices share one memory: streaming makes nothing fit
    peers         links by which a device may serve another one as an expert tier
    in_order      every device has a stage, in the order of the devices
    notes         what was assumed
    """

    devices: tuple[DeviceCost, ...]
    hosts: tuple[HostCost, ...]
    link_bytes_per_s: tuple[tuple[int, ...], ...]
    upload_overhead_ns: int
    host_bytes: int
    disk_bytes_per_s: int
    rates: costs.Rates
    table: costs.LayerTable
    one_memory: bool = False
    peers: tuple[PeerLink, ...] = ()
    in_order: bool = False
    notes: tuple[str, ...] = ()

    def chosen(self, indices: Sequence[int]) -> "Machine":
        """The same machine with these devices only, in this order; one may come several times.

        A device that comes n times is n devices of an nth of the memory: stages share it.
        """
        return dataclasses.replace(
            self,
            devices=tuple(
                dataclasses.replace(
                    self.devices[i], memory_bytes=self.devices[i].memory_bytes // indices.count(i)
                )
                for i in indices
            ),
            link_bytes_per_s=tuple(
                tuple(
                    int(self.rates.bytes_per_s) if i == j else self.link_bytes_per_s[i][j]
                    for j in indices
                )
                for i in indices
            ),
            peers=tuple(
                dataclasses.replace(link, owner=owner, peer=peer)
                for link in self.peers
                for owner, i in enumerate(indices)
                for peer, j in enumerate(indices)
                if (link.owner, link.peer) == (i, j) and indices.count(j) == 1
            ),
        )

    def serving(self, *, holds: bool, relays: bool) -> "Machine":
        """The same machine with neighbours that serve in these ways only."""
        links = (dataclasses.replace(link, holds=holds, relays=relays) for link in self.peers)
        return dataclasses.replace(self, peers=tuple(links) if holds or relays else ())


def local_machine(
    config: RunConfig,
    devices: Sequence[jax.Device],
    item_bytes: int,
    host_bytes: int | None = None,
    device_bytes: int | None = None,
) -> Machine:
    """The machine with `devices` for a run that starts now.

    item_bytes    of one expert, which is what uploads are measured at
    host_bytes    that the run may use; None for what is free
    device_bytes  of every device; None for what is free on each
    Raises ConfigError when the machine file is of other devices.
    """
    free = [_usable_bytes(device) if device_bytes is None else device_bytes for device in devices]
    budget = config.memory.device_bytes
    usable = [each if budget is None else min(each, budget) for each in free]
    on_cpu = devices[0].platform == "cpu"
    host = admission.host_bytes() if host_bytes is None else host_bytes
    one_memory = on_cpu and budget is None
    if config.machine.file is None:
        names = [f"{device.platform}:{device.id}" for device in devices]
        return _assumed(names, usable, host, one_memory)
    record = read_machine(config.machine.file)
    known = [row["id"] for row in record["devices"]]
    wanted = [device.id for device in devices]
    kinds = {row["id"]: row["kind"] for row in record["devices"]}
    for device in devices:
        if kinds.get(device.id) != device.device_kind:
            raise ConfigError(
                f"config.machine.file: {config.machine.file} knows the devices {kinds}, this "
                f"machine has {device.device_kind} {device.id}: probe it with python -m "
                "ds4jax.cli.probe --out=FILE"
            )
    limits = [record["devices"][known.index(each)].get("memory_bytes") for each in wanted]
    usable = [min(each, int(limit or each)) for each, limit in zip(usable, limits, strict=True)]
    q1 = config.numerics.resolve().q1
    return _from_record(record, wanted, usable, host, item_bytes, one_memory, q1=q1)


@dataclasses.dataclass(frozen=True)
class Table:
    """What the other processes of a run have to know of the devices of one: see `Machine`.

    host  its address; processes of one host share the limits of it
    """

    host: str
    devices: tuple[DeviceCost, ...]
    link_limit_bytes_per_s: int
    link_bytes_per_s: tuple[tuple[int, ...], ...]
    upload_overhead_ns: int
    host_bytes: int
    disk_bytes_per_s: int
    rates: costs.Rates
    one_memory: bool

    @classmethod
    def of(cls, machine: Machine, host: str) -> "Table":
        """The rows of this process."""
        return cls(
            host,
            machine.devices,
            machine.hosts[0].bytes_per_s,
            machine.link_bytes_per_s,
            machine.upload_overhead_ns,
            machine.host_bytes,
            machine.disk_bytes_per_s,
            machine.rates,
            machine.one_memory,
        )


def joined_machine(tables: Sequence[Table], layers: costs.LayerTable) -> Machine:
    """The devices of all processes in their order, of which each has a stage.

    layers  what parts of layers take, as all processes know it
    """
    fastest = max(tables, key=lambda table: table.rates.matrix_flops_per_s)
    hosts = list(dict.fromkeys(table.host for table in tables))
    limits = {table.host: table.link_limit_bytes_per_s for table in tables}
    devices: list[DeviceCost] = []
    owners: list[tuple[int, int]] = []
    for rank, table in enumerate(tables):
        speed = table.rates.matrix_flops_per_s / fastest.rates.matrix_flops_per_s
        for index, device in enumerate(table.devices):
            owners.append((rank, index))
            devices.append(
                dataclasses.replace(
                    device,
                    name=f"{device.name} of process {rank}",
                    speed_permille=max(round(device.speed_permille * speed), 1),
                    host=hosts.index(table.host),
                )
            )

    def link(source: tuple[int, int], target: tuple[int, int]) -> int:
        (rank, i), (other, j) = source, target
        if rank == other:
            return tables[rank].link_bytes_per_s[i][j]
        near = tables[rank].host == tables[other].host
        return _PEER_BYTES_PER_S if near else _NETWORK_BYTES_PER_S

    return Machine(
        devices=tuple(devices),
        hosts=tuple(HostCost(host, limits[host]) for host in hosts),
        link_bytes_per_s=tuple(tuple(link(a, b) for b in owners) for a in owners),
        upload_overhead_ns=max(table.upload_overhead_ns for table in tables),
        host_bytes=sum(table.host_bytes for table in tables),
        disk_bytes_per_s=min(table.disk_bytes_per_s for table in tables),
        rates=fastest.rates,
        table=layers,
        one_memory=any(table.one_memory for table in tables),
        in_order=True,
    )


def probed(config: RunConfig, device: jax.Device) -> bool:
    """Whether the machine file has this device."""
    if config.machine.file is None:
        return False
    rows = read_machine(config.machine.file)["devices"]
    return (device.id, device.device_kind) in [(row["id"], row["kind"]) for row in rows]


def planned_machine(
    config: RunConfig, item_bytes: int, devices: int | None, host_bytes: int | None
) -> Machine:
    """A machine that need not be this one, with at least `devices` devices where that is given.

    Its devices are those of the machine file; without one as many as asked for, like the first one
    here. Memory that neither the file nor config.memory.device_bytes tells is what is free here.
    """
    local, budget = jax.local_devices(), config.memory.device_bytes
    host = admission.host_bytes() if host_bytes is None else host_bytes
    if config.machine.file is None:
        names = [f"{local[0].platform}:{i}" for i in range(devices or len(local))]
        one_memory = local[0].platform == "cpu" and budget is None
        free = _usable_bytes(local[0]) if budget is None else budget
        return _assumed(names, [free] * len(names), host, one_memory)
    record = read_machine(config.machine.file)
    ids = [row["id"] for row in record["devices"]]
    memory = []
    for row in record["devices"]:
        limit = row.get("memory_bytes")
        if limit is None and budget is None:
            raise ConfigError(
                f"config.machine.file: {config.machine.file} does not tell the memory of device "
                f"{row['id']}: set config.memory.device_bytes"
            )
        memory.append(int(min(limit or budget or 0, budget or limit or 0)))
    q1 = config.numerics.resolve().q1
    return _from_record(record, ids, memory, host, item_bytes, False, q1=q1)


def _usable_bytes(device: jax.Device) -> int:
    """What plans may fill: the allocator of a GPU leaves gaps between arrays."""
    free = admission.device_bytes(device)
    return free if device.platform == "cpu" else free - free // 100


def _assumed(names: Sequence[str], memory: Sequence[int], host: int, one_memory: bool) -> Machine:
    link = int(LINK_BYTES_PER_S)
    return Machine(
        devices=tuple(
            DeviceCost(name, nbytes, link) for name, nbytes in zip(names, memory, strict=True)
        ),
        hosts=(HostCost(),),
        link_bytes_per_s=uniform_links(len(names), _PEER_BYTES_PER_S),
        upload_overhead_ns=_UPLOAD_NS,
        host_bytes=host,
        disk_bytes_per_s=_DISK_BYTES_PER_S,
        rates=costs.H200,
        table=costs.measured_h200(),
        one_memory=one_memory,
        notes=(
            "there is no machine file: times are those of an H200 behind a link of "
            f"{LINK_BYTES_PER_S / 1e9:.0f} GB/s, and devices without a stage stay idle",
        ),
    )


def _from_record(
    record: Mapping[str, Any],
    ids: Sequence[int],
    memory: Sequence[int],
    host: int,
    item_bytes: int,
    one_memory: bool,
    *,
    q1: bool,
) -> Machine:
    by_id = {row["id"]: row for row in record["devices"]}
    part = {**record, "devices": [by_id[each] for each in ids]}
    rows = machine_rows(part, memory_bytes=memory, expert_bytes=item_bytes)
    notes = list(rows.notes)
    disk = (record.get("disk") or {}).get("cold_bytes_per_s")
    if disk is None:
        notes.append(f"the disk was not measured: priced at {_DISK_BYTES_PER_S / 1e9:.0f} GB/s")
    float32 = [row["matmul_flops_per_s"].get("float32") or 0 for row in part["devices"]]
    rates = costs.Rates(
        rows.flops_per_s, max(float32) or rows.flops_per_s / 12, rows.memory_bytes_per_s
    )
    if record.get("layers") is not None:
        table = _layer_table(record["layers"])
        if not table.measured(q1=q1):
            notes.append(
                f"layers were timed as {table.numerics} only: other products than those of this run"
            )
        # Layers were timed on the first device; rates are those of the fastest one.
        first = record["devices"][0]
        if first["id"] in ids:
            factor = 1000 / rows.devices[list(ids).index(first["id"])].speed_permille
        else:
            measured = first["matmul_flops_per_s"].get("bfloat16")
            factor = rows.flops_per_s / measured if measured else 1.0
        rates = _scaled(table.rates, factor)
    else:
        table = costs.measured_h200()
        notes.append("no layer was timed: shares of the floor are those of an H200")
    return Machine(
        devices=rows.devices,
        hosts=rows.hosts,
        link_bytes_per_s=rows.link_bytes_per_s,
        upload_overhead_ns=rows.upload_overhead_ns,
        host_bytes=host,
        disk_bytes_per_s=int(disk or _DISK_BYTES_PER_S),
        rates=rates,
        table=table,
        one_memory=one_memory,
        peers=rows.peers,
        notes=tuple(notes),
    )


def _layer_table(record: Any) -> costs.LayerTable:
    if (wrong := schema.problem(record, _LAYERS, "layers")) is not None:
        raise PlanError(
            f"config.machine.file: {wrong}: mend it, or make the file with python -m "
            "ds4jax.cli.probe --out=FILE --model=MODEL.json"
        )
    return costs.LayerTable(record, "config.machine.file")


def _scaled(rates: costs.Rates, factor: float) -> costs.Rates:
    return costs.Rates(*(value * factor for value in dataclasses.astuple(rates)))
