"""The DeepSeek-V4 stack as modules that hold their resident weights.

Modules receive weights through the constructor and are run under plain `jax.jit`; treat them as
frozen. Routed experts are never module fields: they arrive as call arguments, because most of
them live elsewhere. `abstract(config)` builds the same tree from shapes and dtypes.

Paths in the tree are the names of the published checkpoint with `layers.L` -> `blocks[L]`,
`NAME.weight` / `NAME.scale` of a matrix -> `NAME.weight.codes` / `NAME.weight.scales`,
`hc_attn_fn` -> `hc_attn.fn` (likewise hc_ffn, hc_head, base, scale), `embed.weight` -> `embed` and
`head.weight` -> `head`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.attention import Attention, abstract_attention, abstract_norm
from ds4jax.cache import Chunk, LayerState
from ds4jax.config import ModelConfig, Numerics
from ds4jax.hyper import HyperConnection, HyperHead, abstract_connection, abstract_head
from ds4jax.layers import RMSNorm, wide_product
from ds4jax.moe import MoE, Routing, abstract_moe
from ds4jax.quant import abstract_array
from pallas_kernels import indexer, routed_experts


@nnx.dataclass
class Block(nnx.Module):
    """One layer: attention and mixture of experts, each inside a hyper-connection.

    Blocks with the same attention kind, ratio and routing share one trace: nothing in a block
    says which layer it is.
    """

    hc_attn: HyperConnection = nnx.data()
    attn_norm: RMSNorm = nnx.data()
    attn: Attention = nnx.data()
    hc_ffn: HyperConnection = nnx.data()
    ffn_norm: RMSNorm = nnx.data()
    ffn: MoE = nnx.data()

    @property
    def ratio(self) -> int:
        """Compression ratio of the attention, 0 = window only."""
        return self.attn.ratio

    def attend(
        self, streams: jax.Array, state: LayerState, chunk: Chunk, numerics: Numerics
    ) -> tuple[jax.Array, LayerState]:
        """The attention half: streams [T, S, D] -> streams, and the state after the chunk."""
        return self.attend_and_select(streams, state, chunk, numerics)[:2]

    def attend_and_select(
        self, streams: jax.Array, state: LayerState, chunk: Chunk, numerics: Numerics
    ) -> tuple[jax.Array, LayerState, jax.Array | None]:
        """`attend`, and on CSA layers the entries that each token attended to.

        The selection is i32 [T, index_topk], ascending and -1 padded; None on other layers. Rows
        of padding hold no meaning. A token whose scores held NaN selects `indexer.NAN_SCORE`, and
        its streams become NaN: its router tells the host, see `Router`.
        """
        with jax.named_scope("hc_attn_pre"):
            inputs, post, comb = self.hc_attn.pre(streams)
            inputs = self.attn_norm(inputs)
        outputs, state, selected = self.attn(inputs, state, chunk, numerics)
        if selected is not None:
            post = jnp.where(selected[:, :1] == indexer.NAN_SCORE, jnp.float32(jnp.nan), post)
        with jax.named_scope("hc_attn_post"):
            return self.hc_attn.post(outputs, streams, post, comb), state, selected

    def route(self, streams: jax.Array, chunk: Chunk, numerics: Numerics) -> Routing:
        """The first part of the expert half: what the routed experts need, see `Routing`."""
        with jax.named_scope("hc_ffn_pre"):
            inputs, post, comb = self.hc_ffn.pre(streams)
            inputs = self.ffn_norm(inputs)
        with jax.named_scope("route"):
            ids, weights = self.ffn.gate(inputs, chunk.tokens)
            ids = jnp.where(chunk.real[:, None], ids, -1)
        return Routing(inputs, ids, weights, post, comb)

    def finish(
        self, streams: jax.Array, routing: Routing, slots: jax.Array, numerics: Numerics
    ) -> jax.Array:
        """The last part: shared expert, sum of the expert slots [T, k, D], hyper-connection."""
        with jax.named_scope("shared_expert"):
            shared = self.ffn.shared_experts(routing.inputs, numerics)
        with jax.named_scope("combine"):
            outputs = routed_experts.combine_slots(slots, shared)
            return self.hc_ffn.post(outputs, streams, routing.post, routing.comb)

    def __call__(
        self,
        streams: jax.Array,
        state: LayerState,
        chunk: Chunk,
        slabs: Sequence[routed_experts.ExpertSlab],
        where: jax.Array,
        numerics: Numerics,
    ) -> tuple[jax.Array, LayerState]:
        """The whole layer in one call, with all its experts at hand.

        slabs, where: the layer's experts, see `routed_experts.expert_slots`.
        """
        streams, state = self.attend(streams, state, chunk, numerics)
        routing = self.route(streams, chunk, numerics)
        slots = routed_experts.expert_slots(
            routing.inputs,
            routing.ids,
            routing.weights,
            tuple(slabs),
            where,
            limit=self.ffn.shared_experts.limit,
            quantize_input=numerics.q1,
        )
        return self.finish(streams, routing, slots, numerics), state


@nnx.dataclass
class Transformer(nnx.Module):
    """The main model without its routed experts.

    embed, head  [V, D] bfloat16 (float32 in float32 checkpoints); they are separate matrices.
    """

    embed: jax.Array = nnx.data()
    blocks: tuple[Block, ...] = nnx.data()
    hc_head: HyperHead = nnx.data()
    norm: RMSNorm = nnx.data()
    head: jax.Array = nnx.data()
    config: ModelConfig = nnx.static()

    def embed_tokens(self, tokens: jax.Array, numerics: Numerics) -> jax.Array:
        """tokens [T] i32 -> S equal streams [T, S, D] in the compute dtype."""
        return embed_tokens(self.embed, tokens, self.config.hc_mult, numerics)

    def logits(self, streams: jax.Array) -> jax.Array:
        """Streams of any rows after the last block [rows, S, D] -> float32 [rows, V]."""
        with jax.named_scope("head"):
            return wide_product(self.norm(self.hc_head(streams)), self.head)


def embed_tokens(
    table: jax.Array, tokens: jax.Array, streams: int, numerics: Numerics
) -> jax.Array:
    """Rows of `table` [V, D], unscaled, copied to `streams` equal streams: [T, S, D]."""
    rows = table[tokens].astype(numerics.dtype)
    return jnp.repeat(rows[:, None, :], streams, axis=1)


def abstract(config: ModelConfig) -> Transformer:
    """The tree of the main model as ShapeDtypeStructs, in the published storage formats.

    Token tables of hash layers are i32 here (I64 in the files).
    """
    table = abstract_array((config.vocab_size, config.hidden_size), jnp.bfloat16)
    return Transformer(
        embed=table,
        blocks=tuple(
            abstract_block(config, ratio, hashed=config.is_hash(layer))
            for layer, ratio in enumerate(config.layer_ratios)
        ),
        hc_head=abstract_head(config),
        norm=abstract_norm(config, config.hidden_size),
        head=table,
        config=config,
    )


def abstract_block(config: ModelConfig, ratio: int, *, hashed: bool) -> Block:
    """Shapes and dtypes of one block."""
    return Block(
        hc_attn=abstract_connection(config),
        attn_norm=abstract_norm(config, config.hidden_size),
        attn=abstract_attention(config, ratio),
        hc_ffn=abstract_connection(config),
        ffn_norm=abstract_norm(config, config.hidden_size),
        ffn=abstract_moe(config, hashed=hashed),
    )
