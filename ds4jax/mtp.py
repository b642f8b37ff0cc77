"""The multi-token-prediction block of the original V4-Flash and V4-Pro checkpoints.

Not run in prefill: a drafter joins the streams of position t after the last main layer with the
embedding of the token that follows and predicts the one after that.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.attention import abstract_norm
from ds4jax.config import ModelConfig, Numerics
from ds4jax.hyper import HyperHead, abstract_head
from ds4jax.layers import Linear, RMSNorm, wide_product
from ds4jax.model import Block, abstract_block
from ds4jax.quant import abstract_fp8
from pallas_kernels import codecs


@nnx.dataclass
class MTPBlock(nnx.Module):
    """A window-only, score-routed block with its own entry and head maps.

    enorm, hnorm    norms of the token embedding and of each stream, [D]
    e_proj, h_proj  [D, D] projections of the two
    block           the layer itself, run like any other block with its own state and experts
    hc_head, norm   replace those of the main model; the embedding and the head are shared
    """

    enorm: RMSNorm = nnx.data()
    hnorm: RMSNorm = nnx.data()
    e_proj: Linear = nnx.data()
    h_proj: Linear = nnx.data()
    block: Block = nnx.data()
    hc_head: HyperHead = nnx.data()
    norm: RMSNorm = nnx.data()

    def join(self, embedded: jax.Array, streams: jax.Array, numerics: Numerics) -> jax.Array:
        """Input streams of `block` [T, S, D].

        embedded  [T, D] compute dtype, rows of the main model's embedding
        streams   [T, S, D] of the main model after its last layer, before the head collapse

        Which token's embedding is joined with which position is the caller's choice; by the
        convention of DeepSeek-V3 it is the token at position t + 1.
        """
        rows, count, hidden = streams.shape
        token = self.e_proj(self.enorm(embedded), numerics).astype(jnp.float32)
        past = self.h_proj(self.hnorm(streams).reshape(rows * count, hidden), numerics)
        past = past.reshape(streams.shape).astype(jnp.float32)
        return codecs.round_to(token[:, None, :] + past, numerics.dtype)

    def logits(self, streams: jax.Array, head: jax.Array) -> jax.Array:
        """Streams after `block` [rows, S, D] and the main head [V, D] -> float32 [rows, V]."""
        return wide_product(self.norm(self.hc_head(streams)), head)


def abstract_mtp(config: ModelConfig) -> MTPBlock:
    """Shapes and dtypes of the block in the published storage formats."""
    hidden = config.hidden_size
    return MTPBlock(
        enorm=abstract_norm(config, hidden),
        hnorm=abstract_norm(config, hidden),
        e_proj=Linear(abstract_fp8(hidden, hidden), True),
        h_proj=Linear(abstract_fp8(hidden, hidden), True),
        block=abstract_block(config, 0, hashed=False),
        hc_head=abstract_head(config),
        norm=abstract_norm(config, hidden),
    )
