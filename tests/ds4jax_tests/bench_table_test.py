"""The table of all budgets and the comparison with transformers: their commands and verdicts."""

import json
import pathlib
import sys

import pytest

from ds4jax.bench import beside_transformers, flash_table, layers
from ds4jax.cli import common
from ds4jax.config import ModelConfig
from ds4jax.run_config import RunConfig

ROOT = pathlib.Path(__file__).parents[2]
FLASH = ROOT / "configs" / "models" / "flash.json"
GIVEN = {
    "configs": "configs/runs",
    "prefix": "flash_1xh200",
    "model": "synthetic:flash",
    "python": "python3",
    "extra": ["--config.prefill.chunk_tokens=4096"],
}


def row(step: str, **changes):
    values = dict.fromkeys(flash_table.COLUMNS, 0) | {
        "step": step,
        "arm": "a",
        "prompt_tokens": 8192,
        "numerics": "bfloat16",
        "routing": "uniform",
        "chunk_tokens": 8192,
        "mode": "whole",
        "overlap": None,
        "peak_bytes": None,
        "sha256": "a" * 64,
    }
    return values | changes


def test_one_sha_is_demanded_of_equal_settings_only():
    rows = [row("full"), row("24gb"), row("zipf", routing="zipf", sha256="b" * 64)]
    assert flash_table.disagreements(rows) == []
    (text,) = flash_table.disagreements([*rows, row("48gb", sha256="c" * 64)])
    assert "8192 tokens" in text
    assert f"{'a' * 12} in full/a, 24gb/a; {'c' * 12} in 48gb/a" in text


def test_every_process_has_a_run_file_and_its_time():
    for step in flash_table.STEPS:
        command = flash_table.command_of(step, pathlib.Path("out") / step.name, 77.7, GIVEN)
        assert f"--out_dir=out/{step.name}" in command
        assert command[-1] == "--config.prefill.chunk_tokens=4096"
        if step.name == "beside":
            assert "--python=python3" in command
            continue
        assert "--time_limit=78" in command
        config = ROOT / "configs" / "runs" / f"flash_1xh200{step.budget}.toml"
        assert f"--config=configs/runs/{config.name}" in command
        assert RunConfig.from_toml(config).synthetic.distinct_layers == 16


def test_rows_of_a_process_are_taken_over_and_shown(tmp_path):
    record = {"rows": [], "ratios": []}
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [row("x", prompt_sha256="p")]}))
    (tmp_path / "beside.json").write_text(json.dumps({"ratios": [{"ratio": 8.0}]}))
    flash_table._collect(record, "24gb", tmp_path)
    flash_table._collect(record, "48gb", tmp_path / "missing")
    assert [each["step"] for each in record["rows"]] == ["24gb"]
    assert record["ratios"] == [{"ratio": 8.0}]
    assert "24gb" in flash_table.line(record["rows"][0])


def test_a_process_that_takes_too_long_is_ended():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert flash_table._run(command, {}, 0.2) == "killed after 0 s"
    assert flash_table._run([sys.executable, "-c", "raise SystemExit(3)"], {}, 60) == "exit code 3"


def test_without_time_every_process_is_left_out(tmp_path):
    arguments = ["table", f"--out_dir={tmp_path}", "--time_limit=20"]
    assert flash_table.main(arguments) == common.OK
    found = json.loads((tmp_path / "table.json").read_text())
    assert {step["name"] for step in found["steps"]} == {step.name for step in flash_table.STEPS}
    assert all("left_out_with_s" in step for step in found["steps"])


def test_unknown_processes_are_refused(tmp_path, capsys):
    assert flash_table.main(["table", f"--out_dir={tmp_path}", "--only=12gb"]) == common.USER_ERROR
    assert "--only has ['12gb'], expected some of short, full, 96gb" in capsys.readouterr().err


NO_PYTHON = "--python is 'nowhere/python', expected an interpreter"
TOO_LONG = "expected at most 1048576 (the positions of the model)"


@pytest.mark.parametrize(
    ("bench", "flag", "message"),
    [
        (flash_table, "--configs=nowhere", "nowhere/flash_1xh200.toml does not exist"),
        (flash_table, "--prefix=x", "x.toml does not exist"),
        (flash_table, "--python=nowhere/python", NO_PYTHON),
        (beside_transformers, "--python=nowhere/python", NO_PYTHON),
        (beside_transformers, "--repeats=0", "repeats=0: 0 is not a positive integer"),
        (beside_transformers, "--prompt_tokens=99999999999", TOO_LONG),
        (beside_transformers, "--model=none.json", "none.json does not exist"),
    ],
)
def test_what_nothing_could_be_measured_with_is_refused(bench, flag, message, tmp_path, capsys):
    arguments = ["bench", f"--out_dir={tmp_path / 'out'}", flag]
    assert bench.main(arguments) == common.USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_transformers_gets_the_layers_that_are_timed():
    model = layers.one_of_each(ModelConfig.from_json(FLASH))
    raw = beside_transformers.published_config(FLASH, model)
    assert raw["num_hidden_layers"] == 3
    assert sorted(raw["compress_ratios"]) == [0, 4, 128]
    assert raw["num_hash_layers"] == 0
    assert raw["hidden_size"] == 4096


def test_the_best_that_ran_is_compared():
    ours = [{"prompt_tokens": n, "median_s": 0.1} for n in (64, 128)]
    theirs = [
        {"prompt_tokens": 64, "experts": "eager", "median_s": 2.0},
        {"prompt_tokens": 64, "experts": "grouped_mm", "median_s": 0.9},
        {"prompt_tokens": 128, "experts": "grouped_mm", "error": "out of memory"},
        {"experts": "other", "error": "unknown"},
    ]
    (found,) = beside_transformers.ratios(ours, theirs)
    assert found["experts"] == "grouped_mm"
    assert found["ratio"] == pytest.approx(9.0)


def test_what_transformers_wrote_before_it_was_ended_is_kept(tmp_path):
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\necho \'{"rows": [{"prompt_tokens": 64}]}\' > "$3"\nexec sleep 60\n'
    )
    script.chmod(0o755)
    found = beside_transformers.transformers_rows({}, [64], 1, str(script), 0.5)
    assert found["rows"] == [{"prompt_tokens": 64}]
    assert found["ended"] == "stopped after 0.5 s"
    script.write_text("#!/bin/sh\nexit 4\n")
    found = beside_transformers.transformers_rows({}, [64], 1, str(script), 60)
    assert found == {"rows": [], "ended": "with exit code 4"}
