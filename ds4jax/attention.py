"""Attention over the sliding window and compressed entries: SWA, CSA and HCA layers.

All three kinds share one softmax over the window, the visible compressed entries and a sink.
SWA has no entries, HCA sees every closed block of `ratio` tokens, CSA sees the entries that its
indexer scores best. The compressed state is brought up to date before the chunk's queries look
at it, so a chunk sees its own blocks as soon as they close.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax import kv
from ds4jax.cache import Chunk, LayerState
from ds4jax.config import OVERLAPPED_RATIO, ModelConfig, Numerics
from ds4jax.layers import (
    Linear,
    RMSNorm,
    rope_frequencies,
    rope_table,
)
from ds4jax.quant import abstract_array, abstract_fp8, abstract_plain
from pallas_kernels import (
    block_linear,
    codecs,
    compressor,
    indexer,
    rotary,
    sparse_attention,
    window_attention,
)


@nnx.dataclass
class Compressor(nnx.Module):
    """Turns every `ratio` tokens into one entry: a per-channel gated mean, then a norm.

    wkv, wgate  [w, D], float32 products
    ape         [ratio, w] float32, added to the gates by absolute position mod ratio
    norm        [w / 2] if blocks overlap (ratio 4), [w] otherwise
    """

    wkv: Linear = nnx.data()
    wgate: Linear = nnx.data()
    ape: jax.Array = nnx.data()
    norm: RMSNorm = nnx.data()
    ratio: int = nnx.static()

    def __call__(
        self, inputs: jax.Array, carry: compressor.Carry, chunk: Chunk, numerics: Numerics
    ) -> tuple[jax.Array, compressor.Carry]:
        """Closes the blocks that end in this chunk.

        inputs  [T, D], the normed attention input
        return  normed entries [nb, d] in the compute dtype, entry i of the result being block
                position // ratio + i (rows of blocks still open hold no meaning), and the carry
        """
        values = self.wkv.wide(inputs)
        gates = self.wgate.wide(inputs) + self.ape[chunk.positions % self.ratio]
        entries, _, _, carry = compressor.compress(
            values,
            gates,
            carry,
            chunk.position,
            chunk.length,
            ratio=self.ratio,
            overlap=self.ratio == OVERLAPPED_RATIO,
        )
        return self.norm(codecs.round_to(entries, numerics.dtype)), carry


@nnx.dataclass
class Indexer(nnx.Module):
    """Scores compressed entries for every query token of a CSA layer.

    wq_b          [Hi * Di, Rq] queries from the latent of the attention queries
    weights_proj  [Hi, D] signed head weights
    compressor    makes the keys [Di]
    """

    wq_b: Linear = nnx.data()
    weights_proj: Linear = nnx.data()
    compressor: Compressor = nnx.data()
    config: ModelConfig = nnx.static()

    def queries(
        self, latent: jax.Array, table: tuple[jax.Array, jax.Array], numerics: Numerics
    ) -> jax.Array:
        """latent [T, Rq] -> [T, Hi, Di] in the compute dtype."""
        heads = self.wq_b(latent, numerics).reshape(
            latent.shape[0], self.config.index_n_heads, self.config.index_head_dim
        )
        return indexer.prepare_queries(heads, table, quantise=numerics.q3)

    def head_weights(self, inputs: jax.Array, numerics: Numerics) -> jax.Array:
        """inputs [T, D] -> [T, Hi] float32, rounded to the compute dtype before and after scale."""
        scale = self.config.index_head_dim**-0.5 * self.config.index_n_heads**-0.5
        weights = self.weights_proj(inputs, numerics).astype(jnp.float32) * scale
        return codecs.round_to(weights, numerics.dtype).astype(jnp.float32)


@nnx.dataclass
class Attention(nnx.Module):
    """Multi-query attention with one shared key = value head and a grouped output projection.

    wq_a [Rq, D], q_norm [Rq], wq_b [H * K, Rq], wkv [K, D], kv_norm [K], attn_sink [H] float32,
    wo_a [G * Ro, H / G * K], wo_b [D, G * Ro]; compressor on CSA and HCA, indexer on CSA.
    """

    wq_a: Linear = nnx.data()
    q_norm: RMSNorm = nnx.data()
    wq_b: Linear = nnx.data()
    wkv: Linear = nnx.data()
    kv_norm: RMSNorm = nnx.data()
    attn_sink: jax.Array = nnx.data()
    wo_a: Linear = nnx.data()
    wo_b: Linear = nnx.data()
    compressor: Compressor | None = nnx.data()
    indexer: Indexer | None = nnx.data()
    config: ModelConfig = nnx.static()
    ratio: int = nnx.static()

    def __call__(
        self, inputs: jax.Array, state: LayerState, chunk: Chunk, numerics: Numerics
    ) -> tuple[jax.Array, LayerState, jax.Array | None]:
        """inputs [T, D] in the compute dtype -> outputs [T, D], state after the chunk, selection.

        The selection is that of `select` on CSA layers and None on others.
        """
        table = self.rope(chunk.positions)
        latent, queries = self.queries(inputs, numerics)
        window_kv, state = self.update(inputs, table, state, chunk, numerics)
        selected = None
        if self.indexer is not None:
            selected = self.select(inputs, latent, table, state, chunk, numerics)
        with jax.named_scope("attend"):
            compressed = self.entries(state, numerics)
            heads = self.attend(queries, table, window_kv, selected, compressed, chunk)
        with jax.named_scope("output"):
            outputs = self.output(heads, numerics)
        return outputs, state, selected

    def attend(
        self,
        queries: jax.Array,
        table: rotary.Table,
        window_kv: jax.Array,
        selected: jax.Array | None,
        compressed: jax.Array | None,
        chunk: Chunk,
    ) -> jax.Array:
        """One softmax over window, compressed entries and sink: [T, H, K].

        Every query head is normalised over all its channels, without a weight and before the
        rotation; outputs are turned back by the angle of their token.
        """
        window, scale = self.config.sliding_window, self.config.head_dim**-0.5
        heads = {"norm_eps": self.config.rms_norm_eps, "rope": table}
        if selected is None:
            return window_attention.window_attention(
                queries,
                window_kv,
                compressed,
                self.attn_sink,
                chunk.position,
                ratio=max(self.ratio, 1),
                window=window,
                scale=scale,
                **heads,
            )
        assert compressed is not None
        return sparse_attention.sparse_attention(
            queries,
            window_kv,
            compressed,
            selected,
            self.attn_sink,
            chunk.position,
            window=window,
            scale=scale,
            **heads,
        )

    def entries(self, state: LayerState, numerics: Numerics) -> jax.Array | None:
        """The compressed entries [N, K] of `state`, in the compute dtype."""
        if numerics.kv == "plain" or state.compressed is None:
            return state.compressed
        config = self.config
        return kv.unpack(state.compressed, config.plain_channels, config.rope_channels)

    def rope(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This layer's cos and sin at `positions`."""
        return rope_table(positions, rope_frequencies(self.config, self.ratio))

    def queries(self, inputs: jax.Array, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
        """The latent [T, Rq], which the indexer shares, and the queries [T, H, K] as projected."""
        with jax.named_scope("queries"):
            latent = self.q_norm(self.wq_a(inputs, numerics))
            heads = self.wq_b(latent, numerics)
            return latent, heads.reshape(
                inputs.shape[0], self.config.num_attention_heads, self.config.head_dim
            )

    def quantise_kv(self, keys: jax.Array, numerics: Numerics) -> jax.Array:
        """The FP8 rounding of the channels without rotation (q2), rows [..., K]."""
        if not numerics.q2:
            return keys
        plain = self.config.plain_channels
        return jnp.concatenate(
            [codecs.fake_quant_fp8(keys[..., :plain], kv.BLOCK), keys[..., plain:]], axis=-1
        )

    def update(
        self,
        inputs: jax.Array,
        table: tuple[jax.Array, jax.Array],
        state: LayerState,
        chunk: Chunk,
        numerics: Numerics,
    ) -> tuple[jax.Array, LayerState]:
        """Adds the chunk to the state: window_kv [W - 1 + T, K] for its queries, and the new state.

        Row j of window_kv stands at position chunk.position - (W - 1) + j.
        """
        with jax.named_scope("window"):
            keys = rotary.apply_rope(self.kv_norm(self.wkv(inputs, numerics)), table)
            window_kv = jnp.concatenate([state.window, self.quantise_kv(keys, numerics)])
            window = jax.lax.dynamic_slice_in_dim(
                window_kv, chunk.length, state.window.shape[0], axis=0
            )
            state = dataclasses.replace(state, window=window)
        if self.compressor is not None:
            assert state.compressed is not None
            assert state.carry is not None
            with jax.named_scope("compress"):
                entries, carry = self.compressor(inputs, state.carry, chunk, numerics)
                entries = rotary.apply_rope(
                    entries, self.rope(self.entry_positions(entries, chunk))
                )
                entries = self.quantise_kv(entries, numerics)
                if numerics.kv == "fp8":
                    entries = kv.pack(entries, self.config.rope_channels)
                compressed = self.append(state.compressed, entries, chunk)
                state = dataclasses.replace(state, compressed=compressed, carry=carry)
        if self.indexer is not None:
            assert state.index_keys is not None
            assert state.index_carry is not None
            with jax.named_scope("index_keys"):
                keys, carry = self.indexer.compressor(inputs, state.index_carry, chunk, numerics)
                keys = rotary.apply_rope(keys, self.rope(self.entry_positions(keys, chunk)))
                keys = indexer.mix_channels(keys, quantise=numerics.q3)
                index_keys = self.append(state.index_keys, keys, chunk)
                state = dataclasses.replace(state, index_keys=index_keys, index_carry=carry)
        return window_kv, state

    def entry_positions(self, entries: jax.Array, chunk: Chunk) -> jax.Array:
        """Position of the first own token of each entry closed in this chunk: i32 [nb]."""
        first = chunk.position // self.ratio
        return self.ratio * (first + jnp.arange(entries.shape[0], dtype=jnp.int32))

    def append(self, buffer: jax.Array, entries: jax.Array, chunk: Chunk) -> jax.Array:
        """Writes the entries of blocks that closed in this chunk; open blocks are dropped."""
        offsets = jnp.arange(entries.shape[0], dtype=jnp.int32)
        rows = chunk.position // self.ratio + offsets
        closed = rows < (chunk.position + chunk.length) // self.ratio
        # Dropped rows get distinct indices beyond the end, so that all stay sorted and unique.
        rows = jnp.where(closed, rows, buffer.shape[0] + offsets)
        return buffer.at[rows].set(
            entries, mode="drop", indices_are_sorted=True, unique_indices=True
        )

    def select(
        self,
        inputs: jax.Array,
        latent: jax.Array,
        table: tuple[jax.Array, jax.Array],
        state: LayerState,
        chunk: Chunk,
        numerics: Numerics,
    ) -> jax.Array:
        """The entries each token attends to on a CSA layer: i32 [T, index_topk], -1 padded.

        `state` already holds the chunk (see `update`). Scores are float32 in every setting.
        """
        with jax.named_scope("select"):
            assert self.indexer is not None
            assert state.index_keys is not None
            return indexer.select_entries(
                self.indexer.queries(latent, table, numerics),
                state.index_keys,
                self.indexer.head_weights(inputs, numerics),
                chunk.position,
                k=self.config.index_topk,
                ratio=self.ratio,
            )

    def output(self, heads: jax.Array, numerics: Numerics) -> jax.Array:
        """Grouped projection of the heads [T, H, K] -> [T, D].

        Each of G consecutive groups of heads has its own block of rows of wo_a. The published
        code runs wo_a on unquantised activations, so q1 never applies to it.
        """
        groups, rank = self.config.o_groups, self.config.o_lora_rank
        grouped = heads.reshape(heads.shape[0], groups, -1)
        stored = self.wo_a.weight
        weight = block_linear.decoded(stored.codes, stored.scales, numerics.dtype)
        weight = weight.reshape(groups, rank, -1)
        latent = jax.lax.dot_general(
            grouped,
            weight,
            (((2,), (2,)), ((1,), (0,))),
            precision=numerics.precision,
            preferred_element_type=jnp.dtype(numerics.dtype),
        )
        return self.wo_b(
            jnp.swapaxes(latent, 0, 1).reshape(heads.shape[0], groups * rank), numerics
        )


def abstract_attention(config: ModelConfig, ratio: int) -> Attention:
    """Shapes and dtypes of an attention with compression ratio `ratio` (0 = window only)."""
    hidden, head, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    latent, grouped = config.q_lora_rank, config.o_groups * config.o_lora_rank
    overlap = ratio == OVERLAPPED_RATIO
    index_rows = config.index_n_heads * config.index_head_dim
    return Attention(
        wq_a=Linear(abstract_fp8(latent, hidden), True),
        q_norm=abstract_norm(config, latent),
        wq_b=Linear(abstract_fp8(heads * head, latent), True),
        wkv=Linear(abstract_fp8(head, hidden), True),
        kv_norm=abstract_norm(config, head),
        attn_sink=abstract_array((heads,), jnp.float32),
        wo_a=Linear(abstract_fp8(grouped, heads // config.o_groups * head), False),
        wo_b=Linear(abstract_fp8(hidden, grouped), True),
        compressor=_abstract_compressor(config, ratio, head) if ratio else None,
        indexer=Indexer(
            Linear(abstract_fp8(index_rows, latent), True),
            Linear(abstract_plain(config.index_n_heads, hidden), False),
            _abstract_compressor(config, ratio, config.index_head_dim),
            config,
        )
        if overlap
        else None,
        config=config,
        ratio=ratio,
    )


def abstract_norm(config: ModelConfig, channels: int) -> RMSNorm:
    """Shape and dtype of a norm over `channels`."""
    return RMSNorm(abstract_array((channels,), jnp.bfloat16), config.rms_norm_eps)


def _abstract_compressor(config: ModelConfig, ratio: int, channels: int) -> Compressor:
    width = 2 * channels if ratio == OVERLAPPED_RATIO else channels
    return Compressor(
        Linear(abstract_plain(width, config.hidden_size)),
        Linear(abstract_plain(width, config.hidden_size)),
        abstract_array((ratio, width), jnp.float32),
        abstract_norm(config, channels),
        ratio,
    )
