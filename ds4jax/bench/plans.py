"""Measures how far plans are from what runs take, and that two stages on one device change no bit.

python -m ds4jax.bench.plans --machine=machine.json --out_dir=DIR
    [--model=configs/models/flash.json] [--layers=6] [--repeats=3] [--config.SECTION.KEY=VALUE ...]

The model is cut to its first layers, with random weights. Cases, in the order of their memory since
a device tells only the highest peak so far: experts streamed for a prompt of several chunks within
a small budget, half of the experts streamed for one chunk, everything resident, and the same in two
stages on the one device. Every case is read until two outputs in a row are equal, then `repeats`
times; its time is their median. The folder gets plans.json; the last line on stdout is JSON.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from ds4jax import accounts, report
from ds4jax import engine as engines
from ds4jax.bench import manifest
from ds4jax.bench.prefill import output_hash
from ds4jax.cache import capacity_for
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.cli import common
from ds4jax.config import CONFIG_FOLDER, ModelConfig
from ds4jax.flags import config_from_flags, define_config_flags
from ds4jax.job import peak_bytes
from ds4jax.plan import plan_local
from ds4jax.run_config import RunConfig

SCHEMA = "ds4jax.bench.plans/1"
MOST_READS = 6  # before two outputs in a row are equal
TIME_LIMIT, MEMORY_LIMIT = 0.10, 0.02  # plan errors that are asked for
CHUNKS = 4  # of the long prompt


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration: chunks of the prompt, and dotted keys."""

    name: str
    chunks: int
    keys: Mapping[str, Any]


def cases(small_bytes: int, layers: int) -> list[Case]:
    """What is measured, ascending in memory; `small_bytes` are too few for all experts."""
    half = layers // 2
    stages = {"pipeline.split": f"{half},{layers - half}", "pipeline.devices": "0,0"}
    whole = {"streaming.mode": "whole"}
    return [
        Case("small budget, layer-major", CHUNKS, {**whole, "memory.device_bytes": small_bytes}),
        Case("half resident, one chunk", 1, {**whole, "streaming.resident_fraction": 0.5}),
        Case("all resident", CHUNKS, whole),
        Case("two stages on one device", CHUNKS, {**whole, **stages}),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_bench, argv)


def _bench(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    define_config_flags(values)
    for name, default, text in (
        ("machine", None, "Machine file; it takes the place of config.machine.file."),
        ("model", str(CONFIG_FOLDER / "models" / "flash.json"), "Model config that is cut."),
        ("out_dir", None, "Folder to write."),
    ):
        flags.DEFINE_string(name, default, text, flag_values=values)
    flags.DEFINE_integer("layers", 6, "Layers that are kept, at least 2.", flag_values=values)
    flags.DEFINE_integer(
        "repeats", 3, "Measured runs of a case.", lower_bound=1, flag_values=values
    )
    common.parse_flags(values, argv, __doc__ or "")
    given: Mapping[str, Any] = values.flag_values_dict()
    out_dir = Path(common.require_flag(values, "out_dir"))
    config = config_from_flags(values, {"config.prefill.logits": "last"})
    if given["machine"]:
        config = config.replace({"machine.file": given["machine"]})
    model = cut(ModelConfig.from_json(given["model"]), given["layers"])
    source = SyntheticSource(model, 0, mtp=False)
    record: dict[str, Any] = {"schema": SCHEMA, "layers": model.num_hidden_layers, "rows": []}
    small = _small_bytes(source, config)
    with report.disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    for case in cases(small, model.num_hidden_layers):
        row = measure(source, config, case, given["repeats"])
        record["rows"].append(row)
        record.setdefault("manifest", row.pop("manifest"))
        row.pop("manifest", None)
        report.write_json(out_dir / "plans.json", record)
        common.say(_line(row))
    shas = {row["sha256"] for row in record["rows"] if row["chunks"] == CHUNKS}
    record["same_bits"] = len(shas) == 1
    report.write_json(out_dir / "plans.json", record)
    common.say(f"outputs of the {CHUNKS} chunks in all cases: {'same' if len(shas) == 1 else shas}")
    common.print_result(record)
    return common.OK


def cut(model: ModelConfig, layers: int) -> ModelConfig:
    """The first layers of a model."""
    if not 2 <= layers <= model.num_hidden_layers:
        raise common.UsageError(
            f"--layers is {layers}, expected 2 to {model.num_hidden_layers} for this model"
        )
    return dataclasses.replace(
        model,
        num_hidden_layers=layers,
        compress_ratios=(*model.layer_ratios[:layers], 0),
        num_hash_layers=min(model.num_hash_layers, layers),
    )


def _small_bytes(source: SyntheticSource, config: RunConfig) -> int:
    """A budget in which a third of the experts stays on the device, by the plan of all of them."""
    device = jax.local_devices()[0]
    tokens = CHUNKS * config.prefill.chunk_tokens
    capacity = capacity_for(config, source.config, tokens)
    layer_major = config.replace({"streaming.resident_fraction": 1 / 3, "streaming.mode": "whole"})
    plan = plan_local(source, layer_major, [device], [tokens], capacity)
    return plan.stages[0].price.total_bytes


def measure(source: SyntheticSource, config: RunConfig, case: Case, repeats: int) -> dict[str, Any]:
    """A row of a case: what was planned and what happened."""
    config = config.replace(case.keys)
    tokens = case.chunks * config.prefill.chunk_tokens
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, tokens, dtype=np.int32)
    with engines.load(source, config, prompt_tokens=tokens) as engine:
        reads: list[str] = []
        while len(reads) < 2 or reads[-1] != reads[-2]:
            if len(reads) == MOST_READS:
                raise RuntimeError(f"{case.name}: other bytes in each of {MOST_READS} runs")
            reads.append(output_hash(engine.prefill(ids)))
        seconds, result = [], None
        for _ in range(repeats):
            result = None  # its state is as large as the next one
            began = time.perf_counter()
            result = engine.prefill(ids)
            seconds.append(time.perf_counter() - began)
        assert result is not None
        error = accounts.plan_error(
            engine.plans,
            result.report.passes,
            peak_bytes(engine),
            run_plan=engine.run_plan,
            spans=[(0, tokens)],
            seconds=statistics.median(seconds),
        )
        names = [f"{each.device_kind} {each.id}" for each in engine.devices]
        return {
            "case": case.name,
            "chunks": case.chunks,
            "tokens": tokens,
            "keys": dict(case.keys),
            "seconds": seconds,
            "sha256": output_hash(result),
            "plan": accounts.plan_record(engine.plans, names),
            "plan_error": error,
            "within": within(error),
            "layer_seconds": [list(part.layer_seconds) for part in result.report.passes],
            "ledgers": [
                ledger.to_json() for part in result.report.passes for ledger in part.ledgers
            ],
            "load_s": engine.load_seconds,
            "manifest": manifest.manifest(config, "synthetic, first layers", engine.device),
        }


def within(error: Mapping[str, Any]) -> dict[str, bool | None]:
    """Which plan errors are within what is asked for; None where one is not known."""
    time_error, memory = error["time_error"], error["device_error"]
    return {
        "time": None if time_error is None else abs(time_error) <= TIME_LIMIT,
        "bytes": error["moved_error_bytes"] == 0,
        "memory": None if memory is None else abs(memory) <= MEMORY_LIMIT,
    }


def _line(row: Mapping[str, Any]) -> str:
    error = row["plan_error"]
    peak = error["peak_device_bytes"]
    memory = "peak not reported"
    if peak is not None:
        memory = (
            f"peak {peak / 1e9:.2f} of {error['predicted_device_bytes'] / 1e9:.2f} GB "
            f"({error['device_error']:+.1%})"
        )
    return (
        f"{row['case']:<28} {row['tokens']:>6} tokens: {error['measured_s']:.3f} of "
        f"{error['predicted_s']:.3f} s ({error['time_error']:+.1%}), "
        f"{error['moved_bytes']} bytes moved ({error['moved_error_bytes']:+d}), {memory}, "
        f"sha256 {row['sha256'][:12]}, loaded in {row['load_s']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
