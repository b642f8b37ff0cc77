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

import streaming
from ds4jax.moe import LayerSlabs, Routing

# Includes compiling the programs of the first layer.
TIMEOUT_S = 600.0

# (routing on an owner's device, its experts) -> slots [T, k, D] there, see `Runner.experts`.
Experts = Callable[[Routing, LayerSlabs], jax.Array]


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
        experts: Experts,
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
                    jax.device_put(experts(self._bare(*parts), self._slabs[layer]), self.home)
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
