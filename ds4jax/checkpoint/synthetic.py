"""Deterministic random weights in the published storage formats, for any model size, without disk.

Every 32-bit word of a tensor is a hash of (seed, tensor name, index of the word), so any range can
be made alone, in any order, on any thread. The hash uses 32-bit integer operators only and gives
the same words for numpy and JAX arrays.

Storage bits are made directly from words: bits = (word & mask) + offset. The mask keeps the sign,
two exponent bits and the mantissa, the offset sets the smallest exponent. Widths of matrices give
the exponent, so that every product keeps its input's magnitude and activations stay near one
through the whole stack.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ds4jax.checkpoint import keys
from ds4jax.checkpoint.source import TensorInfo, TensorSource, config_text
from ds4jax.config import ModelConfig

WORDS_PER_STEP = 1 << 16  # words hashed at once: the temporaries stay in the cache of a core


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Words of storage = (hash & mask) + offset, in uint32 without carry between elements."""

    mask: int
    offset: int


def hash_words(index: Any, key: tuple[Any, Any]) -> Any:
    """Mixes uint32 indices (numpy or JAX) with a 64-bit key; numpy arrays are overwritten.

    key  its halves, uint32 scalars or arrays of the same shape as the indices
    """
    low, high = key
    index ^= low
    index ^= index >> np.uint32(16)
    index *= np.uint32(0x7FEB352D)
    # The second half of the key keeps two tensors from being shifted copies of each other.
    index ^= high
    index ^= index >> np.uint32(15)
    index *= np.uint32(0x846CA68B)
    index ^= index >> np.uint32(16)
    return index


def tensor_key(seed: int, name: str) -> tuple[np.uint32, np.uint32]:
    """The hash key of a tensor."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    low, high = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4))
    return np.uint32(low), np.uint32(high)


def table_strides(experts: int, columns: int) -> int:
    """Strides 1..n of a token table: (columns - 1) * n < experts, so no row meets itself again."""
    return max((experts - 1) // max(columns - 1, 1), 1)


class SyntheticSource(TensorSource):
    """The tensors of `keys.official_header(config, experts)`, made up from `seed`."""

    def __init__(
        self, config: ModelConfig, seed: int, *, experts: str = "fp4", mtp: bool = True
    ) -> None:
        self.config = config
        self.seed = seed
        self.experts = experts
        self._infos = keys.official_header(config, experts, mtp=mtp)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def config_text(self) -> str:
        return config_text(self.config, self.experts)

    def provenance(self, names: Iterable[str]) -> dict[str, list[int]]:
        return {"synthetic": [self.seed]}

    def read_into(self, name: str, buffer: np.ndarray, start: int = 0) -> None:
        info = self.info(name)
        if start < 0 or start + buffer.nbytes > info.nbytes:
            raise ValueError(
                f"{name} has {info.nbytes} bytes, bytes {start}..{start + buffer.nbytes} were "
                "asked for"
            )
        key = tensor_key(self.seed, name)
        if info.dtype == "I64":
            self._read_table(key, info, buffer, start)
            return
        recipe = self.recipe(name)
        done = 0
        while done < buffer.nbytes:
            first, skip = divmod(start + done, 4)
            count = min(WORDS_PER_STEP, -(-(buffer.nbytes - done + skip) // 4))
            words = hash_words(np.arange(first, first + count, dtype=np.uint32), key)
            words &= np.uint32(recipe.mask)
            words += np.uint32(recipe.offset)
            made = words.view(np.uint8)[skip : skip + buffer.nbytes - done]
            buffer[done : done + made.nbytes] = made
            done += made.nbytes

    def _read_table(
        self, key: tuple[Any, Any], info: TensorInfo, buffer: np.ndarray, start: int
    ) -> None:
        """Rows of distinct experts: row r holds (first + column * stride) mod E, hashed from r."""
        columns, experts = info.shape[1], self.config.n_routed_experts
        row_bytes = 8 * columns
        first_row, skip = divmod(start, row_bytes)
        last_row = -(-(start + buffer.nbytes) // row_bytes)
        hashed = hash_words(np.arange(first_row, last_row, dtype=np.uint32), key).astype(np.int64)
        strides = table_strides(experts, columns)
        first, stride = hashed % experts, hashed // experts % strides + 1
        table = (first[:, None] + np.arange(columns)[None, :] * stride[:, None]) % experts
        buffer[:] = table.reshape(-1).view(np.uint8)[skip : skip + buffer.nbytes]

    def recipe(self, name: str) -> Recipe:
        """How the words of a tensor are made; token tables have none."""
        info = self.info(name)
        if info.dtype == "I8":
            return Recipe(0xFFFFFFFF, 0)  # all 16 codes of E2M1 are numbers
        if info.dtype == "F8_E4M3":
            return Recipe(0x9F9F9F9F, 0x30303030)
        if info.dtype == "F8_E8M0":
            return self._scale_recipe(name)
        if re.search(r"norm\.weight$", name):
            return _RECIPES_NEAR_ONE[info.dtype]
        if name.endswith("_scale"):
            return Recipe(0x007FFFFF, 0x3F000000)  # hyper-connection scales: [0.5, 1)
        deviation = next(
            (value for pattern, value in _DEVIATIONS if re.search(pattern, name)),
            info.shape[-1] ** -0.5,
        )
        # Four octaves from 2^e have the root mean square 2^e * sqrt(85 / 4 * 7 / 3).
        exponent = round(math.log2(deviation / 7.04))
        if info.dtype == "BF16":
            return Recipe(0x81FF81FF, (exponent + 127 << 7) * 0x00010001)
        return Recipe(0x81FFFFFF, exponent + 127 << 23)

    def _scale_recipe(self, name: str) -> Recipe:
        weight = self._infos[name.removesuffix("scale") + "weight"]
        if weight.dtype == "I8":
            # Codes have the root mean square 2.93, scales in four octaves another 4.61.
            spread, deviation, inputs = 0x03030303, 2.93 * 4.61, 2 * weight.shape[-1]
        else:
            # Codes 0x30..0x4f have 3.38, scales in two octaves another 1.58.
            spread, deviation, inputs = 0x01010101, 3.38 * 1.58, weight.shape[-1]
        byte = 127 + round(math.log2(inputs**-0.5 / deviation))
        return Recipe(spread, byte * 0x01010101)


_RECIPES_NEAR_ONE = {
    "BF16": Recipe(0x001F001F, 0x3F803F80),  # [1, 1.25)
    "F32": Recipe(0x001FFFFF, 0x3F800000),
}
# Standard deviations of tensors whose last axis is no fan-in; the first match counts.
_DEVIATIONS = (
    (r"^embed\.", 1.0),
    (r"attn_sink$", 1.0),
    (r"\.ape$", 0.5),
    (r"hc_\w+_base$", 0.5),
    (r"gate\.bias", 0.05),
)
