"""Measures a machine for the planner: links, copies, products, memory nodes, disk.

`probe` returns plain numbers that go to a file as JSON and come back through `sharding.machine`.
What could not be measured is listed with the reason, so that a missing number is never taken for
zero. A rate is bytes (or operations) divided by the median time of some repeats; the best of them
is kept beside it, since a shared machine makes medians worse but not the best.
"""

import contextlib
import dataclasses
import importlib.metadata
import mmap
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCHEMA = 1
MIB = 1 << 20
# One expert of DeepSeek-V4-Flash in FP4, and powers of four around it.
SIZES = (MIB, 4 * MIB, 13_369_344, 64 * MIB, 256 * MIB, 1024 * MIB)

# Page-locks an array while the context lasts.
Register = Callable[[np.ndarray], contextlib.AbstractContextManager[Any]]
# Copies an array on a device into (page-locked) host memory of its size; returns when it is there.
Download = Callable[[jax.Array, np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much to measure.

    sizes           bytes of the copies; the last is used where only one size is measured.
    repeats         of every measurement, after one that is not counted.
    in_flight_bytes copies of one size that are issued together add up to this, 32 at most.
    matmul_size     rows and columns of the square products.
    compute_ms      length of the computation beside which a copy is timed.
    disk_bytes      size of the file that is written and read.
    """

    sizes: tuple[int, ...] = SIZES
    repeats: int = 5
    in_flight_bytes: int = 1024 * MIB
    matmul_size: int = 8192
    compute_ms: float = 20.0
    disk_bytes: int = 1024 * MIB

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 4096 or self.repeats < 1:
            raise ValueError(
                f"sizes {self.sizes} and repeats {self.repeats}: expected sizes of at least 4096 "
                "bytes and at least one repeat"
            )


class Probe:
    """One probing; `missing` collects what could not be measured."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.perf_counter) -> None:
        self.settings, self.clock = settings, clock
        self.missing: list[dict[str, str]] = []

    def skip(self, what: str, why: str) -> None:
        """Notes something that was not measured."""
        self.missing.append({"what": what, "why": why})

    @contextlib.contextmanager
    def attempt(self, what: str) -> Generator[None]:
        """Notes a measurement that fails (no memory, no permission) and goes on."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            self.skip(what, f"{type(error).__name__}: {str(error).splitlines()[0]}")

    def seconds(self, job: Callable[[], object]) -> list[float]:
        """Times of the repeats of a job, each complete when the job returns."""
        job()
        times = []
        for _ in range(self.settings.repeats):
            start = self.clock()
            job()
            times.append(max(self.clock() - start, 1e-9))
        return times

    def rate(self, amount: int, job: Callable[[], object]) -> dict[str, int]:
        """Amount per second: median and best."""
        times = self.seconds(job)
        return {
            "per_s": int(amount / statistics.median(times)),
            "best_per_s": int(amount / min(times)),
        }

    # Copies

    def copies(self, copy: Callable[[int], Any]) -> list[dict[str, int]]:
        """Ladder of copies of one size: waited for one by one, and many in flight.

        copy(nbytes) issues a copy and returns something to wait for.
        """
        ladder = []
        for nbytes in self.settings.sizes:
            count = max(1, min(32, self.settings.in_flight_bytes // nbytes))

            def alone(nbytes: int = nbytes) -> None:
                jax.block_until_ready(copy(nbytes))

            def together(nbytes: int = nbytes, count: int = count) -> None:
                jax.block_until_ready([copy(nbytes) for _ in range(count)])

            one = self.rate(nbytes, alone)
            many = self.rate(nbytes * count, together)
            ladder.append(
                {
                    "bytes": nbytes,
                    "bytes_per_s": one["per_s"],
                    "best_bytes_per_s": one["best_per_s"],
                    "in_flight": count,
                    "in_flight_bytes_per_s": many["per_s"],
                    "best_in_flight_bytes_per_s": many["best_per_s"],
                }
            )
        return ladder

    def host_to_device(self, device: jax.Device, buffer: np.ndarray) -> list[dict[str, int]]:
        """Ladder of uploads from `buffer` (uint8)."""
        return self.copies(lambda nbytes: jax.device_put(buffer[:nbytes], device))

    def device_to_host(
        self,
        device: jax.Device,
        buffer: np.ndarray | None = None,
        download: Download = lambda array, buffer: None,
    ) -> list[dict[str, int]]:
        """Ladder of downloads by `download` into `buffer`; without it to memory of JAX's own."""
        ladder = []
        for nbytes in self.settings.sizes:
            times = []
            source = jax.device_put(np.zeros(nbytes, np.uint8), device)
            for _ in range(self.settings.repeats + 1):
                fresh = jax.block_until_ready(jnp.copy(source))  # an array caches its host value
                start = self.clock()
                if buffer is None:
                    np.asarray(fresh)
                else:
                    download(fresh, buffer[:nbytes])
                times.append(max(self.clock() - start, 1e-9))
            ladder.append(
                {
                    "bytes": nbytes,
                    "bytes_per_s": int(nbytes / statistics.median(times[1:])),
                    "best_bytes_per_s": int(nbytes / min(times[1:])),
                }
            )
        return ladder

    def device_to_device(self, source: jax.Device, target: jax.Device) -> list[dict[str, int]]:
        """Ladder of copies from one device to another."""
        arrays = {
            nbytes: jax.device_put(jnp.zeros(nbytes, jnp.uint8), source)
            for nbytes in self.settings.sizes
        }
        return self.copies(lambda nbytes: jax.device_put(arrays[nbytes], target, may_alias=False))

    def together(self, copies: Sequence[Callable[[], Any]], nbytes: int) -> dict[str, int]:
        """Total bytes per second of copies of `nbytes` each that are issued at once."""
        measured = self.rate(
            nbytes * len(copies), lambda: jax.block_until_ready([copy() for copy in copies])
        )
        return {"bytes": nbytes, "copies": len(copies), "bytes_per_s": measured["per_s"]}

    # Work of a device

    def memory_rate(self, device: jax.Device) -> dict[str, int]:
        """Bytes read and written per second by a copy within the device."""
        nbytes = self.settings.sizes[-1] // 4 * 4
        array = jax.device_put(jnp.zeros(nbytes // 4, jnp.int32), device)
        step = jax.jit(lambda x: x + 1)
        return self.rate(2 * nbytes, lambda: jax.block_until_ready(step(array)))

    def product_rate(self, device: jax.Device, dtype: Any) -> dict[str, int]:
        """Operations per second of a square product (2 n^3 operations)."""
        n = self.settings.matmul_size
        array = jax.device_put(jnp.ones((n, n), dtype), device)
        product = jax.jit(_product)
        return self.rate(2 * n**3, lambda: jax.block_until_ready(product(array)))

    def overlap(self, device: jax.Device, buffer: np.ndarray) -> dict[str, float]:
        """How much of an upload hides behind a computation that is dispatched right after it."""
        n = self.settings.matmul_size
        array = jax.device_put(jnp.ones((n, n), jnp.bfloat16), device)
        product = jax.jit(_product)
        once = statistics.median(self.seconds(lambda: jax.block_until_ready(product(array))))
        rounds = max(1, round(self.settings.compute_ms / 1e3 / once))
        chain = jax.jit(lambda x: jax.lax.fori_loop(0, rounds, lambda _, y: _product(y), x))
        nbytes = self.settings.sizes[-1]

        def put() -> jax.Array:
            return jax.device_put(buffer[:nbytes], device)

        copy_s = statistics.median(self.seconds(lambda: jax.block_until_ready(put())))
        compute_s = statistics.median(self.seconds(lambda: jax.block_until_ready(chain(array))))
        both_s = statistics.median(
            self.seconds(lambda: jax.block_until_ready((put(), chain(array))))
        )
        hidden = (copy_s + compute_s - both_s) / min(copy_s, compute_s)
        return {
            "copy_s": copy_s,
            "compute_s": compute_s,
            "both_s": both_s,
            "hidden": min(max(hidden, 0.0), 1.0),
        }

    # Host

    def disk(self, folder: str) -> dict[str, Any]:
        """Bytes per second of reading a file: not in the page cache, in it, and around it."""
        nbytes = self.settings.disk_bytes // MIB * MIB or MIB
        buffer = mmap.mmap(-1, nbytes)  # page-aligned, as direct reads need it
        result: dict[str, Any] = {"folder": os.path.abspath(folder), "bytes": nbytes}
        with tempfile.NamedTemporaryFile(dir=folder, prefix="probe-") as file:
            block = np.random.default_rng(0).bytes(MIB)
            start = self.clock()
            for _ in range(nbytes // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            result["write_bytes_per_s"] = int(nbytes / max(self.clock() - start, 1e-9))
            if hasattr(os, "posix_fadvise"):
                result["cold_bytes_per_s"] = self._read(file.name, buffer, 0, drop=True)
            else:
                self.skip("disk, cold", "this system cannot drop a file from the page cache")
            result["warm_bytes_per_s"] = self._read(file.name, buffer, 0, drop=False)
            if hasattr(os, "O_DIRECT"):
                with self.attempt("disk, direct"):
                    result["direct_bytes_per_s"] = self._read(
                        file.name, buffer, os.O_DIRECT, drop=False
                    )
            else:
                self.skip("disk, direct", "this system has no direct reads")
        buffer.close()
        return result

    def _read(self, path: str, buffer: mmap.mmap, flags: int, *, drop: bool) -> int:
        handle = os.open(path, os.O_RDONLY | flags)
        view = memoryview(buffer)
        try:
            times = []
            for _ in range(self.settings.repeats + 1):
                if drop:
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                start = self.clock()
                done = 0
                while done < len(view):
                    count = os.preadv(handle, [view[done : done + 16 * MIB]], done)
                    if count == 0:
                        raise OSError(f"{path} ended after {done} of {len(view)} bytes")
                    done += count
                times.append(max(self.clock() - start, 1e-9))
            return int(len(view) / statistics.median(times[1:]))
        finally:
            view.release()
            os.close(handle)


def _product(x: jax.Array) -> jax.Array:
    return jnp.dot(
        x, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    ).astype(x.dtype)


def numa_nodes(root: str | os.PathLike[str] = "/sys") -> list[dict[str, Any]]:
    """Memory nodes below `root`: number, list of CPUs, bytes, distances (10 is local)."""
    nodes = []
    for path in sorted(pathlib.Path(root).glob("devices/system/node/node*")):
        number = re.fullmatch(r"node(\d+)", path.name)
        if number is None:
            continue
        size = re.search(r"MemTotal:\s+(\d+) kB", (path / "meminfo").read_text())
        nodes.append(
            {
                "node": int(number[1]),
                "cpus": (path / "cpulist").read_text().strip(),
                "memory_bytes": int(size[1]) * 1024 if size else 0,
                "distances": [int(d) for d in (path / "distance").read_text().split()],
            }
        )
    return sorted(nodes, key=lambda node: node["node"])


def numa_node_of(pci_address: str, root: str | os.PathLike[str] = "/sys") -> int | None:
    """Node that a PCI device is attached to; None if the system does not say."""
    path = pathlib.Path(root) / "bus" / "pci" / "devices" / pci_address.lower() / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def probe(
    devices: Sequence[jax.Device] | None = None,
    *,
    settings: Settings | None = None,
    register: Register | None = None,
    download: Download | None = None,
    pci_addresses: Sequence[str] | None = None,
    disk_folder: str | None = None,
    numa_root: str | os.PathLike[str] = "/sys",
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measures the machine; the result is what `sharding.machine.read_machine` reads.

    devices        JAX devices, local ones by default.
    register       page-locks an array while its context lasts; without it nothing is measured from
                   registered memory.
    download       copies into registered memory; without it no such downloads are measured.
    pci_addresses  of the devices, to find their memory nodes.
    disk_folder    where a file is written, read and removed; None: no disk is measured.
    say            called with a line before each part.
    """
    devices = jax.local_devices() if devices is None else list(devices)
    run = Probe(settings or Settings(), clock)
    on_cpu = devices[0].platform == "cpu"
    if on_cpu and settings is None:
        run.settings = cpu_settings()
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": dataclasses.asdict(run.settings),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "platform": devices[0].platform,
        "cpu_count": os.cpu_count(),
        "numa": [],
        "devices": [],
        "links": [],
    }
    with run.attempt("memory nodes"):
        result["numa"] = numa_nodes(numa_root)
    if not result["numa"]:
        run.skip("memory nodes", "the system describes none")
    addresses = list(pci_addresses or [None] * len(devices))
    for device, address in zip(devices, addresses, strict=True):
        say(f"device {device.id}: {device.device_kind}")
        result["devices"].append(_probe_device(run, device, address, numa_root))
    buffer = _host_buffer(run.settings)
    if on_cpu:
        for what in ("host to device", "device to host", "overlap of upload and compute"):
            run.skip(what, "the devices are CPUs: their memory is host memory, nothing is copied")
    else:
        _probe_host_links(run, result, devices, buffer, register, download, say)
    _probe_links(run, result, devices, say)
    if disk_folder is None:
        run.skip("disk", "no folder was given")
    else:
        say(f"disk at {disk_folder}")
        with run.attempt("disk"):
            result["disk"] = run.disk(disk_folder)
    result["not_measured"] = run.missing
    return result


def cpu_settings() -> Settings:
    """Settings for CPU devices, where nothing needs to be large."""
    return Settings(
        sizes=(MIB, SIZES[2]),
        in_flight_bytes=64 * MIB,
        matmul_size=512,
        repeats=3,
        disk_bytes=64 * MIB,
    )


def _host_buffer(settings: Settings) -> np.ndarray:
    """Page-aligned host memory, touched."""
    buffer = np.frombuffer(mmap.mmap(-1, max(settings.sizes)), np.uint8)
    buffer[:: mmap.PAGESIZE] = 1
    return buffer


def _probe_device(
    run: Probe, device: jax.Device, address: str | None, numa_root: str | os.PathLike[str]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": device.id,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_bytes": None,
        "numa_node": None,
    }
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        row["memory_bytes"] = int(stats["bytes_limit"])
    else:
        run.skip(f"memory of device {device.id}", "the backend does not report it")
    if address is not None:
        row["pci_address"] = address
        row["numa_node"] = numa_node_of(address, numa_root)
    if row["numa_node"] is None:
        run.skip(f"memory node of device {device.id}", "its PCI address or node is not known")
    with run.attempt(f"memory rate of device {device.id}"):
        row["memory_bytes_per_s"] = run.memory_rate(device)["per_s"]
    row["matmul_flops_per_s"] = {}
    for dtype in ("bfloat16", "float32"):
        with run.attempt(f"{dtype} products of device {device.id}"):
            row["matmul_flops_per_s"][dtype] = run.product_rate(device, jnp.dtype(dtype))["per_s"]
    return row


def _probe_host_links(
    run: Probe,
    result: dict[str, Any],
    devices: Sequence[jax.Device],
    buffer: np.ndarray,
    register: Register | None,
    download: Download | None,
    say: Callable[[str], None],
) -> None:
    nbytes = run.settings.sizes[-1]
    kinds: list[tuple[str, contextlib.AbstractContextManager[Any]]] = [
        ("pageable", contextlib.nullcontext())
    ]
    if register is None:
        run.skip("registered memory", "no way to page-lock memory was given")
    else:
        kinds.append(("registered", register(buffer)))
    for row in result["devices"]:
        row["host_to_device"], row["overlap"] = {}, {}
    for kind, locked in kinds:
        say(f"host links, {kind} memory")
        with run.attempt(f"host links, {kind} memory"), locked:
            for row, device in zip(result["devices"], devices, strict=True):
                row["host_to_device"][kind] = run.host_to_device(device, buffer)
                row["overlap"][kind] = run.overlap(device, buffer)
            if len(devices) > 1:
                result.setdefault("host_to_all_devices", {})[kind] = run.together(
                    [lambda d=device: jax.device_put(buffer[:nbytes], d) for device in devices],
                    nbytes,
                )
    for row, device in zip(result["devices"], devices, strict=True):
        with run.attempt(f"downloads from device {device.id}"):
            row["device_to_host"] = {"pageable": run.device_to_host(device)}
    if register is None or download is None:
        run.skip("downloads to registered memory", "JAX downloads to memory of its own")
        return
    for row, device in zip(result["devices"], devices, strict=True):
        with run.attempt(f"downloads to registered memory from device {device.id}"):
            with register(buffer):
                ladder = run.device_to_host(device, buffer, download)
            row["device_to_host"]["registered"] = ladder


def _probe_links(
    run: Probe, result: dict[str, Any], devices: Sequence[jax.Device], say: Callable[[str], None]
) -> None:
    if len(devices) == 1:
        run.skip("links between devices", "there is one device")
        return
    for source in devices:
        say(f"links from device {source.id}")
        for target in devices:
            if source is not target:
                with run.attempt(f"link {source.id} to {target.id}"):
                    ladder = run.device_to_device(source, target)
                    result["links"].append(
                        {"source": source.id, "target": target.id, "ladder": ladder}
                    )
    say("all links at once")
    nbytes = run.settings.sizes[-1]
    with run.attempt("all links at once"):
        arrays = [jax.device_put(jnp.zeros(nbytes, jnp.uint8), device) for device in devices]
        pairs = [
            (i, target)
            for i, source in enumerate(devices)
            for target in devices
            if source is not target
        ]
        result["all_links"] = run.together(
            [lambda i=i, t=t: jax.device_put(arrays[i], t, may_alias=False) for i, t in pairs],
            nbytes,
        )
