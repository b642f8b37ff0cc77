"""A kernel that reads a neighbour's memory while it runs, against a copy of the same bytes.

python -m ds4jax.bench.peer_read [--tiles=64]

Every block fetches tiles of the neighbour's array with the bulk copy engine into shared memory and
stores them at home: no receive buffer and no copy before the kernel. Needs two Hopper GPUs of one
process. The last line on stdout is JSON: rates in GB/s, or the reason why it cannot run here.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ds4jax.cli import common

AXIS = "devices"
ROWS, COLUMNS = 64, 256  # a tile of 64 KiB
SLOTS = 3  # tiles of a block in flight


def fetch(x: jax.Array, *, blocks: int, remote: bool) -> jax.Array:
    """A copy of the neighbour's `x` (of this device's without `remote`); call under shard_map.

    x  i32 [blocks * tiles * 64, 256]
    """
    tiles = x.shape[0] // (blocks * ROWS)

    def body(x_ref: Any, out_ref: Any, slots: Any, arrived: Any) -> None:
        source = x_ref
        if remote:
            source = plgpu.remote_ref(x_ref, 1 - lax.axis_index(AXIS))
        first = lax.axis_index("block") * jnp.int32(tiles * ROWS)

        def rows(tile: Any) -> Any:
            return pl.ds(first + tile * jnp.int32(ROWS), ROWS)

        def load(tile: Any) -> None:
            slot = lax.rem(tile, jnp.int32(SLOTS))
            plgpu.copy_gmem_to_smem(source.at[rows(tile)], slots.at[slot], arrived.at[slot])

        for tile in range(min(SLOTS - 1, tiles)):
            load(jnp.int32(tile))

        @pl.loop(0, tiles)
        def _(tile: Any) -> None:
            slot = lax.rem(tile, jnp.int32(SLOTS))
            plgpu.barrier_wait(arrived.at[slot])
            plgpu.copy_smem_to_gmem(slots.at[slot], out_ref.at[rows(tile)])
            # All stores but the last have read their slot, which may be filled again.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            @pl.when(tile + jnp.int32(SLOTS - 1) < tiles)
            def _() -> None:
                load(tile + jnp.int32(SLOTS - 1))

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((SLOTS, ROWS, COLUMNS), x.dtype),
            plgpu.Barrier(num_barriers=SLOTS),
        ],
    )(x)


def program(mesh: Mesh, blocks: int, *, remote: bool) -> Callable[[jax.Array], jax.Array]:
    """`fetch` on the two devices of `mesh`, each on its rows."""
    return jax.jit(
        jax.shard_map(
            functools.partial(fetch, blocks=blocks, remote=remote),
            mesh=mesh,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
            check_vma=False,
        )
    )


def measure(devices: Sequence[jax.Device], tiles: int, repeats: int = 7) -> dict[str, Any]:
    """Rates of the kernel, of a peer copy, and of the kernel at home; checks every element."""
    if len(devices) != 2 or devices[0].platform not in ("gpu", "cuda"):
        raise NotImplementedError(
            f"{len(devices)} devices of {devices[0].platform}: the kernel needs two Hopper GPUs"
        )
    mesh = Mesh(np.asarray(devices), (AXIS,))
    blocks = devices[0].core_count
    rows = blocks * tiles * ROWS
    values = np.random.default_rng(0).integers(0, 1 << 30, (2 * rows, COLUMNS), np.int32)
    placed = jax.device_put(values, jax.sharding.NamedSharding(mesh, P(AXIS)))
    swapped = np.concatenate([values[rows:], values[:rows]])
    nbytes = values.nbytes // 2
    halves = [shard.data for shard in placed.addressable_shards]
    jax.block_until_ready(halves)
    results: dict[str, Any] = {"bytes_per_device": nbytes, "blocks": blocks}
    for name, expected in {"kernel_at_home": values, "kernel": swapped}.items():
        call = program(mesh, blocks, remote=name == "kernel")
        results[f"{name}_correct"] = np.array_equal(np.asarray(call(placed)), expected)
        results[f"{name}_gb_per_s"] = _rate(nbytes, lambda call=call: call(placed), repeats)
    swap = jax.jit(
        jax.shard_map(
            lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]),
            mesh=mesh,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
        )
    )
    results["permute_gb_per_s"] = _rate(nbytes, lambda: swap(placed), repeats)
    results["copy_gb_per_s"] = _rate(
        nbytes,
        lambda: [jax.device_put(halves[i], devices[1 - i], may_alias=False) for i in (0, 1)],
        repeats,
    )
    results["kernel_to_copy"] = results["kernel_gb_per_s"] / results["copy_gb_per_s"]
    return results


def _rate(nbytes: int, job: Callable[[], Any], repeats: int) -> float:
    """GB/s per direction, both devices at once: median of `repeats` after two more."""
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(job())
        times.append(time.perf_counter() - began)
    return nbytes / statistics.median(times[2:]) / 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 also where the kernel cannot run."""
    return common.exit_code(_bench, argv)


def _bench(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "tiles", 64, "Tiles of 64 KiB per block.", lower_bound=1, flag_values=values
    )
    common.parse_flags(values, argv, __doc__ or "")
    try:
        results = measure(jax.local_devices()[:2], int(values.flag_values_dict()["tiles"]))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        results = {"reason": f"{type(error).__name__}: {lines[0]}"}
    common.print_result(results)
    return common.OK


if __name__ == "__main__":
    sys.exit(main())
