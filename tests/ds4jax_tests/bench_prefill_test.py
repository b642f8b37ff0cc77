"""The prefill bench on a tiny model: its files, its numbers and what it refuses."""

import csv
import json

import numpy as np
import pytest

from ds4jax import engine as engines
from ds4jax.bench import manifest, prefill
from ds4jax.cli import common


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
    """One run with streamed experts, two chunks a prompt at most."""
    folder = tmp_path_factory.mktemp("bench")
    code = run(
        folder,
        "--prompt_tokens=40,200",
        "--repeats=2",
        "--config.streaming.resident_fraction=0.5",
        "--config.streaming.mode=whole",
    )
    assert code == common.OK
    return folder / "out", json.loads((folder / "out" / "bench.json").read_text())


def test_rows_hold_the_measurements(record):
    _, found = record
    assert [row["prompt_tokens"] for row in found["rows"]] == [40, 200]
    assert [row["order"] for row in found["rows"]] == ["chunk_major", "layer_major"]
    layers = found["plan"]["layers"]
    for row in found["rows"]:
        assert len(row["seconds"]) == 2
        assert row["rate_tokens_per_s"] * row["median_s"] == pytest.approx(row["prompt_tokens"])
        assert row["predicted_bytes"] == row["moved_bytes"] > 0
        assert row["mode"] == "whole"
        assert [len(part) for part in row["distinct"]] == [layers]
        assert row["warm_up"]["programs"] >= 0
        assert len(row["warm_up"]["seconds"]) >= 2
        assert len(row["sha256"]) == 64


def test_manifest_says_what_was_run(record):
    _, found = record
    facts = found["manifest"]
    assert facts["config"]["prefill"]["chunk_tokens"] == 128
    assert facts["versions"]["jax"]
    assert len(facts["config_sha256"]) == len(facts["bench_sha256"]) == 64
    assert found["plan"]["price_bytes"]["total"] <= found["plan"]["available_bytes"]


def test_table_and_timelines_are_written(record):
    folder, found = record
    with open(folder / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sha256"] for row in rows] == [row["sha256"] for row in found["rows"]]
    for tokens in (40, 200):
        assert json.loads((folder / f"timeline_{tokens}.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--prompt_tokens=8,x", "--prompt_tokens is '8,x', expected whole numbers of at least 1"),
        ("--prompt_tokens=0", "expected whole numbers of at least 1"),
        ("--repeats=0", "--repeats is 0, expected at least 1"),
    ],
)
def test_wrong_flags_are_refused(flag, message, tmp_path, capsys):
    assert run(tmp_path, flag) == common.USER_ERROR
    assert message in capsys.readouterr().err


def test_outputs_that_change_end_the_run(monkeypatch):
    hashes = iter("abcd")
    monkeypatch.setattr(prefill, "output_hash", lambda result: next(hashes))
    with engines.load("synthetic:tiny", {"prefill.chunk_tokens": 128}) as engine:
        ids = manifest.synthetic_ids(20, engine.model_config.vocab_size)
        with pytest.raises(prefill.UnsteadyOutput, match="other bytes in each of 4 runs"):
            prefill._warm_up(engine, ids)


def test_logits_that_are_not_finite_end_the_run():
    class Result:
        logits = np.array([[0.0, np.nan]], np.float32)

    with pytest.raises(prefill.UnsteadyOutput, match="not finite"):
        prefill.output_hash(Result())


def test_shorter_prompts_are_prefixes():
    np.testing.assert_array_equal(
        manifest.synthetic_ids(50, 1000), manifest.synthetic_ids(80, 1000)[:50]
    )
