"""Block shapes of the grouped products, from the tuning table of the device or by rule."""

import dataclasses
import functools
import importlib.resources
import json

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
    """Blocks of both products of a layer; `rows` is the same, they share the table of row tiles."""

    gate_up: Tiling
    down: Tiling

    def __post_init__(self) -> None:
        if self.gate_up.rows != self.down.rows:
            raise ValueError(f"{self}: expected the same rows in both products")


def choose(
    device_kind: str, hidden: int, width: int, tokens: int, experts_per_token: int, experts: int
) -> LayerTiling:
    """Blocks for `tokens` rows routed to `experts_per_token` of `experts` experts each.

    Nothing else may enter: which experts are present, or measured times, would make the result's
    bits depend on them.
    """
    average = tokens * experts_per_token // max(experts, 1)
    bucket = max(16, min(128, 1 << max(average - 1, 0).bit_length()))
    table = _table(device_kind.lower().replace(" ", "_"))
    found = table.get(f"{hidden}x{width}", {}).get(str(bucket))
    if found is not None:
        return LayerTiling(Tiling(**found["gate_up"]), Tiling(**found["down"]))
    gate_up = Tiling(out=64, rows=bucket, step=64, warps=4, stages=3)
    return LayerTiling(gate_up, dataclasses.replace(gate_up, out=128 if hidden % 128 == 0 else 64))


@functools.cache
def _table(device_kind: str) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    file = importlib.resources.files("pallas_kernels") / "tuned" / f"{device_kind}.json"
    return json.loads(file.read_text())["routed_experts"] if file.is_file() else {}
