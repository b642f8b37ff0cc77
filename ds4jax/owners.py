"""A second owner of a stage's experts: another device keeps some of them and computes them there.

The cold owner (the neighbour) gets the inputs of the routed experts first. As soon as their copy is
queued the hot owner (the device of the stage) is dispatched, so that both work at the same time.
What the cold owner wrote is copied back and selected slot by slot, never added to anything: on
devices of one kind every slot has the bits that one owner would have given it.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import streaming
from ds4jax.moe import LayerSlabs, Routing
from ds4jax.runner import Runner, program
from pallas_kernels import routed_experts
from sharding import expert_parallel

# Includes compiling the programs of the first layer.
TIMEOUT_S = 600.0

_AXIS = "owners"


class ColdOwner:
    """Experts of every layer on `device`, for a stage on `home`; `close` ends its thread.

    slabs  the experts of each layer and where they are, on `device`
    """

    def __init__(
        self,
        slabs: Sequence[LayerSlabs],
        device: jax.Device,
        home: jax.Device,
        timeout_s: float = TIMEOUT_S,
    ):
        self.device, self.home = device, home
        self._slabs = list(slabs)
        self._where = [jax.device_put(where, home) for _, where in slabs]
        # Stands for what of a routing stays at home; programs that do not read it take no copy.
        self._nothing = jax.device_put(np.zeros(0, np.float32), device)
        self._pair = streaming.ColdFirst(timeout_s)

    def complete(
        self,
        runner: Runner,
        layer: int,
        routings: Sequence[Routing],
        hot: Callable[[], list[jax.Array | None]],
    ) -> list[jax.Array | None]:
        """Slots of a layer's routed experts for some chunks, those of both owners.

        routings  of each chunk, on `home`
        hot       dispatches the hot owner's share: slots of each chunk, which are consumed; None
                  where it has no experts
        Raises the error of either owner after the other has been dispatched, StreamStalled when
        the cold one does not get to it in time.
        """

        def cold(ready: streaming.Readiness) -> list[jax.Array]:
            with jax.default_device(self.device):
                moved = [
                    jax.device_put((r.inputs, r.ids, r.weights), self.device) for r in routings
                ]
                ready.signal()
                return [
                    jax.device_put(
                        runner.experts(self._bare(*parts), self._slabs[layer]), self.home
                    )
                    for parts in moved
                ]

        colds, hots = self._pair.run(cold, hot)
        merged: list[jax.Array | None] = []
        for number, routing in enumerate(routings):
            mine, other = hots[number], colds[number]
            hots[number] = None
            merged.append(
                other if mine is None else _merge(mine, other, routing.ids, self._where[layer])
            )
        return merged

    def close(self) -> None:
        """Lets go of the experts."""
        self._pair.close()
        self._slabs, self._where = [], []

    def _bare(self, inputs: jax.Array, ids: jax.Array, weights: jax.Array) -> Routing:
        return Routing(inputs, ids, weights, self._nothing, self._nothing)


@functools.partial(jax.jit, donate_argnames="hot")
def _merge(hot: jax.Array, cold: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    """Slots [T, k, D]: of the cold owner where it has the expert, else of the hot one."""
    is_cold = (ids >= 0) & (where[jnp.maximum(ids, 0)] >= 0)
    return jnp.where(is_cold[..., None], cold, hot)


class ParallelOwners:
    """The experts of every layer in equal parts over devices that compute in one program.

    slabs    of each device: the experts of each layer and where they are, on that device
    devices  the first one is that of the stage
    Activations are exchanged by collectives, see `sharding.expert_parallel`.
    """

    def __init__(self, slabs: Sequence[Sequence[LayerSlabs]], devices: Sequence[jax.Device]):
        self.home = devices[0]
        self._mesh = Mesh(np.asarray(devices), (_AXIS,))
        self._rows = NamedSharding(self._mesh, P(_AXIS))
        self._parameters, self._owner_of = [], []
        for parts in zip(*slabs, strict=True):
            owner_of = np.full(parts[0][1].shape, -1, np.int32)
            for owner, (_, where) in enumerate(parts):
                owner_of[np.asarray(where) >= 0] = owner
            self._owner_of.append(jax.device_put(owner_of, NamedSharding(self._mesh, P())))
            self._parameters.append(jax.tree.map(self._spread, *parts))

    def complete(
        self,
        runner: Runner,
        layer: int,
        routings: Sequence[Routing],
        hot: Callable[[], list[jax.Array | None]],
    ) -> list[jax.Array | None]:
        """As `ColdOwner.complete`; there is no share beside this one, so `hot` is not called."""
        slots: list[jax.Array | None] = []
        for routing in routings:
            inputs = (routing.inputs, routing.ids, routing.weights)
            spread = _exchange(
                self._parameters[layer],
                *jax.device_put(inputs, self._rows),
                self._owner_of[layer],
                self._mesh,
                runner.config.swiglu_limit,
                runner.numerics.q1,
            )
            slots.append(jax.device_put(spread, self.home))
        return slots

    def close(self) -> None:
        """Lets go of the experts."""
        self._parameters, self._owner_of = [], []

    def _spread(self, *leaves: jax.Array) -> jax.Array:
        """One array [devices, ...] of which every device has its own entry."""
        shape = (len(leaves), *leaves[0].shape)
        parts = [leaf.reshape(1, *leaf.shape) for leaf in leaves]
        return jax.make_array_from_single_device_arrays(shape, self._rows, parts)


@functools.partial(program, static_argnames=("mesh", "limit", "quantize_input"))
def _exchange(
    parameters: LayerSlabs,
    inputs: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    owner_of: jax.Array,
    mesh: Mesh,
    limit: float,
    quantize_input: bool,
) -> jax.Array:
    """Slots [T, k, D], tokens spread over the owners."""

    def experts(own: LayerSlabs, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return routed_experts.expert_slots(
            x, ids, weights, *own, limit=limit, quantize_input=quantize_input
        )

    return expert_parallel.exchange_slots(
        experts, parameters, inputs, ids, weights, owner_of, mesh=mesh, axis=_AXIS
    )
