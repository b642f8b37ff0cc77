"""Deterministic random weights in the published storage formats, for any model size, without disk.

Every 32-bit word of a tensor is a hash of (seed, tensor name, index of the word), so any range can
be made alone, in any order, on any thread. The hash uses 32-bit integer operators only and gives
the same words for numpy and JAX arrays.

Storage bits are made directly from words: bits = (word & mask) + offset. The mask keeps the sign,
two exponent bits and the mantissa, the offset sets the smallest exponent. Widths of matrices give
the exponent, so that every product keeps its input's magnitude and activations stay near one
through the whole stack.

Which experts tokens choose follows a stated law:

    uniform  router rows and biases are alike: every expert is as likely as the others
    zipf     an expert of a score-routed layer is chosen by a share of the tokens that falls with
             its rank, 1 / rank, in an order of its own for each layer. The router's matrix stays;
             `gate.bias` puts every expert's score the right number of deviations below the common
             threshold. Layers that hash ids choose by the ids, which `prompt_ids` draws by the
             same law, in runs
"""

import dataclasses
import hashlib
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ds4jax.checkpoint import keys
from ds4jax.checkpoint.source import TensorInfo, TensorSource, config_text
from ds4jax.config import ConfigError, ModelConfig

WORDS_PER_STEP = 1 << 16  # words hashed at once: the temporaries stay in the cache of a core
ROUTINGS = ("uniform", "zipf")
RUN_TOKENS = 8  # mean length of a run of one token id in prompts of the routing "zipf"

_EXPERT = re.compile(r"^layers\.(\d+)(?=\.ffn\.experts\.)")
_SCORE_BIAS = re.compile(r"^layers\.\d+\.ffn\.gate\.bias$")
# Likeliest and least likely share of tokens that a bias aims at.
_SHARES = (1e-4, 0.98)


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


def zipf_shares(experts: int, chosen: int) -> np.ndarray:
    """Share of tokens that choose the expert of each rank: f64 [experts], adds up to `chosen`.

    c / rank, but not above 0.98: a token cannot choose an expert twice.
    """
    ranks = np.arange(1, experts + 1)
    low, high = 0.0, float(experts * chosen)
    for _ in range(100):
        factor = (low + high) / 2
        total = np.clip(factor / ranks, *_SHARES).sum()
        low, high = (factor, high) if total < chosen else (low, factor)
    return np.clip(high / ranks, *_SHARES)


def prompt_ids(tokens: int, vocabulary: int, routing: str) -> np.ndarray:
    """Token ids of a synthetic prompt, i32 [tokens]; shorter ones are prefixes of longer ones.

    uniform  independent, all ids alike
    zipf     runs of one id (geometric lengths, 8 tokens on average), whose ids are drawn by
             1 / rank over a fixed order of the vocabulary
    """
    if routing == "uniform":
        return np.random.default_rng(0).integers(0, vocabulary, tokens, np.int32)
    order = np.random.default_rng(1).permutation(vocabulary)
    weights = np.cumsum(1 / np.arange(1, vocabulary + 1))
    # Two streams of numbers, drawn one for each token: a prefix does not depend on the length.
    ranks = np.searchsorted(weights, np.random.default_rng(2).random(tokens) * weights[-1])
    begins = np.random.default_rng(3).random(tokens) < 1 / RUN_TOKENS
    begins[:1] = True
    run = np.maximum.accumulate(np.where(begins, np.arange(tokens), 0))
    return order[ranks[run]].astype(np.int32)


class SyntheticSource(TensorSource):
    """The tensors of `keys.official_header(config, experts)`, made up from `seed`.

    distinct_layers  layers whose routed experts differ: layer l has the experts of l modulo this
                     number. None for all
    routing          which experts tokens choose: one of `ROUTINGS`
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        *,
        experts: str = "fp4",
        mtp: bool = True,
        distinct_layers: int | None = None,
        routing: str = "uniform",
    ) -> None:
        if distinct_layers is not None and distinct_layers < 1:
            raise ConfigError(f"distinct_layers is {distinct_layers}, expected at least 1")
        if routing not in ROUTINGS:
            raise ConfigError(f"routing is {routing!r}, expected one of {', '.join(ROUTINGS)}")
        self.config = config
        self.seed = seed
        self.experts = experts
        self.distinct_layers = distinct_layers or config.num_hidden_layers
        self.routing = routing
        self._infos = keys.official_header(config, experts, mtp=mtp)

    def expert_origin(self, layer: int) -> int:
        return layer % self.distinct_layers

    def key(self, name: str) -> tuple[np.uint32, np.uint32]:
        """The hash key of a tensor: that of the layer that it shares its bytes with."""
        if match := _EXPERT.match(name):
            name = f"layers.{self.expert_origin(int(match[1]))}{name[match.end() :]}"
        return tensor_key(self.seed, name)

    def computed(self, name: str) -> np.ndarray | None:
        """A small tensor that is no hash of its indices; None for all others."""
        if self.routing == "zipf" and _SCORE_BIAS.match(name):
            return self._zipf_bias(name)
        return None

    def _zipf_bias(self, name: str) -> np.ndarray:
        """f32 [experts]; a score is sqrt(softplus(g)), g of deviation `_logit_deviation`."""
        config = self.config
        shares = zipf_shares(config.n_routed_experts, config.num_experts_per_tok)
        deviation = self._logit_deviation(name.removesuffix("bias") + "weight")
        spread = statistics.NormalDist(0, deviation)
        # An expert of this share passes a threshold of 0 after its bias is added.
        passes = np.asarray([spread.inv_cdf(1 - share) for share in shares])
        by_rank = -np.sqrt(np.log1p(np.exp(passes)))
        order = np.random.default_rng(int(self.key(name)[0])).permutation(len(shares))
        bias = np.empty(len(shares), np.float32)
        bias[order] = by_rank - by_rank.mean()
        return bias

    def _logit_deviation(self, weight: str) -> float:
        """Of the router's products with normed inputs: those have the norm weights' mean square."""
        recipe = self.recipe(weight)
        exponent = (recipe.offset >> 7 & 0xFF) - 127
        return 2.0**exponent * 7.04 * self.config.hidden_size**0.5 * 1.125

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def config_text(self) -> str:
        return config_text(self.config, self.experts)

    def provenance(self, names: Iterable[str]) -> dict[str, list[int]]:
        return {"synthetic": [self.seed, self.distinct_layers, ROUTINGS.index(self.routing)]}

    def read_into(self, name: str, buffer: np.ndarray, start: int = 0) -> None:
        self.require_range(name, buffer, start)
        if (made := self.computed(name)) is not None:
            buffer[:] = made.view(np.uint8)[start : start + buffer.nbytes]
            return
        key = self.key(name)
        if (info := self.info(name)).dtype == "I64":
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
