"""The page of a run: whole, self-contained, true to the numbers, safe with any name."""

import html.parser
import re
import xml.etree.ElementTree as ET

import pytest

from ds4jax import events, page
from streaming.trace import Span

PRICE = {
    "weights_bytes": 4_000_000_000,
    "state_bytes": 500_000_000,
    "workspace_bytes": 1_500_000_000,
    "resident_bytes": 10_000_000_000,
    "slab_bytes": 2_000_000_000,
    "micro_batch_bytes": 0,
    "total_bytes": 18_000_000_000,
}


def record(streamed: bool = True, **changes) -> dict:
    """The parts of a run.json that the page shows."""
    moved = {
        "exactly_predicted": True,
        "predicted_bytes": {"ram": 700},
        "known_before_bytes": 700,
        "predicted_most_bytes": 700,
        "moved_bytes": {"ram": 700},
        "moved_experts": {"ram": 7},
        "padding_bytes": 0,
        "pageable_bytes": 0,
        "file_bytes": 0,
        "read_padding_bytes": 0,
        "major_faults": 0,
        "storage_bytes": None,
        "stall_s": 0.002,
        "overlap": 0.97,
        "peak_live_bytes": 200,
        "registered_bytes": 700,
        "copy_gb_per_s": {"copies_by_rate": {"45-50": 3, "50-55": 40}},
        "layers": [
            {"layer": n, "stall_s": 0.001 * n, "dispatch_wait_s": 0.0, "waited_for_expert": 3}
            for n in range(3)
        ],
    }
    values = {
        "status": "complete",
        "checkpoint": {"path": "model", "fingerprint": "abc", "layers": 3},
        "config": {"prefill": {"chunk_tokens": 8}, "prompt": {"text": ["secret"]}},
        "numerics": "bfloat16",
        "versions": {"jax": "1"},
        "device": {"kind": "GPU"},
        "prompts": [{"name": "first"}],
        "tokens_read": 20,
        "tokens_reused": 0,
        "prefill_s": 2.0,
        "rate_tokens_per_s": 10.0,
        "load_s": 1.0,
        "compile_s": 0.5,
        "bytes": {"available_bytes": 20_000_000_000},
        "plan": [{"device": "GPU 0", "price": PRICE, "experts_per_layer": 16}],
        "plan_error": {"peak_device_bytes": 17_000_000_000},
        "streaming": moved if streamed else None,
        "experts": [
            {"layer": n, "distinct_experts": 9, "distinct_experts_per_pass_mean": 4.5 + n}
            for n in range(3)
        ],
        "outputs": {"logits.npy": {"sha256": "f00d"}},
    }
    return values | changes


def chunk(number: int, compiled: int = 0) -> events.ChunkDone:
    return events.ChunkDone(0, number, 8 * number, 8, 8, 0.5, compiled, 0.1, 8, 20)


SPANS = [
    Span("compute", "compute L0 step 0", 1.0, 1.010, {"layer": 0, "bytes": 0}),
    Span("copy", "copy L1 step 1", 1.0, 1.004, {"layer": 1, "bytes": 350}),
    Span("compute", "stall L1 step 1", 1.010, 1.011, {"layer": 1}),
]


CHUNKS = (chunk(0, compiled=5), chunk(1))


def render(found: dict, chunks=CHUNKS, spans=SPANS, shown=(1, 2)) -> str:
    return page.render(found, list(chunks), [0.001, 0.002, 0.0005], list(spans), shown)


class Balance(html.parser.HTMLParser):
    """Fails for tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def pictures(text: str) -> list[ET.Element]:
    return [ET.fromstring(part) for part in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def titles(text: str) -> list[str]:
    return [e.text or "" for p in pictures(text) for e in p.iter() if e.tag.endswith("title")]


@pytest.mark.parametrize("streamed", [True, False])
def test_page_is_whole_and_needs_nothing_else(streamed):
    text = render(record(streamed), spans=SPANS if streamed else ())
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert not {name for name, _ in parser.attributes} & {"src", "href", "onload", "onclick"}
    assert "<script" not in text
    assert "url(" not in text
    assert len(pictures(text)) == (6 if streamed else 4)


def test_pictures_stay_inside_their_frame():
    for picture in pictures(render(record())):
        _, top, width, height = map(float, picture.attrib["viewBox"].split())
        for shape in picture.iter():
            if shape.tag.endswith("rect"):
                x, y, w, h = (float(shape.attrib[name]) for name in ("x", "y", "width", "height"))
                assert x >= 0
                assert y >= top
                assert x + w <= width + 0.51  # the thinnest rectangle is half a pixel
                assert y + h <= top + height


def test_numbers_are_those_of_the_run():
    text = render(record())
    told = titles(text)
    assert "copy L1 step 1: 4.000 ms, 350 B" in told
    assert "stall L1 step 1: 1.000 ms" in told
    assert "first up to token 16: 16.0 tokens/s" in told
    assert "experts that stay: 10 GB" in told
    assert "layer 2: 6.5 of 16 a pass, 9 over the run" in told
    assert "layer 1: 2.00 ms" in told
    assert "pass 2 of 2 over the experts" in text
    assert "measured peak: 17 GB" in text
    assert "<td>layer 2</td><td>2.000</td>" in text
    assert text.index("<td>layer 2</td>") < text.index("<td>layer 1</td>")
    assert "<td>that storage had to deliver</td><td>unknown</td>" in text


def test_compiling_chunks_are_hollow():
    circles = re.findall(r'<circle[^>]*fill="(#\w+)"', render(record()))
    assert circles[0] == "#fff"
    assert circles[1] != "#fff"


def test_names_are_escaped_and_prompts_are_not_shown():
    evil = "<script>alert('x')</script>"
    found = record(prompts=[{"name": evil}], checkpoint=record()["checkpoint"] | {"path": evil})
    text = render(found)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "secret" not in text


def test_layers_are_numbered_once_a_lane_and_only_what_happened_has_a_key():
    spans = [s._replace(end_s=s.end_s + 0.001) for s in SPANS]
    waves = [Span("copy", "copy L1 step 1 wave 1", 1.005, 1.011, {"layer": 1, "bytes": 1})]
    text = page._timeline([*spans, *waves], (0, 1))
    assert re.findall(r'text-anchor="middle">(\d)</text>', text)[:3] == ["1", "0", "1"]
    assert all(f"</i>{kind}" in text for kind in ("copy", "compute", "stall"))
    assert "</i>disk" not in text


def test_what_routers_asked_for_is_told_apart_from_what_was_known_before():
    routed = record()["streaming"] | {"exactly_predicted": False, "known_before_bytes": 300}
    assert "300 bytes of it were known, and 700 at most" in render(record(streaming=routed))


def test_a_single_chunk_is_a_number_and_no_picture():
    assert "One chunk: 16 tokens/s" in render(record(), chunks=(chunk(0),))


def test_run_without_streaming_chunks_or_peak_says_so():
    found = record(False, plan_error={"peak_device_bytes": None})
    text = render(found, chunks=(), spans=())
    assert "nothing was copied" in text
    assert "No chunk was read to its end" in text
    assert "not reported by this backend" in text


def test_stages_have_their_own_lanes_and_bars():
    spans = [s._replace(lane=f"stage {n} {s.lane}") for n in (0, 1) for s in SPANS]
    plan = record()["plan"][0]
    text = render(record(plan=[plan, plan | {"device": "GPU 1"}]), spans=spans)
    lanes = re.findall(r'<text x="0" [^>]*>(stage \d \w+)</text>', text)
    assert lanes == ["stage 0 copy", "stage 0 compute", "stage 1 copy", "stage 1 compute"]
    assert "GPU 1" in text


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0, [0]), (10, [0, 5, 10]), (0.004, [0, 0.001, 0.002, 0.003, 0.004]), (7, [0, 2, 4, 6])],
)
def test_axes_have_round_values(most, expected):
    assert page._nice(most, 4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567.0, "1,234,567"), (12.345, "12.3"), (0.00123, "0.00123"), (50.0, "50")],
)
def test_numbers_have_three_digits(value, text):
    assert page._number(value) == text


def test_ops_are_drawn_against_their_floors_where_a_run_was_traced():
    assert "Time by op" not in render(record())
    rows = [
        {"op": "experts", "seconds": 0.3, "floor_s": 0.15, "share_of_floor": 0.5, "copy": False},
        {"op": "in", "seconds": 0.1, "floor_s": None, "share_of_floor": None, "copy": True},
    ]
    text = render(record(ops=rows))
    assert {"experts: 300.00 ms", "experts: floor 150.00 ms", "in: 100.00 ms"} <= set(titles(text))
    (copy,) = (
        e for p in pictures(text) for e in p.iter() if e.findtext("{*}title") == "in: 100.00 ms"
    )
    assert copy.attrib["fill"] == page.COLORS["copy"]
    assert "<td>experts</td><td>300.00</td><td>150.00</td><td>50 %</td>" in text
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
