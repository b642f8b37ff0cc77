"""NUMA nodes: which there are, which one a device is attached to, where a layer's memory goes."""

import ctypes
import dataclasses
import logging
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)

Policy = Literal["auto", "bind", "interleave", "off"]
POLICIES: tuple[Policy, ...] = ("auto", "bind", "interleave", "off")

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers of Linux
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3
# Node memory that is never planned for: the kernel and other processes need room as well.
_RESERVE_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Node:
    """A NUMA node with its free memory and its distance to every node (10 is local)."""

    number: int
    free_bytes: int
    distances: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Topology:
    """The nodes of a machine; empty where the system tells nothing."""

    nodes: tuple[Node, ...] = ()

    def nearest(self, to: int | None) -> tuple[Node, ...]:
        """Nodes by distance from node `to`, then by number; by free memory when `to` is unknown."""
        origin = {node.number: node for node in self.nodes}.get(-1 if to is None else to)
        if origin is None:
            return tuple(sorted(self.nodes, key=lambda node: (-node.free_bytes, node.number)))
        rank = {node.number: index for index, node in enumerate(self.nodes)}

        def distance(node: Node) -> int:
            if len(origin.distances) == len(self.nodes):
                return origin.distances[rank[node.number]]
            return 10 if node is origin else 20

        return tuple(sorted(self.nodes, key=lambda node: (distance(node), node.number)))


def read_topology(root: str | Path = "/sys") -> Topology:
    """The topology that a Linux system describes below `root`; empty when it has none."""
    folder = Path(root) / "devices" / "system" / "node"
    numbers = sorted(
        int(found[1])
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (found := re.fullmatch(r"node(\d+)", path.name))
    )
    nodes = []
    for number in numbers:
        try:
            memory = (folder / f"node{number}" / "meminfo").read_text()
        except OSError:
            continue
        # Page cache counts as used in MemFree, yet makes room when memory is asked for.
        sizes = {
            key: int(value) * 1024
            for key, value in re.findall(r"(MemFree|Inactive\(file\)):\s+(\d+) kB", memory)
        }
        if "MemFree" not in sizes:
            continue
        try:
            words = (folder / f"node{number}" / "distance").read_text().split()
        except OSError:
            words = []
        nodes.append(Node(number, sum(sizes.values()), tuple(map(int, words))))
    return Topology(tuple(nodes))


def device_node(pci_address: str | None, root: str | Path = "/sys") -> int | None:
    """The node that a PCI device (domain:bus:device.function) is attached to, None if unknown."""
    if pci_address is None:
        return None
    path = Path(root) / "bus" / "pci" / "devices" / pci_address.lower() / "numa_node"
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    # Machines without NUMA information say -1.
    return number if number >= 0 else None


def place(
    block_bytes: Sequence[int], topology: Topology, policy: Policy, near: int | None
) -> tuple[tuple[int, ...], ...]:
    """Nodes for each block of memory: () leaves it to the system, several mean interleaved pages.

    block_bytes  sizes, in order; 0 for blocks that do not exist
    near         the device's node
    policy       "off": no placement. "interleave": all nodes. "bind": the device's node alone,
                 ValueError when it is unknown or too small. "auto": the device's node while it
                 has room, then the next ones by distance; no placement on machines with one
                 node, without information, or when the nodes together are too small.
    """
    if policy not in POLICIES:
        raise ValueError(f"NUMA policy is {policy!r}, expected one of {', '.join(POLICIES)}")
    nowhere: tuple[tuple[int, ...], ...] = ((),) * len(block_bytes)
    numbers = tuple(node.number for node in topology.nodes)
    if policy == "bind":
        return _bind_all(block_bytes, topology, near)
    if policy == "off" or len(numbers) < 2:
        return nowhere
    if policy == "interleave":
        return (numbers,) * len(block_bytes)
    rooms = [(node.number, _usable(node)) for node in topology.nearest(near)]
    placed: list[tuple[int, ...]] = []
    for nbytes in block_bytes:
        while rooms and rooms[0][1] < nbytes:
            rooms.pop(0)
        if not rooms:
            log.warning(
                "numa: %d bytes do not fit the free memory of nodes %s, placement is left to the "
                "system",
                sum(block_bytes),
                list(numbers),
            )
            return nowhere
        number, room = rooms[0]
        rooms[0] = (number, room - nbytes)
        placed.append((number,))
    return tuple(placed)


def _bind_all(
    block_bytes: Sequence[int], topology: Topology, near: int | None
) -> tuple[tuple[int, ...], ...]:
    node = {node.number: node for node in topology.nodes}.get(-1 if near is None else near)
    if node is None:
        raise ValueError(
            f"NUMA policy bind needs the device's node, the system says {near} and has nodes "
            f"{[node.number for node in topology.nodes]}: use auto or off"
        )
    if sum(block_bytes) > _usable(node):
        raise ValueError(
            f"NUMA policy bind: {sum(block_bytes)} bytes do not fit node {node.number}, which has "
            f"{_usable(node)} usable: use auto or interleave"
        )
    return ((node.number,),) * len(block_bytes)


def _usable(node: Node) -> int:
    return int(node.free_bytes * (1 - _RESERVE_SHARE))


def bind(address: int, nbytes: int, nodes: Sequence[int]) -> bool:
    """Asks the system to take the pages of a range from `nodes`, interleaved when several.

    Has to come before the memory is first written. Returns whether the system agreed; a refusal
    (containers often forbid it) costs speed, not correctness, and is logged.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not hasattr(ctypes, "CDLL"):
        log.warning("numa: no memory binding on %s", platform.machine())
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    mask = sum(1 << node for node in nodes)
    words = (ctypes.c_ulong * (1 + max(nodes) // 64))()
    for index in range(len(words)):
        words[index] = mask >> (64 * index) & (2**64 - 1)
    mode = _MPOL_BIND if len(nodes) == 1 else _MPOL_INTERLEAVE
    status = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(mode),
        words,
        ctypes.c_ulong(64 * len(words) + 1),
        ctypes.c_uint(0),
    )
    if status != 0:
        error = ctypes.get_errno()
        log.warning("numa: binding %d bytes to nodes %s failed, errno %d", nbytes, nodes, error)
    return status == 0
