"""Router, shared expert and the data that travels from the router to the routed experts."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig, Numerics
from ds4jax.layers import Linear, wide_product
from ds4jax.quant import QTensor, abstract_array, abstract_fp8, abstract_plain
from pallas_kernels import codecs, top_k
from pallas_kernels.routed_experts import ExpertSlab

# Slabs of a layer and where its experts are in them, see `routed_experts.expert_slots`.
LayerSlabs = tuple[tuple[ExpertSlab, ...], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What a block hands to its routed experts and needs again to finish.

    inputs   [T, D] compute dtype, the normed FFN input
    ids      [T, k] i32, the experts of a row; -1 on padding rows
    weights  [T, k] float32, with the routed scaling factor
    post     [T, S] float32, comb [T, S, S] float32: the hyper-connection of the FFN site
    """

    inputs: jax.Array
    ids: jax.Array
    weights: jax.Array
    post: jax.Array
    comb: jax.Array


@nnx.dataclass
class Router(nnx.Module):
    """Chooses num_experts_per_tok experts of every token, always in float32.

    weight   [E, D] as QTensor without scales
    bias     [E] float32 on score-routed layers: added for the choice, never to the weights
    tid2eid  [V, k] i32 on hash layers: the experts of each token id; the scores still weigh them
    """

    weight: QTensor = nnx.data()
    bias: jax.Array | None = nnx.data()
    tid2eid: jax.Array | None = nnx.data()
    config: ModelConfig = nnx.static()

    def __call__(self, inputs: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """inputs [T, D], tokens [T] i32 -> expert ids [T, k] i32, weights [T, k] float32.

        A token with a score that is NaN gets no experts, ids -1: the host counts the choices.
        """
        scores = jnp.sqrt(jax.nn.softplus(wide_product(inputs, self.weight.codes)))
        if self.tid2eid is not None:
            ids = self.tid2eid[tokens]
        else:
            assert self.bias is not None
            ids = top_k.top_k(scores + self.bias[None, :], self.config.num_experts_per_tok)
        ids = jnp.where(jnp.any(jnp.isnan(scores), axis=-1, keepdims=True), -1, ids)
        chosen = jnp.take_along_axis(scores, ids, axis=-1)
        total = jnp.sum(chosen, axis=-1, keepdims=True)
        return ids, chosen / total * self.config.routed_scaling_factor


@nnx.dataclass
class SharedExpert(nnx.Module):
    """The expert that every token visits: w2(silu(min(w1 x, c)) * clip(w3 x, -c, c)).

    c is swiglu_limit; the same clamp as on the routed experts.
    """

    w1: Linear = nnx.data()
    w2: Linear = nnx.data()
    w3: Linear = nnx.data()
    limit: float = nnx.static()

    def __call__(self, inputs: jax.Array, numerics: Numerics) -> jax.Array:
        """[T, D] -> [T, D] in the compute dtype; the gated product is rounded once before w2."""
        gate = jnp.minimum(self.w1(inputs, numerics).astype(jnp.float32), self.limit)
        up = jnp.clip(self.w3(inputs, numerics).astype(jnp.float32), -self.limit, self.limit)
        hidden = codecs.round_to(jax.nn.silu(gate) * up, numerics.dtype)
        return self.w2(hidden, numerics)


@nnx.dataclass
class MoE(nnx.Module):
    """The resident part of a mixture of experts; routed experts are call arguments."""

    gate: Router = nnx.data()
    shared_experts: SharedExpert = nnx.data()


def abstract_moe(config: ModelConfig, *, hashed: bool) -> MoE:
    """Shapes and dtypes of the resident FFN weights of a hash-routed or score-routed layer."""
    hidden, width, experts = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
    )
    table = abstract_array((config.vocab_size, config.num_experts_per_tok), jnp.int32)
    bias = abstract_array((experts,), jnp.float32)
    gate = Router(
        abstract_plain(experts, hidden),
        None if hashed else bias,
        table if hashed else None,
        config,
    )
    shared = SharedExpert(
        Linear(abstract_fp8(width, hidden), True),
        Linear(abstract_fp8(hidden, width), True),
        Linear(abstract_fp8(width, hidden), True),
        config.swiglu_limit,
    )
    return MoE(gate, shared)
