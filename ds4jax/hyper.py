"""Hyper-connections: S residual streams mixed before and after every sublayer.

The streams are [T, S, D] in the compute dtype. All maps and mixes run in float32 with one
rounding at each end, whatever the compute dtype is.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.quant import abstract_array
from pallas_kernels import hyper_connections


@nnx.dataclass
class HyperConnection(nnx.Module):
    """The maps of one sublayer: S read weights, S write weights and an S x S residual mix.

    fn     [S * (2 + S), S * D] float32, rows in the order read, write, mix (row-major S x S)
    base   [S * (2 + S)] float32
    scale  [3] float32, one for each of read, write, mix
    """

    fn: jax.Array = nnx.data()
    base: jax.Array = nnx.data()
    scale: jax.Array = nnx.data()
    config: ModelConfig = nnx.static()

    def pre(self, streams: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """streams [T, S, D] -> sublayer input [T, D], write weights [T, S], mix [T, S, S]."""
        return hyper_connections.pre(
            streams,
            self.fn,
            self.base,
            self.scale,
            iterations=self.config.hc_sinkhorn_iters,
            eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )

    def post(
        self, output: jax.Array, streams: jax.Array, write: jax.Array, mix: jax.Array
    ) -> jax.Array:
        """New stream k = write_k * output + sum_j mix[j, k] * stream_j: [T, S, D]."""
        return hyper_connections.post(output, streams, write, mix)


@nnx.dataclass
class HyperHead(nnx.Module):
    """Collapses the streams to one vector: sigmoid weights without mix, factor or normalisation.

    fn [S, S * D], base [S], scale [1], all float32.
    """

    fn: jax.Array = nnx.data()
    base: jax.Array = nnx.data()
    scale: jax.Array = nnx.data()
    config: ModelConfig = nnx.static()

    def __call__(self, streams: jax.Array) -> jax.Array:
        """[T, S, D] -> [T, D] in the dtype of the streams."""
        return hyper_connections.collapse(
            streams,
            self.fn,
            self.base,
            self.scale,
            eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )


def _float32(*shape: int) -> jax.Array:
    return abstract_array(shape, jnp.float32)


def abstract_connection(config: ModelConfig) -> HyperConnection:
    """Shapes and dtypes of one sublayer's maps."""
    streams, width = config.hc_mult, config.hc_mult * config.hidden_size
    maps = streams * (2 + streams)
    return HyperConnection(_float32(maps, width), _float32(maps), _float32(3), config)


def abstract_head(config: ModelConfig) -> HyperHead:
    """Shapes and dtypes of the head collapse."""
    streams, width = config.hc_mult, config.hc_mult * config.hidden_size
    return HyperHead(_float32(streams, width), _float32(streams), _float32(1), config)
