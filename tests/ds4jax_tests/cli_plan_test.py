"""The command ds4jax-plan: a table and JSON for a machine that may be another one."""

import json

import pytest

from ds4jax import testing
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
    assert found["schema"] == "ds4jax.plan/1"
    assert (found["passes"], stage["order"], stage["tier"]) == (1, "layer_major", "ram")
    assert stage["price"]["total_bytes"] <= found["device_bytes"] == 128_000_000_000
    (per_layer,) = set(stage["residents_per_layer"])
    assert stage["streamed_bytes"] == 43 * (256 - per_layer) * stage["expert_bytes"]
    table = "\n".join(lines[:-1])
    assert f"{per_layer} of 256 experts in every layer" in table
    assert "what binds   device memory" in table
    assert f"{stage['price']['resident_bytes']} bytes" in table


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
    assert "stage 1: layers 20 to 42" in lines


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
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, arguments, message):
    code, lines, err = run(capsys, *arguments)
    assert code == 2
    assert lines == []
    assert message in err
    assert "Traceback" not in err
