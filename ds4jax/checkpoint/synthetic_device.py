"""Weights of `SyntheticSource` made on the device that uses them, bit for bit those of the host.

A full-size model is 150 GB: hashing it on the host takes minutes, on an accelerator well under a
second. Every element is computed from its own index, so a tensor needs no scratch memory.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.checkpoint import keys
from ds4jax.checkpoint.source import TensorInfo, TensorSource
from ds4jax.checkpoint.synthetic import (
    SyntheticSource,
    hash_words,
    table_strides,
)
from pallas_kernels.routed_experts import ExpertSlab

_BYTE = np.dtype(np.uint8)
_BITS: Mapping[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def maker(source: TensorSource, device: jax.Device | None) -> "DeviceMaker | None":
    """What makes the tensors of `source` on `device`; None where they come from the host.

    On a CPU the host's way is as good and compiles nothing.
    """
    device = device or jax.local_devices()[0]
    if not isinstance(source, SyntheticSource) or device.platform == "cpu":
        return None
    return DeviceMaker(source, device)


class DeviceMaker:
    """Makes tensors of `source` on `device`, in the form in which they are loaded."""

    def __init__(self, source: SyntheticSource, device: jax.Device) -> None:
        self.source, self.device = source, device

    def resident(self, specs: Mapping[str, keys.TensorSpec]) -> dict[str, jax.Array]:
        """The tensors of `specs` in the dtypes that they have in memory, and their scales."""
        infos = self.source.infos()
        made = {}
        for name in keys.with_scales(specs, infos):
            dtype = keys.loaded_dtype(specs[name], infos[name]) if name in specs else _BYTE
            made[name] = self.tensor(name, dtype)
        return made

    def tensor(self, name: str, dtype: np.dtype) -> jax.Array:
        """A whole tensor as `dtype`: int32 for a token table, else one of the stored width."""
        info = self.source.info(name)
        if info.dtype == "I64":
            return self._table(name, info)
        if (small := self.source.computed(name)) is not None:
            return jax.device_put(small, self.device)
        if dtype.itemsize != info.numpy_dtype.itemsize:
            raise NotImplementedError(
                f"{name} is stored as {info.dtype}, it is not made as {dtype}"
            )
        return self._stack([name], info, dtype)[0]

    def slab(self, layer: int | str, experts: Sequence[int]) -> ExpertSlab:
        """As `load.load_expert_slab`, on the device."""
        format = keys.expert_format(self.source, layer)
        prefixes = [keys.expert_prefix(layer, expert) for expert in experts]

        def stack(matrices: tuple[str, ...], part: str) -> Any:
            names = [f"{prefix}{matrix}.{part}" for prefix in prefixes for matrix in matrices]
            if names[0] not in self.source.infos():
                return None
            made = self.joined(names)
            return made.reshape(len(experts), -1, made.shape[1])

        gate_up, down = ("w1", "w3"), ("w2",)
        return ExpertSlab(
            stack(gate_up, "weight"),
            stack(gate_up, "scale"),
            stack(down, "weight"),
            stack(down, "scale"),
            format,
        )

    def joined(self, names: Sequence[str]) -> jax.Array:
        """Matrices of one kind below each other: [names * rows, columns], packed codes as bytes."""
        info = self.source.info(names[0])
        in_bytes = info.dtype in ("I8", "F8_E8M0")
        made = self._stack(names, info, _BYTE if in_bytes else info.numpy_dtype)
        return made.reshape(-1, info.shape[1])

    def _stack(self, names: Sequence[str], info: TensorInfo, dtype: np.dtype) -> jax.Array:
        """Tensors of one kind: [names, *shape]."""
        recipes = [self.source.recipe(name) for name in names]
        return _make(
            self._put([self.source.key(name) for name in names]),
            self._put([(recipe.mask, recipe.offset) for recipe in recipes]),
            info.shape,
            dtype,
        )

    def _table(self, name: str, info: TensorInfo) -> jax.Array:
        rows, columns = info.shape
        experts = self.source.config.n_routed_experts
        key = self._put([self.source.key(name)])
        return _make_table(key, rows, columns, experts, table_strides(experts, columns))

    def _put(self, values: Sequence[tuple[Any, Any]]) -> jax.Array:
        return jax.device_put(np.asarray(values, np.uint32), self.device)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _make(keys_: jax.Array, recipes: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """keys_, recipes u32 [n, 2] -> [n, *shape] of `dtype`."""
    count, size = keys_.shape[0], np.dtype(dtype).itemsize
    per_word = 4 // size
    full = (count, *shape)
    index = jnp.zeros(full, jnp.uint32)
    stride = math.prod(shape)
    for axis, length in enumerate(shape):
        stride //= length
        index += jax.lax.broadcasted_iota(jnp.uint32, full, axis + 1) * jnp.uint32(stride)
    expand = (count,) + (1,) * len(shape)
    low, high, mask, offset = (
        jnp.broadcast_to(column.reshape(expand), full)
        for column in (keys_[:, 0], keys_[:, 1], recipes[:, 0], recipes[:, 1])
    )
    words = (hash_words(index // jnp.uint32(per_word), (low, high)) & mask) + offset
    shift = index % jnp.uint32(per_word) * jnp.uint32(8 * size)
    bits = (words >> shift).astype(_BITS[size])
    return jax.lax.bitcast_convert_type(bits, dtype)


@functools.partial(jax.jit, static_argnames=("rows", "columns", "experts", "strides"))
def _make_table(key: jax.Array, rows: int, columns: int, experts: int, strides: int) -> jax.Array:
    """A token table, i32 [rows, columns]; see `SyntheticSource`."""
    index = jnp.arange(rows, dtype=jnp.uint32)
    low, high = (jnp.broadcast_to(key[0, part], index.shape) for part in (0, 1))
    hashed = hash_words(index, (low, high))
    count = jnp.uint32(experts)
    first, stride = hashed % count, hashed // count % jnp.uint32(strides) + jnp.uint32(1)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 1)
    table = (first[:, None] + column * stride[:, None]) % count
    return table.astype(jnp.int32)
