"""The report of a run as one page: what a person looks at. Standard library only, no scripts.

`render` takes the content of run.json, the chunks and passes of the run, and gives the HTML text
with its pictures inside.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds4jax import events
from ds4jax.report import size
from streaming.trace import Span

WIDTH = 1040  # of every picture, in CSS pixels
LEFT, RIGHT = 96, 16  # beside the plot, for its labels
MOST_BAR = 60  # width of a bar where there are few

COLORS = {
    "disk": "#8a63d2",
    "copy": "#2f6fde",
    "compute": "#2c9c69",
    "stall": "#d64545",
    "dispatch": "#9aa3ad",
}
FLOOR = "#1d2733"
LINES = ("#2f6fde", "#d6762b", "#2c9c69", "#8a63d2", "#d64545")
USES = {
    "weights_bytes": ("weights", "#5b6c7d"),
    "resident_bytes": ("experts that stay", "#2c9c69"),
    "slab_bytes": ("experts on their way", "#2f6fde"),
    "state_bytes": ("state", "#e0a32e"),
    "micro_batch_bytes": ("micro-batch", "#c9763d"),
    "workspace_bytes": ("workspace", "#b9c2cb"),
}

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2733; background: #f4f6f8; margin: 0; }
main { max-width: 1088px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 4px; }
section { background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 16px 24px;
  margin: 16px 0; overflow-x: auto; }
p { margin: 4px 0 10px; color: #55626f; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px 36px; }
.tiles div { min-width: 110px; } .tiles b { display: block; font-size: 20px; }
.tiles span, .key { color: #55626f; font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin: 0 5px 0 14px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 14px; border-bottom: 1px solid #e6ebf0; }
th { font-weight: 600; color: #55626f; } th:first-child, td:first-child { text-align: left; }
svg { display: block; } svg text { font: 12px system-ui, sans-serif; fill: #55626f; }
"""


def render(
    record: Mapping[str, Any],
    chunks: Sequence[events.ChunkDone],
    layer_seconds: Sequence[float],
    spans: Sequence[Span],
    shown_pass: tuple[int, int],
) -> str:
    """The page.

    record         the content of run.json
    layer_seconds  device time of every layer, over the run
    spans          of the pass that the timeline shows; shown_pass is its number and that of all
    """
    sections = [
        _head(record),
        _timeline(spans, shown_pass),
        _bytes(record["streaming"]),
        _rate(chunks, record["prompts"]),
        _memory(record),
        _ops(record),
        _layers(record, layer_seconds),
        _waits(record["streaming"]),
        _settings(record),
    ]
    title = f"Prefill of {record['tokens_read']} tokens"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in sections if part)
        + "\n</main></body></html>\n"
    )


def _head(record: Mapping[str, Any]) -> str:
    tiles = {
        "tokens read": f"{record['tokens_read']:,}",
        "tokens/s": _number(record["rate_tokens_per_s"]),
        "prefill": f"{_number(record['prefill_s'])} s",
        "of it compiling": f"{_number(record['compile_s'])} s",
        "loading": f"{_number(record['load_s'])} s",
    }
    if record["tokens_reused"]:
        tiles["tokens reused"] = f"{record['tokens_reused']:,}"
    if streamed := record["streaming"]:
        tiles["moved"] = size(sum(streamed["moved_bytes"].values()))
        tiles["waited for experts"] = f"{_number(streamed['stall_s'])} s"
        if streamed["overlap"] is not None:
            tiles["overlap"] = f"{100 * streamed['overlap']:.0f} %"
    boxes = "".join(
        f"<div><b>{_text(value)}</b><span>{name}</span></div>" for name, value in tiles.items()
    )
    return (
        f"<h1>Prefill run: {_text(record['status'])}</h1>"
        f"<p>{_text(record['checkpoint']['path'])}, {record['checkpoint']['layers']} layers, "
        f"{_text(record['numerics'])} on {_text(record['device']['kind'])}</p>"
        f'<section><div class="tiles">{boxes}</div></section>'
    )


def _timeline(spans: Sequence[Span], shown: tuple[int, int]) -> str:
    if not spans:
        text = "All experts stayed on the device: nothing was copied while it computed."
        return _section("Copy and compute", text)
    begin, end = min(s.begin_s for s in spans), max(s.end_s for s in spans)
    lanes = sorted({span.lane for span in spans}, key=_lane_order)
    height, scale = 34, (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-9)
    shapes = []
    for row, lane in enumerate(lanes):
        top = row * (height + 8)
        shapes.append(f'<text x="0" y="{top + height / 2 + 4}">{_text(lane)}</text>')
        shapes.append(_box(LEFT, top, WIDTH - LEFT - RIGHT, height, "#eef1f4"))
        ends: dict[int, tuple[float, float]] = {}  # of each layer
        for span in spans:
            if span.lane != lane:
                continue
            x, width = LEFT + (span.begin_s - begin) * scale, (span.end_s - span.begin_s) * scale
            kind = _kind(span)
            told = f"{span.name}: {1e3 * (span.end_s - span.begin_s):.3f} ms"
            if span.arguments.get("bytes"):
                told += f", {size(span.arguments['bytes'])}"
            shapes.append(_box(x, top, max(width, 0.5), height, COLORS.get(kind, "#888"), told))
            if kind in ("copy", "compute", "stall") and "layer" in span.arguments:
                layer = span.arguments["layer"]
                left, right = ends.get(layer, (x, x + width))
                ends[layer] = min(left, x), max(right, x + width)
        for layer, (left, right) in ends.items():
            if right - left > 7 * len(str(layer)) + 3:
                shapes.append(
                    f'<text x="{(left + right) / 2:.1f}" y="{top + height / 2 + 4}" '
                    f'style="fill:#fff" text-anchor="middle">{layer}</text>'
                )
    bottom = len(lanes) * (height + 8)
    shapes += _ticks(0, 1e3 * (end - begin), bottom, "ms")
    number, count = shown
    which = "the only pass" if count == 1 else f"pass {number + 1} of {count}"
    text = (
        f"Numbered by layer, one rectangle per slab: {which} over the experts. Stall: the device "
        "waits for a slab. Dispatch: the host hands a copy over, or waits for room for it. The "
        "file timeline.json has everything, for chrome://tracing or Perfetto."
    )
    found = {_kind(span) for span in spans}
    key = _key((kind, color) for kind, color in COLORS.items() if kind in found)
    return _section("Copy and compute", text, key, _svg(shapes, bottom + 26))


def _bytes(streamed: Mapping[str, Any] | None) -> str:
    if streamed is None:
        return ""
    predicted, moved = streamed["predicted_bytes"], streamed["moved_bytes"]
    tiers = sorted(predicted.keys() | moved.keys())
    rows = [
        (
            "host memory" if tier == "ram" else tier,
            f"{streamed['moved_experts'].get(tier, 0):,}",
            f"{moved.get(tier, 0):,}",
            f"{predicted.get(tier, 0):,}",
        )
        for tier in tiers
    ]
    others = [
        ("not page-locked", streamed["pageable_bytes"]),
        ("padding", streamed["padding_bytes"]),
        ("read from files", streamed["file_bytes"]),
        ("read beyond the experts", streamed["read_padding_bytes"]),
        ("that storage had to deliver", streamed["storage_bytes"]),
        ("page-locked host memory", streamed["registered_bytes"]),
        ("slabs on the device, at most", streamed["peak_live_bytes"]),
    ]
    exact = (
        "Known exactly before the run."
        if streamed["exactly_predicted"]
        else "The router decided what moves: predicted is what its choices ask for. Before the run "
        f"{streamed['known_before_bytes']:,} bytes of it were known, and "
        f"{streamed['predicted_most_bytes']:,} at most."
    )
    details = _table(
        ("bytes", ""),
        [(name, "unknown" if count is None else f"{count:,}") for name, count in others],
    )
    histogram = streamed["copy_gb_per_s"]["copies_by_rate"]
    rates = _bars(
        list(histogram), list(histogram.values()), COLORS["copy"], "copies", 130, axis="GB/s"
    )
    return _section(
        "Bytes by tier",
        f"{exact} {streamed['major_faults']} page faults waited for storage.",
        _table(("from", "experts", "bytes moved", "bytes predicted"), rows),
        "<p></p>",
        details,
        "<p>Copies by their rate in GB/s:</p>",
        rates,
    )


def _rate(chunks: Sequence[events.ChunkDone], prompts: Sequence[Mapping[str, Any]]) -> str:
    points = [
        (c.position + c.tokens, c.tokens / c.seconds, c.compiled > 0, c.prompt)
        for c in chunks
        if c.seconds > 0
    ]
    if not points:
        return _section("Rate by position", "No chunk was read to its end.")
    if len(points) == 1:
        return _section("Rate by position", f"One chunk: {_number(points[0][1])} tokens/s.")
    height = 190
    most_x, most_y = max(p[0] for p in points), 1.08 * max(p[1] for p in points)
    scale_x, scale_y = (WIDTH - LEFT - RIGHT) / most_x, height / most_y
    shapes = _grid(most_y, height, "tokens/s") + _ticks(0, most_x, height, "tokens")
    for prompt in sorted({point[3] for point in points}):
        own = [
            (LEFT + x * scale_x, height - y * scale_y, c) for x, y, c, p in points if p == prompt
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in own)
        shapes.append(
            f'<polyline points="{line}" fill="none" stroke="{COLORS["copy"]}" stroke-width="1.5"/>'
        )
        name = prompts[prompt]["name"] if prompt < len(prompts) else ""
        for (x, y, compiled), point in zip(own, [p for p in points if p[3] == prompt], strict=True):
            fill = "#fff" if compiled else COLORS["copy"]
            shapes.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" '
                f'stroke="{COLORS["copy"]}"><title>{_text(name)} up to token {point[0]}: '
                f"{point[1]:.1f} tokens/s</title></circle>"
            )
    text = "One point per chunk at its last token; hollow where something was compiled."
    return _section("Rate by position", text, _svg(shapes, height + 26))


def _memory(record: Mapping[str, Any]) -> str:
    stages, peak = record["plan"], record["plan_error"]["peak_device_bytes"]
    available = record["bytes"]["available_bytes"]
    totals = [stage["price"]["total_bytes"] for stage in stages]
    one = len(stages) == 1
    # What is free on a large machine would make the plan a thin line.
    room = available if one and available < 3 * totals[0] else max(*totals, peak or 0, 1)
    scale, height, shapes = (WIDTH - LEFT - RIGHT) / room, 34, []
    for row, stage in enumerate(stages):
        x, top = float(LEFT), row * (height + 8)
        shapes.append(
            f'<text x="0" y="{top + height / 2 + 4}">{_text(stage["device"][:14])}</text>'
        )
        shapes.append(_box(LEFT, top, WIDTH - LEFT - RIGHT, height, "#eef1f4"))
        for key, (name, color) in USES.items():
            count = stage["price"][key]
            shapes.append(_box(x, top, count * scale, height, color, f"{name}: {size(count)}"))
            x += count * scale
    bottom = len(stages) * (height + 8)
    if peak is not None and one:
        x = LEFT + peak * scale
        shapes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="-2" y2="{bottom - 4}" stroke="#d64545" '
            'stroke-width="2"/>'
        )
    unit, factor = ("GB", 1e9) if room >= 1e9 else ("MB", 1e6)
    shapes += _ticks(0, room / factor, bottom, unit)
    measured = "not reported by this backend" if peak is None else f"{size(peak)} (red line)"
    rows = [
        (name, *(f"{stage['price'][key]:,}" for stage in stages)) for key, (name, _) in USES.items()
    ]
    rows.append(("together", *(f"{total:,}" for total in totals)))
    return _section(
        "Device memory by use",
        f"Planned {size(sum(totals))} of {size(available)} that were free; measured peak: "
        f"{measured}.",
        _key((name, color) for name, color in USES.values()),
        _svg(shapes, bottom + 26),
        "<p></p>",
        _table(("planned bytes", *(stage["device"] for stage in stages)), rows),
    )


def _ops(record: Mapping[str, Any]) -> str:
    """Where the run was traced: the time of each op beside the least that the device needs."""
    if not (ops := record.get("ops")):
        return ""
    height, gap = 26, 8
    scale = (WIDTH - LEFT - RIGHT) / max(*(row["seconds"] for row in ops), 1e-9)
    shapes = []
    for number, row in enumerate(ops):
        top, floor = number * (height + gap), row["floor_s"] or 0.0
        told = f"{row['op']}: {1e3 * row['seconds']:.2f} ms"
        shapes.append(f'<text x="0" y="{top + height / 2 + 4}">{_text(row["op"])}</text>')
        width = max(row["seconds"] * scale, 0.5)
        color = COLORS["copy" if row["copy"] else "compute"]
        shapes.append(_box(LEFT, top, width, height, color, told))
        if floor:
            # A floor above the time would be a mistake in one of them: it is drawn to the edge.
            width = min(floor * scale, WIDTH - LEFT - RIGHT)
            told = f"{row['op']}: floor {1e3 * floor:.2f} ms"
            shapes.append(_box(LEFT, top + height / 3, width, height / 3, FLOOR, told))
    bottom = len(ops) * (height + gap)
    shapes += _ticks(0, 1e3 * max(row["seconds"] for row in ops), bottom, "ms")
    rows = [
        (
            row["op"],
            f"{1e3 * row['seconds']:.2f}",
            "" if row["floor_s"] is None else f"{1e3 * row['floor_s']:.2f}",
            "" if row["share_of_floor"] is None else f"{100 * row['share_of_floor']:.0f} %",
        )
        for row in ops
    ]
    return _section(
        "Time by op",
        "Device time of the programs of a traced run; copies run beside them. The floor is the "
        "larger of a program's operations and its bytes at the best rates measured on an H200, "
        "bfloat16 products.",
        _key((("programs", COLORS["compute"]), ("floor", FLOOR), ("copies", COLORS["copy"]))),
        _svg(shapes, bottom + 26),
        "<p></p>",
        _table(("op", "ms", "floor, ms", "share"), rows),
    )


def frontier(lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """A picture of rates (tokens/s) over prompt lengths, one line for each name, as SVG text."""
    points = [point for line in lines.values() for point in line]
    most = 1.08 * max((rate for _, rate in points), default=1.0)
    first = math.log2(min((tokens for tokens, _ in points), default=1))
    last = math.log2(max((tokens for tokens, _ in points), default=2))
    height, step = 300, (WIDTH - LEFT - RIGHT - 80) / max(last - first, 1.0)

    def place(tokens: int) -> float:
        return LEFT + 40 + (math.log2(tokens) - first) * step

    shapes = [*_grid(most, height, "tokens/s"), f'<text x="0" y="{height + 16}">tokens</text>']
    for tokens in sorted({tokens for tokens, _ in points}):
        middle = f'x="{place(tokens):.1f}" y="{height + 16}" text-anchor="middle"'
        shapes.append(f"<text {middle}>{tokens:,}</text>")
    for number, (name, line) in enumerate(lines.items()):
        color = LINES[number % len(LINES)]
        own = sorted(line)
        path = " ".join(f"{place(x):.1f},{height * (1 - y / most):.1f}" for x, y in own)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y in own:
            shapes.append(
                f'<circle cx="{place(x):.1f}" cy="{height * (1 - y / most):.1f}" r="4" '
                f'fill="{color}"><title>{_text(name)}, {x:,} tokens: {_number(y)} tokens/s</title>'
                "</circle>"
            )
        shapes.append(_box(LEFT, height + 30 + 18 * number, 11, 11, color))
        shapes.append(f'<text x="{LEFT + 18}" y="{height + 40 + 18 * number}">{_text(name)}</text>')
    return _svg(shapes, height + 36 + 18 * len(lines))


def _layers(record: Mapping[str, Any], layer_seconds: Sequence[float]) -> str:
    table = record["experts"]
    labels = [str(row["layer"]) for row in table]
    distinct = [row["distinct_experts_per_pass_mean"] for row in table]
    experts = record["plan"][0]["experts_per_layer"]
    told = [
        f"layer {row['layer']}: {row['distinct_experts_per_pass_mean']:.1f} of {experts} a pass, "
        f"{row['distinct_experts']} over the run"
        for row in table
    ]
    times = [f"layer {n}: {1e3 * seconds:.2f} ms" for n, seconds in enumerate(layer_seconds)]
    return _section(
        "By layer",
        f"Distinct experts that a pass used, of {experts}:",
        _bars(labels, distinct, COLORS["copy"], "experts", 150, told, experts),
        "<p>Device time over the run in ms, waits for experts included:</p>",
        _bars(
            labels,
            [1e3 * seconds for seconds in layer_seconds],
            COLORS["compute"],
            "ms",
            150,
            times,
        ),
    )


def _waits(streamed: Mapping[str, Any] | None) -> str:
    if streamed is None:
        return ""
    worst = sorted(
        (row for row in streamed["layers"] if row["stall_s"] + row["dispatch_wait_s"] > 0),
        key=lambda row: -row["stall_s"] - row["dispatch_wait_s"],
    )[:8]
    if not worst:
        return _section("Waits", "No layer waited for an expert.")
    rows = [
        (
            f"layer {row['layer']}",
            f"{1e3 * row['stall_s']:.3f}",
            f"{1e3 * row['dispatch_wait_s']:.3f}",
            str(row["waited_for_expert"]),
        )
        for row in worst
    ]
    names = ("longest waits", "device, ms", "host for files, ms", "expert")
    return _section("Waits", "Compute that had to wait for a slab.", _table(names, rows))


def _settings(record: Mapping[str, Any]) -> str:
    rows = [
        (f"config.{section}.{key}", str(value))
        for section, values in record["config"].items()
        for key, value in values.items()
        if section != "prompt"
    ]
    rows += [(name, str(value)) for name, value in record["versions"].items()]
    rows += [("weights", record["checkpoint"]["fingerprint"])]
    rows += [(name, output["sha256"]) for name, output in record["outputs"].items()]
    return _section("Settings", "", _table(("key", "value"), rows))


def _bars(
    labels: Sequence[str],
    values: Sequence[float],
    color: str,
    unit: str,
    height: int,
    told: Sequence[str] | None = None,
    top: float | None = None,
    axis: str = "layer",
) -> str:
    """One bar per value; told is what each says when pointed at, top the end of the scale."""
    most = top or 1.08 * max(values, default=0) or 1.0
    step = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
    shapes = _grid(most, height, unit)
    every = max(1, math.ceil(34 / step))
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        x, bar = LEFT + index * step, height * value / most
        text = told[index] if told else f"{label}: {value}"
        width = min(0.8 * step, MOST_BAR)
        shapes.append(_box(x + (step - width) / 2, height - bar, width, bar, color, text))
        if index % every == 0:
            shapes.append(
                f'<text x="{x + step / 2:.1f}" y="{height + 16}" text-anchor="middle">'
                f"{_text(label)}</text>"
            )
    shapes.append(f'<text x="0" y="{height + 16}">{axis}</text>')
    return _svg(shapes, height + 22)


def _grid(most: float, height: int, unit: str) -> list[str]:
    """Horizontal lines with their values."""
    shapes = []
    for value in _nice(most, 4):
        y = height - height * value / most
        shapes.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e8ed"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
        )
    shapes.append(f'<text x="0" y="{height - 10}">{unit}</text>')
    return shapes


def _ticks(first: float, last: float, top: float, unit: str) -> list[str]:
    """Values below a horizontal axis."""
    span = max(last - first, 1e-12)
    shapes = []
    for value in _nice(span, 8):
        x = LEFT + (WIDTH - LEFT - RIGHT) * value / span
        shapes.append(
            f'<text x="{x:.1f}" y="{top + 16}" text-anchor="middle">{_number(first + value)}</text>'
        )
    shapes.append(f'<text x="0" y="{top + 16}">{unit}</text>')
    return shapes


def _nice(most: float, count: int) -> list[float]:
    """About `count` round values from 0 up to `most`."""
    if most <= 0:
        return [0.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [step * index for index in range(int(most / step * 1.0001) + 1)]


def _number(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _kind(span: Span) -> str:
    """What a span of the timeline is, a key of `COLORS`."""
    return "stall" if span.name.startswith("stall") else span.lane.rpartition(" ")[2]


def _lane_order(lane: str) -> tuple[str, int]:
    stage, _, kind = lane.rpartition(" ")
    order = list(COLORS)
    return stage, order.index(kind) if kind in order else len(order)


def _box(x: float, y: float, width: float, height: float, color: str, told: str = "") -> str:
    title = f"<title>{_text(told)}</title>" if told else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}" '
        f'fill="{color}" stroke="#fff" stroke-width="0.3">{title}</rect>'
    )


def _svg(shapes: Iterable[str], height: float) -> str:
    # Room for half a line of text above the plot.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height + 8:.0f}" '
        f'viewBox="0 -8 {WIDTH} {height + 8:.0f}" role="img">{"".join(shapes)}</svg>'
    )


def _key(entries: Iterable[tuple[str, str]]) -> str:
    marks = "".join(f'<i style="background:{color}"></i>{_text(name)}' for name, color in entries)
    return f'<p class="key">{marks}</p>'


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _section(title: str, text: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2><p>{_text(text)}</p>{''.join(parts)}</section>"


def _text(value: object) -> str:
    return html.escape(str(value))
