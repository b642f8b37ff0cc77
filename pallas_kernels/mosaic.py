"""What the Pallas-Mosaic kernels share: one block per multiprocessor, warpgroups with tasks."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK_AXIS = "sm"
WARPGROUP_AXIS = "wg"
INTERPRETED_BLOCKS = 2


def blocks_at_a_time(device: jax.Device) -> int:
    """Blocks that run at a time: one per multiprocessor, two where there are none."""
    return getattr(device, "core_count", INTERPRETED_BLOCKS)


def kernel(
    body: Callable[..., None],
    name: str,
    *,
    out_type: jax.ShapeDtypeStruct,
    scratch_types: Mapping[str, Any],
    blocks: int,
    warpgroups: int,
    interpret: bool,
    approx_math: bool = False,
) -> Callable[..., jax.Array]:
    """A function of arrays that runs `body(*inputs, out, **scratch)` in every warpgroup.

    blocks  that run at a time; `lax.axis_index` of BLOCK_AXIS and WARPGROUP_AXIS tells a body where
            it is.
    name    of the compiled kernel.
    approx_math  exponentials, roots and quotients by the fast instructions.
    """

    def named(*refs, **scratch):
        if not interpret:
            _name_module()
        body(*refs, **scratch)

    named.__name__ = name
    return plgpu.kernel(
        named,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(blocks,),
        grid_names=(BLOCK_AXIS,),
        num_threads=warpgroups,
        thread_name=WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=approx_math
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )


@plgpu.inline_mgpu()
def _name_module(ctx):
    """Names the module's dumps after the kernel; emits nothing.

    JAX 0.11 would number them through the process and write the number into the module. Equal
    kernels would then differ: each program compiles its own, although the runtime keeps one for
    equal modules, and the keys of a persistent cache depend on the order of lowering.
    """
    attributes = ctx.module.operation.attributes
    attributes["mosaic_gpu.dump_basename"] = attributes["sym_name"]


def claim(empty: Any, step: jax.Array) -> jax.Array:
    """The buffer of a ring for the producer's i32 step, once the consumers are done with it.

    empty  a barrier for each buffer of the ring, at which consumers arrive.
    """
    stages = empty.shape[0]
    slot = lax.rem(step, stages)

    @pl.when(step >= stages)
    def _():
        plgpu.barrier_wait(empty.at[slot])

    return slot


def drain(empty: Any, steps: jax.Array) -> None:
    """Waits until the consumers are done with all buffers, after `steps` i32 steps.

    A block must not end while somebody may still arrive at its barriers.
    """
    for slot in range(empty.shape[0]):

        @pl.when(steps > slot)
        def _(slot=slot):
            plgpu.barrier_wait(empty.at[slot])
