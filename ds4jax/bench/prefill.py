"""Measures how fast prompts are read, over prompt lengths, with a run configuration of the CLI.

python -m ds4jax.bench.prefill --config=configs/runs/NAME.toml --out_dir=DIR
    [--checkpoint=synthetic:flash] [--prompt_tokens=512,8192,32768] [--repeats=3]
    [--config.SECTION.KEY=VALUE ...]

Prompts are random token ids. Every length is read until two outputs in a row have the same bytes
(warm-up, compilation included), then `repeats` times; the numbers are medians over these, all of
them are kept. A time goes from the call to the logits of the last token in host memory: the time
to the first token. The folder gets bench.json, rewritten after every length, bench.csv, and a
timeline of the last repeat of each length (Chrome trace). The last line on stdout is bench.json.
"""

import csv
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import streaming
from ds4jax import engine as engines
from ds4jax import report
from ds4jax.bench import manifest
from ds4jax.cli import common
from ds4jax.engine import Engine, PrefillResult
from ds4jax.flags import config_from_flags, define_config_flags

SCHEMA = "ds4jax.bench.prefill/1"
MOST_WARM_UPS = 4

CSV_COLUMNS = (
    "prompt_tokens",
    "rate_tokens_per_s",
    "median_s",
    "spread",
    "order",
    "mode",
    "distinct_mean",
    "moved_bytes",
    "overlap",
    "stall_s",
    "peak_bytes",
    "sha256",
)


class UnsteadyOutput(RuntimeError):
    """Repeats of one prompt did not give the same bytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_bench, argv)


def _bench(argv: Sequence[str]) -> int:
    flag_values = flags.FlagValues()
    define_config_flags(flag_values)
    flags.DEFINE_string(
        "checkpoint", "synthetic:flash", "As of ds4jax-prefill.", flag_values=flag_values
    )
    flags.DEFINE_string("out_dir", None, "Folder to write.", flag_values=flag_values)
    flags.DEFINE_list(
        "prompt_tokens",
        ["512", "8192", "32768"],
        "Prompt lengths in tokens, comma separated.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer("repeats", 3, "Measured runs of a length.", flag_values=flag_values)
    common.parse_flags(flag_values, argv, __doc__ or "")
    given: Mapping[str, Any] = flag_values.flag_values_dict()
    lengths, repeats = whole_numbers("prompt_tokens", given["prompt_tokens"]), given["repeats"]
    if repeats < 1:
        raise common.UsageError(f"--repeats is {repeats}, expected at least 1")
    out_dir = Path(common.require_flag(flag_values, "out_dir"))
    config = config_from_flags(flag_values, {"config.prefill.logits": "last"})
    checkpoint = given["checkpoint"]
    # As the prefill command: JAX takes three quarters of a GPU unless told otherwise.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    with report.disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    with engines.load(checkpoint, config, prompt_tokens=max(lengths)) as engine:
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "manifest": manifest.manifest(config, checkpoint, engine.device),
            "plan": plan_facts(engine),
            "rows": [],
        }
        common.say(_loaded(record["plan"]))
        ids = manifest.synthetic_ids(max(lengths), engine.model_config.vocab_size)
        for row in measure_lengths(engine, ids, lengths, repeats, out_dir):
            record["rows"].append(row)
            report.write_json(out_dir / "bench.json", record)
            write_csv(out_dir / "bench.csv", record["rows"])
            common.say(_line(row))
    common.print_result(
        {"rows": [{key: row[key] for key in CSV_COLUMNS} for row in record["rows"]]}
    )
    return common.OK


def whole_numbers(flag: str, values: Sequence[str], *, least: int = 1) -> list[int]:
    """The values of a list flag as integers; raises UsageError."""
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise common.UsageError(
            f"--{flag} is {','.join(values)!r}, expected whole numbers of at least {least}, "
            "comma separated"
        )
    return numbers


def plan_facts(engine: Engine) -> dict[str, Any]:
    """What the engine planned and loaded, as JSON."""
    plan, pool = engine.plan, engine.plan.experts
    resident = [len(experts) for experts in pool.residency.resident]
    return {
        "layers": len(resident),
        "resident_experts_per_layer": [min(resident), max(resident)],
        "streamed_experts": sum(map(len, pool.residency.streamed)),
        "tier": pool.tier,
        "window": pool.resolved_window,
        "order": plan.order,
        "micro_batch_tokens": plan.micro_batch_tokens,
        "price_bytes": {**vars(plan.price), "total": plan.price.total_bytes},
        "store_bytes": plan.store_bytes,
        "available_bytes": engine.available_bytes,
        "load_s": engine.load_seconds,
    }


def measure_lengths(
    engine: Engine, ids: np.ndarray, lengths: Iterable[int], repeats: int, out_dir: Path
) -> Iterable[dict[str, Any]]:
    """A row for each prompt length, as soon as it is measured."""
    for length in lengths:
        prompt = ids[:length]
        warm_up, sha = _warm_up(engine, prompt)
        times, result = [], None
        for _ in range(repeats):
            result = None  # its state is as large as the next one
            seconds, result = _timed(engine, prompt)
            times.append(seconds)
            if (found := output_hash(result)) != sha:
                raise UnsteadyOutput(f"{length} tokens gave {found}, after {sha} before")
        assert result is not None
        spans = [span for ledger in _ledgers(result) for span in ledger.spans]
        if spans:
            streaming.write_timeline(out_dir / f"timeline_{length}.json", spans)
        yield _row(engine, length, times, sha, warm_up, result)


def _warm_up(engine: Engine, prompt: np.ndarray) -> tuple[dict[str, Any], str]:
    """Reads until two outputs in a row are equal."""
    hashes: list[str] = []
    seconds, compiled = [], [0, 0.0]
    while len(hashes) < 2 or hashes[-1] != hashes[-2]:
        if len(hashes) == MOST_WARM_UPS:
            raise UnsteadyOutput(
                f"{len(prompt)} tokens gave other bytes in each of {len(hashes)} runs: {hashes}"
            )
        took, result = _timed(engine, prompt)
        hashes.append(output_hash(result))
        seconds.append(took)
        programs, compile_s = result.report.compiled
        compiled = [compiled[0] + programs, compiled[1] + compile_s]
        del result
    return {"seconds": seconds, "programs": compiled[0], "compile_s": compiled[1]}, hashes[-1]


def _timed(engine: Engine, prompt: np.ndarray) -> tuple[float, PrefillResult]:
    began = time.perf_counter()
    result = engine.prefill(prompt)
    return time.perf_counter() - began, result


def output_hash(result: PrefillResult) -> str:
    """sha256 of the logits as little-endian float32."""
    assert result.logits is not None
    if not np.isfinite(result.logits).all():
        raise UnsteadyOutput("the logits are not finite")
    return hashlib.sha256(np.ascontiguousarray(result.logits, "<f4").tobytes()).hexdigest()


def _row(
    engine: Engine,
    length: int,
    times: Sequence[float],
    sha: str,
    warm_up: Mapping[str, Any],
    result: PrefillResult,
) -> dict[str, Any]:
    passes = result.report.passes
    ledgers = _ledgers(result)
    distinct = [list(part.distinct) for part in passes]
    flat = [count for part in distinct for count in part]
    median = statistics.median(times)
    stats = engine.device.memory_stats() if engine.device.platform != "cpu" else None
    whole = all(ledger.predicted.exact for ledger in ledgers)
    return {
        "prompt_tokens": length,
        "rate_tokens_per_s": length / median,
        "median_s": median,
        "ttft_s": median,
        "seconds": list(times),
        "spread": manifest.spread(times),
        "sha256": sha,
        "warm_up": dict(warm_up),
        "rows": sorted({chunk.rows for chunk in result.report.chunks}),
        "order": "layer_major" if len(result.report.chunks) > len(passes) else "chunk_major",
        "mode": ("whole" if whole else "routed") if ledgers else "resident",
        "passes": len(passes),
        "distinct_mean": statistics.mean(flat),
        "distinct": distinct,
        "layer_seconds": [list(part.layer_seconds) for part in passes],
        "predicted_bytes": sum(sum(ledger.predicted.bytes.values()) for ledger in ledgers),
        "most_bytes": sum(ledger.predicted.most_bytes for ledger in ledgers),
        "moved_bytes": sum(ledger.total_bytes for ledger in ledgers),
        "overlap": statistics.median(ledger.overlap or 0.0 for ledger in ledgers)
        if ledgers
        else None,
        "stall_s": sum(ledger.stall_s for ledger in ledgers),
        "ledgers": [ledger.to_json() for ledger in ledgers],
        "state_bytes": result.report.state_bytes,
        # Of the process so far: lengths are best given in ascending order.
        "peak_bytes": stats.get("peak_bytes_in_use") if stats else None,
    }


def _ledgers(result: PrefillResult) -> list[streaming.Ledger]:
    """What was streamed for a prompt, one ledger per pass and stage."""
    return [ledger for part in result.report.passes for ledger in part.ledgers]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The columns of `rows` that fit in a table."""
    with report.disk_errors(path), open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _loaded(plan: Mapping[str, Any]) -> str:
    low, high = plan["resident_experts_per_layer"]
    return (
        f"loaded {plan['layers']} layers in {plan['load_s']:.1f} s: {low}..{high} resident experts "
        f"per layer, {plan['streamed_experts']} streamed from {plan['tier']} "
        f"({plan['store_bytes'] / 1e9:.1f} GB), {plan['order']} over "
        f"{plan['micro_batch_tokens']} tokens, planned "
        f"{plan['price_bytes']['total'] / 1e9:.1f} of {plan['available_bytes'] / 1e9:.1f} GB"
    )


def _line(row: Mapping[str, Any]) -> str:
    overlap = "" if row["overlap"] is None else f", overlap {row['overlap']:.1%}"
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 1e9:.1f} GB"
    return (
        f"{row['prompt_tokens']:>8} tokens: {row['rate_tokens_per_s']:9.1f} tokens/s, "
        f"{row['median_s']:.3f} s (spread {row['spread']:.1%}), {row['mode']}, "
        f"{row['distinct_mean']:.1f} distinct experts a layer, "
        f"{row['moved_bytes'] / 1e9:.2f} GB moved{overlap}, stall {row['stall_s']:.3f} s{peak}, "
        f"warm-up {sum(row['warm_up']['seconds']):.1f} s ({row['warm_up']['compile_s']:.1f} s for "
        f"{row['warm_up']['programs']} programs), sha256 {row['sha256'][:12]}"
    )


if __name__ == "__main__":
    sys.exit(main())
