"""The bench of plan errors on a tiny model: bytes are exact on any device."""

import json
import pathlib

import pytest

from ds4jax.bench import plans
from ds4jax.cli import common
from ds4jax.config import ModelConfig

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"


def test_every_case_moves_what_was_planned_and_stages_change_no_bit(tmp_path, capsys):
    arguments = [
        "bench",
        f"--model={CONFIGS / 'tiny.json'}",
        f"--out_dir={tmp_path}",
        "--layers=3",
        "--repeats=1",
        "--config.prefill.chunk_tokens=32",
    ]
    assert plans.main(arguments) == common.OK
    record = json.loads((tmp_path / "plans.json").read_text())
    assert record["same_bits"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == record
    small, half, everything, stages = record["rows"]
    for row in record["rows"]:
        error = row["plan_error"]
        assert row["within"]["bytes"], error
        assert error["predicted_moved_bytes"] == error["moved_bytes"]
        assert error["predicted_s"] > 0
        assert error["time_error"] > 0  # the predicted times are those of an H200
        assert error["peak_device_bytes"] is None  # a CPU does not tell
    item = half["plan_error"]["moved_bytes"] // (3 * 8)
    assert item == 3 * 128 * (128 // 2 + 128 // 32)
    assert small["plan_error"]["moved_bytes"] % item == 0
    assert everything["plan_error"]["moved_bytes"] == stages["plan_error"]["moved_bytes"] == 0
    assert [stage["layers"] for stage in stages["plan"]] == [1, 2]


def test_errors_are_held_against_their_limits():
    error = {"time_error": -0.1, "device_error": 0.021, "moved_error_bytes": 0}
    assert plans.within(error) == {"time": True, "bytes": True, "memory": False}
    unknown = {"time_error": None, "device_error": None, "moved_error_bytes": -1}
    assert plans.within(unknown) == {"time": None, "bytes": False, "memory": None}


def test_a_model_is_cut_to_its_first_layers():
    flash = ModelConfig.from_json(CONFIGS / "flash.json")
    found = plans.cut(flash, 6)
    assert found.layer_ratios == flash.layer_ratios[:6]
    assert found.num_hash_layers == 3
    found.validate()
    with pytest.raises(common.UsageError, match=r"--layers is 44, expected 2 to 43"):
        plans.cut(flash, 44)
