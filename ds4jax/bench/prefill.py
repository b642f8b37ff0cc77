"""Measures how fast prompts are read, over prompt lengths, with a run configuration of the CLI.

python -m ds4jax.bench.prefill --config=configs/runs/NAME.toml --out_dir=DIR
    [--checkpoint=synthetic:flash] [--prompt_tokens=512,8192,131072] [--repeats=3]
    [--compare=OTHER.toml | --compare=numerics.preset=bfloat16] [--trace=8192]
    [--then=streaming.mode=routed:512] [--profile_first] [--time_limit=SECONDS]
    [--config.SECTION.KEY=VALUE ...]

Prompts are random token ids that follow config.synthetic.routing. Every length is read until two
outputs in a row have the same bytes (warm-up, compilation included), then `repeats` times; numbers
are medians over these, all of them are kept. A time goes from the call to the logits of the last
token in host memory: the time to the first token.

With --compare the measured runs of two configurations alternate, A B B A. The noise floor is what
repeats of one of them differ by; a smaller difference between them is none. Configurations that do
not do the same work are refused: other weights, other prompts, or other bytes although numerics and
chunks are equal. They share the loaded weights where only numerics or the mode of streaming differ.

--then adds rows of other configurations on the same weights, each with lengths of its own.

The folder gets bench.json, rewritten after every length, bench.csv, bench.svg, a timeline of the
last repeat of each length (Chrome trace), and with --trace a page with the time of every op against
its floor. The last line on stdout is the table.
"""

import collections
import contextlib
import cProfile
import csv
import dataclasses
import gc
import os
import pstats
import statistics
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

import streaming
from ds4jax import accounts, page, report
from ds4jax import engine as engines
from ds4jax.bench import manifest, ops
from ds4jax.checkpoint.open import open_source
from ds4jax.checkpoint.synthetic import prompt_ids
from ds4jax.cli import common
from ds4jax.engine import Engine
from ds4jax.flags import config_from_flags, define_config_flags
from ds4jax.job import PrefillJob, run_record
from ds4jax.passes import PassReport
from ds4jax.readings import PrefillResult
from ds4jax.rows import Prompts
from ds4jax.run_config import RunConfig
from ds4jax.text import Prompt

SCHEMA = "ds4jax.bench.prefill/3"
MOST_WARM_UPS = 4

CSV_COLUMNS = (
    "arm",
    "prompt_tokens",
    "numerics",
    "rate_tokens_per_s",
    "median_s",
    "predicted_s",
    "repeats",
    "spread",
    "order",
    "mode",
    "distinct_mean",
    "moved_bytes",
    "predicted_bytes",
    "overlap",
    "stall_s",
    "gc_pause_s",
    "peak_bytes",
    "sha256",
)


# Seconds of this process so far by what JAX does on the way from a function to a program.
PHASES: collections.defaultdict[str, float] = collections.defaultdict(float)
_COUNTING = threading.Lock()  # programs are compiled on several threads


def _count_phase(event: str, duration_secs: float, **_: object) -> None:
    name = event.rpartition("/")[2]
    spent = name != "compile_time_saved_sec"
    if spent and event.startswith(("/jax/core/compile/", "/jax/compilation_cache/")):
        with _COUNTING:
            PHASES[name] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_count_phase)


def measure_phases() -> Callable[[], dict[str, float]]:
    """Starts a measurement; the returned function tells the seconds of each phase since then."""
    before = PHASES.copy()
    return lambda: {name: round(total - before[name], 3) for name, total in PHASES.items()}


class UnsteadyOutput(RuntimeError):
    """Runs that have to give the same bytes did not."""


class WrongBytes(RuntimeError):
    """A run moved other bytes than it had to."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A configuration that is measured, and the engine that runs it."""

    name: str
    config: RunConfig
    engine: Engine


class Clock:
    """The seconds that are left of --time_limit; None is no limit."""

    def __init__(self, limit_s: float | None, now: Callable[[], float] = time.perf_counter):
        self._now, self._end = now, None if limit_s is None else now() + limit_s

    def allows(self, seconds: float) -> bool:
        """Whether something that takes this long would end in time."""
        return self._end is None or self._now() + seconds <= self._end


@dataclasses.dataclass(frozen=True)
class Timed:
    """One run: seconds of wall time, and those of them that the garbage collector took."""

    seconds: float
    gc_pause_s: float
    result: PrefillResult


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
        ["512", "2048", "8192", "32768", "131072"],
        "Prompt lengths in tokens, comma separated.",
        flag_values=flag_values,
    )
    flags.DEFINE_list(
        "repeats", ["3"], "Measured runs: one number, or one per length.", flag_values=flag_values
    )
    flags.DEFINE_string(
        "compare",
        None,
        "The configuration B: a TOML file, or changes such as numerics.preset=bfloat16, comma "
        "separated.",
        flag_values=flag_values,
    )
    flags.DEFINE_multi_string(
        "then",
        [],
        "Further rows on the same weights: changes as of --compare, a colon, and lengths.",
        flag_values=flag_values,
    )
    flags.DEFINE_list(
        "trace", [], "Lengths of which one more run is traced.", flag_values=flag_values
    )
    flags.DEFINE_bool(
        "profile_first",
        False,
        "Write what Python did in the first run of every length; it takes longer for that.",
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        "time_limit",
        None,
        "Seconds after which nothing is begun that would not end in time.",
        flag_values=flag_values,
    )
    common.parse_flags(flag_values, argv, __doc__ or "")
    given: Mapping[str, Any] = flag_values.flag_values_dict()
    clock = Clock(given["time_limit"])
    lengths = common.whole_numbers("prompt_tokens", given["prompt_tokens"])
    repeats = common.whole_numbers("repeats", given["repeats"])
    if len(repeats) not in (1, len(lengths)):
        raise common.UsageError(
            f"--repeats has {len(repeats)} numbers, expected 1 or {len(lengths)}, one per length"
        )
    traced = common.whole_numbers("trace", given["trace"]) if given["trace"] else []
    out_dir = Path(common.require_flag(flag_values, "out_dir"))
    config = config_from_flags(flag_values, {"config.prefill.logits": "last"})
    other = other_config(config, given["compare"]) if given["compare"] else None
    later = [then_rows(config, text) for text in given["then"]]
    checkpoint = given["checkpoint"]
    with open_source(checkpoint, config.synthetic) as source:
        positions = source.config.max_position_embeddings
    common.require_positions("prompt_tokens", lengths, positions)
    for _, _, own in later:
        common.require_positions("then", own, positions)
    # As the prefill command.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", common.MEMORY_FRACTION)
    with report.disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(checkpoint, out_dir, clock, frozenset(traced), given["profile_first"])
    try:
        bench.load(config, other, max([*lengths, *(n for _, _, own in later for n in own)]))
        counts = repeats * len(lengths) if len(repeats) == 1 else repeats
        for length, count in zip(lengths, counts, strict=True):
            bench.measure(bench.arms, length, count)
        for name, changed, own in later:
            arm = Arm(name, changed, bench.arms[0].engine.reconfigured(changed))
            for length in own:
                bench.measure([arm], length, counts[0])
    finally:
        bench.close()
        with contextlib.suppress(OSError):
            out_dir.rmdir()  # only if nothing was measured
    common.print_result(
        {
            "rows": [{key: row[key] for key in CSV_COLUMNS} for row in bench.record["rows"]],
            "comparisons": bench.record["comparisons"],
            "skipped_tokens": bench.record["skipped_tokens"],
        }
    )
    return common.OK


def other_config(config: RunConfig, text: str) -> RunConfig:
    """The configuration B of --compare; raises UsageError if it would not do the same work."""
    if "=" in text:
        other = _changed(config, text)
    else:
        other = RunConfig.from_toml(text).replace({"prefill.logits": config.prefill.logits})
    for name in ("synthetic", "prefill.logits", "prefill.top_logprobs"):
        ours, theirs = (_field(each, name) for each in (config, other))
        if ours != theirs:
            raise common.UsageError(
                f"--compare: config.{name} is {theirs} for B and {ours} for A: the two would not "
                "do the same work"
            )
    return other


def then_rows(config: RunConfig, text: str) -> tuple[str, RunConfig, list[int]]:
    """The name, configuration and lengths that a value of --then gives; raises UsageError."""
    changes, _, own = text.rpartition(":")
    if "=" not in changes:
        raise common.UsageError(
            f"--then is {text!r}, expected changes, a colon and lengths such as "
            "numerics.preset=bfloat16:8192,32768"
        )
    return changes, _changed(config, changes), common.whole_numbers("then", own.split(","))


def _changed(config: RunConfig, text: str) -> RunConfig:
    """`config` with changes such as "numerics.preset=bfloat16,streaming.mode=whole"."""
    changes = (part.partition("=") for part in text.split(","))
    return config.replace({key: _plain(value) for key, _, value in changes})


def _field(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _plain(text: str) -> Any:
    """The value of a key on the command line: what TOML reads, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


class Bench:
    """The arms, and the folder with what was measured so far."""

    def __init__(
        self,
        checkpoint: str,
        out_dir: Path,
        clock: Clock,
        traced: frozenset[int] = frozenset(),
        profile_first: bool = False,
    ):
        self.checkpoint, self.out_dir, self.clock, self.traced = checkpoint, out_dir, clock, traced
        self.profile_first = profile_first
        self.arms: list[Arm] = []
        self.record: dict[str, Any] = {
            "schema": SCHEMA,
            "rows": [],
            "comparisons": [],
            "skipped_tokens": [],
        }

    def load(self, config: RunConfig, other: RunConfig | None, longest: int) -> None:
        """Loads the arms, B on the weights of A where it can use them."""
        for name, each in (("a", config), ("b", other)):
            if each is None:
                continue
            phases = measure_phases()
            if self.arms and self.arms[0].engine.can_run(each):
                engine = self.arms[0].engine.reconfigured(each)
            else:
                engine = engines.load(self.checkpoint, each, prompt_tokens=longest)
            self.arms.append(Arm(name, each, engine))
            facts = manifest.manifest(each, self.checkpoint, engine.device)
            self.record.setdefault("arms", {})[name] = {
                "manifest": facts,
                "plan": plan_facts(engine),
                "load_phases": phases(),
            }
            common.say(f"{name}: {_loaded(self.record['arms'][name]['plan'])}")

    def close(self) -> None:
        """Lets go of all weights."""
        for arm in reversed(self.arms):
            arm.engine.close()

    def measure(self, arms: Sequence[Arm], length: int, repeats: int) -> None:
        """Warms up, measures and writes one prompt length; skips it if the time is too short."""
        vocabulary = arms[0].engine.model_config.vocab_size
        prompt = prompt_ids(length, vocabulary, arms[0].config.synthetic.routing)
        rates = [row["rate_tokens_per_s"] for row in self.record["rows"]]
        # Two runs at the best rate so far: anything less would leave no sha to compare.
        if not self.clock.allows(2 * len(arms) * length / max(rates) if rates else 0.0):
            self.record["skipped_tokens"].append(length)
            common.say(f"{length} tokens: skipped, the time limit is near")
            return
        warm = {arm.name: warm_up(arm.engine, prompt, self._profile(arm, length)) for arm in arms}
        runs: dict[str, list[Timed]] = {arm.name: [] for arm in arms}
        for turn in range(repeats):
            # A B B A A B B A ...: a drift of the machine falls on both alike.
            for arm in arms if turn % 2 == 0 else reversed(arms):
                expected = min(warm[arm.name].seconds)
                if runs[arm.name] and not self.clock.allows(expected):
                    continue
                if runs[arm.name]:
                    # The state of a result is as large as the next one's.
                    runs[arm.name][-1] = _without_state(runs[arm.name][-1])
                runs[arm.name].append(timed(arm.engine, prompt))
                found, sha = output_hash(runs[arm.name][-1].result), warm[arm.name].sha256
                if found != sha:
                    raise UnsteadyOutput(f"{length} tokens gave {found}, after {sha} before")
        rows = [_row(arm, prompt, warm[arm.name], runs[arm.name]) for arm in arms]
        for arm, row in zip(arms, rows, strict=True):
            self._pictures(arm, length, runs[arm.name][-1].result)
            if length in self.traced and self.clock.allows(3 * row["median_s"] + 5):
                runs[arm.name].clear()
                self._trace(arm, prompt, row)
        self.record["rows"] += rows
        if len(rows) == 2:
            self.record["comparisons"].append(comparison(*rows))
        self._write(rows)

    def _profile(self, arm: Arm, length: int) -> Path | None:
        return self.out_dir / f"first_{arm.name}_{length}.txt" if self.profile_first else None

    def _pictures(self, arm: Arm, length: int, result: PrefillResult) -> None:
        spans = accounts.timeline(arm.engine.plans, result.report.passes)
        if spans:
            streaming.write_timeline(self.out_dir / f"timeline_{arm.name}_{length}.json", spans)

    def _trace(self, arm: Arm, prompt: np.ndarray, row: dict[str, Any]) -> None:
        """Reads the prompt once more under the profiler; adds the ops, writes the page."""
        model, numerics = arm.engine.model_config, arm.engine.numerics
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run = timed(arm.engine, prompt)
            row["ops"] = ops.against_floors(
                ops.program_seconds(folder), model, run.result.report.chunks, numerics
            )
            row["kernels"] = ops.kernel_seconds(folder)[:40]
        row["traced_s"] = run.seconds
        text = self._page(arm, prompt, run.result, row["ops"])
        path = self.out_dir / f"page_{arm.name}_{len(prompt)}.html"
        with report.disk_errors(path):
            path.write_text(text, encoding="utf-8")

    def _page(
        self, arm: Arm, prompt: np.ndarray, result: PrefillResult, rows: list[dict[str, Any]]
    ) -> str:
        job = PrefillJob(self.checkpoint, str(self.out_dir), arm.config)
        outputs = {"logits": {"rows": 1, "sha256": output_hash(result)}}
        prompts = [Prompt(f"{len(prompt)} tokens", prompt)]
        record = run_record(job, arm.engine, prompts, [result.report], outputs, False)
        passes = list(result.report.passes)
        shown = accounts.typical_pass(passes)
        return page.render(
            {**record, "ops": rows},
            result.report.chunks,
            accounts.layer_seconds(passes, arm.engine.model_config.num_hidden_layers),
            accounts.timeline(arm.engine.plans, [passes[shown]]),
            (shown, len(passes)),
        )

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        report.write_json(self.out_dir / "bench.json", self.record)
        write_csv(self.out_dir / "bench.csv", self.record["rows"])
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in self.record["rows"]:
            point = (row["prompt_tokens"], row["rate_tokens_per_s"])
            lines.setdefault(row["arm"], []).append(point)
        path = self.out_dir / "bench.svg"
        with report.disk_errors(path):
            path.write_text(page.frontier(lines), encoding="utf-8")
        for row in rows:
            common.say(_line(row))
            for op in row.get("ops", ()):
                common.say(ops.line(op))
        if len(rows) == 2:
            common.say(_comparison_line(self.record["comparisons"][-1]))


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
        "load_compiled_programs": engine.load_compiled[0],
        "load_compile_s": engine.load_compiled[1],
    }


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """The runs until two outputs in a row were equal, compilation included.

    phases  seconds by what JAX did on the way to programs; traces inside traces count twice
    """

    seconds: tuple[float, ...]
    gc_pauses_s: tuple[float, ...]
    phases: dict[str, float]
    programs: int
    compile_s: float
    sha256: str


def warm_up(engine: Engine, prompt: np.ndarray, profile: Path | None = None) -> WarmUp:
    """Reads until two outputs in a row are equal.

    profile  file for what Python did in the first run
    """
    hashes: list[str] = []
    seconds, pauses, programs, compile_s = [], [], 0, 0.0
    phases = measure_phases()
    while len(hashes) < 2 or hashes[-1] != hashes[-2]:
        if len(hashes) == MOST_WARM_UPS:
            raise UnsteadyOutput(
                f"{len(prompt)} tokens gave other bytes in each of {len(hashes)} runs: {hashes}"
            )
        with _profiled(profile if not hashes else None):
            run = timed(engine, prompt)
        hashes.append(output_hash(run.result))
        seconds.append(run.seconds)
        pauses.append(run.gc_pause_s)
        compiled = run.result.report.compiled
        programs, compile_s = programs + compiled[0], compile_s + compiled[1]
        del run
    return WarmUp(tuple(seconds), tuple(pauses), phases(), programs, compile_s, hashes[-1])


@contextlib.contextmanager
def _profiled(path: Path | None) -> Generator[None]:
    """Writes the calls of this thread to `path`, first those that took longest."""
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    with report.disk_errors(path), open(path, "w", encoding="utf-8") as file:
        pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(150)


def timed(engine: Engine, prompt: np.ndarray) -> Timed:
    """Reads a prompt and says how long it took."""
    pauses: list[float] = []

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            pauses.append(-time.perf_counter())
        elif pauses and pauses[-1] < 0:
            pauses[-1] += time.perf_counter()

    gc.callbacks.append(on_collection)
    try:
        began = time.perf_counter()
        result = engine.prefill(prompt)
        seconds = time.perf_counter() - began
    finally:
        gc.callbacks.remove(on_collection)
    return Timed(seconds, sum(pause for pause in pauses if pause > 0), result)


def _without_state(run: Timed) -> Timed:
    empty = dataclasses.replace(run.result.state, layers=())
    return dataclasses.replace(run, result=dataclasses.replace(run.result, state=empty))


def output_hash(result: PrefillResult) -> str:
    """sha256 of the logits as little-endian float32."""
    assert result.logits is not None
    if not np.isfinite(result.logits).all():
        raise UnsteadyOutput("the logits are not finite")
    return report.array_hash(result.logits, "<f4")


def _row(arm: Arm, prompt: np.ndarray, warm: WarmUp, runs: Sequence[Timed]) -> dict[str, Any]:
    engine, result, times = arm.engine, runs[-1].result, [run.seconds for run in runs]
    passes = result.report.passes
    ledgers = [ledger for part in passes for ledger in part.ledgers]
    distinct = [list(part.distinct) for part in passes]
    median = statistics.median(times)
    stats = engine.device.memory_stats() if engine.device.platform != "cpu" else None
    exact = all(ledger.predicted.exact for ledger in ledgers)
    predicted = sum(accounts.expected_bytes(engine.plans, passes).values())
    moved = sum(ledger.total_bytes for ledger in ledgers)
    if moved != predicted:
        raise WrongBytes(f"{len(prompt)} tokens: {moved} bytes moved, {predicted} were predicted")
    return {
        "arm": arm.name,
        "prompt_tokens": len(prompt),
        "prompt_sha256": report.token_hash(prompt),
        "numerics": str(engine.numerics),
        "chunk_tokens": arm.config.prefill.chunk_tokens,
        "tokens_read": result.report.tokens_read,
        "tokens_reused": result.report.tokens_reused,
        "rate_tokens_per_s": len(prompt) / median,
        "median_s": median,
        "ttft_s": median,
        "predicted_s": _predicted_s(arm, len(prompt)),
        "seconds": times,
        "repeats": len(times),
        "spread": manifest.spread(times),
        "gc_pause_s": max(run.gc_pause_s for run in runs),
        "sha256": warm.sha256,
        "warm_up": dataclasses.asdict(warm),
        "rows": sorted({chunk.rows for chunk in result.report.chunks}),
        "order": "layer_major" if len(result.report.chunks) > len(passes) else "chunk_major",
        "mode": ("whole" if exact else "routed") if ledgers else "resident",
        "passes": len(passes),
        "chunks": [
            {
                "position": chunk.position,
                "tokens": chunk.tokens,
                "seconds": chunk.seconds,
                "rate_tokens_per_s": chunk.tokens / chunk.seconds,
            }
            for chunk in result.report.chunks
        ],
        "routing": arm.config.synthetic.routing,
        "distinct_mean": statistics.mean(count for part in distinct for count in part),
        "distinct": distinct,
        "distinct_streamed": _distinct_streamed(engine, passes),
        "busiest_expert_share": _busiest(passes, len(prompt)),
        "layer_seconds": [list(part.layer_seconds) for part in passes],
        "predicted_bytes": predicted,
        "known_before_bytes": sum(sum(ledger.predicted.bytes.values()) for ledger in ledgers),
        "most_bytes": sum(ledger.predicted.most_bytes for ledger in ledgers),
        "moved_bytes": moved,
        "moved_experts": sum(sum(ledger.moved_items.values()) for ledger in ledgers),
        "overlap": statistics.median(ledger.overlap or 0.0 for ledger in ledgers)
        if ledgers
        else None,
        "stall_s": sum(ledger.stall_s for ledger in ledgers),
        "ledgers": [ledger.to_json() for ledger in ledgers],
        "state_bytes": result.report.state_bytes,
        # Of the process so far: lengths are best given in ascending order.
        "peak_bytes": stats.get("peak_bytes_in_use") if stats else None,
        "planned_bytes": sum(plan.price.total_bytes for plan in engine.plans),
    }


def _predicted_s(arm: Arm, tokens: int) -> float | None:
    """What the plan gives a prompt in this arm, without compilation; None without a plan."""
    plan = arm.engine.run_plan
    if plan is None:
        return None
    own = dataclasses.replace(plan, run=dataclasses.replace(plan.run, config=arm.config))
    return own.predict(Prompts.of(tokens)).seconds


def _distinct_streamed(engine: Engine, passes: Sequence[PassReport]) -> int:
    """Distinct experts that passes used of those that are streamed: what routed sets move."""
    streamed = [each for plan in engine.plans for each in plan.experts.residency.streamed]
    return sum(
        int(np.count_nonzero(part.counts[layer, list(items)]))
        for part in passes
        for layer, items in enumerate(streamed)
    )


def _busiest(passes: Sequence[PassReport], tokens: int) -> float:
    """Share of the tokens that chose the most chosen expert of a layer, mean over the layers."""
    return float(accounts.usage_counts(passes).max(axis=1).mean() / tokens)


def comparison(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """How B did against A on one prompt; raises UnsteadyOutput for unequal work.

    noise  the largest difference between repeats of one arm, as a share of its median
    """
    for key in ("prompt_sha256", "tokens_read", "tokens_reused", "routing"):
        if a[key] != b[key]:
            raise UnsteadyOutput(f"{key} is {a[key]} in A and {b[key]} in B: unequal work")
    same = all(a[key] == b[key] for key in ("numerics", "chunk_tokens"))
    if same and a["sha256"] != b["sha256"]:
        raise UnsteadyOutput(
            f"{a['prompt_tokens']} tokens gave {a['sha256']} in A and {b['sha256']} in B, with the "
            "same numerics and chunks"
        )
    noise = max(a["spread"], b["spread"])
    gain = a["median_s"] / b["median_s"] - 1
    verdict = "within the noise" if abs(gain) <= noise else "B faster" if gain > 0 else "B slower"
    return {
        "prompt_tokens": a["prompt_tokens"],
        "a_s": a["median_s"],
        "b_s": b["median_s"],
        "gain_of_b": gain,
        "noise": noise,
        "verdict": verdict,
        "same_output": a["sha256"] == b["sha256"],
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The columns of `rows` that fit in a table."""
    with report.disk_errors(path), open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _loaded(plan: Mapping[str, Any]) -> str:
    low, high = plan["resident_experts_per_layer"]
    return (
        f"loaded {plan['layers']} layers in {plan['load_s']:.1f} s, "
        f"{plan['load_compiled_programs']} programs compiled beside "
        f"({plan['load_compile_s']:.1f} s added up): {low}..{high} resident experts per layer, "
        f"{plan['streamed_experts']} streamed from {plan['tier']} "
        f"({plan['store_bytes'] / 1e9:.1f} GB), {plan['order']} over "
        f"{plan['micro_batch_tokens']} tokens, planned "
        f"{plan['price_bytes']['total'] / 1e9:.1f} of {plan['available_bytes'] / 1e9:.1f} GB"
    )


def _line(row: Mapping[str, Any]) -> str:
    overlap = "" if row["overlap"] is None else f", overlap {row['overlap']:.1%}"
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 1e9:.1f} GB"
    planned = f", planned {row['predicted_s']:.3f} s" if row["predicted_s"] else ""
    warm = row["warm_up"]
    return (
        f"{row['arm']} {row['prompt_tokens']:>8} tokens: {row['rate_tokens_per_s']:9.1f} tokens/s, "
        f"{row['median_s']:.3f} s ({row['repeats']} runs, spread {row['spread']:.1%}{planned}), "
        f"{row['numerics']}, {row['routing']}, {row['mode']}, "
        f"{row['distinct_mean']:.1f} distinct experts a layer ({row['distinct_streamed']} of the "
        f"streamed, {row['moved_experts']} moved), busiest {row['busiest_expert_share']:.1%}, "
        f"{row['moved_bytes'] / 1e9:.2f} GB moved ({row['predicted_bytes'] / 1e9:.2f} predicted, "
        f"{row['known_before_bytes'] / 1e9:.2f} of it before the run){overlap}, "
        f"stall {row['stall_s']:.3f} s{peak}, garbage {row['gc_pause_s']:.3f} s, "
        f"warm-up {sum(warm['seconds']):.1f} s ({warm['compile_s']:.1f} s for "
        f"{warm['programs']} programs), sha256 {row['sha256'][:12]}"
    )


def _comparison_line(found: Mapping[str, Any]) -> str:
    return (
        f"B against A at {found['prompt_tokens']} tokens: {found['gain_of_b']:+.1%}, noise "
        f"{found['noise']:.1%}: {found['verdict']}; "
        f"{'equal' if found['same_output'] else 'other'} output bytes"
    )


if __name__ == "__main__":
    sys.exit(main())
