"""Which kernels a device can run: the doors ask here before they choose an implementation."""

import jax

IMPLEMENTATIONS = ("reference", "portable", "sm90")

# Shared memory that one block can use on consumer cards (compute capability 8.6, 8.9 and 12.0).
PORTABLE_SHARED_MEMORY = 99 * 1024


def default_device() -> jax.Device:
    """The device a computation without committed operands runs on."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]


def unsupported(implementation: str, device: jax.Device, *, interpret: bool = False) -> str | None:
    """Why `implementation` cannot run on `device`; None when it can.

    "portable" kernels (Pallas-Triton) need an NVIDIA GPU of compute capability 8.0, "sm90" kernels
    (Pallas-Mosaic) exactly 9.0; with `interpret` both run anywhere. Raises ValueError for an
    unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}, expected one of {IMPLEMENTATIONS} or None"
        )
    if implementation == "reference" or interpret:
        return None
    if device.platform not in ("gpu", "cuda"):
        return f"{implementation} kernels need an NVIDIA GPU, {device} is on {device.platform}"
    capability = float(getattr(device, "compute_capability", None) or "nan")
    if implementation == "sm90" and capability != 9.0:
        return f"sm90 kernels need compute capability 9.0, {device} has {capability}"
    # Negated so that an unknown capability is refused too.
    if not capability >= 8.0:
        return f"{implementation} kernels need compute capability 8.0, {device} has {capability}"
    return None


def require(implementation: str, reason: str | None) -> None:
    """Raises NotImplementedError with `reason` when there is one."""
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r} refused: {reason}")
