"""Measures the streamer on a GPU: bandwidth, overlap, spread, baselines, disk.

    python -m streaming.bench --out=results [--parts=disk,waves]

Items have the size of V4-Flash experts: 43 layers, of which 65 of 256 items stream, as where the
others fit on one H200. The compute is a chain of matrix products. Writes streaming_bench.json
after every part and two timelines; prints one line per part, then a table of what was asked for.
Every run checks the ledger, the order of the window and samples of every item's bytes. The exit
status is 1 when a part failed or was left out for lack of time; targets that were missed only show.
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streaming import numa, residency
from streaming.disk import DiskRing, Locate
from streaming.ledger import Ledger
from streaming.notes import Notes, prefer_routed
from streaming.pinned import CudaDriver, PinError, Pinner
from streaming.readers import FileRange, ReaderKind
from streaming.slab import Component, SlabLayout, page_round
from streaming.store import HostStore
from streaming.streamer import DISK_WINDOW, Step, Streamer
from streaming.trace import write_timeline

SCHEMA = "streaming.bench/3"

# The parts in their order, first what everything else rests on, then by importance; each with the
# parts whose results it needs.
PARTS: dict[str, tuple[str, ...]] = {
    "fill": (),
    "product": (),
    "pageable": ("fill", "product"),
    "pin": ("fill",),
    "copies_alone": ("pin",),
    "copy_bound": ("product", "copies_alone"),
    "compute_bound": ("product", "copies_alone"),
    "routed": ("product", "copies_alone"),
    "disk": ("product",),
    "windows": ("product", "copies_alone"),
    "policies": ("product", "copies_alone"),
    "notes": ("product",),
    "small_put": ("pin",),
    "waves": ("product", "copies_alone"),
}
# How files are read, and whether the page cache has been emptied before; the first one also with
# fewer threads than processors, which leaves some of them to whoever dispatches.
READS: tuple[tuple[str, ReaderKind, bool], ...] = (
    ("preadv_warm", "preadv", False),
    ("mmap_warm", "mmap", False),
    ("preadv_cold", "preadv", True),
    ("direct", "direct", True),
    ("mmap_cold", "mmap", True),
)
_READING_THREADS = (12, 8)

# What a layer of V4-Flash takes on an H200 with so many tokens, about.
_LAYER_SECONDS = {128: 2e-3, 512: 3e-3, 2048: 5e-3}
_MOST_PRODUCTS = 200
_SLOW_COPY = 0.9  # of the median rate; what counts as a slow copy
_GRACE_S = 15.0  # after the deadline; then the program ends itself

# No timing of candidates while compiling, and no form whose choice needs it.
_COMPILE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


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
    disk_repeats: int  # of the runs with compute that the target is about

    def layout(self, layers: int, items: int) -> SlabLayout:
        d, f, u8 = self.hidden, self.width, np.dtype(np.uint8)
        components = (
            Component("gate_up", (2 * f, d // 2), u8),
            Component("gate_up_scale", (2 * f, d // 32), u8),
            Component("down", (d, f // 2), u8),
            Component("down_scale", (d, f // 32), u8),
        )
        return SlabLayout(layers, items, components)


# 43 layers x 65 streamed experts of 13.4 MB: 37 GB of host memory, 75 GB in two passes.
FULL = Scale(43, 256, 191, 4096, 2048, 2, 5, 8192, 8, 64, 3)
TINY = Scale(4, 8, 2, 64, 64, 2, 2, 64, 3, 4, 1)


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

    return jax.jit(program, compiler_options=_COMPILE)


class Bench:
    """The machine, the store and what was measured so far."""

    def __init__(self, scale: Scale, out: Path, seconds: float, folder: str | None = None):
        self.folder = folder
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
        self.store: HostStore | None = None
        keys = jax.random.split(jax.random.key(0))
        shape = (scale.product, scale.product)
        with jax.default_device(self.device):
            self.x = jax.random.normal(keys[0], shape, jnp.bfloat16)
            root = jnp.asarray(scale.product**-0.5, jnp.bfloat16)
            self.w = jax.random.normal(keys[1], shape, jnp.bfloat16) * root
        self.programs: dict[int, Callable[..., jax.Array]] = {}
        self.product_s = self.copy_s = 0.0
        self.failed: list[str] = []
        self.running = ""

    def part(self, name: str, measure: Callable[[], Any]) -> None:
        """Runs one part of the measurement; an error becomes its result."""
        began, self.running = time.perf_counter(), name
        if began > self.deadline:
            result: Any = {"skipped": "out of time"}
        else:
            try:
                result = measure()
            except Exception as error:
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
        if "error" in result or "skipped" in result:
            self.failed.append(name)
        self.results[name] = result
        self.results[f"{name}_part_s"] = time.perf_counter() - began
        self.save()
        line = {k: v for k, v in result.items() if not isinstance(v, dict | list)}
        print(f"{name}: {json.dumps(line)}", flush=True)

    def save(self) -> None:
        """Writes what is known so far, with the targets."""
        self.results["targets"] = targets(self.results)
        self.results["failed"] = list(self.failed)
        path = self.out / "streaming_bench.json"
        path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    def stuck(self) -> None:
        """Ends the program with what is known, when a part does not come to its end."""
        self.failed.append(self.running)
        self.results[self.running] = {"error": "not over when the time was"}
        self.save()
        print_table(self.results)
        sys.stdout.flush()
        os._exit(1)

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
        assert self.store is not None
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
        assert self.store is not None  # parts that need it come after "fill"
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
        return min(max(round(share * self.copy_s / self.product_s), 1), _MOST_PRODUCTS)

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
        *,
        copy_s: float | None = None,
        ids: Callable[[int], np.ndarray] | None = None,
    ) -> dict[str, Any]:
        """Several identical runs after one that compiles and warms up.

        copy_s  seconds of a unit when nothing computes; those of whole layers without it
        """
        ledger, _ = self.run(streamer, steps[: self.scale.layers], products, ids)
        runs, walls = [], []
        for _ in range(repeats):
            ledger, wall = self.run(streamer, steps, products, ids)
            walls.append(wall)
            runs.append(
                {
                    **_account(ledger, wall),
                    "histogram": ledger.histogram(),
                    "copies": [round(rate, 2) for rate in ledger.copy_gb_per_s],
                }
            )
        middle = statistics.median(walls)
        units = len(ledger.copy_gb_per_s)
        compute_s = products * self.product_s * units
        copy_s = (self.copy_s if copy_s is None else copy_s) * units
        if timeline is not None:
            write_timeline(self.out / f"streaming_timeline_{timeline}.json", ledger.spans)
        return {
            "bytes": ledger.total_bytes,
            "products": products,
            "median_wall_s": middle,
            "spread": (max(walls) - min(walls)) / middle,
            "slow_copies": _slow_copies(runs, ledger.total_bytes / units),
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
        """Compute takes 1.2 times the copy: all copies but the first should hide."""
        with self.streamer() as streamer:
            return self.repeated(
                streamer, self.steps(), self.products(1.2), self.scale.repeats, "compute_bound"
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
            for name, share in (("compute_bound", 1.2), ("copy_bound", 0.5)):
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
            found = self.repeated(
                streamer,
                self.steps(1),
                self.products(1.2 / waves),
                2,
                copy_s=self.copy_s / waves,
            )
            return {"budget_bytes": budget, "waves": waves, **found}

    def pageable(self) -> dict[str, Any]:
        """The same from memory that is not page-locked, a few layers of it."""
        steps = [Step(layer) for layer in range(min(4, self.scale.layers))]
        with self.streamer() as streamer:
            self.run(streamer, steps[:2], 0)
            alone, alone_s = self.run(streamer, steps, 0)
            # The copy alone takes alone_s per unit; compute as long as that.
            products = min(max(round(alone_s / len(steps) / self.product_s), 1), _MOST_PRODUCTS)
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
        """Only what a router asks for: 6 of all items per token, popularity as 1 / rank.

        "independent": every token draws for itself. "correlated": 8 tokens in a row draw once.
        """
        found: dict[str, Any] = {}
        items, layers = self.scale.items, self.scale.layers
        share = len(self.kept.streamed[0])
        for tokens, layer_s in _LAYER_SECONDS.items():
            products = min(max(round(layer_s / self.product_s), 1), 8)
            with self.streamer() as streamer:
                whole = self.repeated(streamer, self.steps(1), products, 2)
            for name, draws in (("independent", tokens), ("correlated", tokens // 8)):
                routing = [_route(draws, items, seed) for seed in range(layers)]
                steps = [Step(layer, "routed") for layer in range(layers)]
                with self.streamer() as streamer:
                    part = self.repeated(streamer, steps, products, 2, ids=routing.__getitem__)
                distinct = [len(np.unique(ids)) for ids in routing]
                missed = sum(int((np.unique(ids) >= self.scale.resident).sum()) for ids in routing)
                faster = part["median_wall_s"] < whole["median_wall_s"]
                expected_faster = prefer_routed(
                    distinct_misses=missed / layers,
                    share=share,
                    item_bytes=self.layout.item_bytes,
                    link_bytes_per_s=share * self.layout.item_bytes / self.copy_s,
                    compute_s=products * self.product_s,
                )
                found[f"tokens_{tokens}_{name}"] = {
                    "wall_s": part["median_wall_s"],
                    "whole_wall_s": whole["median_wall_s"],
                    "wins": "routed" if faster else "whole",
                    "auto_takes": "routed" if expected_faster else "whole",
                    "compute_s": products * self.product_s * layers,
                    "distinct_mean": statistics.mean(distinct),
                    "moved_mean": missed / layers,
                    "share": share,
                    "bytes": part["bytes"],
                    "whole_bytes": whole["bytes"],
                    "bytes_are_distinct": part["bytes"] == missed * self.layout.item_bytes,
                    "gb_per_s": part["gb_per_s"],
                }
        return _with_summary(found, "wins", "auto_takes")

    def notes(self) -> dict[str, Any]:
        """What a note of 4,096 tokens costs: the call on an idle device and behind 10 products.

        A callback keeps the dispatching thread until the device has come to it.
        """
        ids = jax.device_put(_route(4096, self.scale.items, 0), self.device)
        program = make_program(10)
        empty = {"none": jnp.zeros((1, 1), jnp.uint8)}
        jax.block_until_ready(program(self.x, self.w, empty))
        found: dict[str, Any] = {"products_s": 10 * self.product_s}
        for name, sends_ids, by_callback in (
            ("fetch_counts", False, False),
            ("callback_counts", False, True),
            ("callback_ids", True, True),
        ):
            notes = Notes(self.scale.items, by_callback=by_callback)
            times: dict[str, list[float]] = {"idle": [], "behind": []}
            for number in range(2 * self.scale.repeats + 2):
                behind = number % 2
                output = program(self.x, self.w, empty) if behind else ids
                began = time.perf_counter()
                notes.send(number, 0, ids, as_ids=sends_ids)
                called = time.perf_counter() - began
                notes.wait(number, 60)
                jax.block_until_ready(output)
                if number > 1:  # the first two compile
                    times["behind" if behind else "idle"].append(called)
            found[f"{name}_idle_s"] = statistics.median(times["idle"])
            found[f"{name}_behind_s"] = statistics.median(times["behind"])
        return found

    def small_put(self) -> dict[str, Any]:
        """How long four bytes take alone, and issued behind the copy of a whole unit."""
        number = np.zeros(1, np.int32)
        assert self.store is not None
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
        found: dict[str, Any] = {"bytes": needed}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            found["file_system"] = _file_system(folder)
            if shutil.disk_usage(folder).free < 1.2 * needed:
                return {"skipped": "not enough room", "needed_bytes": needed}
            began = time.perf_counter()
            locate = _write_layers(layout, folder)
            found["write_s"] = time.perf_counter() - began
            arms = [(name, reader, cold, None) for name, reader, cold in READS if not cold]
            arms += [
                (f"{READS[0][0]}_{n}_threads", READS[0][1], False, n) for n in _READING_THREADS
            ]
            arms += [(name, reader, cold, None) for name, reader, cold in READS if cold]
            for name, reader, cold, threads in arms:
                if time.perf_counter() > self.deadline:
                    found[name] = {"skipped": "out of time"}
                    continue
                if cold:
                    _forget(folder)
                repeats = 1 if cold else self.scale.repeats
                found[name] = self._disk_runs(layout, locate, name, reader, repeats, threads)
        return _with_summary(found, "gb_per_s", "storage_bytes")

    def _disk_runs(
        self,
        layout: SlabLayout,
        locate: Locate,
        name: str,
        reader: ReaderKind,
        repeats: int,
        threads: int | None,
    ) -> dict[str, Any]:
        """Runs with next to no compute; where repeated, also with as much as files take."""
        pinner = Pinner(self.driver)
        ring = DiskRing(
            layout,
            locate,
            rows=layout.items,
            slots=DISK_WINDOW + 1,
            reader=reader,
            threads=threads,
            pinner=pinner,
        )
        pinner.wait()
        steps = [Step(layer) for layer in range(layout.layers)]
        items = residency.even(layout.layers, layout.items, 0).streamed
        with Streamer(layout, items, self.device, ring=ring) as streamer:
            if repeats > 1:  # the page cache is warm afterwards, whatever it was
                self.run(streamer, steps, 1)
            runs = [self.run(streamer, steps, 1) for _ in range(repeats)]
            walls = [wall for _, wall in runs]
            middle, ledger = statistics.median(walls), runs[-1][0]
            found: dict[str, Any] = {
                "runs_wall_s": walls,
                "gb_per_s": ledger.total_bytes / middle / 1e9,
                "spread": (max(walls) - min(walls)) / middle,
                "storage_bytes": ledger.storage_bytes,
                "major_faults": ledger.major_faults,
                "slow_fills": ledger.slow_fills,
                **_account(ledger, runs[-1][1]),
            }
            if repeats > 1:
                unit_s = middle / len(steps)
                products = min(max(round(1.2 * unit_s / self.product_s), 1), _MOST_PRODUCTS)
                # As many layers as the model has: the first slots are read before any compute.
                passes = -(-self.scale.layers // len(steps))
                self.run(streamer, steps, products)
                hidden = [
                    self.run(streamer, steps * passes, products)
                    for _ in range(self.scale.disk_repeats if name == READS[0][0] else 1)
                ]
                write_timeline(self.out / f"streaming_timeline_{name}.json", hidden[-1][0].spans)
                found["with_compute"] = {
                    "units": len(steps) * passes,
                    "products": products,
                    "compute_alone_s": products * self.product_s * len(steps) * passes,
                    "median_wall_s": statistics.median(wall for _, wall in hidden),
                    "median_overlap": statistics.median(run.overlap or 0.0 for run, _ in hidden),
                    "runs": [_account(run, wall) for run, wall in hidden],
                }
        return found

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def _account(ledger: Ledger, wall: float) -> dict[str, Any]:
    """Where the time of a run went."""
    rates = ledger.copy_gb_per_s
    return {
        "wall_s": wall,
        "overlap": ledger.overlap,
        "copy_busy_s": ledger.copy_busy_s,
        "compute_busy_s": ledger.compute_busy_s,
        "both_busy_s": ledger.both_busy_s,
        "stall_s": ledger.stall_s,
        "dispatch_wait_s": ledger.dispatch_wait_s,
        "copy_gb_per_s_min": min(rates),
        "copy_gb_per_s_median": statistics.median(rates),
        "copy_gb_per_s_max": max(rates),
    }


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


def _slow_copies(runs: Sequence[dict[str, Any]], unit_bytes: float) -> dict[str, Any]:
    """Whether slow copies make the difference between the fastest and the slowest run.

    A copy is slow below 0.9 of the median rate of all runs; its excess is the time beyond what
    it would have taken at that rate. Differences are those of the slowest run to the fastest.
    """
    median = statistics.median(rate for run in runs for rate in run["copies"])

    def excess(run: dict[str, Any]) -> float:
        slow = [rate for rate in run["copies"] if 0 < rate < _SLOW_COPY * median]
        return sum(unit_bytes / 1e9 * (1 / rate - 1 / median) for rate in slow)

    ordered = sorted(runs, key=lambda run: run["wall_s"])
    fastest, slowest = ordered[0], ordered[-1]
    return {
        "median_gb_per_s": median,
        "count_by_run": [sum(rate < _SLOW_COPY * median for rate in run["copies"]) for run in runs],
        "excess_s_by_run": [excess(run) for run in runs],
        "wall_difference_s": slowest["wall_s"] - fastest["wall_s"],
        "excess_difference_s": excess(slowest) - excess(fastest),
        "copy_busy_difference_s": slowest["copy_busy_s"] - fastest["copy_busy_s"],
        "compute_busy_difference_s": slowest["compute_busy_s"] - fastest["compute_busy_s"],
    }


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


def _file_system(folder: str) -> str | None:
    """Type of the file system that a folder is on, None where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return None
    real = Path(folder).resolve()
    above = [(len(row[1]), row[2]) for row in mounts if real.is_relative_to(row[1])]
    return max(above)[1] if above else None


def _forget(folder: str) -> None:
    """Asks the system to drop cached pages of the files in a folder."""
    for path in Path(folder).iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked for and what was found; `met` is None for what has no limit or no result."""
    rows: list[dict[str, Any]] = []

    def row(what: str, limit: str, met: Callable[[Any], bool] | None, *keys: str) -> None:
        found: Any = results
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        judged = None if met is None or found is None else met(found)
        rows.append({"what": what, "limit": limit, "found": found, "met": judged})

    sustained = ("copies_alone", "sustained_gb_per_s")
    row("sustained GB/s, nothing computes", ">= 48", lambda x: x >= 48, *sustained)
    row("bytes of that run", ">= 50e9", lambda x: x >= 50e9, "copies_alone", "bytes")
    bound = ("compute_bound", "median_overlap")
    row("overlap, compute 1.2 x copy", ">= 0.95", lambda x: x >= 0.95, *bound)
    bound = ("copy_bound", "wall_over_bound")
    row("copy-bound wall / (bytes / bandwidth)", "<= 1.05", lambda x: x <= 1.05, *bound)
    for name in ("compute_bound", "copy_bound"):
        row(f"spread of 5 runs, {name}", "0.02, or explained", None, name, "spread")
        row(" slowest - fastest, s", "", None, name, "slow_copies", "wall_difference_s")
        row("  of it slow copies, s", "", None, name, "slow_copies", "excess_difference_s")
        row("  compute busy, s", "", None, name, "slow_copies", "compute_busy_difference_s")
    row("registration, s per GB", "", None, "pin", "s_per_gb")
    row("registration, device bytes", "", None, "pin", "device_bytes")
    for name in ("compute_bound", "copy_bound"):
        whole = ("windows", f"window_0_{name}", "median_wall_s")
        row(f"no prefetch, one pass, {name}, s", "", None, *whole)
        whole = ("windows", f"window_2_{name}", "median_wall_s")
        row(f"window 2, one pass, {name}, s", "", None, *whole)
    row("pageable GB/s", "", None, "pageable", "gb_per_s")
    row("pageable overlap", "", None, "pageable", "overlap")
    for name in ("lru", "static"):
        row(f"half resident, {name}, s", "", None, "policies", name, "median_wall_s")
        row(f"half resident, {name}, bytes", "", None, "policies", name, "bytes")
    row("waves: overlap", "", None, "waves", "median_overlap")
    for tokens in _LAYER_SECONDS:
        for name in ("independent", "correlated"):
            arm = ("routed", f"tokens_{tokens}_{name}")
            row(
                f"routed {tokens} {name}: bytes = distinct", "yes", bool, *arm, "bytes_are_distinct"
            )
            row(" items of a layer moved", "", None, *arm, "moved_mean")
            row(" routed, s", "", None, *arm, "wall_s")
            row(" whole, s", "", None, *arm, "whole_wall_s")
            row(" auto takes", "", None, *arm, "auto_takes")
    for name, *_ in READS:
        row(f"disk {name} GB/s", "", None, "disk", name, "gb_per_s")
    arm = ("disk", "preadv_warm")
    row("disk warm: bytes from storage", "0", lambda x: x == 0, *arm, "storage_bytes")
    row("disk warm: major page faults", "0", lambda x: x == 0, *arm, "major_faults")
    row(
        "disk warm: overlap, compute 1.2 x",
        ">= 0.95",
        lambda x: x >= 0.95,
        *arm,
        "with_compute",
        "median_overlap",
    )
    for threads in _READING_THREADS:
        fewer = (*arm[:1], f"{arm[1]}_{threads}_threads")
        row(f" with {threads} reading threads: GB/s", "", None, *fewer, "gb_per_s")
        row("  overlap", "", None, *fewer, "with_compute", "median_overlap")
    row("note by callback, idle, s", "", None, "notes", "callback_counts_idle_s")
    row("note by callback, behind compute, s", "", None, "notes", "callback_counts_behind_s")
    row("note fetched, s", "", None, "notes", "fetch_counts_behind_s")
    return rows


def print_table(results: dict[str, Any]) -> None:
    """The targets that something was found for, one line each."""
    words = {None: "", True: "met", False: "MISSED"}
    for row in results["targets"]:
        if (found := row["found"]) is None:
            continue
        text = f"{found:.4g}" if isinstance(found, float) else str(found)
        print(f"{row['what']:<44} {text:>14}  {row['limit']:<20}{words[row['met']]}")
    print(f"parts that failed or were left out: {', '.join(results['failed']) or 'none'}")


def parts(names: Iterable[str]) -> list[str]:
    """The named parts and those that they need, in their order; ValueError for an unknown one."""
    wanted: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in PARTS:
            raise ValueError(f"--parts names {name!r}, expected some of {', '.join(PARTS)}")
        wanted.add(name)
        left.extend(PARTS[name])
    return [name for name in PARTS if name in wanted]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures everything; returns the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder for results")
    parser.add_argument("--seconds", type=float, default=145.0, help="start no part after this")
    parser.add_argument("--folder", help="where files for the disk tier go; default: temporary")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test on a CPU")
    parser.add_argument("--parts", help="only these and what they need, comma separated")
    options = parser.parse_args(arguments)
    try:
        wanted = parts(options.parts.split(",") if options.parts else PARTS)
    except ValueError as error:
        parser.error(str(error))
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {options.out!r}, a folder that cannot be made ({error.strerror})")
    bench = Bench(TINY if options.tiny else FULL, out, options.seconds, options.folder)
    watchdog = threading.Timer(options.seconds + _GRACE_S, bench.stuck)
    watchdog.daemon = True
    watchdog.start()
    for name in wanted:
        bench.part(name, getattr(bench, name))
    watchdog.cancel()
    bench.close()
    print_table(bench.results)
    return bench.results


if __name__ == "__main__":
    sys.exit(1 if main()["failed"] else 0)
