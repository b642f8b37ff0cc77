"""Times the parts of one full-width layer of each kind against what the device could do.

python -m ds4jax.bench.layers --out_dir=DIR [--model=configs/models/flash.json]
    [--tokens=8192] [--positions=0,24576] [--repeats=7] [--trace] [--config.SECTION.KEY=VALUE ...]

A layer is attend, route, experts, finish: the programs that a run dispatches, with all experts of
the layer on the device. The floor of a part is the larger of its arithmetic and its bytes (weights,
inputs and outputs once) at the rates of an H200. `--trace` adds the time of every kernel of the
layers, from the profiler. The folder gets layers.json; the table goes to stderr.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from ds4jax import admission, report
from ds4jax.bench import manifest, ops
from ds4jax.cache import Chunk, LayerState, empty_state, make_chunk
from ds4jax.checkpoint import load as loading
from ds4jax.checkpoint.synthetic import SyntheticSource, prompt_ids
from ds4jax.cli import common
from ds4jax.config import CONFIG_FOLDER, ModelConfig, Numerics
from ds4jax.costs import PARTS, work
from ds4jax.flags import config_from_flags, define_config_flags
from ds4jax.moe import LayerSlabs
from ds4jax.runner import COMPILED, Runner

SCHEMA = "ds4jax.bench.layers/1"


@dataclasses.dataclass
class Bench:
    """One layer of each kind, with all that its programs take."""

    config: ModelConfig
    runner: Runner
    slabs: list[LayerSlabs]
    device: jax.Device

    def layer(self, layer: int, chunk: Chunk, state: LayerState, repeats: int) -> dict[str, Any]:
        """Seconds of each part, medians of `repeats` measurements of a few calls."""
        streams = _noise(1, (chunk.tokens.shape[0], self.config.hc_mult, self.config.hidden_size))
        streams = jax.device_put(streams.astype(self.runner.numerics.dtype), self.device)
        held: dict[str, Any] = {"streams": streams, "state": state}
        runner = self.runner

        def attend() -> Any:
            held["streams"], held["state"] = runner.attend(
                layer, held["streams"], held["state"], chunk
            )
            return held["streams"]

        def route() -> Any:
            held["routing"] = runner.route(layer, held["streams"], chunk)
            return held["routing"].ids

        def experts() -> Any:
            held["slots"] = None  # a buffer that is not needed while the next one is filled
            held["slots"] = runner.experts(held["routing"], self.slabs[layer], None)
            return held["slots"]

        def finish() -> Any:
            held["streams"] = runner.finish(layer, held["streams"], held["routing"], held["slots"])
            return held["streams"]

        found: dict[str, Any] = {}
        for name, call in zip(PARTS, (attend, route, experts, finish), strict=True):
            compiled, before = COMPILED.measure(), self._peak()
            jax.block_until_ready(call())
            programs, compile_s = compiled()
            found[name] = {
                **_seconds(call, repeats),
                "programs": programs,
                "compile_s": compile_s,
                "peak_rise_bytes": self._peak() - before,
            }
        programs = runner.layer_programs(
            layer,
            streams=held["streams"],
            state=held["state"],
            chunk=chunk,
            slabs=[self.slabs[layer]] * 2,
        )
        for name, program in programs.items():
            memory, part = program.lower().compile().memory_analysis(), found[name.split()[0]]
            if memory:
                part["temp_bytes"] = max(memory.temp_size_in_bytes, part.get("temp_bytes", 0))
        ids = np.asarray(held["routing"].ids)
        found["distinct"] = len(set(ids[ids >= 0].tolist()))
        found["finite"] = bool(jnp.isfinite(held["slots"]).all())
        self.again = (attend, route, experts, finish)
        return found

    def _peak(self) -> int:
        stats = self.device.memory_stats() if self.device.platform != "cpu" else None
        return stats["peak_bytes_in_use"] if stats else 0


def _seconds(call: Callable[[], Any], repeats: int, calls: int = 4) -> dict[str, Any]:
    """Seconds per call; several calls in a row hide the launch, as in a run."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        last: Any = None
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - began) / calls)
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def _noise(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def one_of_each(config: ModelConfig) -> ModelConfig:
    """A model with one score-routed layer of each kind that `config` has."""
    ratios = tuple(dict.fromkeys(config.layer_ratios))
    return dataclasses.replace(
        config, num_hidden_layers=len(ratios), compress_ratios=(*ratios, 0), num_hash_layers=0
    )


def random_state(state: LayerState, seed: int) -> LayerState:
    """A state of the same shapes with contents: zeros would make ties and faster products."""
    leaves, tree = jax.tree.flatten(state)
    made = [
        _noise(seed + number, leaf.shape).astype(leaf.dtype) for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, made)


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
    flags.DEFINE_integer(
        "tokens", 8192, "Rows of the chunk.", lower_bound=1, flag_values=flag_values
    )
    flags.DEFINE_list(
        "positions", ["0"], "Positions of the chunk's first token.", flag_values=flag_values
    )
    flags.DEFINE_integer(
        "repeats", 7, "Measurements of a part.", lower_bound=1, flag_values=flag_values
    )
    flags.DEFINE_bool("trace", False, "Time every kernel as well.", flag_values=flag_values)
    common.parse_flags(flag_values, argv, __doc__ or "")
    given: Mapping[str, Any] = flag_values.flag_values_dict()
    positions = common.whole_numbers("positions", given["positions"], least=0)
    out_dir = Path(common.require_flag(flag_values, "out_dir"))
    config = config_from_flags(flag_values, {})
    model = one_of_each(ModelConfig.from_json(given["model"]))
    tokens, numerics = given["tokens"], config.numerics.resolve()
    common.require_positions(
        "positions", positions, model.max_position_embeddings - tokens, "what --tokens leaves"
    )
    with report.disk_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    device = jax.local_devices()[0]
    bench = load(model, numerics, device)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "manifest": manifest.manifest(config, f"synthetic:{given['model']}", device),
        "tokens": tokens,
        "workspace_estimate_bytes": admission.workspace_bytes(model, numerics, tokens),
        "rows": [],
    }
    for row in measure(bench, tokens, positions, given["repeats"]):
        if given["trace"]:
            row["kernels"] = _traced(bench)
        record["rows"].append(row)
        report.write_json(out_dir / "layers.json", record)
        common.say(table(row))
    common.print_result({"out_dir": str(out_dir)})
    return common.OK


def load(model: ModelConfig, numerics: Numerics, device: jax.Device) -> Bench:
    """The layers of `model` with random weights, all experts on `device`."""
    source = SyntheticSource(model, 0, mtp=False)
    began = time.perf_counter()
    transformer = loading.load_resident(source, device=device)
    experts = range(model.n_routed_experts)
    where = jax.device_put(np.arange(model.n_routed_experts, dtype=np.int32), device)
    slabs: list[LayerSlabs] = [
        ((loading.place_expert_slab(source, layer, experts, device),), where)
        for layer in range(model.num_hidden_layers)
    ]
    jax.block_until_ready(slabs)
    common.say(f"loaded {len(slabs)} layers in {time.perf_counter() - began:.1f} s")
    return Bench(model, Runner(transformer, numerics), slabs, device)


def measure(
    bench: Bench, tokens: int, positions: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """A row for every layer and position: seconds and work of its parts, chunks of `tokens`."""
    ids = prompt_ids(tokens, bench.config.vocab_size, "uniform")
    for position in positions:
        capacity = max(8192, position + tokens)
        states = empty_state(bench.config, bench.runner.numerics, capacity).layers
        for layer in range(bench.config.num_hidden_layers):
            chunk = jax.device_put(make_chunk(ids, position, tokens), bench.device)
            state = jax.device_put(random_state(states[layer], layer * 100), bench.device)
            parts = bench.layer(layer, chunk, state, repeats)
            floors = work(bench.config, layer, tokens, position)
            for name in PARTS:
                parts[name]["floor_s"] = floors[name].floor_s
                each = dataclasses.asdict(floors[name])
                parts[name].update({key: float(value) for key, value in each.items()})
            yield {
                "kind": bench.config.kind(layer).value,
                "position": position,
                "tokens": tokens,
                "numerics": str(bench.runner.numerics),
                "seconds": sum(parts[name]["median_s"] for name in PARTS),
                "floor_s": sum(floors[name].floor_s for name in PARTS),
                "parts": parts,
            }


def _traced(bench: Bench) -> list[dict[str, Any]]:
    """Kernels of one pass through the layer that was timed last."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for call in bench.again:
                jax.block_until_ready(call())
        return ops.kernel_seconds(folder)


def table(row: Mapping[str, Any]) -> str:
    """A measured layer in a few lines."""
    lines = [
        f"{row['kind']} at {row['position']}, {row['tokens']} tokens, {row['numerics']}: "
        f"{row['seconds'] * 1e3:.2f} ms, floor {row['floor_s'] * 1e3:.2f} ms; "
        f"{row['parts']['distinct']} distinct experts, finite {row['parts']['finite']}"
    ]
    for name in PARTS:
        part = row["parts"][name]
        lines.append(
            f"  {name:8} {part['median_s'] * 1e3:8.3f} ms ({part['min_s'] * 1e3:.3f}.."
            f"{part['max_s'] * 1e3:.3f}), floor {part['floor_s'] * 1e3:7.3f} ms = "
            f"{part['floor_s'] / part['median_s']:5.1%}, compile {part['compile_s']:.1f} s, "
            f"peak +{part['peak_rise_bytes'] / 1e9:.2f} GB"
        )
    for kernel in row.get("kernels", ())[:14]:
        lines.append(
            f"    {kernel['seconds'] * 1e3:8.3f} ms {kernel['calls']:4} x {kernel['kernel'][:90]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
