"""Block shapes of the grouped products, from the tuning table of the device or by rule."""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

MINIMUM_BLOCK = 64  # rows of a weight and contraction elements are cut in multiples of this


@dataclasses.dataclass(frozen=True)
class Tiling:
    """One block of a grouped product: `out` weight rows times `rows` routed rows.

    step    contraction elements per loop iteration.
    warps, stages   warps of a block and depth of the software pipeline.
    """

    out: int
    rows: int
    step: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        for name, value, least in (
            ("out", self.out, MINIMUM_BLOCK),
            ("rows", self.rows, 16),
            ("step", self.step, MINIMUM_BLOCK),
            ("warps", self.warps, 1),
        ):
            if value < least or value & (value - 1):
                raise ValueError(f"{name}={value}: expected a power of two of at least {least}")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages}: expected at least 1")


@dataclasses.dataclass(frozen=True)
class LayerTiling:
    """Blocks of both products of a layer, one pair per size of row tiles, largest size first.

    The products of a pair share a table of row tiles, so their `rows` are equal. All sizes have the
    `step` of the first: it decides the order of sums, and a row must get the same bits in any tile.
    """

    gate_up: tuple[Tiling, ...]
    down: tuple[Tiling, ...]

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not sizes or sizes != tuple(blocks.rows for blocks in self.down):
            raise ValueError(f"{self}: expected the same rows in both products")
        if list(sizes) != sorted(set(sizes), reverse=True):
            raise ValueError(f"{self}: expected decreasing rows")
        for product in (self.gate_up, self.down):
            if len({blocks.step for blocks in product}) > 1:
                raise ValueError(f"{self}: expected one step for all sizes of a product")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(blocks.rows for blocks in self.gate_up)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the Hopper kernels cut the products.

    sizes      routed rows that a tile may be computed with, ascending: it takes the first that
               holds its rows. The last one is that of a full tile.
    chunk      rows of one FP8 product at most; a size is cut into equal products.
    under_way  FP8 products that run at a time, 1 or 2.
    stages     buffers in the ring.
    """

    sizes: tuple[int, ...]
    chunk: int
    under_way: int
    stages: int

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes={self.sizes}: expected ascending numbers")
        if not 0 < self.rows <= 256 or self.rows % 32:
            raise ValueError(f"sizes={self.sizes}: expected a multiple of 32 up to 256 as the last")
        for size in self.sizes:
            products = -(-size // self.chunk)
            if size % (8 * products):
                raise ValueError(
                    f"sizes={self.sizes}, chunk={self.chunk}: {size} rows are no equal products of "
                    "a multiple of 8 rows"
                )
        if self.under_way not in (1, 2) or self.stages < 2:
            raise ValueError(
                f"under_way={self.under_way}, stages={self.stages}: expected 1 or 2, and 2 or more"
            )

    @property
    def rows(self) -> int:
        """Of a full tile."""
        return self.sizes[-1]

    def product_rows(self, size: int) -> int:
        """Rows of each FP8 product of a tile computed with `size` rows."""
        return size // -(-size // self.chunk)

    def store_rows(self, size: int) -> int:
        """Rows of such a tile that are written at a time."""
        return max(rows for rows in range(8, 57, 8) if size % rows == 0)


def choose(
    device_kind: str, hidden: int, width: int, tokens: int, experts_per_token: int, experts: int
) -> LayerTiling:
    """Blocks for `tokens` rows routed to `experts_per_token` of `experts` experts each.

    Nothing else may enter: which experts are present, or measured times, would make the result's
    bits depend on them.
    """
    average = tokens * experts_per_token / max(experts, 1)
    bucket = next((size for size in (16, 32, 64) if average <= size), 128)
    table = _table(device_kind.lower().replace(" ", "_"), "routed_experts")
    found = table.get(f"{hidden}x{width}", {}).get(str(bucket))
    if found is not None:
        products = (
            tuple(Tiling(**blocks) for blocks in found[name]) for name in ("gate_up", "down")
        )
        return LayerTiling(*products)
    blocks = Tiling(out=64, rows=bucket, step=64, warps=4, stages=3)
    return LayerTiling((blocks,), (dataclasses.replace(blocks, out=128),))


def schedule(device_kind: str, hidden: int, width: int, kind: str) -> Schedule:
    """How the Hopper kernels cut the products of `kind` "fp8" or "bf16"."""
    table = _table(device_kind.lower().replace(" ", "_"), "routed_experts_sm90")
    found = table.get(f"{hidden}x{width}", {}).get(kind)
    if found is not None:
        return Schedule(**(found | {"sizes": tuple(found["sizes"])}))
    return Schedule(sizes=(64, 96, 128, 160, 192), chunk=96, under_way=1, stages=4)


@functools.cache
def _table(device_kind: str, section: str) -> dict[str, Any]:
    file = importlib.resources.files("pallas_kernels") / "tuned" / f"{device_kind}.json"
    return json.loads(file.read_text()).get(section, {}) if file.is_file() else {}
