"""Checks and times the routed experts on this machine's GPU; tunes the block shapes.

    python -m pallas_kernels.routed_experts.bench --out=experts.json          check, then time
    python -m pallas_kernels.routed_experts.bench --tune --out=tuned.json     check, then tune

Every timing covers the whole op: row order, both products and the combine. Weights and inputs are
random; routing is uniform, or skewed so that the likeliest expert is 55 times the least likely.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench, specs, support
from pallas_kernels.routed_experts import (
    ExpertSlab,
    combine_slots,
    expert_slots,
    ordering,
    portable,
    reference,
    tiling,
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

    return jax.block_until_ready(make())


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


def whole_op(spec: specs.Spec, quantize_input: bool, implementation: str):
    """jitted (x, ids, weights, slab, where, shared) -> [T, D]."""

    def run(x, ids, weights, slab, where, shared):
        slots = expert_slots(
            x,
            ids,
            weights,
            (slab,),
            where,
            limit=spec.swiglu_limit,
            quantize_input=quantize_input,
            implementation=implementation,
        )
        return combine_slots(slots, shared)

    return jax.jit(run)


def check(spec: specs.Spec, slab: ExpertSlab, implementation: str, log) -> list[dict]:
    """Errors against float32; raises AssertionError beyond ERROR_LIMIT."""
    where = jnp.arange(spec.experts, dtype=jnp.int32)
    rows = []
    for tokens, quantize_input in itertools.product((5, 1000), (False, True)):
        x, ids, weights = make_inputs(spec, tokens, "skewed", seed=tokens)
        options = {"limit": spec.swiglu_limit, "quantize_input": quantize_input}
        run = functools.partial(expert_slots, implementation=implementation, **options)
        got = jax.jit(run)(x, ids, weights, (slab,), where)
        # bfloat16 inputs decide the input roundings of both: h is then rounded alike.
        oracle_x = x if quantize_input else x.astype(jnp.float32)
        fresh = jnp.full((*ids.shape, spec.hidden), jnp.nan, oracle_x.dtype)
        oracle = jax.jit(functools.partial(reference.expert_slots, **options))
        wanted = oracle(oracle_x, ids, weights, (slab,), where, fresh).astype(jnp.float32)
        error = float(
            jnp.linalg.norm((got.astype(jnp.float32) - wanted).ravel())
            / jnp.linalg.norm(wanted.ravel())
        )
        row = {"tokens": tokens, "quantize_input": quantize_input, "relative_error": error}
        log(row)
        rows.append(row)
        assert error <= ERROR_LIMIT, row
        # The same bits from two slabs in two calls, experts in another order.
        order = np.random.default_rng(tokens).permutation(spec.experts)
        cut = spec.experts // 3
        slots = None
        for experts in (order[:cut], order[cut:]):
            places = np.full(spec.experts, -1, np.int32)
            places[experts] = np.arange(len(experts))
            piece = jax.tree.map(lambda array, rows=experts: array[rows], slab)
            slots = jax.jit(run)(x, ids, weights, (piece,), jnp.asarray(places), slots=slots)
            del piece
        same = bool(
            jnp.array_equal(
                jax.lax.bitcast_convert_type(got, jnp.uint16),
                jax.lax.bitcast_convert_type(slots, jnp.uint16),
            )
        )
        assert same, f"bits differ between one call and two at {tokens} tokens"
    return rows


def time_ops(spec: specs.Spec, slab: ExpertSlab, implementation: str, log) -> list[dict]:
    """Whole-op medians for TOKENS, both routings and both input precisions."""
    where = jnp.arange(spec.experts, dtype=jnp.int32)
    results = []
    for tokens, routing, quantize_input in itertools.product(
        TOKENS, ("uniform", "skewed"), (False, True)
    ):
        x, ids, weights = make_inputs(spec, tokens, routing)
        op = whole_op(spec, quantize_input, implementation)
        timing = bench.measure(
            op, x, ids, weights, slab, where, x, runs=12, calls_per_run=20 if tokens < 2048 else 3
        )
        flops = 6 * tokens * spec.experts_per_token * spec.hidden * spec.expert_width
        memory = op.lower(x, ids, weights, slab, where, x).compile().memory_analysis()
        row = {
            "tokens": tokens,
            "routing": routing,
            "quantize_input": quantize_input,
            **timing.as_dict(),
            "tflops": flops / timing.median_s / 1e12,
            "temp_bytes": memory.temp_size_in_bytes,
        }
        results.append(row)
        log(
            f"{tokens:6d} {routing:8s} q1={quantize_input!s:5s} {timing.median_s * 1e3:8.3f} ms "
            f"{row['tflops']:6.1f} TFLOP/s, temporaries {row['temp_bytes'] / 2**20:.0f} MiB"
        )
    return results


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
    parser.add_argument("--implementation", default="portable")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    spec = specs.SPECS[args.spec]
    device = support.default_device()
    start = time.perf_counter()

    def log(message):
        print(f"[{time.perf_counter() - start:6.1f}] {message}", flush=True)

    slab = make_slab(spec)
    document = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python -m pallas_kernels.routed_experts.bench " + " ".join(argv),
        "implementation": args.implementation,
        "check": check(spec, slab, args.implementation, log),
    }
    if args.tune:
        document["routed_experts"] = tune(spec, slab, log)
    else:
        document["timings"] = time_ops(spec, slab, args.implementation, log)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
