"""The command ds4jax-plan: a table and JSON for a machine that may be another one."""

import json

import pytest

from ds4jax import costs, testing
from ds4jax.checkpoint.safetensors import SafetensorsSource
from ds4jax.cli import plan


def run(capsys, *arguments) -> tuple[int, list[str], str]:
    code = plan.main(["ds4jax-plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def test_flash_is_planned_for_a_gpu_that_is_not_here(capsys):
    code, lines, _ = run(
        capsys,
        "--checkpoint=synthetic:flash",
        "--prompt_tokens=131072",
        "--host_bytes=200000000000",
        "--config.memory.device_bytes=128000000000",
    )
    assert code == 0
    found = json.loads(lines[-1])
    (stage,) = found["stages"]
    assert found["schema"] == "ds4jax.plan/2"
    assert (found["passes"], stage["order"], stage["tier"]) == (1, "layer_major", "ram")
    assert stage["price"]["total_bytes"] <= found["device_bytes"][0] == 128_000_000_000
    residents = stage["residents_per_layer"]
    assert stage["streamed_bytes"] == (43 * 256 - sum(residents)) * stage["expert_bytes"]
    assert found["predicted_bytes"] == {"ram": stage["streamed_bytes"]}
    assert found["predicted_s"] >= max(found["predicted_compute_s"], found["predicted_copy_s"])
    table = "\n".join(lines[:-1])
    assert len(set(residents)) == 1
    assert f"{residents[0]} of 256 experts in every layer" in table
    assert "binding resource: compute of stage 0" in table
    assert "assumed: there is no machine file" in table
    assert "what binds   device memory" in table
    assert f"{stage['price']['resident_bytes']} bytes" in table


def test_a_micro_batch_that_waits_on_the_host_is_told_with_its_bytes(capsys):
    code, lines, _ = run(
        capsys,
        "--checkpoint=synthetic:flash",
        "--prompt_tokens=131072",
        "--host_bytes=200000000000",
        "--config.memory.device_bytes=48000000000",
        "--config.streaming.activations=host",
    )
    assert code == 0
    (stage,) = json.loads(lines[-1])["stages"]
    assert stage["activations"] == "host"
    assert stage["host_activation_bytes"] > 0
    assert stage["locking_device_bytes"] > 0
    waiting = f"waits between layers in {stage['host_activation_bytes']} bytes of host memory"
    assert waiting in "\n".join(lines[:-1])


def test_more_passes_move_more_and_the_split_is_shown(capsys):
    code, lines, _ = run(
        capsys,
        "--checkpoint=synthetic:flash",
        "--prompt_tokens=40000",
        "--host_bytes=200000000000",
        "--config.memory.device_bytes=64000000000",
        "--config.streaming.micro_batch_tokens=16384",
        "--config.pipeline.split=20,23",
    )
    assert code == 0
    found = json.loads(lines[-1])
    assert found["passes"] == 3
    assert [stage["layers"] for stage in found["stages"]] == [20, 23]
    for stage in found["stages"]:
        assert stage["streamed_bytes"] == 3 * stage["streamed_bytes_per_pass"]
    assert "cpu:1: layers 20 to 42" in lines
    assert found["split"] == [20, 23]


def test_layers_are_split_over_unequal_devices(capsys, tmp_path):
    """The card with a third of the memory gets the fewest layers; chunk_tokens is only advised."""
    machine = {
        "schema": 1,
        "platform": "gpu",
        "devices": [
            {
                "id": i,
                "kind": "card",
                "memory_bytes": gb * 10**9,
                "memory_bytes_per_s": 4 * 10**12,
                "matmul_flops_per_s": {"bfloat16": 700 * 10**12, "float32": 60 * 10**12},
                "host_to_device": {"registered": [{"bytes": 1 << 28, "bytes_per_s": 25 * 10**9}]},
            }
            for i, gb in enumerate((80, 48, 48, 24))
        ],
        "links": [],
    }
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    code, lines, _ = run(
        capsys,
        "--checkpoint=synthetic:flash",
        "--prompt_tokens=131072",
        "--host_bytes=200000000000",
        f"--config.machine.file={tmp_path / 'machine.json'}",
        "--config.pipeline.split=auto",
    )
    assert code == 0
    found = json.loads(lines[-1])
    by_memory = dict(zip(found["devices"], found["split"], strict=True))
    assert sum(found["split"]) == 43
    assert by_memory[3] < min(by_memory[0], by_memory[1], by_memory[2])
    for stage in found["stages"]:
        assert stage["price"]["total_bytes"] <= stage["device_bytes"]
    assert found["ties"][0]["split"] == found["split"]
    assert found["runners_up"]
    assert all("chunk_tokens" in each["setting"] for each in found["recommended"])
    text = "\n".join(lines)
    assert "binding resource: " in text
    assert "runners-up:" in text


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("rates", "bytes_per_s"), float("nan"), "layers.rates.bytes_per_s is nan, expected a num"),
        (("widths",), "x", "layers.widths is 'x', expected an object"),
        (("rows", 0, "tokens"), 0, "layers.rows[0].tokens is 0, expected a whole number of at le"),
        (("rows", 1, "parts", "route", "median_s"), float("inf"), "route.median_s is inf, expect"),
        (("rows", 0, "parts", "attend", "temp_bytes"), "x", "temp_bytes is 'x', expected a whole"),
    ],
)
def test_layer_times_that_no_machine_has_are_named(place, value, message, capsys, tmp_path):
    part = layers = json.loads(json.dumps(costs.measured_h200().to_json()))
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    device = {
        "id": 0,
        "kind": "card",
        "memory_bytes": 48 * 10**9,
        "memory_bytes_per_s": 4 * 10**12,
        "matmul_flops_per_s": {"bfloat16": 700 * 10**12},
    }
    machine = {"schema": 1, "platform": "gpu", "devices": [device], "links": [], "layers": layers}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    code, lines, err = run(
        capsys,
        "--checkpoint=synthetic:tiny",
        "--prompt_tokens=5",
        f"--config.machine.file={tmp_path / 'machine.json'}",
    )
    assert (code, lines) == (2, [])
    assert err.startswith("error: config.machine.file: layers.")
    assert message in err


def test_no_weight_is_read(capsys, tmp_path, monkeypatch):
    folder = testing.write_checkpoint(tmp_path / "tiny")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("read a tensor")

    monkeypatch.setattr(SafetensorsSource, "read_into", fail)
    code, lines, _ = run(capsys, f"--checkpoint={folder}", "--prompt_tokens=100")
    assert code == 0
    assert json.loads(lines[-1])["stages"][0]["binding"].startswith("nothing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint=synthetic:tiny",), "--prompt_tokens is missing"),
        (("--prompt_tokens=5",), "--checkpoint is missing"),
        (
            (
                "--checkpoint=synthetic:flash",
                "--prompt_tokens=5",
                "--config.memory.device_bytes=1000000000",
            ),
            "are missing",
        ),
        (("--checkpoint=synthetic:tiny", "--prompt_tokens=0"), "--prompt_tokens"),
        (
            ("--checkpoint=synthetic:tiny", "--prompt_tokens=5,99999999999999"),
            "--prompt_tokens has 99999999999999, expected at most 1048576 (the positions of",
        ),
        (
            ("--checkpoint=synthetic:tiny", "--prompt_tokens=5", "--config.prefill.max_tokens=4"),
            "--prompt_tokens has 5, expected at most 4 (config.prefill.max_tokens)",
        ),
        (
            ("--checkpoint=synthetic:tiny", "--prompt_tokens=5", "--host_bytes=-1"),
            "flag --host_bytes=-1: -1 is not a non-negative integer",
        ),
        (
            ("--checkpoint=synthetic:tiny", "--prompt_tokens=5", "--host_bytes=1e9"),
            "flag --host_bytes=1e9: expected a whole number (--help lists all flags)",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, arguments, message):
    code, lines, err = run(capsys, *arguments)
    assert code == 2
    assert lines == []
    assert message in err
    assert "Traceback" not in err
