"""Checks, then times the attention-side kernels at the released layer shapes on one GPU.

    python -m pallas_kernels.bench_attention --out results.json [--only csa,top_k] [--sweep]

Per kernel: agreement with the plain-JAX reference on a part of the chunk, equal bits when a chunk
is cut and when it is run again, then medians beside the reference. `--sweep` times other tile
shapes too, `--memory` adds the compiled workspace of a chunk at 1,048,576 tokens of context.
Everything goes to the JSON file, a table to stdout; the exit code is 1 when a check fails.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    attention_kernel,
    attention_sm90,
    bench,
    compressor,
    hyper_connections,
    indexer,
)
from pallas_kernels.compressor import kernel as compressor_kernel
from pallas_kernels.hyper_connections import kernel as hyper_kernel
from pallas_kernels.indexer import kernel as indexer_kernel
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.specs import FLASH
from pallas_kernels.top_k import kernel as top_k_kernel
from pallas_kernels.top_k import top_k
from pallas_kernels.window_attention import window_attention

CHUNK = 8192
CONTEXTS = (CHUNK, 4 * CHUNK, 16 * CHUNK)
CUTS = (CHUNK // 2, CHUNK // 8, CHUNK // 64)
MILLION = 1_048_576
MIB = 2**20
BF16_LIMIT = 5e-3  # relative Frobenius distance to the reference

RATIOS = {"swa": 0, "hca": 128, "csa": 4}
SITE = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}


@dataclasses.dataclass(frozen=True)
class Case:
    """One timing of `function(*operands)`; flops and nbytes are those of that call."""

    name: str
    variant: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    flops: float = 0.0
    nbytes: float = 0.0
    times: int = 1  # the function runs 1 / times of the work


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(dtype)


def digest(tree: Any) -> str:
    """Hash of the bits of all arrays."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        sha.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return sha.hexdigest()[:16]


# ----------------------------------------------------------------------------------- attention


HEADS = {"norm_eps": 1e-6}


def rope(context: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the chunk that ends at `context`."""
    pairs = FLASH.rope_dim // 2
    angle = np.outer(np.arange(context - CHUNK, context), 1e4 ** -(np.arange(pairs) / pairs))
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def attention_operands(context: int, ratio: int) -> tuple[jax.Array, ...]:
    """q, window_kv, compressed, sink and position of the chunk that ends at `context`."""
    capacity = -(-context // ratio // 128) * 128 + 128 if ratio else 0
    return (
        normal(1, CHUNK, FLASH.heads, FLASH.head_dim, scale=2.0),
        normal(2, CHUNK + FLASH.window - 1, FLASH.head_dim),
        normal(3, capacity, FLASH.head_dim) if ratio else None,
        normal(4, FLASH.heads, dtype=jnp.float32),
        jnp.int32(context - CHUNK),
    )


def visible(context: int, ratio: int) -> np.ndarray:
    """Entries that each token of the chunk sees."""
    return (np.arange(context - CHUNK, context) + 1) // ratio


def selection(context: int) -> jax.Array:
    """A random list of index_topk visible entries per token of the chunk."""
    seen = jnp.asarray(visible(context, 4), jnp.int32)
    tile = CHUNK // 8

    def part(start: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(5), start)
        scores = jax.random.uniform(key, (tile, context // 4))
        limit = jax.lax.dynamic_slice_in_dim(seen, start, tile)
        return top_k_kernel.top_k(scores, FLASH.index_topk, limit)

    starts = jnp.arange(0, CHUNK, tile, dtype=jnp.int32)
    return jax.jit(lambda: jax.lax.map(part, starts).reshape(CHUNK, -1))()


def attention_forms(kind: str, sweep: bool = False) -> dict[str, Callable[..., jax.Array]]:
    """Kernels by name: functions of q, window_kv, compressed, indices, sink, position and rope.

    They normalise and rotate the queries and turn the outputs back, as a layer does; a name that
    ends with "bare" is the attention alone.
    """
    shared = {"ratio": max(RATIOS[kind], 1), "scale": FLASH.head_dim**-0.5, "window": FLASH.window}

    def form(attend: Callable[..., jax.Array], bare: bool) -> Callable[..., jax.Array]:
        def call(*operands: Any) -> jax.Array:
            steps = {} if bare else {**HEADS, "rope": operands[-1]}
            return attend(*operands[:-1], **shared, **steps, interpret=False)

        return call

    kernels = {"portable": attention_kernel.attend, "sm90": attention_sm90.attend}
    forms = {name: form(attend, False) for name, attend in kernels.items()}
    forms |= {f"{name} bare": form(attend, True) for name, attend in kernels.items()}
    for heads, keys, warps, stages in SWEEPS["attention"] if sweep else ():
        config = attention_kernel.Config(heads, keys, warps, stages)
        attend = functools.partial(attention_kernel.attend, config=config)
        forms[f"{heads}x{keys}w{warps}s{stages}"] = form(attend, False)
    return forms


def attention_cases(kind: str, sweep: bool) -> Iterator[Case]:
    ratio = RATIOS[kind]
    for context in CONTEXTS[:1] if kind == "swa" else CONTEXTS:
        q, window_kv, compressed, sink, position = attention_operands(context, ratio)
        seen = visible(context, ratio) if ratio else np.zeros(CHUNK, int)
        indices = None
        if kind == "csa":
            seen = np.minimum(seen, FLASH.index_topk)
            indices = selection(context)
        keys = np.minimum(np.arange(context - CHUNK, context) + 1, FLASH.window) + seen
        flops = 4.0 * FLASH.heads * FLASH.head_dim * float(keys.sum())
        name = f"{kind} attention {context // 1024}k"
        angles = rope(context)
        operands = (q, window_kv, compressed, indices, sink, position, angles)
        for variant, function in attention_forms(kind, sweep).items():
            yield Case(name, variant, function, operands, flops)
        rows = CHUNK // 8
        tail = (q[-rows:], window_kv[-rows - FLASH.window + 1 :])
        options = {"window": FLASH.window, "scale": FLASH.head_dim**-0.5, **HEADS}
        options["implementation"] = "reference"
        tail_angles = tuple(x[-rows:] for x in angles)
        if kind == "csa":
            operands = (*tail, compressed, indices[-rows:], sink, position + CHUNK - rows)
            plain = functools.partial(sparse_attention, **options)
        else:
            operands = (*tail, compressed, sink, position + CHUNK - rows)
            plain = functools.partial(window_attention, ratio=max(ratio, 1), **options)

        def function(angles: Any, *operands: Any, plain: Any = plain) -> jax.Array:
            return plain(*operands, rope=angles)

        operands = (tail_angles, *operands)
        share = float(keys[-rows:].sum() / keys.sum())
        yield Case(name, "reference", function, operands, flops * share, times=CHUNK // rows)


def check_attention(kind: str) -> dict[str, Any]:
    """Agreement on 64 tokens in the middle of the chunk, bits of cuts and of a second run."""
    ratio = RATIOS[kind]
    context = CONTEXTS[-1]
    q, window_kv, compressed, sink, position = attention_operands(context, ratio)
    indices = selection(context) if kind == "csa" else None
    if compressed is not None:  # capacity rows nobody sees hold NaN
        compressed = compressed.at[context // ratio :].set(jnp.nan)
    angles = rope(context)
    results: dict[str, Any] = {}
    for variant, function in attention_forms(kind).items():
        if variant.endswith("bare"):
            continue
        call = jax.jit(function)

        def part(start: int, count: int, call: Any = call) -> jax.Array:
            stop = start + count
            return call(
                q[start:stop],
                window_kv[start : stop + FLASH.window - 1],
                compressed,
                None if indices is None else indices[start:stop],
                sink,
                position + start,
                tuple(x[start:stop] for x in angles),
            )

        whole = call(q, window_kv, compressed, indices, sink, position, angles)
        middle = CHUNK // 2 - 29
        rows = slice(middle, middle + 64)
        options = {"window": FLASH.window, "scale": FLASH.head_dim**-0.5, **HEADS}
        options["rope"] = tuple(x[rows] for x in angles)
        operands = (q[rows], window_kv[middle : middle + 64 + FLASH.window - 1], compressed)
        if indices is None:
            wanted = window_attention(
                *operands,
                sink,
                position + middle,
                ratio=max(ratio, 1),
                implementation="reference",
                **options,
            )
        else:
            wanted = sparse_attention(
                *operands,
                indices[rows],
                sink,
                position + middle,
                implementation="reference",
                **options,
            )
        results[variant] = {
            "distance": bench.distance(whole[rows], wanted),
            "finite": bool(jnp.isfinite(whole).all()),
            "again": digest(call(q, window_kv, compressed, indices, sink, position, angles))
            == digest(whole),
            "cut": all(
                bool((part(start, size) == whole[start : start + size]).all())
                for size in (*CUTS, 1)
                for start in (0, size, CHUNK - size)
            ),
            "digest": digest(whole),
        }
        results[variant]["ok"] = bool(
            results[variant]["distance"] <= BF16_LIMIT
            and results[variant]["finite"]
            and results[variant]["again"]
            and results[variant]["cut"]
        )
    return results


# ------------------------------------------------------------------------------------- indexer


def indexer_operands(context: int) -> tuple[jax.Array, ...]:
    capacity = -(-context // 4 // 128) * 128 + 128
    return (
        normal(6, CHUNK, FLASH.index_heads, FLASH.index_head_dim),
        normal(7, capacity, FLASH.index_head_dim),
        normal(8, CHUNK, FLASH.index_heads, dtype=jnp.float32, scale=0.01),
        jnp.int32(context - CHUNK),
    )


def indexer_cases(sweep: bool) -> Iterator[Case]:
    configs = dict(indexer_kernel.CONFIGS)
    if sweep:
        for tokens, entries, warps, stages in SWEEPS["indexer"]:
            name = f"{tokens}x{entries}w{warps}s{stages}"
            configs[name] = indexer_kernel.Config(tokens, entries, warps, stages)
    work = 2.0 * FLASH.index_heads * FLASH.index_head_dim
    for context in CONTEXTS:
        operands = indexer_operands(context)
        flops = work * float(visible(context, 4).sum())
        for variant, config in configs.items():
            if variant not in indexer_kernel.CONFIGS and context != CONTEXTS[-1]:
                continue
            function = functools.partial(
                indexer_kernel.indexer_scores, ratio=4, config=config, fill=False
            )
            name = f"indexer scores {context // 1024}k"
            yield Case(name, variant, function, operands, flops)
        for variant in indexer_kernel.CONFIGS:
            function = functools.partial(
                indexer.select_entries, k=FLASH.index_topk, implementation=variant
            )
            yield Case(f"select entries {context // 1024}k", variant, function, operands, flops)
        rows = CHUNK // 32
        tail = (
            operands[0][-rows:],
            operands[1],
            operands[2][-rows:],
            operands[3] + CHUNK - rows,
        )
        function = functools.partial(indexer.indexer_scores, implementation="reference")
        share = float(visible(context, 4)[-rows:].sum() / visible(context, 4).sum())
        name = f"indexer scores {context // 1024}k"
        yield Case(name, "reference", function, tail, flops * share, times=CHUNK // rows)


def check_indexer() -> dict[str, Any]:
    context, rows = CONTEXTS[1], CHUNK // 16
    queries, keys, weights, position = indexer_operands(context)
    keys = keys.at[context // 4 :].set(jnp.nan)
    middle = CHUNK // 2 - 29
    results: dict[str, Any] = {}
    for variant, config in indexer_kernel.CONFIGS.items():
        scores = jax.jit(functools.partial(indexer_kernel.indexer_scores, ratio=4, config=config))
        select = jax.jit(
            functools.partial(indexer.select_entries, k=FLASH.index_topk, implementation=variant)
        )
        whole = scores(queries, keys, weights, position)[:, : context // 4]
        part = slice(middle, middle + rows)
        wanted = indexer.indexer_scores(
            queries[part], keys, weights[part], position + middle, implementation="reference"
        )[:, : context // 4]
        finite = jnp.isfinite(wanted)
        got = whole[part]
        chosen = select(queries, keys, weights, position)
        results[variant] = {
            "distance": bench.distance(jnp.where(finite, got, 0), jnp.where(finite, wanted, 0)),
            "mask": bool((jnp.isfinite(got) == finite).all()),
            "set": bool(
                (chosen[part] == top_k(got, FLASH.index_topk, implementation="reference")).all()
            ),
            "cut": all(
                bool(
                    (
                        select(
                            queries[start : start + size],
                            keys,
                            weights[start : start + size],
                            position + start,
                        )
                        == chosen[start : start + size]
                    ).all()
                )
                and bool(
                    (
                        scores(
                            queries[start : start + size],
                            keys,
                            weights[start : start + size],
                            position + start,
                        )[:, : context // 4]
                        == whole[start : start + size]
                    ).all()
                )
                for size in CUTS
                for start in (0, size, CHUNK - size)
            ),
            "digest": digest((whole, chosen)),
        }
        results[variant]["ok"] = bool(
            results[variant]["distance"] <= 1e-5
            and results[variant]["mask"]
            and results[variant]["set"]
            and results[variant]["cut"]
        )
    return results


# --------------------------------------------------------------------------------------- top-k


def top_k_cases(sweep: bool) -> Iterator[Case]:
    variants = {"sm90": {}}
    if sweep:
        variants |= {
            f"segment{segment}lanes{lanes}": {"segment": segment, "lanes": lanes}
            for segment, lanes in SWEEPS["top_k"]
        }
    for context, rows in zip(CONTEXTS, (CHUNK, CHUNK, CHUNK // 4), strict=True):
        scores = normal(9, rows, context // 4, dtype=jnp.float32)
        limit = jnp.asarray(visible(context, 4)[-rows:], jnp.int32)
        name = f"top-512 {context // 1024}k"
        for variant, options in variants.items():
            function = functools.partial(_top_k, k=FLASH.index_topk, **options)
            yield Case(name, variant, function, (scores, limit), 0.0, scores.nbytes, CHUNK // rows)
        function = functools.partial(top_k, k=FLASH.index_topk, implementation="reference")
        yield Case(name, "reference", function, (scores,), 0.0, scores.nbytes, CHUNK // rows)
    scores = normal(9, CHUNK, FLASH.experts, dtype=jnp.float32)
    for variant in ("sm90", "reference"):
        function = functools.partial(top_k, k=FLASH.experts_per_token, implementation=variant)
        yield Case("top-6 of 256", variant, function, (scores,), 0.0, scores.nbytes)


def _top_k(scores: jax.Array, limit: jax.Array, k: int, **options: int) -> jax.Array:
    return top_k_kernel.top_k(scores, k, limit, **options)


def check_top_k() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for entries, k in (
        (2048, 512),
        (8192, 512),
        (32768, 512),
        (32768, 1024),
        (5000, 6),
        (300, 512),
    ):
        scores = normal(entries + k, 64, entries, dtype=jnp.float32)
        scores = scores.at[1].set(jnp.round(scores[1]))  # ties
        scores = scores.at[2].set(jnp.where(scores[2] > 0, 0.0, -0.0))
        scores = scores.at[3, ::3].set(jnp.nan)
        scores = scores.at[4, 20:].set(-jnp.inf)
        scores = scores.at[5].set(-jnp.inf)
        scores = scores.at[6, ::2].set(jnp.inf)
        got = jax.jit(functools.partial(top_k, k=k, implementation="portable"))(scores)
        wanted = top_k(scores, k, implementation="reference")
        results[f"{k} of {entries}"] = {"ok": bool((got == wanted).all()), "digest": digest(got)}
    return results


# --------------------------------------------------------------------------- hyper-connections


def hyper_operands(seed: int = 10) -> tuple[jax.Array, ...]:
    rows = FLASH.streams * (2 + FLASH.streams)
    return (
        normal(seed, CHUNK, FLASH.streams, FLASH.hidden),
        normal(11, rows, FLASH.streams * FLASH.hidden, dtype=jnp.float32, scale=0.01),
        normal(12, rows, dtype=jnp.float32),
        jnp.asarray([0.8, 1.1, 0.9], jnp.float32),
    )


def hyper_cases(sweep: bool) -> Iterator[Case]:
    streams, fn, base, scale = hyper_operands()
    y = normal(13, CHUNK, FLASH.hidden)
    configs = {"sm90": hyper_kernel.DEFAULT}
    if sweep:
        for changes in SWEEPS["hyper"]:
            name = " ".join(f"{key}={value}" for key, value in changes.items())
            configs[name] = dataclasses.replace(hyper_kernel.DEFAULT, **changes)
    weights = normal(14, CHUNK, FLASH.streams, dtype=jnp.float32)
    comb = normal(15, CHUNK, FLASH.streams, FLASH.streams, dtype=jnp.float32)
    size = float(streams.nbytes)
    for variant, config in configs.items():
        project = functools.partial(hyper_kernel.project, config=config, interpret=False)
        pre = functools.partial(hyper_kernel.pre, **SITE, config=config)
        post = functools.partial(hyper_kernel.post, config=config)
        yield Case("mHC projection", variant, project, (streams, fn), 0.0, size)
        yield Case("mHC pre", variant, pre, (streams, fn, base, scale), 0.0, 1.25 * size)
        yield Case("mHC post", variant, post, (y, streams, weights, comb), 0.0, 2.25 * size)
    for variant in ("reference", "sm90"):
        yield Case(
            "mHC site",
            variant,
            functools.partial(_site, implementation=variant),
            (streams, fn, base, scale, y),
            0.0,
            3.5 * size,
        )


def _site(streams: jax.Array, fn: Any, base: Any, scale: Any, y: Any, implementation: str) -> Any:
    u, weights, comb = hyper_connections.pre(
        streams, fn, base, scale, **SITE, implementation=implementation
    )
    return hyper_connections.post(u + y, streams, weights, comb, implementation=implementation)


def check_hyper() -> dict[str, Any]:
    streams, fn, base, scale = hyper_operands(20)
    call = jax.jit(functools.partial(hyper_connections.pre, **SITE, implementation="sm90"))
    back = jax.jit(functools.partial(hyper_connections.post, implementation="sm90"))
    y = normal(13, CHUNK, FLASH.hidden)
    got = call(streams, fn, base, scale)
    mixed = back(y, streams, *got[1:])
    rows = slice(CHUNK // 2 - 29, CHUNK // 2 + 99)
    wanted = hyper_connections.pre(
        streams[rows], fn, base, scale, **SITE, implementation="reference"
    )
    wanted_mixed = hyper_connections.post(
        y[rows], streams[rows], *wanted[1:], implementation="reference"
    )
    distances = [bench.distance(a[rows], b) for a, b in zip(got, wanted, strict=True)]
    distances.append(bench.distance(mixed[rows], wanted_mixed))
    limits = (5e-3, 1e-4, 1e-4, 5e-3)
    cut = True
    for size in (*CUTS, 1):
        for start in (0, CHUNK - size):
            part = slice(start, start + size)
            again = call(streams[part], fn, base, scale)
            cut &= all(bool((a == b[part]).all()) for a, b in zip(again, got, strict=True))
            cut &= bool((back(y[part], streams[part], *again[1:]) == mixed[part]).all())
    ok = cut and all(d <= limit for d, limit in zip(distances, limits, strict=True))
    return {"sm90": {"distances": distances, "cut": cut, "digest": digest((got, mixed)), "ok": ok}}


# ------------------------------------------------------------------------------- compressors


def compressor_operands(width: int, ratio: int, overlap: bool) -> tuple[Any, ...]:
    return (
        normal(16, CHUNK, width, dtype=jnp.float32),
        normal(17, CHUNK, width, dtype=jnp.float32),
        compressor.empty_carry(width, ratio=ratio, overlap=overlap),
        jnp.int32(0),
        jnp.int32(CHUNK),
    )


COMPRESSORS = {
    "csa": (2 * FLASH.head_dim, 4, True),
    "indexer": (2 * FLASH.index_head_dim, 4, True),
    "hca": (FLASH.head_dim, 128, False),
}


def compressor_cases(sweep: bool) -> Iterator[Case]:
    for name, (width, ratio, overlap) in COMPRESSORS.items():
        operands = compressor_operands(width, ratio, overlap)
        for variant in ("sm90", "reference"):
            function = functools.partial(
                compressor.compress, ratio=ratio, overlap=overlap, implementation=variant
            )
            nbytes = 2.0 * operands[0].nbytes
            yield Case(f"compressor {name}", variant, function, operands, 0.0, nbytes)
    inputs = normal(18, CHUNK, FLASH.hidden)
    weights = [normal(19, 2 * COMPRESSORS[name][0], FLASH.hidden) for name in ("csa", "indexer")]
    carries = [
        compressor.empty_carry(COMPRESSORS[n][0], ratio=4, overlap=True) for n in ("csa", "indexer")
    ]
    yield Case("compressors of a CSA layer", "sm90", _csa_compressors, (inputs, weights, carries))


def _csa_compressors(inputs: jax.Array, weights: list[jax.Array], carries: list[Any]) -> Any:
    """Projections (exact products of bfloat16 operands, float32 sums) and both compressors."""
    results = []
    for weight, carry in zip(weights, carries, strict=True):
        half = weight.shape[0] // 2
        values, gates = (
            jax.lax.dot_general(
                inputs, part, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            for part in (weight[:half], weight[half:])
        )
        results.append(compressor.compress(values, gates, carry, 0, CHUNK, ratio=4, overlap=True))
    return results


def check_compressors() -> dict[str, Any]:
    results = {}
    for name, (width, ratio, overlap) in COMPRESSORS.items():
        values, gates, carry, _, _ = compressor_operands(width, ratio, overlap)
        call = jax.jit(
            functools.partial(
                compressor_kernel.compress, ratio=ratio, overlap=overlap, interpret=False
            )
        )
        whole = call(values, gates, carry, jnp.int32(0), jnp.int32(CHUNK))
        wanted = compressor.compress(
            values,
            gates,
            carry,
            0,
            CHUNK,
            ratio=ratio,
            overlap=overlap,
            implementation="reference",
        )
        parts, state, position = [], carry, 0
        for size in (CHUNK // 8, CHUNK // 64, CHUNK // 64, 1, 300, CHUNK // 8):
            rows = slice(position, position + size)
            entries, count, first, state = call(
                values[rows], gates[rows], state, jnp.int32(position), jnp.int32(size)
            )
            parts.append((int(first), entries[: int(count)]))
            position += size
        cut = all(
            bool((entries == whole[0][first : first + entries.shape[0]]).all())
            for first, entries in parts
        )
        error = bench.distance(whole[0], wanted[0])
        results[name] = {"distance": error, "cut": cut, "digest": digest(whole[0])}
        results[name]["ok"] = cut and error <= 1e-5
    return results


# -------------------------------------------------------------------------------------- memory


def workspace() -> dict[str, float]:
    """Compiled temporaries in MiB of a chunk of 8,192 at 1,048,576 tokens of context, by op."""

    def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    f32, i32 = jnp.float32, jnp.int32
    q = struct(CHUNK, FLASH.heads, FLASH.head_dim)
    window = struct(CHUNK + FLASH.window - 1, FLASH.head_dim)
    sink, position = struct(FLASH.heads, dtype=f32), struct(dtype=i32)
    options = {"window": FLASH.window, "scale": FLASH.head_dim**-0.5}
    streams = struct(CHUNK, FLASH.streams, FLASH.hidden)
    rows = FLASH.streams * (2 + FLASH.streams)
    site = (streams, struct(rows, FLASH.streams * FLASH.hidden, dtype=f32))
    site += (struct(rows, dtype=f32), struct(3, dtype=f32), struct(CHUNK, FLASH.hidden))
    entries = struct(MILLION // 4 + 128, FLASH.head_dim)
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "SWA": (
            functools.partial(window_attention, ratio=1, **options),
            (q, window, None, sink, position),
        ),
        "HCA": (
            functools.partial(window_attention, ratio=128, **options),
            (q, window, struct(MILLION // 128 + 128, FLASH.head_dim), sink, position),
        ),
        "CSA sparse": (
            functools.partial(sparse_attention, **options),
            (q, window, entries, struct(CHUNK, FLASH.index_topk, dtype=i32), sink, position),
        ),
        "select entries": (
            functools.partial(indexer.select_entries, k=FLASH.index_topk),
            (
                struct(CHUNK, FLASH.index_heads, FLASH.index_head_dim),
                struct(MILLION // 4 + 128, FLASH.index_head_dim),
                struct(CHUNK, FLASH.index_heads, dtype=f32),
                position,
            ),
        ),
        "mHC site": (functools.partial(_site, implementation="sm90"), site),
    }
    for name, (width, ratio, overlap) in COMPRESSORS.items():
        carry = jax.eval_shape(
            functools.partial(compressor.empty_carry, width, ratio=ratio, overlap=overlap)
        )
        functions[f"compressor {name}"] = (
            functools.partial(compressor.compress, ratio=ratio, overlap=overlap),
            (struct(CHUNK, width, dtype=f32),) * 2 + (carry, position, position),
        )
    return {
        name: jax.jit(function).lower(*avals).compile().memory_analysis().temp_size_in_bytes / MIB
        for name, (function, avals) in functions.items()
    }


# ---------------------------------------------------------------------------------------- main

SWEEPS: dict[str, Any] = {
    "attention": [(32, 32, 4, 3), (64, 32, 8, 4), (64, 64, 8, 2)],
    "indexer": [(64, 128, 4, 2), (64, 128, 4, 4), (64, 64, 4, 4), (64, 256, 8, 3)],
    "top_k": [(8192, 1024), (16384, 2048), (4096, 1024), (4096, 512)],
    "hyper": [
        {"project_stages": 3},
        {"project_tokens": 128, "project_warps": 8},
        {"project_columns": 128, "project_stages": 3},
        {"pre_tokens": 4, "pre_columns": 512},
        {"pre_tokens": 8, "pre_columns": 512, "pre_warps": 8},
    ],
}

OPERATIONS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[bool], Iterator[Case]]]] = {
    "csa": (
        functools.partial(check_attention, "csa"),
        functools.partial(attention_cases, "csa"),
    ),
    "hca": (
        functools.partial(check_attention, "hca"),
        functools.partial(attention_cases, "hca"),
    ),
    "swa": (
        functools.partial(check_attention, "swa"),
        functools.partial(attention_cases, "swa"),
    ),
    "top_k": (check_top_k, top_k_cases),
    "indexer": (check_indexer, indexer_cases),
    "hyper": (check_hyper, hyper_cases),
    "compressor": (check_compressors, compressor_cases),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=bench.output_file, required=True, help="JSON file to write")
    parser.add_argument("--only", default=",".join(OPERATIONS), help="comma-separated operations")
    parser.add_argument("--variants", help="comma-separated; which to time (default: all)")
    parser.add_argument("--sweep", action="store_true", help="time other tile shapes too")
    parser.add_argument("--memory", action="store_true", help="compile at 1,048,576 tokens")
    parser.add_argument("--runs", type=bench.count, default=7)
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",")
    if unknown := set(names) - set(OPERATIONS):
        parser.error(
            f"--only: {', '.join(sorted(unknown))}: expected some of {','.join(OPERATIONS)}"
        )
    report: dict[str, Any] = bench.origin("pallas_kernels.bench_attention", argv)
    report |= {"checks": {}, "times": []}
    failed = False
    wanted = set(arguments.variants.split(",")) if arguments.variants else None
    timed: set[str] = set()

    def save() -> None:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)

    for name in names:
        check, cases = OPERATIONS[name]
        outcome = check()
        report["checks"][name] = outcome
        for variant, values in outcome.items():
            failed |= not values["ok"]
            print(f"check {name} {variant}: {json.dumps(values)}", flush=True)
        save()
        for case in cases(arguments.sweep):
            if wanted is not None and case.variant not in wanted:
                continue
            timed.add(case.variant)
            row: dict[str, Any] = {"name": case.name, "variant": case.variant}
            try:
                timing = bench.measure(
                    jax.jit(case.function), *case.operands, runs=arguments.runs, calls_per_run=3
                )
            except jax.errors.JaxRuntimeError as error:
                row["error"] = str(error)[:200]
                print(f"{case.name:28} {case.variant:34} {row['error'][:60]}", flush=True)
            else:
                milliseconds = timing.median_s * 1e3 * case.times
                row |= {"ms": milliseconds, "of_chunk": 1 / case.times, **timing.as_dict()}
                rates = ""
                if case.flops:
                    row["tflops"] = case.flops / timing.median_s / 1e12
                    rates = f"{row['tflops']:7.0f} TFLOP/s"
                elif case.nbytes:
                    row["tbytes"] = case.nbytes / timing.median_s / 1e12
                    rates = f"{row['tbytes']:7.2f} TB/s"
                print(
                    f"{case.name:28} {case.variant:34} {milliseconds:9.3f} ms {rates}", flush=True
                )
            report["times"].append(row)
            save()
    if arguments.memory:
        report["workspace_mib"] = workspace()
        print("workspace at 1,048,576 tokens, MiB:", json.dumps(report["workspace_mib"]))
        save()
    if missing := (wanted or set()) - timed:
        print(f"--variants: nothing timed here is called {', '.join(sorted(missing))}")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
