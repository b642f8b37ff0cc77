"""Copies activations to the next stage: within a process, and between processes.

Within a process a hand-off is `copy_tree`. Between processes it is a `Sender` and a `Receiver`,
joined by one TCP connection that carries a header per unit (its id, the structure of the tree, the
shapes and dtypes) and an acknowledgement per unit. The arrays themselves take one of four ways:

    "socket"      raw bytes over the same connection. Works everywhere, one copy on either host.
    "transfer"    `jax.experimental.transfer`: the producer offers the arrays under the unit's id,
                  the consumer pulls them to its device.
    "permute"     `jax.lax.ppermute` over the two devices of the link, under `jax.distributed`: NCCL
                  on CUDA, Gloo on CPUs, any number of processes. Either device waits in its queue
                  of programs until the other one has come to the exchange.
    "device_put"  `jax.device_put` to a device of the other process, under `jax.distributed`. On
                  CUDA this is NCCL; keep it and collectives of one process on one thread. Only
                  for runs of two processes: JAX numbers the transfers of a process, whoever the
                  peer is, and both sides have to arrive at the same number.

Ids make the order explicit: request << 32 | step << 8 | stage. The header is sent after the arrays
were offered, so a pull never waits for an offer; a unit is acknowledged when its arrays are ready
on the consumer's device, and the producer offers at most `depth` units that are not acknowledged,
so nothing is offered that is not pulled. A peer that dies closes the connection (or stops answering
keep-alive probes, within half a minute), one that hangs is noticed after the timeout of the link:
the other side raises HandoffError.
"""

import collections
import contextlib
import dataclasses
import json
import socket
import struct
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

_LENGTH = struct.Struct("!Q")
_STEPS, _STAGES, _REQUESTS = 1 << 24, 1 << 8, 1 << 31


class HandoffError(RuntimeError):
    """A hand-off between processes failed: names the peer and the unit."""


def copy_tree(tree: Any, device: jax.Device) -> Any:
    """The same pytree with its JAX arrays copied to `device`; returns before the copies are done.

    Arrays that are there already are copied too: the result never shares a buffer with `tree`, so
    either side may donate. Leaves that are no JAX arrays are passed on.
    """
    leaves, treedef = jax.tree.flatten(tree)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    copies = jax.device_put([leaves[i] for i in at], device, may_alias=False)
    for i, copy in zip(at, copies, strict=True):
        leaves[i] = copy
    return jax.tree.unflatten(treedef, leaves)


def transfer_id(request: int, step: int, stage: int) -> int:
    """Id of the hand-off of unit `step` of `request` into `stage`; raises ValueError if too big."""
    for name, value, limit in (
        ("request", request, _REQUESTS),
        ("step", step, _STEPS),
        ("stage", stage, _STAGES),
    ):
        if not 0 <= value < limit:
            raise ValueError(f"{name} is {value}, expected 0..{limit - 1}")
    return request << 32 | step << 8 | stage


class Payload(Protocol):
    """A way for arrays to get from one process to the other. One object per end of a link."""

    def offer(self, link: socket.socket, uid: int, arrays: list[jax.Array]) -> dict[str, Any]:
        """Starts sending; what it returns is added to the header."""

    def push(self, link: socket.socket, arrays: list[jax.Array]) -> None:
        """Called after the header was sent."""

    def take(
        self,
        link: socket.socket,
        uid: int,
        header: dict[str, Any],
        specs: list[jax.ShapeDtypeStruct],
        device: jax.Device,
    ) -> list[jax.Array]:
        """The arrays on `device`, not necessarily ready."""


class SocketPayload:
    """Raw bytes over the connection of the link."""

    def offer(self, link: socket.socket, uid: int, arrays: list[jax.Array]) -> dict[str, Any]:
        return {}

    def push(self, link: socket.socket, arrays: list[jax.Array]) -> None:
        for array in arrays:
            host = np.ascontiguousarray(np.asarray(array))
            link.sendall(memoryview(host.reshape(-1).view(np.uint8)))

    def take(
        self,
        link: socket.socket,
        uid: int,
        header: dict[str, Any],
        specs: list[jax.ShapeDtypeStruct],
        device: jax.Device,
    ) -> list[jax.Array]:
        arrays = []
        for spec in specs:
            # A fresh buffer each time: the CPU backend keeps using it instead of copying.
            raw = np.empty(spec.size * spec.dtype.itemsize, np.uint8)
            _receive_into(link, memoryview(raw))
            arrays.append(jax.device_put(raw.view(spec.dtype).reshape(spec.shape), device))
        return arrays


class TransferPayload:
    """`jax.experimental.transfer`. One object (one server) may serve all links of a process."""

    def __init__(self, device: jax.Device, host: str = "127.0.0.1") -> None:
        """Starts a transfer server for the backend of `device`, reachable under `host`."""
        self._server = transfer.start_transfer_server(device.client, f"{host}:0", [f"{host}:0"])
        self._connections: dict[str, Any] = {}

    def offer(self, link: socket.socket, uid: int, arrays: list[jax.Array]) -> dict[str, Any]:
        self._server.await_pull(uid, arrays)
        return {"server": self._server.address()}

    def push(self, link: socket.socket, arrays: list[jax.Array]) -> None:
        pass  # the consumer pulls

    def take(
        self,
        link: socket.socket,
        uid: int,
        header: dict[str, Any],
        specs: list[jax.ShapeDtypeStruct],
        device: jax.Device,
    ) -> list[jax.Array]:
        address = header["server"]
        if address not in self._connections:
            self._connections[address] = self._server.connect(address)
        placed = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=SingleDeviceSharding(device))
            for s in specs
        ]
        return self._connections[address].pull(uid, placed)


class PermutePayload:
    """A collective permute from `source` to `target`, of which one belongs to this process.

    Both processes run the same program, which exists once per shape, for one array after the other:
    each end holds another array of that size meanwhile. The links of a chain cannot block each
    other: the producer enters an exchange whatever its own producer does.
    """

    def __init__(self, source: jax.Device, target: jax.Device) -> None:
        local = source.process_index == jax.process_index()
        self._here = source if local else target
        mesh = Mesh(np.asarray([source, target]), ("link",))
        self._sharding = NamedSharding(mesh, P("link"))
        self._permute = jax.jit(
            jax.shard_map(
                lambda array: jax.lax.ppermute(array, "link", [(0, 1)]),
                mesh=mesh,
                in_specs=P("link"),
                out_specs=P("link"),
            )
        )

    def offer(self, link: socket.socket, uid: int, arrays: list[jax.Array]) -> dict[str, Any]:
        if any(array.ndim == 0 for array in arrays):
            raise ValueError("an array without dimensions cannot be permuted: expected at least 1")
        return {}

    def push(self, link: socket.socket, arrays: list[jax.Array]) -> None:
        for array in arrays:
            self._exchange(array)

    def take(
        self,
        link: socket.socket,
        uid: int,
        header: dict[str, Any],
        specs: list[jax.ShapeDtypeStruct],
        device: jax.Device,
    ) -> list[jax.Array]:
        arrays = [
            self._exchange(jnp.zeros(spec.shape, spec.dtype, device=self._here)) for spec in specs
        ]
        return jax.device_put(arrays, device)

    def _exchange(self, array: jax.Array) -> jax.Array:
        """What this end gets for `array`: the source zeros, the target that of the source."""
        whole = jax.make_array_from_single_device_arrays(
            (2 * array.shape[0], *array.shape[1:]),
            self._sharding,
            [jax.device_put(array, self._here)],
        )
        return self._permute(whole).addressable_data(0)


@dataclasses.dataclass(frozen=True)
class DevicePutPayload:
    """`jax.device_put` from `source` to `target`, of which one belongs to another process.

    Raises ValueError in a run of more than two processes: a middle stage would wait forever.
    """

    source: jax.Device
    target: jax.Device

    def __post_init__(self) -> None:
        if jax.process_count() > 2:
            raise ValueError(
                f"hand-off by device_put in a run of {jax.process_count()} processes: expected at "
                "most 2; use PermutePayload, TransferPayload or SocketPayload"
            )

    def offer(self, link: socket.socket, uid: int, arrays: list[jax.Array]) -> dict[str, Any]:
        return {}

    def push(self, link: socket.socket, arrays: list[jax.Array]) -> None:
        jax.device_put(jax.device_put(arrays, self.source), SingleDeviceSharding(self.target))

    def take(
        self,
        link: socket.socket,
        uid: int,
        header: dict[str, Any],
        specs: list[jax.ShapeDtypeStruct],
        device: jax.Device,
    ) -> list[jax.Array]:
        # The consumer's view of an array whose only shard lives in the producer's process.
        remote = [
            jax.make_array_from_single_device_arrays(
                s.shape, SingleDeviceSharding(self.source), [], dtype=s.dtype
            )
            for s in specs
        ]
        return jax.device_put(remote, SingleDeviceSharding(self.target))


class _End:
    """What both ends of a link share."""

    def __init__(
        self,
        link: socket.socket,
        payload: Payload,
        request: int,
        stage: int,
        timeout_s: float | None,
    ) -> None:
        self._link, self._payload = link, payload
        self._request, self._stage, self._timeout_s = request, stage, timeout_s
        link.settimeout(timeout_s)
        host, port = link.getpeername()[:2]
        self._peer = f"{host}:{port}"
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """Closes the connection, and unblocks a thread that waits on it. May be called again."""
        with contextlib.suppress(OSError):  # the peer may have been first
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _failed(self, what: str, step: int, error: Exception) -> HandoffError:
        told = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError):
            told = f"the peer lives, and nothing came from it within {self._timeout_s} s"
        return HandoffError(
            f"{what} unit {step} of request {self._request}, stage {self._stage}, peer "
            f"{self._peer}: {told}"
        )


class Sender(_End):
    """The producer's end: `send` units in order, then `flush`."""

    def __init__(
        self,
        link: socket.socket,
        payload: Payload,
        *,
        stage: int,
        request: int = 0,
        depth: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        """stage is the receiving stage. Usually made by `connect`.

        timeout_s  longest wait for an acknowledgement; None waits as long as the peer lives
        """
        super().__init__(link, payload, request, stage, timeout_s)
        self._depth = depth
        self._open: collections.deque[tuple[int, int, list[jax.Array]]] = collections.deque()

    def send(self, step: int, tree: Any) -> None:
        """Sends a unit; waits while `depth` units are not acknowledged.

        The tree may hold dicts (with string keys), lists, tuples, None, JAX or NumPy arrays, and
        Python numbers and strings. Raises HandoffError if the peer is gone.
        """
        uid = transfer_id(self._request, step, self._stage)
        arrays: list[jax.Array] = []
        structure = _describe(tree, arrays)
        try:
            self._await_acknowledged(self._depth - 1)
            header = self._payload.offer(self._link, uid, arrays) if arrays else {}
            header |= {
                "id": uid,
                "tree": structure,
                "arrays": [[array.dtype.name, list(array.shape)] for array in arrays],
            }
            _send_message(self._link, json.dumps(header).encode())
            if arrays:
                self._payload.push(self._link, arrays)
        except (OSError, EOFError, ValueError) as error:
            raise self._failed("sending", step, error) from error
        self._open.append((uid, step, arrays))

    def flush(self) -> None:
        """Waits until the peer has everything. Raises HandoffError if it is gone."""
        step = self._open[-1][1] if self._open else -1
        try:
            self._await_acknowledged(0)
        except (OSError, EOFError, ValueError) as error:
            raise self._failed("waiting for", step, error) from error

    def wait_closed(self, timeout_s: float | None = None) -> None:
        """Waits until the peer has closed its end; acknowledgements are dropped.

        timeout_s  longest wait for a sign of it; None for that of the link
        """
        with contextlib.suppress(OSError):
            self._link.settimeout(self._timeout_s if timeout_s is None else timeout_s)
            while self._link.recv(1 << 12):
                pass

    def _await_acknowledged(self, open_units: int) -> None:
        while len(self._open) > open_units:
            raw = bytearray(_LENGTH.size)
            _receive_into(self._link, memoryview(raw))
            (uid,) = _LENGTH.unpack(raw)
            if uid != self._open[0][0]:
                raise ValueError(f"id {uid:#x} acknowledged, expected {self._open[0][0]:#x}")
            self._open.popleft()


class Receiver(_End):
    """The consumer's end: `receive` units in order."""

    def __init__(
        self,
        link: socket.socket,
        payload: Payload,
        device: jax.Device,
        *,
        stage: int,
        request: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """stage is this stage. Usually made by `Listener.accept`.

        timeout_s  longest wait for a unit; None waits as long as the peer lives
        """
        super().__init__(link, payload, request, stage, timeout_s)
        self._device = device

    def receive(self, step: int) -> Any:
        """The tree of unit `step`, arrays ready on the device.

        Raises HandoffError if the peer is gone or sent another unit.
        """
        uid = transfer_id(self._request, step, self._stage)
        try:
            header = json.loads(_receive_message(self._link))
            if header["id"] != uid:
                raise ValueError(f"id {header['id']:#x} arrived, expected {uid:#x}")
            specs = [
                jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(name))
                for name, shape in header["arrays"]
            ]
            arrays = []
            if specs:
                arrays = self._payload.take(self._link, uid, header, specs, self._device)
            jax.block_until_ready(arrays)
            self._link.sendall(_LENGTH.pack(uid))
        except (OSError, EOFError, ValueError, jax.errors.JaxRuntimeError) as error:
            raise self._failed("receiving", step, error) from error
        return _rebuild(header["tree"], arrays, self._device)


class Listener:
    """Waits for the producer of one stage."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.create_server((host, port))
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def accept(
        self,
        payload: Payload,
        device: jax.Device,
        *,
        stage: int,
        request: int = 0,
        timeout_s: float | None = 60.0,
        unit_timeout_s: float | None = None,
    ) -> Receiver:
        """The receiving end of the first connection; raises HandoffError if none comes in time.

        unit_timeout_s  see `Receiver`
        """
        self._socket.settimeout(timeout_s)
        try:
            link, _ = self._socket.accept()
        except OSError as error:
            raise HandoffError(
                f"no producer of stage {stage} connected to {self.address}: {error}"
            ) from error
        finally:
            self._socket.close()
        return Receiver(
            link, payload, device, stage=stage, request=request, timeout_s=unit_timeout_s
        )

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()


def connect(
    address: str,
    payload: Payload,
    *,
    stage: int,
    request: int = 0,
    depth: int = 1,
    timeout_s: float = 60.0,
    unit_timeout_s: float | None = None,
) -> Sender:
    """The sending end to a `Listener`; raises HandoffError if it cannot be reached.

    unit_timeout_s  see `Sender`
    """
    host, _, port = address.rpartition(":")
    try:
        link = socket.create_connection((host, int(port)), timeout_s)
    except OSError as error:
        raise HandoffError(f"stage {stage} cannot be reached at {address}: {error}") from error
    return Sender(
        link, payload, stage=stage, request=request, depth=depth, timeout_s=unit_timeout_s
    )


def _describe(tree: Any, arrays: list[jax.Array]) -> Any:
    """JSON for the structure of `tree`; appends its arrays."""
    if isinstance(tree, jax.Array | np.ndarray) and tree.size == 0:
        # Nothing to send, and a pull of an empty array never becomes ready (jax 0.11).
        return {"empty": [tree.dtype.name, list(tree.shape)]}
    if isinstance(tree, jax.Array | np.ndarray):
        arrays.append(jnp.asarray(tree))
        return {"array": len(arrays) - 1}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_describe(item, arrays) for item in tree]}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _describe(item, arrays) for key, item in tree.items()}}
    raise TypeError(
        f"a hand-off between processes cannot hold a {type(tree).__name__}: expected dicts with "
        "string keys, lists, tuples, arrays, numbers, strings and None"
    )


def _rebuild(structure: Any, arrays: list[jax.Array], device: jax.Device) -> Any:
    ((kind, content),) = structure.items()
    if kind == "array":
        return arrays[content]
    if kind == "empty":
        name, shape = content
        return jax.device_put(np.zeros(shape, jnp.dtype(name)), device)
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _rebuild(item, arrays, device) for key, item in content.items()}
    items = [_rebuild(item, arrays, device) for item in content]
    return tuple(items) if kind == "tuple" else items


def _send_message(link: socket.socket, message: bytes) -> None:
    link.sendall(_LENGTH.pack(len(message)) + message)


def _receive_message(link: socket.socket) -> bytes:
    raw = bytearray(_LENGTH.size)
    _receive_into(link, memoryview(raw))
    message = bytearray(_LENGTH.unpack(raw)[0])
    _receive_into(link, memoryview(message))
    return bytes(message)


def _receive_into(link: socket.socket, view: memoryview) -> None:
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise EOFError("the peer closed the connection")
        view = view[count:]
