"""What a layer remembers between chunks of one sequence, as explicit pytrees.

There is no batch dimension: a call advances one chunk of one sequence. Chunks may be padded to a
fixed number of rows; padding rows never enter the state.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ds4jax import kv
from ds4jax.config import OVERLAPPED_RATIO, ModelConfig, Numerics
from ds4jax.run_config import RunConfig
from pallas_kernels import compressor

FIRST_CAPACITY = 8192  # tokens; state buffers grow from here by factors of 4
ENTRY_ROWS = 128  # compressed buffers have a multiple of this many rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence.

    tokens    [T] i32, rows >= length are padding and hold any valid id
    position  i32 scalar, absolute position of row 0
    length    i32 scalar, number of real rows, 0 <= length <= T
    """

    tokens: jax.Array
    position: jax.Array
    length: jax.Array

    @property
    def positions(self) -> jax.Array:
        """Absolute position of every row, padding included: [T] i32."""
        return self.position + jnp.arange(self.tokens.shape[0], dtype=jnp.int32)

    @property
    def real(self) -> jax.Array:
        """Which rows are tokens: [T] bool."""
        return jnp.arange(self.tokens.shape[0], dtype=jnp.int32) < self.length


def make_chunk(tokens: np.ndarray, position: int, rows: int) -> Chunk:
    """A chunk of the i32 ids `tokens`, padded to `rows` rows with id 0."""
    padded = np.zeros(rows, np.int32)
    padded[: len(tokens)] = tokens
    return Chunk(
        jnp.asarray(padded), jnp.asarray(position, jnp.int32), jnp.asarray(len(tokens), jnp.int32)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """State of one layer after P tokens; fields that a layer kind lacks are None.

    window       [W - 1, K] compute dtype: keys of positions P - (W - 1) .. P - 1, normed, rotated
                 and quantised; rows of negative positions are zeros that no mask lets through
    compressed   [N, K] compute dtype: entries 0 .. P // ratio - 1, then zeros (CSA, HCA); rows of
                 bytes with numerics.kv = "fp8", see `kv`
    carry        float32 gates and values of the open block, and with overlap of the last closed
                 one (CSA, HCA)
    index_keys   [N, Di] compute dtype: indexer keys of the same entries (CSA)
    index_carry  the carry of the indexer's own compressor (CSA)
    """

    window: jax.Array
    compressed: jax.Array | None = None
    carry: compressor.Carry | None = None
    index_keys: jax.Array | None = None
    index_carry: compressor.Carry | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceState:
    """State of a sequence: `position` tokens seen (a host integer) and one state per layer.

    In a run of several processes the layers of the other ones are None.
    """

    position: int = dataclasses.field(metadata={"static": True})
    layers: tuple[LayerState, ...]


@dataclasses.dataclass(frozen=True)
class PausedPass:
    """A sequence in the middle of a micro-batch, between two layers.

    layer    the next layer
    state    its position is that of the first token of the micro-batch; layers below `layer` have
             seen the micro-batch already
    streams  of each chunk, what enters the next layer
    tokens   how many tokens each chunk has
    """

    layer: int
    state: SequenceState
    streams: tuple[jax.Array, ...]
    tokens: tuple[int, ...]


def capacity_for(config: RunConfig, model_config: ModelConfig, tokens: int) -> int:
    """Tokens that state buffers for `tokens` tokens have room for.

    A few fixed sizes, so that prompts of different lengths share programs.
    """
    if config.prefill.max_tokens is not None:
        return config.prefill.max_tokens
    capacity = FIRST_CAPACITY
    while capacity < tokens:
        capacity *= 4
    return min(capacity, model_config.max_position_embeddings)


def state_capacity(state: SequenceState, config: ModelConfig) -> int:
    """Tokens that the buffers of `state` have room for."""
    return min(
        (
            # Token (n + 1) * ratio - 1 is the first to close an entry that needs another row.
            ratio * (layer.compressed.shape[0] + 1) - 1
            for ratio, layer in zip(config.layer_ratios, state.layers, strict=False)
            if layer is not None and layer.compressed is not None
        ),
        default=config.max_position_embeddings,
    )


def entry_rows(ratio: int, capacity_tokens: int) -> int:
    """Rows N of a compressed buffer for `capacity_tokens` tokens: a multiple of 128."""
    return max(-(-(capacity_tokens // ratio) // ENTRY_ROWS), 1) * ENTRY_ROWS


def empty_layer_state(
    config: ModelConfig, ratio: int, numerics: Numerics, capacity_tokens: int
) -> LayerState:
    """The state before the first token of a layer with compression ratio `ratio` (0 = window)."""
    head, dtype = config.head_dim, numerics.dtype
    window = jnp.zeros((config.sliding_window - 1, head), dtype)
    if ratio == 0:
        return LayerState(window)
    rows = entry_rows(ratio, capacity_tokens)
    if numerics.kv == "fp8":
        compressed = jnp.zeros((rows, kv.row_bytes(config)), jnp.uint8)
    else:
        compressed = jnp.zeros((rows, head), dtype)
    if ratio != OVERLAPPED_RATIO:
        return LayerState(
            window,
            compressed=compressed,
            carry=compressor.empty_carry(head, ratio=ratio, overlap=False),
        )
    index_head = config.index_head_dim
    return LayerState(
        window,
        compressed=compressed,
        carry=compressor.empty_carry(2 * head, ratio=ratio, overlap=True),
        index_keys=jnp.zeros((rows, index_head), dtype),
        index_carry=compressor.empty_carry(2 * index_head, ratio=ratio, overlap=True),
    )


def empty_state(config: ModelConfig, numerics: Numerics, capacity_tokens: int) -> SequenceState:
    """The state before the first token, with room for `capacity_tokens` tokens."""
    return SequenceState(
        0,
        tuple(
            empty_layer_state(config, ratio, numerics, capacity_tokens)
            for ratio in config.layer_ratios
        ),
    )


def abstract_state(config: ModelConfig, numerics: Numerics, capacity_tokens: int) -> SequenceState:
    """Shapes and dtypes of `empty_state`; allocates nothing."""
    return SequenceState(
        0,
        tuple(
            _abstract_layer_state(config, ratio, numerics, capacity_tokens)
            for ratio in config.layer_ratios
        ),
    )


@functools.cache
def _abstract_layer_state(
    config: ModelConfig, ratio: int, numerics: Numerics, capacity_tokens: int
) -> LayerState:
    """Traced once for all layers of a ratio: plans and checks ask for every layer of the model."""
    return jax.eval_shape(lambda: empty_layer_state(config, ratio, numerics, capacity_tokens))


def new_layer_state(
    config: ModelConfig, ratio: int, numerics: Numerics, capacity_tokens: int, device: jax.Device
) -> LayerState:
    """`empty_layer_state` on `device`, by a program that all layers of a ratio share.

    Committed like the states that programs return: jit tells the two apart.
    """
    return _empty_program(config, ratio, numerics, capacity_tokens, device)()


@functools.cache
def _empty_program(
    config: ModelConfig, ratio: int, numerics: Numerics, capacity_tokens: int, device: jax.Device
) -> Callable[[], LayerState]:
    return jax.jit(
        lambda: empty_layer_state(config, ratio, numerics, capacity_tokens),
        out_shardings=SingleDeviceSharding(device),
    )


def state_bytes(
    config: ModelConfig, numerics: Numerics, capacity_tokens: int, layers: range | None = None
) -> int:
    """Bytes of the arrays of `empty_state` (of some layers only), without allocating them."""
    chosen = range(config.num_hidden_layers) if layers is None else layers
    state = abstract_state(config, numerics, capacity_tokens)
    leaves = jax.tree.leaves([state.layers[layer] for layer in chosen])
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def grow_state(state: SequenceState, config: ModelConfig, capacity_tokens: int) -> SequenceState:
    """The same state with room for `capacity_tokens` tokens; never shrinks."""

    def grow(buffer: jax.Array | None, ratio: int) -> jax.Array | None:
        if buffer is None:
            return None
        missing = max(entry_rows(ratio, capacity_tokens) - buffer.shape[0], 0)
        return jnp.pad(buffer, ((0, missing), (0, 0)))

    layers = tuple(
        layer
        if layer is None  # another process has it
        else dataclasses.replace(
            layer,
            compressed=grow(layer.compressed, ratio),
            index_keys=grow(layer.index_keys, ratio),
        )
        for layer, ratio in zip(state.layers, config.layer_ratios, strict=True)
    )
    return SequenceState(state.position, layers)
