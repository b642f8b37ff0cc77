"""The programs of known prompts, compiled while weights are loaded.

Tracing and lowering hold Python's lock and go one program after the other, on one thread; XLA
compiles several programs at once on others. A call with arguments of the same shapes finds its
program compiled; one that was not foreseen is compiled when it is called, as without this module.
"""

import concurrent.futures as futures
import functools
import os
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from types import TracebackType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from ds4jax.cache import abstract_state, capacity_for, make_chunk
from ds4jax.checkpoint.load import abstract_expert_slab
from ds4jax.checkpoint.source import TensorSource
from ds4jax.config import ModelConfig
from ds4jax.costs import padded_rows, row_shapes
from ds4jax.experts import slab_layout, slab_sizes
from ds4jax.moe import LayerSlabs
from ds4jax.plan import Plan
from ds4jax.run_config import PrefillConfig, RunConfig
from ds4jax.runner import Program, Runner, abstract_on

MOST_AT_ONCE = 8  # compilations; each takes a few threads and some hundred MB of host memory


def chunk_shapes(
    prompts: Sequence[int], run_config: RunConfig, config: ModelConfig
) -> list[tuple[int, int]]:
    """Rows and state capacity of the chunks of prompts of so many tokens, the largest first."""
    chunk, shapes = run_config.prefill.chunk_tokens, set()
    for tokens in prompts:
        capacity = capacity_for(run_config, config, tokens)
        for length in (min(chunk, tokens), tokens % chunk or chunk):
            shapes.add((padded_rows(length, row_shapes(chunk)), capacity))
    return sorted(shapes, reverse=True)


def stage_programs(
    source: TensorSource,
    plan: Plan,
    device: jax.Device,
    runner: Runner,
    shapes: Sequence[tuple[int, int]],
    options: PrefillConfig,
) -> Iterator[Program]:
    """The programs that chunks of these shapes need on a stage; some come several times.

    Foreseen are experts of whole layers, of which routed sets make slabs of other sizes, that this
    device computes.
    """
    config, here = runner.config, SingleDeviceSharding(device)
    sizes = slab_sizes(plan.experts, slab_layout(source, len(runner.layers)).item_bytes)
    where = jax.ShapeDtypeStruct((config.n_routed_experts,), jnp.int32)
    no_tokens = np.zeros(0, np.int32)

    @functools.cache  # for all layers with as many experts
    def slabs_of(*experts: int, resident: bool) -> LayerSlabs:
        made = (abstract_expert_slab(source, count, resident=resident) for count in experts)
        return abstract_on(here, (tuple(made), where))

    for rows, capacity in shapes:
        state = abstract_on(here, abstract_state(config, runner.numerics, capacity))
        chunk = abstract_on(here, jax.eval_shape(functools.partial(make_chunk, no_tokens, 0, rows)))
        if runner.layers.start == 0:
            yield runner.embed_program(chunk)
        shape = (rows, config.hc_mult, config.hidden_size)
        streams = jax.ShapeDtypeStruct(shape, runner.numerics.dtype, sharding=here)
        for layer, (resident, waves) in zip(runner.layers, sizes, strict=True):
            slabs = [slabs_of(resident, resident=True)] if resident else []
            slabs += [slabs_of(*wave, resident=False) for wave in waves]
            programs = runner.layer_programs(
                layer, streams=streams, state=state.layers[layer], chunk=chunk, slabs=slabs
            )
            yield from programs.values()
            if waves:
                yield runner.tick_program(programs["experts 0"].outputs())
        yield runner.tick_program(streams)
        if runner.layers.stop == config.num_hidden_layers:
            yield from runner.head_programs(streams, options.logits, options.top_logprobs)


class Compiler:
    """Compiles programs beside what the `with` block does; leaving it gives up what is left."""

    def __init__(self) -> None:
        self._lowering = futures.ThreadPoolExecutor(1, "lowering")
        workers = min(os.cpu_count() or 1, MOST_AT_ONCE)
        self._compiling = futures.ThreadPoolExecutor(workers, "compiling")
        self._tasks: list[futures.Future[list[futures.Future[float]]]] = []
        self._known: set[Hashable] = set()
        self._stop = threading.Event()

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._lowering.shutdown(cancel_futures=True)
        self._compiling.shutdown(cancel_futures=True)

    def add(self, device: jax.Device, programs: Iterator[Program]) -> None:
        """Starts to lower and compile programs that are going to run on `device`."""
        self._tasks.append(self._lowering.submit(self._lower, device, programs))

    def wait(self) -> tuple[int, float]:
        """Waits for all: how many programs there are, and the sum of what compiling them took.

        Raises what a program could not be traced or compiled for.
        """
        seconds = [each.result() for task in self._tasks for each in task.result()]
        return len(seconds), sum(seconds)

    def _lower(
        self, device: jax.Device, programs: Iterator[Program]
    ) -> list[futures.Future[float]]:
        compiled: list[futures.Future[float]] = []
        # As in `stages.Stage`: what is the default device tells traces apart.
        with jax.default_device(device):
            for program in programs:
                if self._stop.is_set():
                    break
                if program.key not in self._known:
                    self._known.add(program.key)
                    compiled.append(self._compiling.submit(_compile, program.lower()))
        return compiled


def _compile(lowered: jax.stages.Lowered) -> float:
    began = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - began
