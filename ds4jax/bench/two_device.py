"""What a second device brings, measured: pipeline, two owners, peer tiers, two processes.

python -m ds4jax.bench.two_device --out_dir=DIR [--model=configs/models/flash.json] [--layers=8]
    [--chunk_tokens=8192] [--prompt_tokens=8192,32768,131072] [--sections=links,one,...]
    [--budget_s=330]

The first layers of the model, with random weights. Every section is an attempt of its own with a
time limit; one that fails, or does not fit in what is left of the budget, leaves its reason and
what it has measured by then. It ends between two runs: a section that does not end within a minute
of its limit goes on beside those that follow, which then say so. two_device.json is rewritten after
each of them; the table comes last. Predictions are those of `sharding.split`, from the times of one
device and the rates of the first section.

Without two accelerators, XLA_FLAGS=--xla_force_host_platform_device_count=2 gives two CPU devices;
with one device the pipeline has both of its stages there.
"""

import contextlib
import dataclasses
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental.compilation_cache import compilation_cache

import streaming
from ds4jax import accounts, costs, events, report
from ds4jax import engine as engines
from ds4jax.bench import links, overlap
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.open import open_source
from ds4jax.cli import common
from ds4jax.config import CONFIG_FOLDER, ModelConfig
from ds4jax.engine import Engine, PrefillResult
from ds4jax.moe import Routing
from ds4jax.rows import Prompts
from ds4jax.runner import COMPILED
from sharding import cost, probe, split
from streaming.window import live_bound

SCHEMA = "ds4jax.bench.two_device/1"
STREAMED = 0.5  # share of the experts that is streamed where any are
MICRO_BATCH_CHUNKS = 2  # of the streamed runs
MIB = 1 << 20
# Before they are measured: between two H200, and from the host to each.
PEER_GB_PER_S, HOST_GB_PER_S = 300.0, 53.0
LAUNCH_LIMIT_S = 100  # of a run in two processes
GRACE_S = 60  # that a section may take beyond its limit, for a load or a run that it is in


class SectionOver(Exception):
    """The time of a section is over."""


@dataclasses.dataclass
class Bench:
    """Everything that sections share.

    found     their results, by section; shas the outputs by prompt length
    launched  process groups that may still run
    partial   what the section at hand has found so far; ends is when its time is over
    """

    out_dir: Path
    checkpoint: str
    layers: int
    chunk: int
    lengths: Sequence[int]
    deadline: float
    cache: str
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    shas: dict[int, str] = dataclasses.field(default_factory=dict)
    launched: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list)
    partial: dict[str, Any] = dataclasses.field(default_factory=dict)
    ends: float = float("inf")

    @property
    def devices(self) -> list[jax.Device]:
        """The two devices; the same one twice where there is one."""
        local = jax.local_devices()
        return [local[0], local[min(1, len(local) - 1)]]

    def ids(self, length: int, vocabulary: int) -> np.ndarray:
        """The prompt of a length."""
        return np.random.default_rng(0).integers(0, vocabulary, length, np.int32)

    def load(self, **keys: Any) -> Engine:
        """An engine with dotted keys, written with double underscores.

        How loading went is in `partial`: seconds of checking, planning and all weights but the
        experts (dense_s), of the experts after that, of programs (added up), of waiting for these
        when the experts were there, and of everything.
        """
        values: dict[str, Any] = {
            "prefill.chunk_tokens": self.chunk,
            "prefill.max_tokens": max(*self.lengths, 2 * self.chunk),
            "streaming.order": "chunk_major",
            "streaming.resident_fraction": 1.0,
            "streaming.mode": "whole",
        }
        values |= {name.replace("__", "."): value for name, value in keys.items()}
        self.partial["load"] = {}

        def add(**found: float) -> None:
            self.partial["load"] = {**self.partial["load"], **found}

        def on_event(event: Any) -> None:
            if isinstance(event, events.WeightsLoaded):
                dense_s = self.partial["load"].get("dense_s", event.seconds)
                add(dense_s=dense_s, experts_s=event.seconds - dense_s)
            elif isinstance(event, events.ProgramsCompiled):
                add(
                    programs=event.programs,
                    programs_s=event.seconds,
                    awaited_s=event.waited_seconds,
                )

        engine = engines.load(
            self.checkpoint, values, prompt_tokens=max(self.lengths), on_event=on_event
        )
        add(seconds=engine.load_seconds)
        common.say(f"  loaded: {_short(self.partial['load'])}")
        return engine

    def pipeline(self) -> dict[str, Any]:
        """Keys of two stages."""
        half = self.layers // 2
        places = "0,1" if len(jax.local_devices()) > 1 else "0,0"
        return {"pipeline__split": f"{self.layers - half},{half}", "pipeline__devices": places}

    def measure(self, engine: Engine, lengths: Sequence[int], repeats: int = 3) -> dict[str, Any]:
        """Reads prompts of `lengths`, after once without counting; one row each.

        Raises SectionOver when the section's time is over; what was measured is in `partial`.
        """
        rows = {}
        for length in lengths:
            ids = self.ids(length, engine.model_config.vocab_size)
            times, result = [], None
            first: dict[str, Any] = {}
            for _ in range(repeats + 1):
                self.require_time()
                result = None  # its state is as large as the next one
                began, compiled = time.perf_counter(), COMPILED.measure()
                result = engine.prefill(ids)
                times.append(time.perf_counter() - began)
                if not first:
                    programs, compile_s = compiled()
                    first = {
                        "first_s": times[0],
                        "first_programs": programs,
                        "first_programs_s": compile_s,
                        "first_pageable_bytes": _pageable_bytes(result),
                    }
            assert result is not None
            assert result.logits is not None
            sha = logits_hash(result.logits)
            passes = result.report.passes
            ledgers = [ledger for part in passes for ledger in part.ledgers]
            moved: dict[str, int] = {}
            for ledger in ledgers:
                for tier, nbytes in ledger.moved_bytes.items():
                    moved[tier] = moved.get(tier, 0) + nbytes
            seconds = statistics.median(times[1:])
            rows[str(length)] = {
                "seconds": seconds,
                "all_seconds": times[1:],
                **first,
                "tokens_per_s": length / seconds,
                "sha256": sha,
                "same_sha": sha == self.shas.setdefault(length, sha),
                "passes": len(passes),
                "layer_s": np.sum([part.layer_seconds for part in passes], axis=0).tolist(),
                "moved_bytes": moved,
                "predicted_bytes_equal": all(
                    dict(ledger.predicted.bytes) == dict(ledger.moved_bytes) for ledger in ledgers
                ),
                "pageable_bytes": _pageable_bytes(result),
                "overlap": [ledger.overlap for ledger in ledgers],
                "stall_s": sum(ledger.stall_s for ledger in ledgers),
            }
            self.partial["rows"] = {**self.partial.get("rows", {}), **rows}
            common.say(
                f"  {length} tokens: {seconds:.3f} s, {length / seconds:.0f} tokens/s; first "
                f"{times[0]:.3f} s, {first['first_programs']} programs in "
                f"{first['first_programs_s']:.3f} s of it"
            )
        return rows

    def require_time(self) -> None:
        """Raises SectionOver when the section's time is over."""
        if time.monotonic() > self.ends:
            raise SectionOver

    def rate(self, *path: str, default: float) -> float:
        """A rate in GB/s of the first section, or the default where it was not measured."""
        value: Any = self.found.get("links", {})
        for name in path:
            value = value.get(name, {}) if isinstance(value, Mapping) else {}
        return value if isinstance(value, float) else default

    def peer_rate(self) -> float:
        """GB/s of the largest copy from the second device to the first."""
        ladder = self.found.get("links", {}).get("peer_1_to_0") or [{}]
        return ladder[-1].get("gb_per_s", PEER_GB_PER_S)


def _pageable_bytes(result: PrefillResult) -> int:
    """Bytes that were copied from memory that was not page-locked, or not yet."""
    return sum(ledger.pageable_bytes for part in result.report.passes for ledger in part.ledgers)


def logits_hash(logits: np.ndarray) -> str:
    """sha256 of logits as little-endian float32; FloatingPointError unless they are finite."""
    if not np.isfinite(logits).all():
        raise FloatingPointError("the logits are not finite")
    return report.array_hash(logits, "<f4")


def section_links(bench: Bench) -> dict[str, Any]:
    """Ladders between the devices, both ways at once, beside compute; host links."""
    if bench.devices[0] == bench.devices[1]:
        raise NotImplementedError("there is one device: no links to measure")
    if bench.devices[0].platform == "cpu":
        settings = probe.Settings(
            sizes=(1 << 16, MIB), repeats=2, in_flight_bytes=MIB, matmul_size=64
        )
    else:
        sizes = (MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
        settings = probe.Settings(sizes=sizes, repeats=5, in_flight_bytes=512 * MIB)
    return links.measure(bench.devices, settings)


def section_one(bench: Bench) -> dict[str, Any]:
    """One device, everything resident: what the others are compared with."""
    with bench.load() as engine:
        rows = bench.measure(engine, bench.lengths)
        return {"rows": rows, "expert_layer_s": _expert_seconds(engine, bench.chunk)}


def _expert_seconds(engine: Engine, tokens: int, repeats: int = 3) -> float:
    """Seconds of the routed experts of a layer on one chunk with uniform routing."""
    stage, config = engine._stages[0], engine.model_config
    generator = np.random.default_rng(1)
    ids = np.argsort(generator.random((tokens, config.n_routed_experts)), axis=1)
    rows = generator.standard_normal((tokens, config.hidden_size))
    parts = (
        rows.astype(engine.numerics.dtype),
        ids[:, : config.num_experts_per_tok].astype(np.int32),
        np.full((tokens, config.num_experts_per_tok), 0.25, np.float32),
        np.zeros(0, np.float32),
        np.zeros(0, np.float32),
    )
    routing = Routing(*jax.device_put(parts, stage.device))
    slabs = stage.pool.resident[-1]
    assert slabs is not None
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        outputs = [stage.runner.experts(routing, slabs) for _ in range(3)]
        jax.block_until_ready(outputs)
        times.append((time.perf_counter() - began) / 3)
    return statistics.median(times[1:])


def section_pipeline(bench: Bench) -> dict[str, Any]:
    """Two stages, everything resident."""
    with bench.load(**bench.pipeline()) as engine:
        rows = bench.measure(engine, bench.lengths)
    return {"rows": rows, "against": _against(bench, rows, "one", bench.chunk, 0)}


def _streamed(bench: Bench) -> dict[str, Any]:
    micro = MICRO_BATCH_CHUNKS * bench.chunk
    return {
        "streaming__resident_fraction": 1 - STREAMED,
        "streaming__order": "layer_major",
        "streaming__micro_batch_tokens": micro,
    }


def section_one_streamed(bench: Bench) -> dict[str, Any]:
    """One device that streams half of its experts from host memory."""
    with bench.load(**_streamed(bench)) as engine:
        return {"rows": bench.measure(engine, bench.lengths), "items": _streamed_items(engine)}


def section_pipeline_streamed(bench: Bench) -> dict[str, Any]:
    """Two stages that stream half of their experts, each over its own host link."""
    with bench.load(**_streamed(bench), **bench.pipeline()) as engine:
        rows = bench.measure(engine, bench.lengths)
        items = _streamed_items(engine)
    micro = MICRO_BATCH_CHUNKS * bench.chunk
    return {"rows": rows, "against": _against(bench, rows, "one_streamed", micro, items)}


def _streamed_items(engine: Engine) -> int:
    """Streamed experts of a layer."""
    return max(map(len, engine.plan.experts.residency.streamed))


def _against(
    bench: Bench, rows: Mapping[str, Any], other: str, micro: int, streamed: int
) -> dict[str, Any]:
    """Two stages against one device with the same layers, and against the planner's prediction.

    lost_share     of both devices' time in which they do not compute what one device would
    handoff_share  what copies of the streams take of it, timed alone; predicted: at the rate of the
                   link
    """
    before = bench.found.get(other, {}).get("rows", {})
    resident = bench.found.get("one", {}).get("rows", {})
    found, copy_s = {}, _handoff_seconds(bench)
    for length, row in rows.items():
        if length not in before or length not in resident:
            continue
        plan = _predict(bench, int(length), resident[length], micro, streamed)
        work = sum(resident[length]["layer_s"])
        seconds, predicted = row["seconds"], plan.objective_ns / 1e9
        handoff = sum(stage.handoff_ns for stage in plan.stages) * plan.schedule.passes / 1e9
        found[length] = {
            "speedup": before[length]["seconds"] / seconds,
            "predicted_s": predicted,
            "prediction_error": predicted / seconds - 1,
            "lost_share": 1 - work / (2 * seconds),
            "predicted_lost_share": 1 - work / (2 * predicted),
            "handoff_share": copy_s * -(-int(length) // bench.chunk) / seconds,
            "predicted_bubble_share": plan.bubble_ns / plan.objective_ns,
            "predicted_handoff_share": handoff / predicted,
        }
    return found


def _handoff_seconds(bench: Bench, repeats: int = 5) -> float:
    """Seconds of copying the streams of a chunk to the second device."""
    config = open_source(bench.checkpoint).config
    shape, (first, second) = (bench.chunk, config.hc_mult, config.hidden_size), bench.devices
    streams = jax.block_until_ready(jax.device_put(np.zeros(shape, jax.numpy.bfloat16), first))
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(streams, second, may_alias=False))
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _predict(
    bench: Bench, length: int, one: Mapping[str, Any], micro: int, streamed: int
) -> split.Plan:
    """The planner's price of the two stages, from the layers' times on one device."""
    chunks, source = -(-length // bench.chunk), open_source(bench.checkpoint)
    config = source.config
    item = _item_bytes(bench)
    passes = -(-chunks * bench.chunk // micro)
    layer_ns = [round(1e9 * seconds / passes) for seconds in one["layer_s"]]
    # What a run takes beside its layers: state, embedding, head, accounts.
    rest = max(one["seconds"] - sum(one["layer_s"]), 0.0)
    tokens = min(micro, chunks * bench.chunk)
    stream_bytes = tokens * config.hc_mult * config.hidden_size * 2
    experts = config.n_routed_experts
    host = round(bench.rate("host_to_0_gb_per_s", default=HOST_GB_PER_S) * 1e9)
    problem = cost.Problem(
        layers=tuple(cost.LayerCost(1, 1, 1, experts) for _ in layer_ns),
        devices=tuple(cost.DeviceCost(f"device {n}", 1 << 50, host) for n in (0, 1)),
        schedules=(
            cost.Schedule(
                order="layer_major" if micro > bench.chunk else "chunk_major",
                micro_batch_tokens=micro,
                passes=passes,
                compute_ns=tuple(layer_ns),
                distinct=(experts,) * len(layer_ns),
                handoff_bytes=stream_bytes,
                head_ns=round(1e9 * rest / passes),
            ),
        ),
        expert_bytes=item,
        link_bytes_per_s=cost.uniform_links(2, round(bench.peer_rate() * 1e9)),
        layer_residents=experts - streamed,
    )
    middle = len(layer_ns) - len(layer_ns) // 2
    stages = [split.StageRange(0, 0, middle), split.StageRange(1, middle, len(layer_ns))]
    return split.price_split(problem, problem.schedules[0], stages)


def _item_bytes(bench: Bench) -> int:
    source = open_source(bench.checkpoint)
    return keys.expert_bytes(source.config, source.infos())


def _second_device(bench: Bench) -> None:
    if bench.devices[0] == bench.devices[1]:
        raise NotImplementedError("there is one device: expected two")


def section_two_owners(bench: Bench) -> dict[str, Any]:
    """A second device keeps and computes half of each layer's experts."""
    _second_device(bench)
    lengths = bench.lengths[:2]
    with bench.load(peer__devices="1", peer__compute_fraction=0.5) as engine:
        rows = bench.measure(engine, lengths)
        found: dict[str, Any] = {"rows": rows}
        try:
            found["side_by_side"] = _side_by_side(bench, engine, lengths[0])
        except (ValueError, RuntimeError, OSError) as error:
            found["side_by_side"] = {"reason": f"{type(error).__name__}: {error}"}
    one = bench.found.get("one", {})
    expert_s, before = one.get("expert_layer_s"), one.get("rows", {})
    tokens, config = bench.chunk, engine.model_config
    there = tokens * config.hidden_size * 2 / bench.peer_rate() / 1e9
    back = there * config.num_experts_per_tok
    for length, row in rows.items():
        if length not in before or expert_s is None:
            continue
        calls = bench.layers * -(-int(length) // bench.chunk)
        # The cold owner's way there and back is longer than the hot owner's half.
        saved = calls * (expert_s / 2 - there - back)
        predicted = before[length]["seconds"] - saved
        row |= {
            "speedup": before[length]["seconds"] / row["seconds"],
            "predicted_s": predicted,
            "prediction_error": predicted / row["seconds"] - 1,
        }
    return found


def _side_by_side(bench: Bench, engine: Engine, length: int) -> dict[str, Any]:
    """Calls of the two owners at the same time, from the profiler."""
    ids = bench.ids(length, engine.model_config.vocab_size)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            engine.prefill(ids)
        devices = overlap.kernels(folder)
    if len(devices) < 2:
        raise ValueError(f"the trace has kernels of {len(devices)} GPUs, expected 2")
    return overlap.pairs(devices[0], devices[1], bench.layers * -(-length // bench.chunk))


def section_peer_memory(bench: Bench) -> dict[str, Any]:
    """Half of the experts wait in the second device's memory."""
    rate = bench.peer_rate()
    return _tier(bench, rate, peer__memory_fraction=1.0)


def section_planned_memory(bench: Bench) -> dict[str, Any]:
    """The plan is free to use a neighbour with all its memory."""
    return _planned(bench, None)


def section_planned_relay(bench: Bench) -> dict[str, Any]:
    """The plan is free to use a neighbour that has room for little more than slabs."""
    source = open_source(bench.checkpoint)
    slabs = round(STREAMED * source.config.n_routed_experts) * live_bound(1)
    return _planned(bench, 5 * slabs // 4 * _item_bytes(bench))


def section_planned_none(bench: Bench) -> dict[str, Any]:
    """The plan is free to use a neighbour behind a link that is said to be a thousandth as fast."""
    return _planned(bench, None, slower=1000)


def _planned(bench: Bench, room: int | None, slower: int = 1) -> dict[str, Any]:
    """Half of the experts streamed, with the neighbour that the plan chooses, or none.

    room    bytes of the neighbour's memory that the machine file tells of; None for all
    slower  by what the file understates the link from it
    """
    _second_device(bench)
    path = bench.out_dir / "machine.json"
    report.write_json(path, _machine_record(bench, room, slower))
    keys = {"machine__file": str(path), "streaming__resident_fraction": 1 - STREAMED}
    with bench.load(**keys) as engine:
        assert engine.run_plan is not None
        compared = accounts.neighbours(engine.run_plan)
        (taken,) = (row["neighbours"] for row in compared if row["chosen"])
        bench.partial |= {"taken": taken, "neighbours": compared}
        for length in bench.lengths[:2]:
            (row,) = bench.measure(engine, [length]).values()
            predicted = engine.run_plan.predict(Prompts.of(length))
            row |= {
                "predicted_s": predicted.seconds,
                "prediction_error": predicted.seconds / row["seconds"] - 1,
                "predicted_moved_bytes": dict(predicted.moved_bytes),
            }
            row["predicted_bytes_equal"] &= row["moved_bytes"] == row["predicted_moved_bytes"]
        return bench.partial


def _machine_record(bench: Bench, room: int | None, slower: int) -> dict[str, Any]:
    """A machine file of the links that were measured; compute is priced as on an H200."""
    host = [bench.rate(f"host_to_{i}_gb_per_s", default=HOST_GB_PER_S) for i in (0, 1)]
    both = bench.rate("host_to_both_gb_per_s", default=sum(host))
    item = _item_bytes(bench)

    def ladder(source: int, target: int) -> list[dict[str, int]]:
        found = bench.found.get("links", {}).get(f"peer_{source}_to_{target}")
        steps = found or [{"bytes": item, "gb_per_s": PEER_GB_PER_S}]
        return [
            {
                "bytes": step["bytes"],
                "bytes_per_s": round(step["gb_per_s"] / slower * 1e9),
                "in_flight_bytes_per_s": round(
                    step.get("in_flight_gb_per_s", step["gb_per_s"]) / slower * 1e9
                ),
            }
            for step in steps
        ]

    return {
        "schema": 1,
        "platform": bench.devices[0].platform,
        "devices": [
            {
                "id": device.id,
                "kind": device.device_kind,
                "memory_bytes": room if number else None,
                "memory_bytes_per_s": round(costs.H200.bytes_per_s),
                "matmul_flops_per_s": {
                    "bfloat16": round(costs.H200.matrix_flops_per_s),
                    "float32": round(costs.H200.float32_flops_per_s),
                },
                "host_to_device": {
                    "registered": [{"bytes": item, "bytes_per_s": round(host[number] * 1e9)}]
                },
            }
            for number, device in enumerate(bench.devices)
        ],
        "host_to_all_devices": {"registered": {"bytes_per_s": round(both * 1e9)}},
        "links": [
            {
                "source": bench.devices[i].id,
                "target": bench.devices[j].id,
                "ladder": ladder(i, j),
            }
            for i, j in ((0, 1), (1, 0))
        ],
    }


def section_relay(bench: Bench) -> dict[str, Any]:
    """Half of the misses come over the second device's host link."""
    own = bench.rate("host_to_0_gb_per_s", default=HOST_GB_PER_S)
    other = bench.rate("host_to_1_gb_per_s", default=HOST_GB_PER_S)
    return _tier(bench, 2 * min(own, other, bench.peer_rate()), peer__relay_fraction=0.5)


def _tier(bench: Bench, predicted: float, **keys: Any) -> dict[str, Any]:
    """Copies alone, as fast as they come, and a prompt; `predicted` is in GB/s."""
    _second_device(bench)
    half = {"streaming__resident_fraction": 1 - STREAMED}
    with bench.load(peer__devices="1", **half, **keys) as engine:
        rates, moved = [], {}
        for _ in range(4):
            moved, seconds = _copies_alone(engine)
            rates.append(sum(moved.values()) / seconds / 1e9)
        rate = statistics.median(rates[1:])
        bench.partial |= {
            "copies_alone_gb_per_s": rate,
            "all_gb_per_s": rates[1:],
            "moved_bytes": moved,
            "predicted_gb_per_s": predicted,
            "prediction_error": predicted / rate - 1,
        }
        bench.measure(engine, bench.lengths[:1])
        return bench.partial


def _copies_alone(engine: Engine) -> tuple[dict[str, int], float]:
    """Streams all layers once with nothing to compute; bytes by tier, and seconds."""
    stage = engine._stages[0]
    steps = [streaming.Step(layer) for layer in range(len(stage.layers))]
    with jax.default_device(stage.device):
        began = time.perf_counter()
        stage.pool.start(steps)
        for step in range(len(steps)):
            stage.pool.issue_ahead(step)
            for wave in range(stage.pool.waves(step)):
                if wave:
                    stage.pool.issue_ahead(step, wave)
                slabs, where = stage.pool.take(step, wave)
                last = _touch([slab.gate_up for slab in slabs], where)
                del slabs
                stage.pool.computed(step, wave, last, last)
        ledger = stage.pool.finish([0] * len(steps))
        seconds = time.perf_counter() - began
    assert ledger is not None
    return dict(ledger.moved_bytes), seconds


@jax.jit
def _touch(arrays: list[jax.Array], where: jax.Array) -> jax.Array:
    """An element that is there when all of them are."""
    return where[0] + sum(array[(0,) * array.ndim].astype(jax.numpy.int32) for array in arrays)


def section_peer_read(bench: Bench) -> dict[str, Any]:
    """A kernel that reads the neighbour's memory, in a process of its own: it may crash it."""
    command = [sys.executable, "-m", "ds4jax.bench.peer_read"]
    environment = _child_environment(bench, "0.1")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        return {"reason": f"exit code {done.returncode}: {tail}"}
    return json.loads(lines[-1])


def _child_environment(bench: Bench, fraction: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction,
        "JAX_COMPILATION_CACHE_DIR": bench.cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def section_processes(bench: Bench) -> dict[str, Any]:
    """Two processes with a stage each: the same bits; then one is killed in the middle."""
    length = bench.lengths[min(1, len(bench.lengths) - 1)]
    vocabulary = open_source(bench.checkpoint).config.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        prompts = [Path(folder) / f"{n}.npy" for n in ("whole", "killed")]
        for path, tokens in zip(prompts, (length, max(bench.lengths)), strict=True):
            np.save(path, bench.ids(tokens, vocabulary))
        found = bench.partial
        by_hand = bench.pipeline()["pipeline__split"]
        # The next way where one does not work.
        for split_text, handoff in (("auto", "auto"), (by_hand, "auto"), (by_hand, "socket")):
            limit = _launch_limit(bench)
            began, out = time.perf_counter(), Path(folder) / f"{split_text} {handoff}"
            whole = _launch(bench, prompts[0], out, handoff, split_text)
            try:
                output, _ = whole.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                _stop(whole)
                output, _ = whole.communicate()
            found |= {
                "split": split_text,
                "handoff": handoff,
                "exit_code": whole.returncode,
                "wall_s": time.perf_counter() - began,
            }
            if whole.returncode == 0:
                break
            found[f"{out.name} reason"] = " | ".join(output.strip().splitlines()[-5:])
        else:
            return found
        record = json.loads((out / report.RUN_FILE).read_text(encoding="utf-8"))
        found |= {
            "layers": [stage["layers"] for stage in record["plan"]],
            "sha256": logits_hash(np.load(out / "logits.npy")),
            "tokens": length,
            "prefill_s": record["prefill_s"],
            "compile_s": record["compile_s"],
        }
        found["same_sha"] = found["sha256"] == bench.shas.get(length)
        found["killed"] = _killed(bench, prompts[1], Path(folder) / "killed", handoff)
    return found


def _launch_limit(bench: Bench) -> float:
    """Seconds that a run in two processes may take; raises SectionOver when there are none."""
    bench.require_time()
    return min(LAUNCH_LIMIT_S, bench.ends - time.monotonic())


def _launch(
    bench: Bench, tokens: Path, out_dir: Path, handoff: str, split_text: str
) -> subprocess.Popen[str]:
    first, second = bench.devices
    several = first.platform != "cpu" and first != second
    gpus = ["--gpus_per_process=1"] if several else []
    values = {
        "prefill.chunk_tokens": bench.chunk,
        "prefill.max_tokens": max(*bench.lengths, 2 * bench.chunk),
        "streaming.order": "chunk_major",
        "streaming.resident_fraction": 1.0,
        "pipeline.split": split_text,
        "pipeline.devices": "0" if split_text == "auto" else "0,0",
        "pipeline.handoff": handoff,
    }
    command = [
        *(sys.executable, "-m", "sharding.launcher", "--processes=2", *gpus, "--"),
        *(sys.executable, "-m", "ds4jax.cli.prefill"),
        *(f"--checkpoint={bench.checkpoint}", f"--out_dir={out_dir}", f"--tokens={tokens}"),
        *(f"--config.{key}={value}" for key, value in values.items()),
    ]
    launcher = subprocess.Popen(
        command,
        env=_child_environment(bench, "0.35"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    bench.launched.append(launcher)
    return launcher


def _killed(bench: Bench, tokens: Path, out_dir: Path, handoff: str) -> dict[str, Any]:
    """Kills a worker when the first chunk is read; how the launcher takes it, and how fast."""
    limit = _launch_limit(bench)
    launcher = _launch(bench, tokens, out_dir, handoff, bench.pipeline()["pipeline__split"])
    lines: list[str] = []
    workers: list[int] = []  # each leads a session of its own
    victim, killed_s = None, None
    timer = threading.Timer(limit, _stop, [launcher])
    timer.start()
    assert launcher.stdout is not None
    try:
        for line in launcher.stdout:
            lines.append(line.rstrip())
            if victim is None and line.startswith("read "):
                workers = _children(launcher.pid)
                if workers:
                    victim, killed_s = workers[-1], time.perf_counter()
                    os.kill(victim, signal.SIGKILL)
        code = launcher.wait()
        seconds = None if killed_s is None else time.perf_counter() - killed_s
    finally:
        timer.cancel()
        if launcher.poll() is None:
            _stop(launcher)
        launcher.stdout.close()
    leaders = (launcher.pid, *workers)
    left = [pid for leader in leaders for pid in _session(leader) if pid != launcher.pid]
    return {
        "victim": victim,
        "exit_code": code,
        "seconds_to_end": seconds,
        "named": [line for line in lines if victim is not None and str(victim) in line][-2:],
        "left_running": left,
        "last_lines": lines[-5:],
    }


def _stop(launcher: subprocess.Popen[str]) -> None:
    """Ends what a launcher has started, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(OSError):
        return [int(child) for child in path.read_text().split()]
    return []


def _session(leader: int) -> list[int]:
    """Processes of a session that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


@dataclasses.dataclass(frozen=True)
class Section:
    """What is measured, the seconds it may take, and those without which it is not begun."""

    measure: Callable[[Bench], dict[str, Any]]
    limit_s: float
    least_s: float


SECTIONS = {
    "links": Section(section_links, 45, 5),
    "one": Section(section_one, 120, 30),
    "pipeline": Section(section_pipeline, 70, 15),
    "two_owners": Section(section_two_owners, 60, 15),
    "relay": Section(section_relay, 50, 15),
    "peer_memory": Section(section_peer_memory, 40, 10),
    "planned_memory": Section(section_planned_memory, 90, 20),
    "planned_relay": Section(section_planned_relay, 90, 20),
    "planned_none": Section(section_planned_none, 60, 15),
    "one_streamed": Section(section_one_streamed, 60, 20),
    "pipeline_streamed": Section(section_pipeline_streamed, 60, 20),
    "peer_read": Section(section_peer_read, 45, 20),
    "processes": Section(section_processes, 3 * LAUNCH_LIMIT_S, 40),
}


_WORK = "two-device-section "  # before the name of a thread's section


def run_section(bench: Bench, name: str, section: Section) -> dict[str, Any]:
    """The result of a section; the reason, and what there is, where it was not finished."""
    began = time.monotonic()
    left = bench.deadline - began
    if left < section.least_s:
        return {"reason": f"left out: {max(left, 0):.0f} s of the budget are left"}
    limit = min(section.limit_s, left)
    beside = _working()
    bench = dataclasses.replace(bench, partial={}, ends=began + limit)
    result: dict[str, Any] = {}

    def work() -> None:
        try:
            result.update(section.measure(bench))
        except SectionOver:
            result["reason"] = f"not done after {limit:.0f} s"
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            result["reason"] = f"{type(error).__name__}: {lines[0][:500]}"

    thread = threading.Thread(target=work, name=_WORK + name, daemon=True)
    thread.start()
    thread.join(min(limit + GRACE_S, left))
    taken = time.monotonic() - began
    if thread.is_alive():
        result = {"reason": f"not done after {taken:.0f} s, and goes on"}
    gc.collect()
    if beside:
        result["beside"] = beside
    return {**bench.partial, **result, "took_s": taken}


def _working() -> list[str]:
    """Sections that have not ended."""
    names = [thread.name for thread in threading.enumerate()]
    return [name.removeprefix(_WORK) for name in names if name.startswith(_WORK)]


def table(found: Mapping[str, Any]) -> str:
    """The results in a few lines."""
    lines = []
    for name, result in found.items():
        head = f"{name:18} {result.get('took_s', 0):6.1f} s"
        if "reason" in result:
            head += f"  {result['reason']}"
        lines.append(head)
        lines += [f"    {key} {_short(value)}" for key, value in result.items() if key in _SHOWN]
        for length, row in result.get("rows", {}).items():
            more = {**row, **result.get("against", {}).get(length, {})}
            parts = [f"{key} {_short(more[key])}" for key in _COLUMNS if more.get(key) is not None]
            lines.append(f"    {length:>7} tokens: {', '.join(parts)}")
    return "\n".join(lines)


_COLUMNS = (
    "seconds",
    "first_s",
    "tokens_per_s",
    "speedup",
    "predicted_s",
    "prediction_error",
    "lost_share",
    "predicted_lost_share",
    "handoff_share",
    "predicted_handoff_share",
    "moved_bytes",
    "pageable_bytes",
    "stall_s",
    "same_sha",
)
_SHOWN = (
    "load",
    "beside",
    "peer_0_to_1",
    "peer_1_to_0",
    "peer_both_gb_per_s",
    "peer_beside_compute",
    "host_to_0_gb_per_s",
    "host_to_1_gb_per_s",
    "host_to_both_gb_per_s",
    "expert_layer_s",
    "side_by_side",
    "taken",
    "neighbours",
    "copies_alone_gb_per_s",
    "predicted_gb_per_s",
    "prediction_error",
    "kernel_at_home_gb_per_s",
    "kernel_gb_per_s",
    "kernel_correct",
    "permute_gb_per_s",
    "copy_gb_per_s",
    "kernel_to_copy",
    "split",
    "layers",
    "exit_code",
    "wall_s",
    "same_sha",
    "killed",
)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} {_short(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_bench, argv)


def _bench(argv: Sequence[str]) -> int:
    began = time.monotonic()
    flag_values = flags.FlagValues()
    flags.DEFINE_string("out_dir", None, "Folder to write.", flag_values=flag_values)
    flags.DEFINE_string(
        "model",
        str(CONFIG_FOLDER / "models" / "flash.json"),
        "Model config whose first layers are run.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer("layers", 8, "How many of them.", lower_bound=2, flag_values=flag_values)
    flags.DEFINE_integer(
        "chunk_tokens", 8192, "Tokens per chunk.", lower_bound=1, flag_values=flag_values
    )
    flags.DEFINE_list(
        "prompt_tokens",
        ["8192", "32768", "131072"],
        "Prompt lengths, ascending.",
        flag_values=flag_values,
    )
    flags.DEFINE_list(
        "sections", list(SECTIONS), "What to measure, in this order.", flag_values=flag_values
    )
    flags.DEFINE_float("budget_s", 330, "Seconds for everything.", flag_values=flag_values)
    common.parse_flags(flag_values, argv, __doc__ or "")
    given: Mapping[str, Any] = flag_values.flag_values_dict()
    out_dir = Path(common.require_flag(flag_values, "out_dir"))
    lengths = common.whole_numbers("prompt_tokens", given["prompt_tokens"])
    if lengths != sorted(lengths):
        raise common.UsageError(f"--prompt_tokens has {lengths}, expected them ascending")
    if not given["sections"] or set(given["sections"]) - set(SECTIONS):
        raise common.UsageError(
            f"--sections has {given['sections']}, expected some of {', '.join(SECTIONS)}"
        )
    whole = ModelConfig.from_json(given["model"])
    common.require_positions("prompt_tokens", lengths, whole.max_position_embeddings)
    if given["layers"] > whole.num_hidden_layers:
        raise common.UsageError(
            f"--layers is {given['layers']}, expected at most {whole.num_hidden_layers} "
            f"({given['model']})"
        )
    with report.disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    # Children need their share of the memory beside this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with _compiled_programs() as cache:
        bench = Bench(
            out_dir,
            f"synthetic:{write_model(given['model'], given['layers'], out_dir)}",
            given["layers"],
            given["chunk_tokens"],
            lengths,
            began + given["budget_s"],
            cache,
        )
        record = {
            "schema": SCHEMA,
            "command": list(argv),
            "versions": report.versions(),
            "devices": [report.device_facts(device) for device in jax.local_devices()],
            "layers": bench.layers,
            "chunk_tokens": bench.chunk,
            "sections": bench.found,
        }
        for name in given["sections"]:
            common.say(name)
            bench.found[name] = run_section(bench, name, SECTIONS[name])
            report.write_json(out_dir / "two_device.json", record)
    for launcher in bench.launched:
        _stop(launcher)
    common.say(table(bench.found))
    common.print_result({"out_dir": str(out_dir), "sections": list(bench.found)})
    if _working():
        # A section that did not end holds the device: leaving in order would wait for it.
        sys.stdout.flush()
        os._exit(common.OK)
    return common.OK


@contextlib.contextmanager
def _compiled_programs() -> Generator[str]:
    """A folder for compiled programs, which devices and processes share."""
    if folder := jax.config.jax_compilation_cache_dir:
        yield folder
        return
    with tempfile.TemporaryDirectory() as folder:
        before = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        try:
            yield folder
        finally:
            jax.config.update("jax_compilation_cache_dir", None)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
            compilation_cache.reset_cache()


def write_model(path: str, layers: int, out_dir: Path) -> Path:
    """Writes the config of the first `layers` layers of a model, and returns its path."""
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    values |= {
        "num_hidden_layers": layers,
        "compress_ratios": [*values["compress_ratios"][:layers], 0],
    }
    made = out_dir / "model.json"
    report.write_json(made, values)
    return made


if __name__ == "__main__":
    sys.exit(main())
