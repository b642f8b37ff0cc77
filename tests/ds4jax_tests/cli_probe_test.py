"""The command that writes the machine file."""

import json
import pathlib

import numpy as np
import pytest

from ds4jax import costs
from ds4jax.cli import probe
from ds4jax.config import ModelConfig
from ds4jax.machine import planned_machine
from ds4jax.run_config import RunConfig
from sharding import probe as measure
from sharding.machine import read_machine

MODELS = pathlib.Path(__file__).parents[2] / "configs" / "models"
TINY = measure.Settings(
    sizes=(4096,), repeats=1, in_flight_bytes=8192, matmul_size=16, disk_bytes=measure.MIB
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(measure, "cpu_settings", lambda: TINY)


def test_writes_a_machine_file_and_its_summary(tmp_path, capsys):
    out = tmp_path / "machine.json"
    assert probe.main(["probe", f"--out={out}", f"--disk={tmp_path}"]) == 0
    stdout, stderr = capsys.readouterr()
    machine = read_machine(out)
    summary = json.loads(stdout.splitlines()[-1])
    assert summary["out"] == str(out)
    assert summary["devices"] == machine["devices"]
    assert machine["disk"]["warm_bytes_per_s"] > 0
    assert "not measured: host to device" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


def test_layers_of_a_model_are_timed_and_priced(tmp_path, capsys):
    out = tmp_path / "machine.json"
    arguments = [f"--out={out}", f"--model={MODELS / 'tiny.json'}", "--layer_tokens=16,32"]
    assert probe.main(["probe", *arguments, "--layer_positions=0,64"]) == 0
    record = read_machine(out)["layers"]
    model = ModelConfig.from_json(MODELS / "tiny.json")
    table = costs.LayerTable(record)
    assert {row["kind"] for row in record["rows"]} == {"swa", "csa", "hca"}
    assert len(record["rows"]) == 3 * 2 * 2
    for row in record["rows"]:
        layer = [model.kind(n).value for n in range(model.num_hidden_layers)].index(row["kind"])
        positions = np.array([row["position"]])
        times = table.seconds(model, layer, row["tokens"], positions, table.rates, q1=True)
        predicted = sum(times.values())
        # Where a layer was measured, the table gives back what was measured.
        measured = sum(row["parts"][part]["median_s"] for part in costs.PARTS)
        assert predicted[0] == pytest.approx(measured, rel=1e-6)
        for part in costs.PARTS:
            room = row["position"] + row["tokens"]
            found = table.temp_bytes(model, layer, part, row["tokens"], room)
            assert found == row["parts"][part]["temp_bytes"] >= 0
    machine = planned_machine(
        RunConfig().replace({"machine.file": str(out), "memory.device_bytes": 10**9}), 26_112, 1, 0
    )
    assert machine.table.rows == record["rows"]
    assert not any("layers were timed" in note for note in machine.notes)
    other = {"machine.file": str(out), "memory.device_bytes": 10**9, "numerics.preset": "bfloat16"}
    notes = planned_machine(RunConfig().replace(other), 26_112, 1, 0).notes
    assert any(note.startswith("layers were timed as bfloat16+q1+q2+q3 only") for note in notes)
    # Of the fastest device, by the speed that the first one has beside it.
    scale = machine.rates.bytes_per_s / table.rates.bytes_per_s
    assert scale == pytest.approx(1000 / machine.devices[0].speed_permille)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out is missing"),
        (["--out=/nowhere/machine.json"], "the folder /nowhere does not exist"),
        (["--out=/tmp"], "--out is /tmp, a folder: expected the name of a file"),
        (["--out=/proc/machine.json"], "--out is /proc/machine.json: nothing can be written in"),
        (["--out=machine.json", "--disk=/nowhere"], "--disk is '/nowhere', expected an existing"),
        (["--outt=machine.json"], "outt"),
        (["--out=machine.json", "--layer_tokens=0"], "--layer_tokens is '0', expected whole"),
        (["--out=machine.json", "--model=none.json"], "none.json does not exist"),
    ],
)
def test_mistakes_of_the_user_are_code_2(flags, message, capsys):
    assert probe.main(["probe", *flags]) == 2
    assert message in capsys.readouterr().err
