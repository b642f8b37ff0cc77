"""Reads the same prompts with transformers' DeepSeek-V4 and with ds4jax, on one device in one call.

python -m ds4jax.bench.beside_transformers --out_dir=DIR [--model=configs/models/flash.json]
    [--prompt_tokens=2048,8192] [--repeats=3] [--python=python3] [--time_limit=60]
    [--config.SECTION.KEY=VALUE ...]

One layer of each attention kind at full width, all experts on the device, random weights: bfloat16
on transformers' side, the published storage formats on ours, activations bfloat16 without simulated
quantisation on both. Both times go from token ids in host memory to the logits of the last one
there, and both keep the state of the sequence. transformers runs first, in a process of its own
(`--python` names the interpreter that has it), with each of its ways to compute experts, and the
fastest counts; its attention for this model is eager only. What runs out of memory is reported. The
folder gets beside.json, the last line on stdout has the ratios.
"""

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from ds4jax import engine as engines
from ds4jax import report
from ds4jax.bench import manifest, prefill
from ds4jax.bench.layers import one_of_each
from ds4jax.checkpoint.synthetic import SyntheticSource, prompt_ids
from ds4jax.cli import common
from ds4jax.config import CONFIG_FOLDER, ModelConfig
from ds4jax.flags import config_from_flags, define_config_flags

SCHEMA = "ds4jax.bench.beside_transformers/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_bench, argv)


def _bench(argv: Sequence[str]) -> int:
    flag_values = flags.FlagValues()
    define_config_flags(flag_values)
    flags.DEFINE_string(
        "model",
        str(CONFIG_FOLDER / "models" / "flash.json"),
        "Model config whose layers are timed, with random weights.",
        flag_values=flag_values,
    )
    flags.DEFINE_string("out_dir", None, "Folder to write.", flag_values=flag_values)
    flags.DEFINE_list(
        "prompt_tokens", ["2048", "8192"], "Prompt lengths in tokens.", flag_values=flag_values
    )
    flags.DEFINE_integer("repeats", 3, "Measured runs.", lower_bound=1, flag_values=flag_values)
    flags.DEFINE_string(
        "python", sys.executable, "Interpreter with transformers.", flag_values=flag_values
    )
    flags.DEFINE_float(
        "time_limit", 60.0, "Seconds that transformers may take.", flag_values=flag_values
    )
    common.parse_flags(flag_values, argv, __doc__ or "")
    given: Mapping[str, Any] = flag_values.flag_values_dict()
    lengths = common.whole_numbers("prompt_tokens", given["prompt_tokens"])
    out_dir = Path(common.require_flag(flag_values, "out_dir"))
    config = config_from_flags(
        flag_values,
        {"config.prefill.logits": "last", "config.numerics.preset": "bfloat16"},
    )
    model = one_of_each(ModelConfig.from_json(given["model"]))
    common.require_positions("prompt_tokens", lengths, model.max_position_embeddings)
    require_python(given["python"])
    with report.disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    theirs = transformers_rows(
        published_config(Path(given["model"]), model),
        lengths,
        given["repeats"],
        given["python"],
        given["time_limit"],
    )
    record: dict[str, Any] = {"schema": SCHEMA, "transformers": theirs, "ds4jax": [], "ratios": []}
    source = SyntheticSource(model, 0, mtp=False)
    with engines.load(source, config, prompt_tokens=max(lengths)) as engine:
        checkpoint = f"synthetic:{given['model']}"
        record["manifest"] = manifest.manifest(config, checkpoint, engine.device)
        for length in lengths:
            prompt = prompt_ids(length, model.vocab_size, "uniform")
            warm = prefill.warm_up(engine, prompt)
            runs = [prefill.timed(engine, prompt).seconds for _ in range(given["repeats"])]
            row = {
                "prompt_tokens": length,
                "numerics": str(engine.numerics),
                "seconds": runs,
                "median_s": statistics.median(runs),
                "rate_tokens_per_s": length / statistics.median(runs),
                "warm_up": dataclasses.asdict(warm),
            }
            record["ds4jax"].append(row)
            record["ratios"] = ratios(record["ds4jax"], theirs["rows"])
            report.write_json(out_dir / "beside.json", record)
            common.say(f"ds4jax, {length} tokens: {row['rate_tokens_per_s']:.1f} tokens/s")
    for found in record["ratios"]:
        common.say(
            f"{found['prompt_tokens']} tokens, 3 layers: ds4jax {found['ds4jax_s']:.4f} s, "
            f"transformers {found['transformers_s']:.4f} s ({found['experts']}): "
            f"{found['ratio']:.2f}x"
        )
    common.print_result({"ratios": record["ratios"], "versions": theirs.get("versions")})
    return common.OK


def require_python(path: str) -> None:
    """Raises UsageError unless there is such a program."""
    if shutil.which(path) is None:
        raise common.UsageError(f"--python is {path!r}, expected an interpreter with transformers")


def published_config(path: Path, model: ModelConfig) -> dict[str, Any]:
    """The content of a config.json with the layers of `model` instead of its own."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {
        **raw,
        "num_hidden_layers": model.num_hidden_layers,
        "compress_ratios": list(model.layer_ratios),
        "num_hash_layers": model.num_hash_layers,
    }


def transformers_rows(
    raw: Mapping[str, Any],
    lengths: Sequence[int],
    repeats: int,
    python: str,
    limit_s: float,
) -> dict[str, Any]:
    """What `transformers_side` measured, as far as it came within `limit_s`."""
    script = Path(__file__).with_name("transformers_side.py")
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder) / "config.json", Path(folder) / "out.json"
        config.write_text(json.dumps(raw), encoding="utf-8")
        command = [python, str(script), str(config), str(out)]
        command += [",".join(map(str, lengths)), str(repeats)]
        ended = "in time"
        try:
            code = subprocess.run(
                command, timeout=limit_s, check=False, stdout=sys.stderr
            ).returncode
            if code:
                ended = f"with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit_s} s"
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    return {**found, "ended": ended}


def ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """How many times as fast as transformers' best we were, for lengths that both have read."""
    found = []
    for row in ours:
        same = [
            each
            for each in theirs
            if each.get("prompt_tokens") == row["prompt_tokens"] and "error" not in each
        ]
        if not same:
            continue
        best = min(same, key=lambda each: each["median_s"])
        found.append(
            {
                "prompt_tokens": row["prompt_tokens"],
                "ds4jax_s": row["median_s"],
                "transformers_s": best["median_s"],
                "experts": best["experts"],
                "ratio": best["median_s"] / row["median_s"],
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
