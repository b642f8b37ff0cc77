"""The command that writes the machine file."""

import json

import pytest

from ds4jax.cli import probe
from sharding import probe as measure
from sharding.machine import read_machine

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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--out is missing"),
        (["--out=/nowhere/machine.json"], "the folder /nowhere does not exist"),
        (["--out=machine.json", "--disk=/nowhere"], "--disk is '/nowhere', expected an existing"),
        (["--outt=machine.json"], "outt"),
    ],
)
def test_mistakes_of_the_user_are_code_2(flags, message, capsys):
    assert probe.main(["probe", *flags]) == 2
    assert message in capsys.readouterr().err
