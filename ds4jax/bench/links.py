"""Measures what two devices and their host can move, alone, at once, and beside computation."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding import probe
from streaming.pinned import CudaDriver, PinError
from streaming.store import allocate


def measure(devices: Sequence[jax.Device], settings: probe.Settings) -> dict[str, Any]:
    """Rates in GB/s between the two `devices`, and from registered host memory to them."""
    run = probe.Probe(settings)
    found: dict[str, Any] = {"sizes": list(settings.sizes)}
    pairs = ((0, 1), (1, 0))
    for i, j in pairs:
        found[f"peer_{i}_to_{j}"] = _ladder(run.device_to_device(devices[i], devices[j]))
    nbytes = settings.sizes[-1]
    arrays = [jax.device_put(jnp.zeros(nbytes, jnp.uint8), device) for device in devices]
    jax.block_until_ready(arrays)
    copies = [
        lambda i=i, j=j: jax.device_put(arrays[i], devices[j], may_alias=False) for i, j in pairs
    ]
    found["peer_both_gb_per_s"] = run.together(copies, nbytes)["bytes_per_s"] / 1e9
    found["peer_beside_compute"] = [
        _beside_compute(run, device, copies[0], where)
        for device, where in zip(devices, ("source", "target"), strict=True)
    ]
    with _host_buffer(devices[0], nbytes) as (buffer, registered):
        found["host_registered"] = registered
        puts = [lambda d=device: jax.device_put(buffer, d) for device in devices]
        for number, put in enumerate(puts):
            found[f"host_to_{number}_gb_per_s"] = (
                run.rate(nbytes, lambda put=put: jax.block_until_ready(put()))["per_s"] / 1e9
            )
        found["host_to_both_gb_per_s"] = run.together(puts, nbytes)["bytes_per_s"] / 1e9
    return found


def _ladder(rows: Sequence[dict[str, int]]) -> list[dict[str, float]]:
    """Bytes and GB/s, waited for one by one and many in flight."""
    return [
        {
            "bytes": row["bytes"],
            "gb_per_s": row["bytes_per_s"] / 1e9,
            "in_flight_gb_per_s": row["in_flight_bytes_per_s"] / 1e9,
        }
        for row in rows
    ]


def _beside_compute(
    run: probe.Probe, device: jax.Device, copy: Callable[[], Any], where: str
) -> dict[str, Any]:
    """A peer copy beside products on one of its ends: which share of the shorter one is hidden."""
    n = run.settings.matmul_size
    array = jax.device_put(jnp.ones((n, n), jnp.bfloat16), device)

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jnp.dot(x, x, preferred_element_type=jnp.float32).astype(x.dtype)

    def compute() -> jax.Array:
        return product(product(array))

    def median(job: Callable[[], Any]) -> float:
        return float(np.median(run.seconds(lambda: jax.block_until_ready(job()))))

    compute_s, copy_s = median(compute), median(copy)
    orders = {
        "copy_first": lambda: (copy(), compute()),
        "compute_first": lambda: (compute(), copy()),
    }
    found: dict[str, Any] = {"compute_on": where, "compute_s": compute_s, "copy_s": copy_s}
    for name, job in orders.items():
        both_s = median(job)
        found[f"{name}_s"] = both_s
        found[f"{name}_hidden"] = (compute_s + copy_s - both_s) / min(compute_s, copy_s)
    return found


@contextlib.contextmanager
def _host_buffer(device: jax.Device, nbytes: int) -> Generator[tuple[np.ndarray, bool]]:
    """Host memory, touched and page-locked where there is a CUDA driver."""
    buffer = allocate(nbytes)
    buffer[:: 1 << 12] = 1
    driver = None
    with contextlib.suppress(PinError):
        if device.platform in ("gpu", "cuda"):
            driver = CudaDriver(device.local_hardware_id or 0)
            driver.register(buffer.ctypes.data, buffer.nbytes)
    try:
        yield buffer, driver is not None
    finally:
        if driver is not None:
            driver.unregister(buffer.ctypes.data)
