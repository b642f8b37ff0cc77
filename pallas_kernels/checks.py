"""Argument checks shared by the doors of the operations."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import support

FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
FLOAT32 = (jnp.dtype("float32"),)
INT32 = (jnp.dtype("int32"),)


class Shapes:
    """Binds dimension letters to sizes, array by array, and refuses contradictions.

    `Shapes("window_attention").bind("q", q, "THK", FLOATS)` records T, H and K; a later array that
    names K has to agree. A dimension may also be an int.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.sizes: dict[str, int] = {}
        self.origin: dict[str, str] = {}

    def bind(
        self, name: str, array: Any, dims: Sequence[str | int], dtypes: Sequence[jnp.dtype]
    ) -> None:
        """Checks one array; raises ValueError naming the array, what it has and what fits."""
        letters = ", ".join(str(dim) for dim in dims)
        if not isinstance(array, jax.Array | np.ndarray):
            raise ValueError(
                f"{self.operation}: {name} is {array!r:.60}, expected an array [{letters}]"
            )
        shape, dtype = array.shape, array.dtype
        if len(shape) != len(dims):
            raise ValueError(
                f"{self.operation}: {name} has shape {shape}, expected {len(dims)} axes [{letters}]"
            )
        for axis, (size, dim) in enumerate(zip(shape, dims, strict=True)):
            wanted = dim if isinstance(dim, int) else self.sizes.setdefault(dim, size)
            if isinstance(dim, str):
                self.origin.setdefault(dim, name)
            if size != wanted:
                source = f" as in {self.origin[dim]}" if isinstance(dim, str) else ""
                raise ValueError(
                    f"{self.operation}: {name} has shape {shape} [{letters}], expected {wanted} on "
                    f"axis {axis}{source}"
                )
        if 0 in shape:
            raise ValueError(
                f"{self.operation}: {name} has shape {shape} [{letters}], expected at least 1 on "
                "every axis"
            )
        if dtype not in dtypes:
            raise ValueError(
                f"{self.operation}: {name} is {dtype}, expected "
                f"{' or '.join(str(allowed) for allowed in dtypes)}"
            )


def positive(operation: str, **values: int) -> None:
    """Raises ValueError for a static size below one."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{operation}: {name} is {value!r}, expected an integer >= 1")


def on_device(array: Any) -> jax.Array:
    """The same array if it is one of JAX (traced or not); numpy arrays have no `.at`."""
    return array if isinstance(array, jax.Array) else jnp.asarray(array)


def scalar(operation: str, name: str, value: Any) -> jax.Array:
    """A position or length as the int32 scalar the kernels take; raises ValueError for others."""
    if isinstance(value, jax.Array | np.ndarray | np.integer):
        fits = value.size == 1 and jnp.issubdtype(value.dtype, jnp.integer)
        found = f"{value.dtype}{list(value.shape)}"
    else:
        fits = type(value) is int and 0 <= value < 2**31
        found = repr(value)
    if not fits:
        raise ValueError(
            f"{operation}: {name} is {found}, expected a whole number from 0 to 2147483647 or an "
            "int32 scalar"
        )
    return jnp.asarray(value, jnp.int32).reshape(())


def pick(
    operation: str,
    implementation: str | None,
    refusal: str | Mapping[str, str | None] | None,
    *,
    interpret: bool = False,
) -> str:
    """The implementation to run: "reference", "tiled", "portable" or "sm90".

    refusal: why the kernels of this operation cannot take these arguments, None when they can; by
    implementation where they differ.
    Automatic choice: the best kernel of the default device, else "tiled". An explicit choice that
    cannot run raises NotImplementedError with the reason; an unknown name raises ValueError.
    """
    plain = ("reference", "tiled")
    kernels = ("sm90", "portable")
    if implementation in plain:
        return implementation
    device = support.default_device()
    reasons = refusal if isinstance(refusal, Mapping) else dict.fromkeys(kernels, refusal)
    if implementation is None:
        for name in kernels:
            if reasons[name] is None and support.unsupported(name, device) is None:
                return name
        return "tiled"
    if implementation not in kernels:
        raise ValueError(
            f"{operation}: implementation is {implementation!r}, expected None or one of "
            f"{', '.join(plain + kernels)}"
        )
    reason = reasons[implementation] or support.unsupported(
        implementation, device, interpret=interpret
    )
    if reason is not None:
        raise NotImplementedError(f"{operation}: {implementation} cannot run this call: {reason}")
    return implementation
