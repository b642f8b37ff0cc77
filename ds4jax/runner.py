"""The programs of a forward pass: one jit per layer part, shared by all layers of a kind.

A layer is attend, route, experts, finish. Only shapes and static fields tell programs apart:
three attention kinds, two routers, and one program each for experts, finish, embedding and head,
times the row shapes and state capacities in use. Streams and states are donated, so a step works
in place; expert slabs are call arguments, so that where a slab comes from is the caller's choice.
"""

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.admission import HEAD_ROWS
from ds4jax.cache import Chunk, LayerState
from ds4jax.config import Numerics
from ds4jax.model import Block, Transformer, embed_tokens
from ds4jax.moe import LayerSlabs, Routing
from pallas_kernels import routed_experts

# Equal bits in every process: XLA on GPUs would otherwise time several forms of a matrix product
# and keep the fastest of that day. Without timing its own Triton products have no good default, so
# products go to the vendor library, which chooses by shape.
_SAME_BITS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
program = functools.partial(jax.jit, compiler_options=_SAME_BITS)

Abstract = jax.Array | jax.ShapeDtypeStruct


class Program:
    """A jitted function with arguments, arrays or their shapes on a device; runs nothing."""

    def __init__(self, function: Any, *args: Any):
        self.function, self.args = function, args

    @property
    def key(self) -> Hashable:
        """Equal for calls that are one program."""
        leaves, tree = jax.tree.flatten(self.args)
        return self.function, tree, *(_key(leaf) for leaf in leaves)

    def outputs(self) -> Any:
        """Shapes of what it returns, on the device of its arguments."""
        leaves = jax.tree.leaves(self.args)
        sharding = next(leaf.sharding for leaf in leaves if getattr(leaf, "sharding", None))
        return abstract_on(sharding, self.function.eval_shape(*self.args))

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers it; what this compiles to is what a call with such arguments runs."""
        return self.function.lower(*self.args)


def _key(leaf: Any) -> Hashable:
    if not hasattr(leaf, "shape"):
        return leaf
    return leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)


def abstract_on(sharding: jax.sharding.Sharding, tree: Any) -> Any:
    """Shapes of the arrays of `tree`, to be found at `sharding`."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


@functools.partial(program, static_argnames=("streams", "numerics"))
def _embed(table: jax.Array, tokens: jax.Array, streams: int, numerics: Numerics) -> jax.Array:
    return embed_tokens(table, tokens, streams, numerics)


@functools.partial(program, static_argnames="numerics", donate_argnames=("streams", "state"))
def _attend(
    block: Block, streams: jax.Array, state: LayerState, chunk: Chunk, numerics: Numerics
) -> tuple[jax.Array, LayerState]:
    return block.attend(streams, state, chunk, numerics)


@functools.partial(program, static_argnames="numerics")
def _route(block: Block, streams: jax.Array, chunk: Chunk, numerics: Numerics) -> Routing:
    return block.route(streams, chunk, numerics)


@functools.partial(program, static_argnames=("limit", "quantize_input"), donate_argnames="slots")
def _experts(
    routing: Routing,
    slabs: tuple[routed_experts.ExpertSlab, ...],
    where: jax.Array,
    slots: jax.Array | None,
    limit: float,
    quantize_input: bool,
) -> jax.Array:
    return routed_experts.expert_slots(
        routing.inputs,
        routing.ids,
        routing.weights,
        slabs,
        where,
        limit=limit,
        quantize_input=quantize_input,
        slots=slots,
    )


@functools.partial(program, static_argnames="numerics", donate_argnames="streams")
def _finish(
    block: Block, streams: jax.Array, routing: Routing, slots: jax.Array, numerics: Numerics
) -> jax.Array:
    return block.finish(streams, routing, slots, numerics)


@program
def _tick(array: jax.Array) -> jax.Array:
    return array[(0,) * array.ndim]


def _rows_from(streams: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(streams, start, min(HEAD_ROWS, streams.shape[0]))


@program
def _logits(head: Transformer, streams: jax.Array, start: jax.Array) -> jax.Array:
    return head.logits(_rows_from(streams, start))


@program
def _row(tile: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(tile, index, 1)


@functools.partial(program, static_argnames="top")
def _logprobs(
    head: Transformer, streams: jax.Array, start: jax.Array, following: jax.Array, top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    logprobs = jax.nn.log_softmax(head.logits(_rows_from(streams, start)))
    following = jax.lax.dynamic_slice_in_dim(following, start, logprobs.shape[0])
    chosen = jnp.take_along_axis(logprobs, jnp.maximum(following, 0)[:, None], axis=1)[:, 0]
    best, tokens = jax.lax.top_k(logprobs, top)
    return jnp.where(following >= 0, chosen, jnp.nan), best, tokens.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of next tokens, natural logarithm.

    next_token  [rows] float32: of the token that follows in the prompt; NaN after its last one
    top         [rows, k] float32: the k largest, descending
    tokens      [rows, k] i32: the tokens of `top`
    """

    next_token: np.ndarray
    top: np.ndarray
    tokens: np.ndarray


class Runner:
    """Layers of a transformer bound to their numerics, cut into the parts that programs take.

    layers  which ones, a contiguous range; None for all. The first layer comes with the embedding,
            the last one with the head.
    """

    def __init__(self, transformer: Transformer, numerics: Numerics, layers: range | None = None):
        self.config = transformer.config
        self.numerics = numerics
        self.layers = range(self.config.num_hidden_layers) if layers is None else layers
        self._table = transformer.embed
        # A program's inputs decide whether two layers share it: each part gets only the weights
        # that it uses, so that hash and score routing differ in `route` alone.
        self._head = _only(transformer, "hc_head", "norm", "head", "config")
        blocks = {layer: transformer.blocks[layer] for layer in self.layers}
        self._attend_parts = {
            layer: _only(block, "hc_attn", "attn_norm", "attn") for layer, block in blocks.items()
        }
        self._route_parts = {
            layer: dataclasses.replace(
                _only(block, "hc_ffn", "ffn_norm"), ffn=_only(block.ffn, "gate")
            )
            for layer, block in blocks.items()
        }
        self._finish_parts = {
            layer: dataclasses.replace(
                _only(block, "hc_ffn"), ffn=_only(block.ffn, "shared_experts")
            )
            for layer, block in blocks.items()
        }

    def with_numerics(self, numerics: Numerics) -> "Runner":
        """The same weights under another numerics setting."""
        other = copy.copy(self)
        other.numerics = numerics
        return other

    def expert_tables(self) -> dict[int, np.ndarray]:
        """On the host: the experts [V, k] of every token id, for those layers that hash ids."""
        tables = {layer: block.ffn.gate.tid2eid for layer, block in self._route_parts.items()}
        return {layer: np.asarray(table) for layer, table in tables.items() if table is not None}

    def embed(self, chunk: Chunk) -> jax.Array:
        """The streams [T, S, D] that enter the first layer."""
        return _embed(self._table, chunk.tokens, self.config.hc_mult, self.numerics)

    def attend(
        self, layer: int, streams: jax.Array, state: LayerState, chunk: Chunk
    ) -> tuple[jax.Array, LayerState]:
        """The attention half of a layer; consumes `streams` and `state`."""
        return _attend(self._attend_parts[layer], streams, state, chunk, self.numerics)

    def route(self, layer: int, streams: jax.Array, chunk: Chunk) -> Routing:
        """Which experts the tokens of the chunk need, and their input."""
        return _route(self._route_parts[layer], streams, chunk, self.numerics)

    def experts(
        self, routing: Routing, slabs: LayerSlabs, slots: jax.Array | None = None
    ) -> jax.Array:
        """Outputs of the routed experts in `slabs`, one slot per choice: [T, k, D].

        slots  the result of an earlier call with other experts of the layer; consumed
        """
        return _experts(routing, *slabs, slots, self.config.swiglu_limit, self.numerics.q1)

    def finish(
        self, layer: int, streams: jax.Array, routing: Routing, slots: jax.Array
    ) -> jax.Array:
        """The end of a layer; consumes `streams`."""
        return _finish(self._finish_parts[layer], streams, routing, slots, self.numerics)

    def layer_programs(
        self,
        layer: int,
        *,
        streams: Abstract,
        state: LayerState,
        chunk: Chunk,
        slabs: Sequence[LayerSlabs],
    ) -> dict[str, Program]:
        """The programs of a layer's parts for arguments of these shapes; runs nothing.

        slabs  that its experts come in, one call each: "experts 0" is the first one
        """
        numerics, limit = self.numerics, self.config.swiglu_limit
        programs = {
            "attend": Program(_attend, self._attend_parts[layer], streams, state, chunk, numerics),
            "route": Program(_route, self._route_parts[layer], streams, chunk, numerics),
        }
        routing, slots = programs["route"].outputs(), None
        for number, (experts, where) in enumerate(slabs):
            program = Program(_experts, routing, experts, where, slots, limit, numerics.q1)
            programs[f"experts {number}"] = program
            slots = slots or program.outputs()
        if slots is not None:
            part = self._finish_parts[layer]
            programs["finish"] = Program(_finish, part, streams, routing, slots, numerics)
        return programs

    def embed_program(self, chunk: Chunk) -> Program:
        """Of `embed`."""
        return Program(_embed, self._table, chunk.tokens, self.config.hc_mult, self.numerics)

    def head_programs(self, streams: Abstract, mode: str, top: int) -> list[Program]:
        """Of `logits`, with a single row where the mode is "last", or of `logprobs`."""
        zero = np.int32(0)
        if mode == "logprobs":
            following = np.zeros(streams.shape[0], np.int32)
            return [Program(_logprobs, self._head, streams, zero, following, top)]
        tile = Program(_logits, self._head, streams, zero)
        return [tile, Program(_row, tile.outputs(), zero)] if mode == "last" else [tile]

    def tick_program(self, array: Abstract) -> Program:
        """Of `tick`."""
        return Program(_tick, array)

    def tick(self, array: jax.Array) -> jax.Array:
        """One element of `array`: ready when the array is, and not donated to anything."""
        return _tick(array)

    def logits(self, streams: jax.Array, first: int, stop: int) -> np.ndarray:
        """Logits of rows first..stop of the last layer's streams, at most 128: [rows, V] float32.

        The product always runs on the same number of rows, so that a row's bits do not depend on
        which other rows are asked for.
        """
        start = self._tile_start(streams, first)
        tile = _logits(self._head, streams, np.int32(start))
        if stop - first == 1:  # the tile is 128 times what has to cross to the host
            return np.asarray(_row(tile, np.int32(first - start)))
        return np.asarray(tile)[first - start : stop - start]

    def logprobs(
        self, streams: jax.Array, first: int, stop: int, following: np.ndarray, top: int
    ) -> LogProbs:
        """Log-probabilities for rows first..stop, at most 128.

        following  [T] i32, the token after each row; -1 where there is none
        """
        start = self._tile_start(streams, first)
        tiles = _logprobs(self._head, streams, np.int32(start), following, top)
        return LogProbs(*(np.asarray(tile)[first - start : stop - start] for tile in tiles))

    def _tile_start(self, streams: jax.Array, first: int) -> int:
        rows = streams.shape[0]
        return min(first, rows - min(HEAD_ROWS, rows))


def tiles(rows: int) -> Sequence[tuple[int, int]]:
    """Ranges of at most 128 rows that cover 0..rows."""
    return [(first, min(first + HEAD_ROWS, rows)) for first in range(0, rows, HEAD_ROWS)]


def _only(module: Any, *names: str) -> Any:
    """The same module with every field but `names` set to None."""
    fields = {field.name for field in dataclasses.fields(module)}
    return dataclasses.replace(module, **dict.fromkeys(fields.difference(names)))


class CompileCount:
    """Counts programs that XLA compiles in this process and the seconds it takes.

    Compilations that a persistent cache answers count too.
    """

    def __init__(self) -> None:
        self.programs, self.seconds = 0, 0.0
        self._lock = threading.Lock()

    def observe(self, event: str, duration_secs: float, **_: object) -> None:
        """Takes the duration events of `jax.monitoring`."""
        if event == "/jax/core/compile/backend_compile_duration":
            with self._lock:
                self.programs += 1
                self.seconds += duration_secs

    def measure(self) -> Callable[[], tuple[int, float]]:
        """Starts a measurement; the returned function tells (programs, seconds) since then."""
        programs, seconds = self.programs, self.seconds
        return lambda: (self.programs - programs, self.seconds - seconds)


COMPILED = CompileCount()
jax.monitoring.register_event_duration_secs_listener(COMPILED.observe)
