"""Checks and times the routed experts on this machine's GPU; tunes the block shapes.

    python -m pallas_kernels.routed_experts.bench --out=experts.json          check, then time
    python -m pallas_kernels.routed_experts.bench --compare --out=experts.json
                                    the same, then other grouped products that JAX kernels exist for
    python -m pallas_kernels.routed_experts.bench --implementation=portable --tune --out=tuned.json
                                    check, then tune the blocks of an implementation

Timings are of the kernels that the door takes, unless `--implementation` names some, and cover the
whole op: row order, both products and the combine. Weights and inputs are random; routing is
uniform, or skewed so that the likeliest expert is 55 times the least likely.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import json
import sys
import time
import unittest.mock
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

from pallas_kernels import bench, specs, support
from pallas_kernels.routed_experts import (
    ExpertSlab,
    combine_slots,
    expert_slots,
    ordering,
    portable,
    preferred,
    reference,
    tiling,
    with_scale_range,
)

TOKENS = (1, 128, 2048, 8192, 32768)
ERROR_LIMIT = 5e-3  # relative Frobenius norm against float32 without intermediate roundings


def make_slab(spec: specs.Spec, seed: int = 0) -> ExpertSlab:
    """Random FP4 codes; scales of 2^-10 to 2^-6, so that activations stay of order one."""

    @jax.jit
    def make():
        keys = jax.random.split(jax.random.key(seed), 4)
        n, d, f = spec.experts, spec.hidden, spec.expert_width
        shapes = ((n, 2 * f, d // 2), (n, 2 * f, d // 32), (n, d, f // 2), (n, d, f // 32))
        arrays = [
            jax.random.bits(k, shape, jnp.uint8) for k, shape in zip(keys, shapes, strict=True)
        ]
        for index in (1, 3):
            arrays[index] = arrays[index] % jnp.uint8(5) + jnp.uint8(117)
        return ExpertSlab(*arrays, "fp4")

    return jax.block_until_ready(with_scale_range(make()))


@functools.cache
def make_inputs(spec: specs.Spec, tokens: int, routing: str, seed: int = 1):
    """x, ids and weights; experts of a token are drawn without replacement."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(tokens, spec.experts))
    if routing == "skewed":
        scores += rng.permutation(np.linspace(0, 4, spec.experts))
    ids = np.argsort(-scores, axis=1)[:, : spec.experts_per_token].astype(np.int32)
    weights = rng.random(ids.shape, np.float32) * np.float32(0.5)
    x = jax.random.normal(jax.random.key(seed), (tokens, spec.hidden), jnp.bfloat16)
    return x, jnp.asarray(ids), jnp.asarray(weights)


def compile_all(
    calls: Mapping[Hashable, tuple[Callable[..., Any], tuple[Any, ...]]],
) -> dict[Hashable, Any]:
    """The programs of jitted functions for their operands, several compiled at a time."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = {
            key: pool.submit(function.lower(*operands).compile)
            for key, (function, operands) in calls.items()
        }
        return {key: program.result() for key, program in running.items()}


def one_call(spec: specs.Spec, quantize_input: bool, implementation: str):
    """(x, ids, weights, slab, where, slots or None) -> slots [T, k, D]."""

    def run(x, ids, weights, slab, where, slots):
        return expert_slots(
            x,
            ids,
            weights,
            (slab,),
            where,
            limit=spec.swiglu_limit,
            quantize_input=quantize_input,
            slots=slots,
            implementation=implementation,
        )

    return run


def whole_op(spec: specs.Spec, quantize_input: bool, implementation: str):
    """jitted (x, ids, weights, slab, where, shared) -> [T, D]."""
    call = one_call(spec, quantize_input, implementation)
    return jax.jit(lambda *operands: combine_slots(call(*operands[:-1], None), operands[-1]))


def check(
    spec: specs.Spec, slab: ExpertSlab, implementation: str, token_counts: tuple[int, ...], log
) -> list[dict]:
    """Errors against float32; raises AssertionError beyond ERROR_LIMIT."""
    where = jnp.arange(spec.experts, dtype=jnp.int32)
    cases, calls = list(itertools.product(token_counts, (False, True))), {}
    for tokens, quantize_input in cases:
        x, ids, weights = make_inputs(spec, tokens, "skewed", seed=tokens)
        options = {"limit": spec.swiglu_limit, "quantize_input": quantize_input}
        run = functools.partial(expert_slots, implementation=implementation, **options)
        oracle = functools.partial(reference.expert_slots, **options)
        # bfloat16 inputs decide the input roundings of both: h is then rounded alike.
        oracle_x = x if quantize_input else x.astype(jnp.float32)
        fresh = jnp.full((*ids.shape, spec.hidden), jnp.nan, oracle_x.dtype)
        operands = (ids, weights, (slab,), where)
        calls[tokens, quantize_input, "run"] = jax.jit(run), (x, *operands)
        calls[tokens, quantize_input, "oracle"] = jax.jit(oracle), (oracle_x, *operands, fresh)
    programs, rows = compile_all(calls), []
    for tokens, quantize_input in cases:
        run, oracle = (programs[tokens, quantize_input, name] for name in ("run", "oracle"))
        x, ids, weights, *_ = calls[tokens, quantize_input, "run"][1]
        got = run(x, ids, weights, (slab,), where)
        error = bench.distance(got, oracle(*calls[tokens, quantize_input, "oracle"][1]))
        row = {
            "implementation": implementation,
            "tokens": tokens,
            "quantize_input": quantize_input,
            "relative_error": error,
        }
        log(row)
        rows.append(row)
        assert error <= ERROR_LIMIT, row
        # The same bits in two calls, experts in another order.
        order = np.random.default_rng(tokens).permutation(spec.experts)
        shuffled = jax.tree.map(lambda array, rows=order: array[rows], slab)
        cut, slots = spec.experts // 3, None
        for part in (range(cut), range(cut, spec.experts)):
            places = np.full(spec.experts, -1, np.int32)
            places[order[part]] = part
            found = run(x, ids, weights, (shuffled,), jnp.asarray(places))
            slots = found if slots is None else jnp.where(jnp.isnan(slots), found, slots)
        del shuffled
        same = bool(
            jnp.array_equal(
                jax.lax.bitcast_convert_type(got, jnp.uint16),
                jax.lax.bitcast_convert_type(slots, jnp.uint16),
            )
        )
        assert same, f"bits differ between one call and two at {tokens} tokens"
    return rows


def time_ops(
    spec: specs.Spec, slab: ExpertSlab, implementation: str | None, token_counts, log
) -> list[dict]:
    """Whole-op medians for `token_counts`, both routings and both input precisions."""
    where, device = jnp.arange(spec.experts, dtype=jnp.int32), support.default_device()
    names, calls = {}, {}
    for tokens, quantize_input in itertools.product(token_counts, (False, True)):
        x, ids, weights = make_inputs(spec, tokens, "uniform")
        name = implementation or preferred(
            x, ids, (slab,), where, device, quantize_input=quantize_input
        )
        names[tokens, quantize_input] = name
        op = whole_op(spec, quantize_input, name)
        calls[tokens, quantize_input] = op, (x, ids, weights, slab, where, x)
    programs, results = compile_all(calls), []
    for tokens, routing, quantize_input in itertools.product(
        token_counts, ("uniform", "skewed"), (False, True)
    ):
        x, ids, weights = make_inputs(spec, tokens, routing)
        op = programs[tokens, quantize_input]
        timing = bench.measure(
            op, x, ids, weights, slab, where, x, runs=12, calls_per_run=20 if tokens < 2048 else 3
        )
        flops = 6 * tokens * spec.experts_per_token * spec.hidden * spec.expert_width
        row = {
            "implementation": names[tokens, quantize_input],
            "tokens": tokens,
            "routing": routing,
            "quantize_input": quantize_input,
            **timing.as_dict(),
            "tflops": flops / timing.median_s / 1e12,
            "temp_bytes": op.memory_analysis().temp_size_in_bytes,
        }
        results.append(row)
        log(
            f"{tokens:6d} {routing:8s} q1={quantize_input!s:5s} {row['implementation']:8s} "
            f"{timing.median_s * 1e3:8.3f} ms {row['tflops']:6.1f} TFLOP/s, "
            f"temporaries {row['temp_bytes'] / 2**20:.0f} MiB"
        )
    return results


def time_calls(
    spec: specs.Spec, slab: ExpertSlab, implementation: str | None, tokens: int, parts: int, log
) -> list[dict]:
    """Medians of a layer in one call, and in `parts` calls of equally many experts each.

    As in a model, where the calls and the combine are programs of their own, and experts that come
    in parts are streamed: their slabs do not know the range of their scales. Raises AssertionError
    when the bits differ.
    """
    x, ids, weights = make_inputs(spec, tokens, "uniform")
    device, count = support.default_device(), spec.experts // parts
    whole = jnp.arange(spec.experts, dtype=jnp.int32)
    bare = dataclasses.replace(slab, scale_range=None)
    pieces = [
        jax.tree.map(lambda array, at=part * count: array[at : at + count], bare)
        for part in range(parts)
    ]
    wheres = [
        jnp.where((whole >= part * count) & (whole < (part + 1) * count), whole - part * count, -1)
        for part in range(parts)
    ]
    combine, calls, names = jax.jit(combine_slots), {}, {}
    for quantize_input in (False, True):
        names[quantize_input] = implementation or preferred(
            x, ids, (slab,), whole, device, quantize_input=quantize_input
        )
        run = one_call(spec, quantize_input, names[quantize_input])
        op = jax.jit(run, donate_argnums=5)
        slots = jax.ShapeDtypeStruct((*ids.shape, spec.hidden), x.dtype)
        for name, operands in (
            ("whole", (slab, whole, None)),
            ("first", (pieces[0], wheres[0], None)),
            ("later", (pieces[0], wheres[0], slots)),
        ):
            calls[quantize_input, name] = op, (x, ids, weights, *operands)
    programs, results = compile_all(calls), []
    for quantize_input in (False, True):
        whole_call, first, later = (
            programs[quantize_input, name] for name in ("whole", "first", "later")
        )

        def one(run=whole_call):
            return combine(run(x, ids, weights, slab, whole, None), x)

        def several(first=first, later=later):
            slots = first(x, ids, weights, pieces[0], wheres[0], None)
            for piece, where in zip(pieces[1:], wheres[1:], strict=True):
                slots = later(x, ids, weights, piece, where, slots)
            return combine(slots, x)

        assert jnp.array_equal(one(), several()), f"bits differ between one call and {parts}"
        for number, function in ((1, one), (parts, several)):
            timing = bench.measure(function, runs=7, calls_per_run=3)
            row = {"implementation": names[quantize_input], "tokens": tokens, "calls": number}
            results.append(row | {"quantize_input": quantize_input} | timing.as_dict())
            log(f"{results[-1]}")
    return results


def compare(spec: specs.Spec, token_counts: tuple[int, ...], log) -> list[dict]:
    """Medians of other grouped products of the same shapes, rows in expert order already.

    The ragged_dot that JAX ships for Mosaic, and those of the PyPI package jax-linear-attention
    where it is installed: bfloat16 weights, and E4M3 without block scales.
    """
    calls, flops = {}, {}
    n, d, f = spec.experts, spec.hidden, spec.expert_width
    for product, contraction, columns in (("gate_up", d, 2 * f), ("down", f, d)):
        some = jax.random.normal(jax.random.key(4), (8, columns, contraction), jnp.bfloat16)
        weights = jnp.tile(some, (n // 8, 1, 1))
        codes = weights.astype(jnp.float8_e4m3fn)
        for tokens in token_counts:
            ids = np.asarray(make_inputs(spec, tokens, "uniform")[1])
            sizes = jnp.asarray(np.bincount(ids.reshape(-1), minlength=n), jnp.int32)
            x = jax.random.normal(jax.random.key(3), (ids.size, contraction), jnp.bfloat16)
            flops[tokens, product] = 2 * x.size * columns
            for label, call, operands in _others(x, weights, codes, sizes):
                calls[label, tokens, product] = jax.jit(call), operands
    results = []
    for (label, tokens, product), program in compile_all(calls).items():
        operands = calls[label, tokens, product][1]
        timing = bench.measure(program, *operands, runs=7, calls_per_run=3)
        tflops = flops[tokens, product] / timing.median_s / 1e12
        row = {"kernel": label, "tokens": tokens, "product": product, "tflops": tflops}
        results.append(row | timing.as_dict())
        log(f"{label} {tokens} {product}: {timing.median_s * 1e3:.3f} ms {tflops:.0f} TFLOP/s")
    return results


def _others(x, weights, codes, sizes):
    """(label, function, operands) of the grouped products that can be imported."""
    blocks = {"block_m": 64, "block_n": 256, "block_k": 64, "max_concurrent_steps": 4}

    def shipped(x, weights, sizes):
        return ragged_dot_mgpu.ragged_dot(
            x, weights, group_sizes=sizes, transpose_rhs=True, grid_block_n=4, **blocks
        )

    yield "jax ragged_dot_mgpu", shipped, (x, weights, sizes)
    if importlib.util.find_spec("jla") is None:
        return
    dense = importlib.import_module("jla.ops.mosaic_gpu.ragged_dot")
    fp8 = importlib.import_module("jla.ops.mosaic_gpu.ragged_dot_fp8")
    config = dense.select_config(x.shape[1], weights.shape[1])

    def bf16(x, weights, sizes):
        return dense._ragged_dot_kernel(x, weights, sizes, transpose_rhs=True, cfg=config)

    yield "jax-linear-attention bf16", bf16, (x, weights, sizes)
    operands = (x.astype(jnp.float8_e4m3fn), codes, sizes)
    yield "jax-linear-attention fp8", fp8.ragged_dot_fp8, operands


# Sizes of the Hopper kernels' tiles that fit the registers, rows of one FP8 product, products under
# way and stages that fit the shared memory.
SCHEDULES = {
    "fp8": [
        ((56, 112, 160, 192, 224), 112, 1, 4),
        ((56, 112, 160, 192, 224), 112, 1, 5),
        ((56, 112, 168, 192, 224), 56, 2, 4),
        ((56, 112, 176, 192, 208, 224), 112, 1, 4),
        ((64, 96, 128, 160, 192), 96, 2, 4),
        ((112, 224), 112, 1, 4),
    ],
    "bf16": [
        ((64, 128, 160, 192, 224, 256), 256, 1, 4),
        ((64, 128, 160, 192, 224), 224, 1, 5),
        ((64, 128, 176, 192, 208, 224, 256), 256, 1, 4),
        ((64, 128, 192, 256), 256, 1, 4),
    ],
}


def tune_sm90(spec: specs.Spec, slab: ExpertSlab, log) -> tuple[dict, list[dict]]:
    """The fastest schedule of the whole op at 8,192 tokens for both kinds of products, and all."""
    where = jnp.arange(spec.experts, dtype=jnp.int32)
    x, ids, weights = make_inputs(spec, 8192, "uniform")
    operands = (x, ids, weights, slab, where, x)
    running = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for kind, shapes in SCHEDULES.items():
            for shape in shapes:
                schedule = tiling.Schedule(*shape)
                with unittest.mock.patch.object(tiling, "schedule", return_value=schedule):
                    lowered = whole_op(spec, kind == "fp8", "sm90").lower(*operands)
                running[kind, schedule] = pool.submit(lowered.compile)
    rows = []
    for (kind, schedule), program in running.items():
        timing = bench.measure(program.result(), *operands, runs=7, calls_per_run=3)
        log(f"{kind}: {timing.median_s * 1e3:.3f} ms {schedule}")
        rows.append({"kind": kind, "schedule": dataclasses.asdict(schedule)} | timing.as_dict())
    rows.sort(key=lambda row: -row["median_s"])
    table = {row["kind"]: row["schedule"] for row in rows}
    return {f"{spec.hidden}x{spec.expert_width}": table}, rows


def candidates(rows: int, matrices: int) -> list[tiling.Tiling]:
    """Block shapes worth timing for tiles of `rows` rows and `matrices` weights at a time.

    Eight warps, and fewer or more than 128 weight rows a block, were slower at 64 and 128 rows.
    """
    found = []
    few = rows <= 32
    outs = (64, 128) if few else (128 // matrices,)
    for out, step, stages in itertools.product(outs, (128, 256) if few else (64, 128), (2, 3, 4)):
        copied = stages * (rows * step * 2 + matrices * out * step // 2)  # bf16 x, FP4 codes
        if 0.2 < copied / support.PORTABLE_SHARED_MEMORY <= 0.97:
            found.append(tiling.Tiling(out, rows, step, warps=4, stages=stages))
    return found


# Average rows per expert up to which a set of tile sizes is used, and the tokens it is tuned with.
BUCKETS = {"16": ((16,), 128), "64": ((128, 64), 2048), "128": ((128, 64), 8192)}


def tune(spec: specs.Spec, slab: ExpertSlab, log) -> dict:
    """The fastest blocks of each product, for each bucket of `tiling.choose`."""
    where = jnp.arange(spec.experts, dtype=jnp.int32)
    table: dict[str, dict] = {}
    for bucket, (sizes, tokens) in BUCKETS.items():
        x, ids, weights = make_inputs(spec, tokens, "uniform")
        order = jax.jit(ordering.order_rows, static_argnums=2)(ids, where, spec.experts)
        h = jax.random.normal(jax.random.key(2), (ids.size, spec.expert_width), jnp.bfloat16)
        slots = jnp.zeros((ids.size, spec.hidden), jnp.bfloat16)
        options = {"k": spec.experts_per_token, "limit": spec.swiglu_limit, "interpret": False}
        # The size that the bucket is named after sets the step.
        table[bucket] = {}
        for name, matrices in (("gate_up", 2), ("down", 1)):
            chosen: dict[int, tiling.Tiling] = {}
            for rows in sorted(sizes, key=lambda size: size != int(bucket)):
                tiles = jax.jit(ordering.row_tiles, static_argnums=(1, 2, 3))(
                    order, 0, spec.experts, (rows,)
                )[0]
                best, step = np.inf, next((blocks.step for blocks in chosen.values()), None)
                for blocks in candidates(rows, matrices):
                    if step not in (None, blocks.step):
                        continue
                    if name == "gate_up":
                        run = functools.partial(portable.gate_up, tiling=blocks, **options)
                        operands = (x, weights.reshape(-1), order, tiles, slab, None)
                    else:
                        run = functools.partial(portable.down, tiling=blocks, interpret=False)
                        operands = (h, order, tiles, slab, slots)
                    timing = bench.measure(jax.jit(run), *operands, runs=5, calls_per_run=10)
                    log(f"{tokens} tokens, {name}: {timing.median_s * 1e3:.3f} ms {blocks}")
                    if timing.median_s < best:
                        best, chosen[rows] = timing.median_s, blocks
            table[bucket][name] = [dataclasses.asdict(chosen[size]) for size in sizes]
    return {f"{spec.hidden}x{spec.expert_width}": table}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default="flash", choices=sorted(specs.SPECS))
    parser.add_argument("--implementation", choices=("portable", "sm90"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--tokens", type=bench.count, nargs="*", default=TOKENS)
    parser.add_argument("--out", type=bench.output_file, required=True)
    args = parser.parse_args(argv)
    if args.tune and args.implementation is None:
        parser.error("--tune: expected --implementation with it")
    spec, device, start = specs.SPECS[args.spec], support.default_device(), time.perf_counter()
    document: dict[str, Any] = bench.origin("pallas_kernels.routed_experts.bench", argv)

    def log(message):
        print(f"[{time.perf_counter() - start:6.1f}] {message}", flush=True)

    def keep(**parts):
        document.update(parts)
        args.out.write_text(json.dumps(document, indent=1) + "\n")

    slab = make_slab(spec)
    hopper = support.unsupported("sm90", device) is None and args.implementation != "portable"
    checked = ("sm90", (1000,)) if hopper else ("portable", (5, 1000))
    keep(check=check(spec, slab, *checked, log))
    if args.tune and hopper:
        table, rows = tune_sm90(spec, slab, log)
        keep(routed_experts_sm90=table, tuning=rows)
    elif args.tune:
        keep(routed_experts=tune(spec, slab, log))
    else:
        counts = tuple(args.tokens)
        keep(timings=time_ops(spec, slab, args.implementation, counts, log))
        keep(calls=time_calls(spec, slab, args.implementation, 8192, 8, log))
    del slab
    if args.compare:
        keep(others=compare(spec, (8192, 32768), log))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
