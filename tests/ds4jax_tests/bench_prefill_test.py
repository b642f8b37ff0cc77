"""The prefill bench on a tiny model: its files, its numbers and what it refuses."""

import csv
import json
import types
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ds4jax import engine as engines
from ds4jax import page, testing
from ds4jax.bench import ops, prefill
from ds4jax.checkpoint.synthetic import prompt_ids
from ds4jax.cli import common
from ds4jax.config import PRESETS
from ds4jax.run_config import RunConfig


def run(tmp_path, *arguments):
    return prefill.main(
        [
            "bench",
            "--checkpoint=synthetic:tiny",
            f"--out_dir={tmp_path / 'out'}",
            "--config.prefill.chunk_tokens=128",
            *arguments,
        ]
    )


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Two ways of streaming, two chunks a prompt at most; further rows of other roundings."""
    folder = tmp_path_factory.mktemp("bench")
    code = run(
        folder,
        "--prompt_tokens=40,200",
        "--config.prefill.chunk_tokens=129",  # rows for which nothing has been compiled yet
        "--repeats=2,1",
        "--config.streaming.resident_fraction=0.5",
        "--config.streaming.mode=whole",
        "--config.synthetic.distinct_layers=2",
        "--config.synthetic.routing=zipf",
        "--compare=streaming.mode=routed",
        "--then=numerics.preset=bfloat16:40",
        "--trace=40",
        "--profile_first",
    )
    assert code == common.OK
    return folder / "out", json.loads((folder / "out" / "bench.json").read_text())


def test_rows_hold_the_measurements(record):
    _, found = record
    rows = [(row["arm"], row["prompt_tokens"], row["repeats"]) for row in found["rows"]]
    later = "numerics.preset=bfloat16"
    assert rows == [("a", 40, 2), ("b", 40, 2), ("a", 200, 1), ("b", 200, 1), (later, 40, 2)]
    layers = found["arms"]["a"]["plan"]["layers"]
    for row in found["rows"]:
        assert len(row["seconds"]) == row["repeats"]
        assert row["rate_tokens_per_s"] * row["median_s"] == pytest.approx(row["prompt_tokens"])
        assert row["order"] == ("layer_major" if row["prompt_tokens"] > 129 else "chunk_major")
        assert row["known_before_bytes"] <= row["predicted_bytes"] == row["moved_bytes"]
        assert row["moved_bytes"] <= row["most_bytes"]
        assert [len(part) for part in row["distinct"]] == [layers]
        assert len(row["warm_up"]["seconds"]) >= 2
        assert len(row["sha256"]) == 64
        assert sum(chunk["tokens"] for chunk in row["chunks"]) == row["prompt_tokens"]
        assert 1 / 16 < row["busiest_expert_share"] <= 1
        assert row["gc_pause_s"] >= 0
        assert row["predicted_s"] > 0


def test_whole_layers_move_as_predicted_and_routed_sets_as_many_as_are_used(record):
    _, found = record
    for row in found["rows"]:
        if row["arm"] == "b":
            assert row["mode"] == "routed"
            assert row["moved_experts"] == row["distinct_streamed"]
            assert row["known_before_bytes"] < row["predicted_bytes"]
        else:
            assert row["mode"] == "whole"
            assert row["known_before_bytes"] == row["predicted_bytes"] > 0
            assert row["moved_experts"] == 5 * 8


def test_loading_and_first_runs_say_what_they_spent_their_time_on(record):
    folder, found = record
    for row in found["rows"]:
        assert len(row["warm_up"]["gc_pauses_s"]) == len(row["warm_up"]["seconds"])
        assert all(seconds >= 0 for seconds in row["warm_up"]["phases"].values())
    loading = found["arms"]["a"]["load_phases"]
    assert loading["jaxpr_to_mlir_module_duration"] > 0
    assert loading["backend_compile_duration"] > 0
    assert "engine.py" in (folder / "first_a_40.txt").read_text()


def test_comparisons_tell_gain_and_noise(record):
    _, found = record
    assert [each["prompt_tokens"] for each in found["comparisons"]] == [40, 200]
    for each in found["comparisons"]:
        assert each["gain_of_b"] == pytest.approx(each["a_s"] / each["b_s"] - 1)
        assert each["same_output"]


def test_manifest_says_what_was_run(record):
    _, found = record
    facts = found["arms"]["b"]["manifest"]
    assert facts["config"]["prefill"]["chunk_tokens"] == 129
    assert facts["config"]["streaming"]["mode"] == "routed"
    assert facts["config"]["synthetic"] == {"distinct_layers": 2, "routing": "zipf"}
    assert facts["versions"]["jax"]
    assert len(facts["config_sha256"]) == len(facts["bench_sha256"]) == 64
    plan = found["arms"]["a"]["plan"]
    assert plan["price_bytes"]["total"] <= plan["available_bytes"]
    assert plan["store_bytes"] * 5 == plan["streamed_experts"] * 2 * (
        found["rows"][0]["moved_bytes"] // 40
    )


def test_tables_pictures_and_timelines_are_written(record):
    folder, found = record
    with open(folder / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sha256"] for row in rows] == [row["sha256"] for row in found["rows"]]
    for tokens in (40, 200):
        for arm in "ab":
            path = folder / f"timeline_{arm}_{tokens}.json"
            assert json.loads(path.read_text())["traceEvents"]
    picture = ET.fromstring((folder / "bench.svg").read_text())
    names = [e.text for e in picture.iter() if e.tag.endswith("text")]
    assert {"40", "200", "a", "b", "numerics.preset=bfloat16"} <= set(names)
    assert "Time by op" in (folder / "page_a_40.html").read_text()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--prompt_tokens=8,x", "--prompt_tokens is '8,x', expected whole numbers of at least 1"),
        ("--prompt_tokens=0", "expected whole numbers of at least 1"),
        ("--prompt_tokens=99999999999", "expected at most 1048576 (the positions of the model)"),
        ("--then=prefill.chunk_tokens=64:99999999999", "--then has 99999999999, expected at most"),
        ("--checkpoint=synthetic:none", "synthetic:none names no model config"),
        ("--config.memory.device_bytes=1", "The weights alone do not fit"),
        ("--repeats=0", "--repeats is '0', expected whole numbers of at least 1"),
        ("--repeats=1,2", "--repeats has 2 numbers, expected 1 or 5, one per length"),
        ("--then=512", "--then is '512', expected changes, a colon and lengths"),
        ("--compare=numerics.present=bfloat16", "did you mean config.numerics.preset?"),
        ("--compare=synthetic.routing=zipf", "the two would not do the same work"),
        ("--compare=prefill.logits=all", "config.prefill.logits is all for B and last for A"),
    ],
)
def test_wrong_flags_are_refused(flag, message, tmp_path, capsys):
    assert run(tmp_path, flag) == common.USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_time_that_is_too_short_skips_lengths_but_keeps_rows(tmp_path):
    arguments = ("--prompt_tokens=20,1000000", "--repeats=1", "--time_limit=300")
    assert run(tmp_path, *arguments) == common.OK
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [row["prompt_tokens"] for row in found["rows"]] == [20]


def test_clock_allows_what_ends_in_time():
    now = iter([10.0, 11.0, 14.5]).__next__
    clock = prefill.Clock(5.0, now)
    assert clock.allows(4.0)
    assert not clock.allows(1.0)
    assert prefill.Clock(None).allows(1e9)


def arm(**changes):
    row = {
        "prompt_sha256": "p",
        "prompt_tokens": 10,
        "tokens_read": 10,
        "tokens_reused": 0,
        "routing": "uniform",
        "numerics": "n",
        "chunk_tokens": 8,
        "sha256": "s",
        "median_s": 1.0,
        "spread": 0.02,
    }
    return row | changes


@pytest.mark.parametrize(
    ("b", "verdict"), [(0.5, "B faster"), (2.0, "B slower"), (0.985, "within the noise")]
)
def test_verdicts_need_more_than_the_noise(b, verdict):
    assert prefill.comparison(arm(), arm(median_s=b))["verdict"] == verdict


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_reused": 4}, "tokens_reused is 0 in A and 4 in B: unequal work"),
        ({"sha256": "t"}, "gave s in A and t in B, with the same numerics"),
    ],
)
def test_unequal_work_is_not_compared(changes, message):
    with pytest.raises(prefill.UnsteadyOutput, match=message):
        prefill.comparison(arm(), arm(**changes))
    assert not prefill.comparison(arm(), arm(numerics="m", sha256="t"))["same_output"]


def test_outputs_that_change_end_the_run(monkeypatch):
    hashes = iter("abcd")
    monkeypatch.setattr(prefill, "output_hash", lambda result: next(hashes))
    with engines.load("synthetic:tiny", {"prefill.chunk_tokens": 128}) as engine:
        ids = prompt_ids(20, engine.model_config.vocab_size, "uniform")
        with pytest.raises(prefill.UnsteadyOutput, match="other bytes in each of 4 runs"):
            prefill.warm_up(engine, ids)


def test_logits_that_are_not_finite_end_the_run():
    class Result:
        logits = np.array([[0.0, np.nan]], np.float32)

    with pytest.raises(prefill.UnsteadyOutput, match="not finite"):
        prefill.output_hash(Result())


def test_changes_are_read_as_toml_or_text():
    changed = prefill.other_config(
        RunConfig(), "streaming.resident_fraction=0.5,numerics.preset=bfloat16,streaming.window=2"
    )
    assert changed.streaming.resident_fraction == 0.5
    assert changed.numerics.preset == "bfloat16"
    assert changed.streaming.window == 2


def test_kernels_are_told_apart_by_their_program(monkeypatch):
    def event(program: str, kernel: str, milliseconds: float):
        stats = [("hlo_module", program)] if program else []
        return types.SimpleNamespace(name=kernel, duration_ns=milliseconds * 1e6, stats=stats)

    kernels = [
        event("jit__attend", "gemm", 3.0),
        event("jit__attend.1", "softmax", 1.0),
        event("jit__experts", "gemm", 7.0),
        event("jit__embed", "gather", 0.5),
        event("", "MemcpyH2D", 20.0),
        event("", "Memset", 2.0),
    ]
    monkeypatch.setattr(ops, "_device_events", lambda folder: iter(kernels))
    seconds = ops.program_seconds("somewhere")
    assert seconds == pytest.approx(
        {"attend": 0.004, "experts": 0.007, "embed": 0.0005, "other": 0.002, "host to device": 0.02}
    )
    assert ops.kernel_seconds("somewhere")[1] == {"kernel": "gemm", "seconds": 0.01, "calls": 2}
    chunks = [types.SimpleNamespace(tokens=64, position=0)] * 2
    rows = ops.against_floors(seconds, testing.tiny_config(), chunks, PRESETS["official"])
    names = ["experts", "attend", "other", "route", "finish", "host to device"]
    assert [row["op"] for row in rows] == names
    assert [row["copy"] for row in rows] == [False] * 5 + [True]
    assert rows[0]["share_of_floor"] == pytest.approx(rows[0]["floor_s"] / 0.007)
    assert rows[2]["seconds"] == pytest.approx(0.0025)
    assert rows[3]["share_of_floor"] is None
    assert "attend              4.00 ms, floor" in ops.line(rows[1])


def test_pictures_of_one_length_have_a_scale():
    assert ET.fromstring(page.frontier({"a": [(512, 3.0)]})) is not None
