"""Measures the streamer on a GPU: bandwidth, overlap, spread, baselines, disk.

    python -m streaming.bench --out=results

Items have the size of V4-Flash experts, the compute is a chain of matrix products. Writes
streaming_bench.json after every part and two timelines; prints one line per result.
Every run checks the ledger, the order of the window and samples of every item's bytes.
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streaming import numa, residency
from streaming.disk import DiskRing, FileRange, Locate, ReaderKind
from streaming.ledger import Ledger
from streaming.pinned import CudaDriver, PinError, Pinner
from streaming.slab import Component, SlabLayout, page_round
from streaming.store import HostStore
from streaming.streamer import Step, Streamer
from streaming.trace import write_timeline

SCHEMA = "streaming.bench/1"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of a measurement; width 4096 and 2048 are those of V4-Flash."""

    layers: int
    items: int
    resident: int
    hidden: int
    width: int
    passes: int
    repeats: int
    product: int
    disk_layers: int
    disk_items: int

    def layout(self, layers: int, items: int) -> SlabLayout:
        d, f, u8 = self.hidden, self.width, np.dtype(np.uint8)
        components = (
            Component("gate_up", (2 * f, d // 2), u8),
            Component("gate_up_scale", (2 * f, d // 32), u8),
            Component("down", (d, f // 2), u8),
            Component("down_scale", (d, f // 32), u8),
        )
        return SlabLayout(layers, items, components)


# 14 layers x 192 streamed experts of 13.4 MB: 36 GB of host memory, 72 GB in two passes.
FULL = Scale(14, 256, 64, 4096, 2048, 2, 5, 8192, 8, 64)
TINY = Scale(4, 8, 2, 64, 64, 2, 2, 64, 3, 4)


def value(layer: int, item: int, component: int) -> int:
    """The byte that fills a component of an item."""
    return (layer * 31 + item * 7 + component * 3) % 251


def expected(layer: int, items: Sequence[int], components: int) -> int:
    """What `sample` makes of these items."""
    return sum(2 * value(layer, item, part) for item in items for part in range(components))


def sample(arrays: dict[str, jax.Array]) -> jax.Array:
    """Sum of the first and last byte of every component of every row, i32."""
    total = jnp.zeros((), jnp.int32)
    for array in arrays.values():
        flat = array.reshape(array.shape[0], -1)
        total += flat[:, 0].astype(jnp.int32).sum() + flat[:, -1].astype(jnp.int32).sum()
    return total


def make_program(products: int) -> Callable[..., jax.Array]:
    """A program that needs its slab first, then multiplies `products` times."""

    def program(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        total = sample(arrays)
        y = x + jnp.where(total < 0, 1, 0).astype(x.dtype)
        for _ in range(products):
            y = jnp.dot(y, w, preferred_element_type=jnp.float32).astype(x.dtype)
        # The result has to depend on the products, and is the sample all the same.
        return total + jnp.where(jnp.isnan(y[0, 0]), 1, 0).astype(jnp.int32)

    return jax.jit(program)


class Bench:
    """The machine, the store and what was measured so far."""

    def __init__(self, scale: Scale, out: Path, seconds: float):
        self.scale, self.out, self.deadline = scale, out, time.perf_counter() + seconds
        self.device = jax.devices()[0]
        self.results: dict[str, Any] = {
            "schema": SCHEMA,
            "device": self.device.device_kind,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "scale": dataclasses.asdict(scale),
        }
        self.layout = scale.layout(scale.layers, scale.items)
        self.kept = residency.even(scale.layers, scale.items, scale.resident)
        self.driver: CudaDriver | None = None
        self.node: int | None = None
        try:
            self.driver = CudaDriver()
            self.node = numa.device_node(self.driver.pci_address())
        except PinError as error:
            self.results["pin_error"] = str(error)
        self.pinner = Pinner(self.driver)
        keys = jax.random.split(jax.random.key(0))
        shape = (scale.product, scale.product)
        with jax.default_device(self.device):
            self.x = jax.random.normal(keys[0], shape, jnp.bfloat16)
            root = jnp.asarray(scale.product**-0.5, jnp.bfloat16)
            self.w = jax.random.normal(keys[1], shape, jnp.bfloat16) * root
        self.programs: dict[int, Callable[..., jax.Array]] = {}
        self.product_s = self.copy_s = 0.0

    def part(self, name: str, measure: Callable[[], Any]) -> None:
        """Runs one part of the measurement; an error becomes its result."""
        began = time.perf_counter()
        if began > self.deadline:
            result: Any = {"skipped": "out of time"}
        else:
            try:
                result = measure()
            except Exception as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
        self.results[name] = result
        self.results[f"{name}_part_s"] = time.perf_counter() - began
        path = self.out / "streaming_bench.json"
        path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
        line = {k: v for k, v in result.items() if not isinstance(v, dict | list)}
        print(f"{name}: {json.dumps(line)}", flush=True)

    def fill(self) -> dict[str, Any]:
        """Fills the store, pageable for now."""
        began = time.perf_counter()
        self.store = HostStore(
            self.layout, self.kept.streamed, device_node=self.node, pinner=self.pinner
        )
        names = [part.name for part in self.layout.components]

        def write(layer: int, item: int, component: str, buffer: np.ndarray) -> None:
            buffer.fill(value(layer, item, names.index(component)))

        self.store.fill(write, pin=False)
        seconds = time.perf_counter() - began
        return {
            "bytes": self.store.nbytes,
            "seconds": seconds,
            "gb_per_s": self.store.nbytes / seconds / 1e9,
            "nodes": sorted({str(nodes) for nodes in self.store.nodes}),
        }

    def pin(self) -> dict[str, Any]:
        """Page-locks the store; its time and its cost in device memory."""
        began = time.perf_counter()
        self.store.pin()
        report = self.pinner.wait()
        return {
            "wall_s": time.perf_counter() - began,
            "s_per_gb": report.seconds / max(report.registered_bytes / 1e9, 1e-9),
            **report._asdict(),
            "errors": list(report.errors),
        }

    def streamer(self, items: Sequence[Sequence[int]] | None = None, **options: Any) -> Streamer:
        items = self.kept.streamed if items is None else items
        return Streamer(self.layout, items, self.device, store=self.store, **options)

    def product(self) -> dict[str, Any]:
        """Seconds of one matrix product."""
        empty = {"none": jnp.zeros((1, 1), jnp.uint8)}
        times = []
        for products in (4, 20):
            program = make_program(products)
            jax.block_until_ready(program(self.x, self.w, empty))
            began = time.perf_counter()
            for _ in range(5):
                output = program(self.x, self.w, empty)
            jax.block_until_ready(output)
            times.append((time.perf_counter() - began) / 5)
        self.product_s = max((times[1] - times[0]) / 16, 1e-9)
        return {
            "product_s": self.product_s,
            "tflop_per_s": 2 * self.scale.product**3 / self.product_s / 1e12,
        }

    def copies_alone(self) -> dict[str, Any]:
        """Whole units one after the other when nothing computes."""
        with self.streamer() as streamer:
            self.run(streamer, self.steps(1), 0)
            ledger, _ = self.run(streamer, self.steps(), 0)
        units = len(ledger.copy_gb_per_s)
        self.copy_s = ledger.wall_s / units
        return {
            "unit_bytes": ledger.total_bytes // units,
            "copy_s": self.copy_s,
            "bytes": ledger.total_bytes,
            "sustained_gb_per_s": ledger.total_bytes / ledger.wall_s / 1e9,
            "histogram": ledger.histogram(),
            "registered_bytes": ledger.registered_bytes,
            "major_faults": ledger.major_faults,
        }

    def steps(self, passes: int | None = None) -> list[Step]:
        passes = self.scale.passes if passes is None else passes
        return [Step(layer) for _ in range(passes) for layer in range(self.scale.layers)]

    def products(self, share: float) -> int:
        """How many products take `share` times as long as the copy of a unit."""
        return min(max(round(share * self.copy_s / self.product_s), 1), 200)

    def run(
        self,
        streamer: Streamer,
        steps: Sequence[Step],
        products: int,
        ids: Callable[[int], np.ndarray] | None = None,
    ) -> tuple[Ledger, float]:
        """One run, checked; returns its ledger and its wall time."""
        if products not in self.programs:
            self.programs[products] = make_program(products)
        program, sums, wanted = self.programs[products], [], []
        parts = len(streamer.layout.components)
        began = time.perf_counter()
        streamer.start(steps)
        for number, step in enumerate(steps):
            streamer.issue_ahead(number)
            if step.mode == "routed":
                assert ids is not None
                streamer.routed(number, ids(number))
            for wave in range(streamer.waves(number)):
                if wave:
                    streamer.issue_ahead(number, wave)
                slab = streamer.take(number, wave)
                wanted.append(expected(step.layer, slab.items, parts))
                sums.append(program(self.x, self.w, dict(slab.arrays)))
                streamer.computed(number, sums[-1], wave)
        ledger = streamer.finish()
        wall = time.perf_counter() - began
        if [int(total) for total in sums] != wanted:
            raise AssertionError("items on the device differ from those in the store")
        if streamer.violations():
            raise AssertionError("\n".join(streamer.violations()))
        return ledger, wall

    def repeated(
        self,
        streamer: Streamer,
        steps: Sequence[Step],
        products: int,
        repeats: int,
        timeline: str | None = None,
    ) -> dict[str, Any]:
        """Several identical runs after one that compiles and warms up."""
        ledger, _ = self.run(streamer, steps[: self.scale.layers], products)
        runs, walls = [], []
        for _ in range(repeats):
            ledger, wall = self.run(streamer, steps, products)
            walls.append(wall)
            rates = ledger.copy_gb_per_s
            runs.append(
                {
                    "wall_s": wall,
                    "overlap": ledger.overlap,
                    "copy_busy_s": ledger.copy_busy_s,
                    "compute_busy_s": ledger.compute_busy_s,
                    "both_busy_s": ledger.both_busy_s,
                    "stall_s": ledger.stall_s,
                    "copy_gb_per_s_min": min(rates),
                    "copy_gb_per_s_median": statistics.median(rates),
                    "copy_gb_per_s_max": max(rates),
                    "histogram": ledger.histogram(),
                    "copies": [round(rate, 2) for rate in rates],
                }
            )
        middle = statistics.median(walls)
        units = len(ledger.copy_gb_per_s)
        compute_s = products * self.product_s * units
        copy_s = self.copy_s * units
        if timeline is not None:
            write_timeline(self.out / f"streaming_timeline_{timeline}.json", ledger.spans)
        return {
            "bytes": ledger.total_bytes,
            "products": products,
            "median_wall_s": middle,
            "spread": (max(walls) - min(walls)) / middle,
            "median_overlap": statistics.median(run["overlap"] or 0.0 for run in runs),
            "gb_per_s": ledger.total_bytes / middle / 1e9,
            "compute_alone_s": compute_s,
            "copy_alone_s": copy_s,
            "wall_over_bound": middle / max(compute_s, copy_s),
            "peak_live_bytes": ledger.peak_live_bytes,
            "major_faults": ledger.major_faults,
            "runs": runs,
        }

    def compute_bound(self) -> dict[str, Any]:
        """Compute takes 1.3 times the copy: all copies but the first should hide."""
        with self.streamer() as streamer:
            return self.repeated(
                streamer, self.steps(), self.products(1.3), self.scale.repeats, "compute_bound"
            )

    def copy_bound(self) -> dict[str, Any]:
        """Compute takes half of the copy: the link should never rest."""
        with self.streamer() as streamer:
            return self.repeated(
                streamer, self.steps(), self.products(0.5), self.scale.repeats, "copy_bound"
            )

    def windows(self) -> dict[str, Any]:
        """No prefetch, and deeper windows, both ways."""
        found = {}
        for window in (0, 2):
            for name, share in (("compute_bound", 1.3), ("copy_bound", 0.5)):
                with self.streamer(window=window) as streamer:
                    found[f"window_{window}_{name}"] = self.repeated(
                        streamer, self.steps(1), self.products(share), 2
                    )
        return _with_summary(found, "median_wall_s", "median_overlap")

    def waves(self) -> dict[str, Any]:
        """A budget of a quarter of what whole layers need: each layer moves in waves."""
        share = len(self.kept.streamed[0])
        budget = 3 * self.layout.item_bytes * max(share // 4, 2)
        with self.streamer(budget_bytes=budget) as streamer:
            waves = -(-share // streamer.wave_items)
            found = self.repeated(streamer, self.steps(1), self.products(1.3 / waves), 2)
            return {"budget_bytes": budget, "waves": waves, **found}

    def pageable(self) -> dict[str, Any]:
        """The same from memory that is not page-locked, a few layers of it."""
        steps = [Step(layer) for layer in range(min(4, self.scale.layers))]
        with self.streamer() as streamer:
            self.run(streamer, steps[:2], 0)
            alone, alone_s = self.run(streamer, steps, 0)
            # The copy alone takes alone_s per unit; compute as long as that.
            products = min(max(round(alone_s / len(steps) / self.product_s), 1), 200)
            self.run(streamer, steps[:2], products)
            ledger, wall = self.run(streamer, steps, products)
        return {
            "bytes": alone.total_bytes,
            "pageable_bytes": alone.pageable_bytes,
            "gb_per_s": alone.total_bytes / alone_s / 1e9,
            "copy_alone_s": alone_s,
            "compute_alone_s": products * self.product_s * len(steps),
            "both_s": wall,
            "overlap": ledger.overlap,
        }

    def policies(self) -> dict[str, Any]:
        """Device memory for half of the items: a static set against least recently used."""
        needs = [(step.layer, self.kept.streamed[step.layer]) for step in self.steps()]
        half = len(self.kept.streamed[0]) // 2
        missed = residency.lru_misses(needs, half * self.scale.layers)
        products = self.products(0.25)
        with self.streamer() as streamer:
            steps = [
                Step(layer, "exact", items) for (layer, _), items in zip(needs, missed, strict=True)
            ]
            lru = self.repeated(streamer, steps, products, 2)
        with self.streamer([items[half:] for items in self.kept.streamed]) as streamer:
            static = self.repeated(streamer, self.steps(), products, 2)
        return _with_summary({"lru": lru, "static": static}, "median_wall_s", "bytes")

    def routed(self) -> dict[str, Any]:
        """Only what a router asks for: 6 of all items per token, popularity as 1 / rank."""
        found: dict[str, Any] = {}
        items, layers = self.scale.items, self.scale.layers
        whole_steps, products = self.steps(1), self.products(0.1)
        with self.streamer() as streamer:
            whole = self.repeated(streamer, whole_steps, products, 2)
        for tokens in (128, 512, 2048):
            routing = [_route(tokens, items, seed) for seed in range(layers)]
            steps = [Step(layer, "routed") for layer in range(layers)]
            with self.streamer() as streamer:
                self.run(streamer, steps, products, routing.__getitem__)
                ledger, wall = self.run(streamer, steps, products, routing.__getitem__)
            distinct = [len(np.unique(ids)) for ids in routing]
            missed = sum(int((np.unique(ids) >= self.scale.resident).sum()) for ids in routing)
            found[f"tokens_{tokens}"] = {
                "wall_s": wall,
                "whole_wall_s": whole["median_wall_s"],
                "distinct_mean": statistics.mean(distinct),
                "bytes": ledger.total_bytes,
                "bytes_are_distinct": ledger.total_bytes == missed * self.layout.item_bytes,
                "gb_per_s": ledger.total_bytes / wall / 1e9,
            }
        return _with_summary(found, "wall_s", "gb_per_s")

    def small_put(self) -> dict[str, Any]:
        """How long four bytes take alone, and issued behind the copy of a whole unit."""
        number = np.zeros(1, np.int32)
        (piece,) = self.store.pieces(0, self.store.order[0])

        def seconds() -> float:
            began = time.perf_counter()
            jax.block_until_ready(jax.device_put(number, self.device))
            return time.perf_counter() - began

        seconds()
        alone = statistics.median(seconds() for _ in range(5))
        large = [jax.device_put(array, self.device) for array in piece.arrays]
        behind = seconds()
        jax.block_until_ready(large)
        return {"alone_s": alone, "behind_a_unit_s": behind}

    def disk(self) -> dict[str, Any]:
        """The same from files, with each reader, from the page cache and past it."""
        layout = self.scale.layout(self.scale.disk_layers, self.scale.disk_items)
        needed = layout.layers * layout.block_bytes(layout.items)
        items = residency.even(layout.layers, layout.items, 0).streamed
        found: dict[str, Any] = {"bytes": needed}
        with tempfile.TemporaryDirectory() as folder:
            if shutil.disk_usage(folder).free < 1.2 * needed:
                return {"skipped": "not enough room", "needed_bytes": needed}
            began = time.perf_counter()
            locate = _write_layers(layout, folder)
            found["write_s"] = time.perf_counter() - began
            arms: list[tuple[str, ReaderKind, bool]] = [
                ("preadv_cold", "preadv", True),
                ("preadv_warm", "preadv", False),
                ("mmap_warm", "mmap", False),
                ("direct", "direct", True),
            ]
            for name, reader, cold in arms:
                if time.perf_counter() > self.deadline:
                    break
                if cold:
                    _forget(folder)
                found[name] = self._disk_run(layout, locate, items, reader)
        return _with_summary(found, "gb_per_s", "storage_bytes")

    def _disk_run(
        self,
        layout: SlabLayout,
        locate: Locate,
        items: Sequence[Sequence[int]],
        reader: ReaderKind,
    ) -> dict[str, Any]:
        pinner = Pinner(self.driver)
        ring = DiskRing(layout, locate, rows=layout.items, slots=3, reader=reader, pinner=pinner)
        pinner.wait()
        steps = [Step(layer) for layer in range(layout.layers)]
        with Streamer(layout, items, self.device, ring=ring) as streamer:
            ledger, wall = self.run(streamer, steps, 1)
        return {
            "wall_s": wall,
            "gb_per_s": ledger.total_bytes / wall / 1e9,
            "overlap": ledger.overlap,
            "dispatch_wait_s": ledger.dispatch_wait_s,
            "storage_bytes": ledger.storage_bytes,
            "major_faults": ledger.major_faults,
            "slow_fills": ledger.slow_fills,
        }

    def close(self) -> None:
        self.store.close()


def _with_summary(found: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`found`, with the named values of its parts beside them, so that they are printed."""
    flat = {
        f"{name}_{key}": part[key]
        for name, part in found.items()
        if isinstance(part, dict)
        for key in keys
        if key in part
    }
    return {**found, **flat}


def _route(tokens: int, items: int, seed: int) -> np.ndarray:
    """Ids [tokens, 6 or fewer]: distinct per token, popularity 1 / rank, ranks shuffled."""
    generator = np.random.default_rng(seed)
    weight = -np.log(1 + generator.permutation(items))
    noise = generator.gumbel(size=(tokens, items))
    return np.argsort(-(weight + noise), axis=1)[:, : min(6, items)].astype(np.int32)


def _write_layers(layout: SlabLayout, folder: str) -> Locate:
    """One file per layer, components one after the other, each on a page."""
    offsets: dict[str, int] = {}
    end = 0
    for part in layout.components:
        offsets[part.name] = end
        end += page_round(layout.items * part.nbytes)
    for layer in range(layout.layers):
        with open(Path(folder) / f"layer-{layer}.bin", "wb") as file:
            for number, part in enumerate(layout.components):
                file.seek(offsets[part.name])
                for item in range(layout.items):
                    file.write(np.full(part.nbytes, value(layer, item, number), np.uint8).data)
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())
    sizes = {part.name: part.nbytes for part in layout.components}

    def locate(layer: int, item: int, component: str) -> Sequence[FileRange]:
        nbytes = sizes[component]
        path = str(Path(folder) / f"layer-{layer}.bin")
        return [FileRange(path, offsets[component] + item * nbytes, nbytes)]

    return locate


def _forget(folder: str) -> None:
    """Asks the system to drop cached pages of the files in a folder."""
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures everything; returns the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for results")
    parser.add_argument("--seconds", type=float, default=170.0, help="start no part after this")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test on a CPU")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(TINY if options.tiny else FULL, out, options.seconds)
    bench.part("fill", bench.fill)
    bench.part("product", bench.product)
    bench.part("pageable", bench.pageable)
    bench.part("pin", bench.pin)
    bench.part("copies_alone", bench.copies_alone)
    bench.part("copy_bound", bench.copy_bound)
    bench.part("compute_bound", bench.compute_bound)
    bench.part("small_put", bench.small_put)
    bench.part("routed", bench.routed)
    bench.part("windows", bench.windows)
    bench.part("waves", bench.waves)
    bench.part("policies", bench.policies)
    bench.part("disk", bench.disk)
    bench.close()
    return bench.results


if __name__ == "__main__":
    main()
