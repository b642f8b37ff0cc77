"""Observers: plain lines, the bar and the metrics file see the same events."""

import io
import json

from ds4jax import events, testing


def chunk(done: int, total: int = 100, **changes) -> events.ChunkDone:
    values = {
        "prompt": 0,
        "chunk": done // 10 - 1,
        "position": done - 10,
        "tokens": 10,
        "rows": 16,
        "seconds": 2.0,
        "compiled": 0,
        "compile_seconds": 0.0,
        "done": done,
        "total": total,
    }
    return events.ChunkDone(**values | changes)


def test_metrics_have_a_unit_in_every_key_and_one_line_per_chunk():
    file = io.StringIO()
    observe = events.jsonl(file)
    observe(events.PromptStarted(0, 1, "p", 20, 0))
    observe(chunk(10, compiled=3, compile_seconds=0.5))
    observe(chunk(20))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert len(lines) == 2
    units = ("_index", "_tokens", "_s", "_per_s", "_programs")
    assert all(key == "schema" or key.endswith(units) for key in lines[0])
    assert lines[0]["compiled_programs"] == 3
    assert lines[0]["rate_tokens_per_s"] == 5.0
    assert [line["done_tokens"] for line in lines] == [10, 20]


def test_pass_gives_a_line_per_layer():
    file = io.StringIO()
    observe = events.jsonl(file)
    layers = (
        events.LayerPass(3, 0.25, 7, 1000, 0.125, 0.0, 5),
        events.LayerPass(4, 0.5, 8, 0, 0.0, 0.0, None),
    )
    observe(events.PassDone(20, 2, layers))
    observe(events.PassDone(4, 1, layers[:1]))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    units = ("_index", "_tokens", "_s", "_chunks", "_experts", "_bytes")
    assert all(key == "schema" or key.endswith(units) for key in lines[0])
    assert [(line["pass_index"], line["layer_index"]) for line in lines] == [(0, 3), (0, 4), (1, 3)]
    assert lines[0]["stall_s"] == 0.125
    assert lines[0]["waited_for_expert_index"] == 5


def test_plain_lines_come_at_the_ends_and_then_once_per_interval():
    clock, stream = testing.FakeClock(), io.StringIO()
    observe = events.plain(stream, interval_s=5.0, clock=clock)
    observe(events.WeightsLoaded(1 << 30, 2 << 30, 1.0))  # too early, not the end
    observe(events.WeightsLoaded(2 << 30, 2 << 30, 2.0))
    observe(events.PromptStarted(0, 2, "first", 100, 7))
    for done in range(10, 101, 10):
        clock.advance(2.0)
        observe(chunk(done))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loaded 2.000 GiB of 2.000 GiB at 1.07 GB/s"
    assert lines[1] == "prompt 1 of 2 (first): 100 tokens, 7 reused from the saved state"
    counts = [int(line.split()[1]) for line in lines[2:]]
    assert counts == [10, 40, 70, 100]  # the first, then every 6 s, then the last


def test_plain_line_tells_compile_time_of_the_chunk():
    stream = io.StringIO()
    events.plain(stream)(chunk(10, compiled=2, compile_seconds=1.5))
    assert "5.0 tokens/s in the last chunk, 1.5 s of it compiling" in stream.getvalue()


def test_bar_shows_both_phases():
    stream = io.StringIO()
    with events.Bar(stream) as bar:
        bar(events.WeightsLoaded(5, 5, 0.1))
        bar(events.PromptStarted(0, 1, "p", 100, 0))
        bar(chunk(100))
    text = stream.getvalue()
    assert "weights" in text
    assert "prompt 1 of 1 (p): 100 tokens" in text
    assert "prefill" in text
    assert "100%" in text


def test_fan_out_keeps_order():
    seen: list[tuple[str, events.Event]] = []
    observe = events.fan_out(
        lambda event: seen.append(("a", event)), lambda event: seen.append(("b", event))
    )
    observe(chunk(10))
    assert [name for name, _ in seen] == ["a", "b"]
