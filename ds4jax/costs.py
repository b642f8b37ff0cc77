"""What the parts of a run cost on a device: operations and bytes, and seconds from measured tables.

`work` counts what each part of a layer has to do at least. A `LayerTable` holds measured times of
the same parts; the share of the floor that they reached there is taken to hold at other lengths,
contexts and rates, interpolated between the rows that were measured.
"""

import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ds4jax.config import PRESETS, LayerKind, ModelConfig
from sharding.cost import PlanError

PARTS = ("attend", "route", "experts", "finish")
SMALL_ROW_SHAPES = (128, 1024)  # what short chunks are padded to instead of chunk_tokens

# Widths that temporaries of a layer depend on.
_WIDTHS = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
)


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device reaches at best: products of bfloat16, of float32, bytes read plus written."""

    matrix_flops_per_s: float
    float32_flops_per_s: float
    bytes_per_s: float


# Measured on an H200: a large bfloat16 product of random data, a device-to-device copy (read plus
# written). Float32 products run on the plain units; their rate is the data sheet's.
H200 = Rates(788e12, 67e12, 4.3e12)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a part has to do at least: operations by unit, and bytes of device memory.

    Numbers, or arrays of one value per chunk.
    """

    matrix_flops: Any
    float32_flops: Any
    nbytes: Any

    def seconds(self, rates: Rates) -> Any:
        """Seconds of the unit that has the most to do."""
        return np.maximum(
            self.matrix_flops / rates.matrix_flops_per_s
            + self.float32_flops / rates.float32_flops_per_s,
            self.nbytes / rates.bytes_per_s,
        )

    @property
    def floor_s(self) -> float:
        """Seconds on an H200."""
        return float(self.seconds(H200))


def row_shapes(chunk_tokens: int) -> tuple[int, ...]:
    """The numbers of rows that chunks are padded to, ascending."""
    return (*(rows for rows in SMALL_ROW_SHAPES if rows < chunk_tokens), chunk_tokens)


def padded_rows(tokens: int, shapes: Sequence[int]) -> int:
    """The one of `shapes`, see `row_shapes`, that a chunk of `tokens` tokens is padded to."""
    return next(rows for rows in shapes if rows >= tokens)


def uniform_distinct(config: ModelConfig, tokens: float) -> float:
    """Distinct experts that `tokens` tokens use if routing is independent and uniform."""
    share = config.num_experts_per_tok / config.n_routed_experts
    return float(config.n_routed_experts * -np.expm1(tokens * np.log1p(-min(share, 1 - 1e-12))))


def work(config: ModelConfig, layer: int, tokens: int, position: Any) -> dict[str, Work]:
    """The work of each part for `tokens` tokens from `position` on, bfloat16 activations.

    position  a number, or an array of them for as many chunks
    """
    c, hidden, heads, head = config, config.hidden_size, config.num_attention_heads, config.head_dim
    ratio, overlapped = c.layer_ratios[layer], c.kind(layer) is LayerKind.CSA
    streams = tokens * c.hc_mult * hidden * 2
    rows = tokens * hidden * 2
    begin = np.asarray(position, np.float64)
    end = begin + tokens

    def over_chunk(total: Any, *limits: int) -> Any:
        """Sum over the chunk's tokens, from sums over all tokens up to one."""
        return total(end, *limits) - total(begin, *limits)

    pairs = over_chunk(_window_sum, c.sliding_window)
    weights = hidden * c.q_lora_rank + c.q_lora_rank * heads * head + hidden * head
    weights += c.o_lora_rank * heads * head + hidden * c.o_groups * c.o_lora_rank
    attention, weight_bytes, read = 0.0, float(weights), 0.0
    if ratio:
        entries = end // ratio
        width = (2 if overlapped else 1) * head
        # The compressors' matrices are stored in bfloat16.
        plain = 2 * hidden * width
        if overlapped:
            pairs = pairs + over_chunk(_entry_sum, ratio, c.index_topk)
            seen = over_chunk(_entry_sum, ratio)
            attention = attention + 2.0 * c.index_n_heads * c.index_head_dim * seen
            plain += hidden * (4 * c.index_head_dim + c.index_n_heads)
            weights += c.q_lora_rank * c.index_n_heads * c.index_head_dim
            weight_bytes += c.q_lora_rank * c.index_n_heads * c.index_head_dim
            read = read + entries * c.index_head_dim * 2
        else:
            pairs = pairs + over_chunk(_entry_sum, ratio)
        weights += plain
        weight_bytes += 2 * plain
        read = read + entries * head * 2
    attention = attention + 4.0 * heads * head * pairs
    maps = c.hc_mult * (2 + c.hc_mult)
    site = 2.0 * tokens * c.hc_mult * hidden * maps
    ffn, routed = c.moe_intermediate_size, c.num_experts_per_tok
    expert = 3 * hidden * ffn
    slots = tokens * routed * hidden * 2
    # FP4 codes, and a scale byte for 32 of them, of the experts that are used.
    slab = uniform_distinct(c, tokens) * expert * (1 / 2 + 1 / 32)
    return {
        "attend": Work(2.0 * tokens * weights + attention, site, 2 * streams + weight_bytes + read),
        "route": Work(0.0, site + 2.0 * tokens * hidden * c.n_routed_experts, streams + rows),
        "experts": Work(2.0 * tokens * routed * expert, 0.0, slab + rows + slots),
        "finish": Work(2.0 * tokens * expert, 0.0, 2 * streams + rows + slots + expert),
    }


def _window_sum(tokens: Any, window: int) -> Any:
    """Sum of min(i, window) for i = 1..tokens."""
    return np.where(
        tokens <= window,
        tokens * (tokens + 1) / 2,
        window * (window + 1) / 2 + (tokens - window) * window,
    )


def _entry_sum(tokens: Any, ratio: int, most: int | None = None) -> Any:
    """Sum of i // ratio, but at most `most`, for i = 1..tokens."""
    counted = tokens if most is None else np.minimum(tokens, ratio * most - 1)
    full = counted // ratio
    total = ratio * full * (full - 1) / 2 + full * (counted - ratio * full + 1)
    return total if most is None else total + (tokens - counted) * most


class LayerTable:
    """Measured times of layer parts on one device; `to_json` of it goes into machine files.

    A row has kind, tokens, position and parts; a part has median_s, the fields of its `Work` and,
    where known, temp_bytes: what its program allocates beside arguments and results. A row whose
    numerics are not those of the table has its own.
    """

    def __init__(self, record: Mapping[str, Any], where: str = "layers"):
        try:
            self.device = str(record["device"])
            self.rates = Rates(**record["rates"])
            self.widths = dict(record["widths"])
            self.numerics = str(record.get("numerics") or PRESETS["official"])
            self.rows = list(record["rows"])
            self._efficiency = {q1: self._points(q1, self._share_of_floor) for q1 in (False, True)}
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise PlanError(
                f"{where}: the table of layer times is not complete ({error!r}): make it with "
                "python -m ds4jax.cli.probe --out=FILE --model=MODEL.json"
            ) from None
        if not self.rows:
            raise PlanError(f"{where}: the table of layer times is empty: probe the machine again")

    @property
    def least_rows(self) -> int:
        """The shortest chunk that was measured."""
        return min(row["tokens"] for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """What the constructor takes."""
        return {
            "device": self.device,
            "numerics": self.numerics,
            "rates": dataclasses.asdict(self.rates),
            "widths": self.widths,
            "rows": self.rows,
        }

    def measured(self, *, q1: bool) -> bool:
        """Whether layers were measured with FP8 products (`q1`), or with bfloat16 ones."""
        return any(self._q1(row) == q1 for row in self.rows)

    def seconds(
        self,
        config: ModelConfig,
        layer: int,
        rows: int,
        positions: np.ndarray,
        rates: Rates,
        *,
        q1: bool,
    ) -> dict[str, np.ndarray]:
        """Seconds of each part of a layer, for chunks of `rows` rows at `positions`.

        rates  of the device
        q1     of the run, see `Numerics`: products in FP8 take other kernels than in bfloat16. What
               was measured with the other ones stands in for what was not measured with these.
        """
        contexts, kind = positions + rows / 2, config.kind(layer).value
        efficiency = self._efficiency[q1 if self.measured(q1=q1) else not q1]
        return {
            part: np.broadcast_to(each.seconds(rates), positions.shape)
            / self._at(efficiency, kind, part, rows, contexts)
            for part, each in work(config, layer, rows, positions).items()
        }

    def temp_bytes(
        self, config: ModelConfig, layer: int, part: str, rows: int, capacity: int
    ) -> int | None:
        """Bytes that the program of a part allocates; None where it was not measured.

        capacity  tokens that the state has room for; a row was measured with as many as it needed
        """
        if any(self.widths.get(name) != getattr(config, name) for name in _WIDTHS):
            return None
        sizes: dict[int, dict[int, int]] = {}
        for row in self.rows:
            found = row["parts"][part].get("temp_bytes")
            if row["kind"] == config.kind(layer).value and found is not None:
                room = row["position"] + row["tokens"]
                by_room = sizes.setdefault(row["tokens"], {})
                by_room[room] = max(found, by_room.get(room, 0))
        if not sizes:
            return None
        measured = {count: _line(by_room, capacity) for count, by_room in sizes.items()}
        tokens = sorted(measured)
        if rows > tokens[-1]:
            return -(-measured[tokens[-1]] * rows // tokens[-1])
        return int(np.ceil(np.interp(rows, tokens, [measured[n] for n in tokens])))

    def _share_of_floor(self, part: Mapping[str, Any]) -> float:
        measured = Work(*(part[field.name] for field in dataclasses.fields(Work)))
        return float(measured.seconds(self.rates)) / part["median_s"]

    def _q1(self, row: Mapping[str, Any]) -> bool:
        return "q1" in (row.get("numerics") or self.numerics).split("+")

    def _points(
        self, q1: bool, value: Any
    ) -> dict[tuple[str, str], dict[int, list[tuple[float, float]]]]:
        """(kind, part) -> tokens -> (context, value), contexts ascending."""
        points: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
        for row in (row for row in self.rows if self._q1(row) == q1):
            for part in PARTS:
                by_tokens = points.setdefault((row["kind"], part), {})
                context = row["position"] + row["tokens"] / 2
                by_tokens.setdefault(row["tokens"], []).append((context, value(row["parts"][part])))
        return {
            key: {tokens: sorted(line) for tokens, line in sorted(lines.items())}
            for key, lines in points.items()
        }

    def _at(
        self,
        points: Mapping[tuple[str, str], Mapping[int, Sequence[tuple[float, float]]]],
        kind: str,
        part: str,
        rows: int,
        contexts: np.ndarray,
    ) -> np.ndarray:
        lines = points.get((kind, part)) or next(
            value for (_, name), value in points.items() if name == part
        )
        sizes = list(lines)
        curves = np.stack([np.interp(contexts, *np.array(lines[tokens]).T) for tokens in sizes])
        at = np.interp(np.log2(rows), np.log2(sizes), np.arange(len(sizes)))
        low = int(at)
        high = min(low + 1, len(sizes) - 1)
        return curves[low] + (at - low) * (curves[high] - curves[low])


def _line(points: Mapping[int, int], at: int) -> int:
    """Interpolated between points; beyond the last one as steep as before it, if that rises."""
    places = sorted(points)
    value = float(np.interp(at, places, [points[place] for place in places]))
    if len(places) > 1 and at > places[-1]:
        (low, high) = places[-2:]
        slope = max(points[high] - points[low], 0) / (high - low)
        value += slope * (at - high)
    return int(np.ceil(value))


def widths(config: ModelConfig) -> dict[str, int]:
    """What a table of layer times says of the model that was measured."""
    return {name: getattr(config, name) for name in _WIDTHS}


@functools.cache
def measured_h200() -> LayerTable:
    """Layers of V4-Flash on one H200, as measured; what plans use where nothing else is known."""
    text = importlib.resources.files("ds4jax").joinpath("data", "h200_layers.json").read_text()
    return LayerTable(json.loads(text), "ds4jax/data/h200_layers.json")
