"""Measures V4-Flash under all memory budgets of configs/runs, each in a process of its own.

python -m ds4jax.bench.flash_table --out_dir=DIR [--time_limit=800] [--only=short,24gb]
    [--model=synthetic:flash] [--configs=configs/runs] [--prefix=flash_1xh200] [--python=python3]

Every process is `ds4jax.bench.prefill`, one `ds4jax.bench.beside_transformers`, with the run file
of its budget; they share a persistent cache of compiled programs. A process gets the time that is
left, up to a limit of its own, and ends in time by itself; what does not fit is left out and said
so. All outputs of one prompt with the same numerics, chunks and weights have to have one sha256,
over all budgets and processes: otherwise the exit code is 1. The folder gets a folder for each
process and table.json, rewritten after each; the table goes to stderr, the last line on stdout is
its rows.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from ds4jax import report
from ds4jax.bench.beside_transformers import require_python
from ds4jax.cli import common
from ds4jax.config import CONFIG_FOLDER

SCHEMA = "ds4jax.bench.flash_table/1"
GRACE_S = 15.0  # beyond its own limit, after which a process is killed
COLUMNS = (
    "arm",
    "prompt_tokens",
    "numerics",
    "routing",
    "rate_tokens_per_s",
    "median_s",
    "predicted_s",
    "repeats",
    "mode",
    "distinct_mean",
    "moved_bytes",
    "predicted_bytes",
    "overlap",
    "stall_s",
    "peak_bytes",
    "planned_bytes",
    "sha256",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One process: its name, run file without prefix, what it is expected to take, its flags."""

    name: str
    budget: str
    seconds: float
    arguments: tuple[str, ...]


# How many experts stay depends on the longest prompt of a process: short prompts have their own.
STEPS = (
    Step(
        "short",
        "",
        140.0,
        (
            "--prompt_tokens=512,8192",
            "--then=streaming.mode=routed:512",
            "--then=numerics.preset=bfloat16:8192",
            "--trace=8192",
        ),
    ),
    Step("full", "", 125.0, ("--prompt_tokens=8192,32768,131072", "--repeats=1,3,2")),
    Step(
        "96gb", "_96gb", 105.0, ("--prompt_tokens=8192,131072", "--repeats=1,2", "--profile_first")
    ),
    Step("24gb", "_24gb", 90.0, ("--prompt_tokens=8192,32768", "--repeats=1,3")),
    Step("beside", "", 60.0, ("--prompt_tokens=2048,8192", "--time_limit=50")),
    Step("48gb", "_48gb", 70.0, ("--prompt_tokens=8192", "--repeats=2")),
    Step(
        "zipf",
        "",
        65.0,
        (
            "--config.synthetic.routing=zipf",
            "--prompt_tokens=512,8192",
            "--then=streaming.mode=routed:512",
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_bench, argv)


def _bench(argv: Sequence[str]) -> int:
    began = time.perf_counter()
    flag_values = flags.FlagValues()
    strings = (
        ("out_dir", None, "Folder to write."),
        ("model", "synthetic:flash", "As --checkpoint of ds4jax-prefill."),
        ("configs", str(CONFIG_FOLDER / "runs"), "Folder of the run files."),
        ("prefix", "flash_1xh200", "How the names of the run files begin."),
        ("python", sys.executable, "Interpreter that has transformers."),
    )
    for name, default, text in strings:
        flags.DEFINE_string(name, default, text, flag_values=flag_values)
    flags.DEFINE_list(
        "only", [step.name for step in STEPS], "Processes to run.", flag_values=flag_values
    )
    flags.DEFINE_float("time_limit", 800.0, "Seconds for everything.", flag_values=flag_values)
    flags.DEFINE_list("extra", [], "Further flags of every bench.", flag_values=flag_values)
    common.parse_flags(flag_values, argv, __doc__ or "")
    given: Mapping[str, Any] = flag_values.flag_values_dict()
    out_dir = Path(common.require_flag(flag_values, "out_dir"))
    unknown = sorted(set(given["only"]) - {step.name for step in STEPS})
    if unknown:
        names = ", ".join(step.name for step in STEPS)
        raise common.UsageError(f"--only has {unknown}, expected some of {names}")
    steps = [step for step in STEPS if step.name in given["only"]]
    for path in (_run_file(step, given) for step in steps):
        if not path.is_file():
            raise common.UsageError(
                f"--configs={given['configs']} --prefix={given['prefix']}: {path} does not exist"
            )
    if any(step.name == "beside" for step in steps):
        require_python(given["python"])
    with report.disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    environment.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "ds4jax-flash-table")
    )
    # Small programs count, too: there is one process after the other.
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    record: dict[str, Any] = {"schema": SCHEMA, "steps": [], "rows": [], "ratios": []}
    for step in steps:
        left = given["time_limit"] - (time.perf_counter() - began) - GRACE_S
        if left < 0.6 * step.seconds:
            record["steps"].append({"name": step.name, "left_out_with_s": round(left, 1)})
            common.say(f"== {step.name}: left out, {left:.0f} s are left")
            continue
        folder = out_dir / step.name
        command = command_of(step, folder, min(left, 1.5 * step.seconds), given)
        common.say(f"== {step.name}, {left:.0f} s left: {' '.join(command[1:])}")
        started = time.perf_counter()
        ended = _run(command, environment, left + GRACE_S / 2)
        took = time.perf_counter() - started
        record["steps"].append({"name": step.name, "seconds": took, "ended": ended})
        _collect(record, step.name, folder)
        report.write_json(out_dir / "table.json", record)
        common.say(f"== {step.name}: {ended}, {took:.1f} s")
    record["disagreements"] = disagreements(record["rows"])
    report.write_json(out_dir / "table.json", record)
    for row in record["rows"]:
        common.say(line(row))
    for found in record["ratios"]:
        common.say(f"transformers, {found['prompt_tokens']} tokens: {found['ratio']:.2f}x")
    for text in record["disagreements"]:
        common.say(f"UNEQUAL: {text}")
    common.print_result({key: record[key] for key in ("rows", "ratios", "steps", "disagreements")})
    return common.INTERNAL_ERROR if record["disagreements"] else common.OK


def command_of(step: Step, folder: Path, limit_s: float, given: Mapping[str, Any]) -> list[str]:
    """The command of a process that has `limit_s` seconds."""
    if step.name == "beside":
        model = given["model"].removeprefix("synthetic:")
        file = CONFIG_FOLDER / "models" / f"{model}.json"
        own = [
            "ds4jax.bench.beside_transformers",
            f"--model={file}",
            f"--python={given['python']}",
        ]
    else:
        own = [
            "ds4jax.bench.prefill",
            f"--config={_run_file(step, given)}",
            f"--checkpoint={given['model']}",
            f"--time_limit={limit_s:.0f}",
        ]
    return [
        sys.executable,
        "-m",
        *own,
        f"--out_dir={folder}",
        *step.arguments,
        *given["extra"],
    ]


def _run_file(step: Step, given: Mapping[str, Any]) -> Path:
    return Path(given["configs"]) / f"{given['prefix']}{step.budget}.toml"


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Runs a process to its end or to the limit, with all that it starts; says how it ended."""
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return f"exit code {process.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        return f"killed after {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _collect(record: dict[str, Any], name: str, folder: Path) -> None:
    """Takes over the rows that a process has written, as far as it came."""
    if (path := folder / "bench.json").exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            keys = (*COLUMNS, "prompt_sha256", "chunk_tokens")
            record["rows"].append({"step": name, **{key: row[key] for key in keys}})
    if (path := folder / "beside.json").exists():
        record["ratios"] = json.loads(path.read_text(encoding="utf-8"))["ratios"]


def disagreements(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Outputs that should have been equal and were not, one text for each prompt and setting."""
    found: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("prompt_tokens", "numerics", "chunk_tokens", "routing"))
        found.setdefault(key, {}).setdefault(row["sha256"], []).append(
            f"{row['step']}/{row['arm']}"
        )
    return [
        f"{key[0]} tokens, {key[1]}, chunks of {key[2]}, {key[3]}: "
        + "; ".join(f"{sha[:12]} in {', '.join(names)}" for sha, names in shas.items())
        for key, shas in found.items()
        if len(shas) > 1
    ]


def line(row: Mapping[str, Any]) -> str:
    """A row of the table for people."""
    overlap = "" if row["overlap"] is None else f", overlap {row['overlap']:.1%}"
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 1e9:.1f} GB"
    return (
        f"{row['step']:5} {row['prompt_tokens']:>7} tokens, {row['numerics']}, {row['routing']}, "
        f"{row['mode']}: {row['rate_tokens_per_s']:9.1f} tokens/s ({row['median_s']:.3f} s, "
        f"{row['repeats']} runs), {row['distinct_mean']:.1f} experts, "
        f"{row['moved_bytes'] / 1e9:.1f} GB{overlap}{peak} of {row['planned_bytes'] / 1e9:.1f} "
        f"planned, {row['sha256'][:12]}"
    )


if __name__ == "__main__":
    sys.exit(main())
