"""The inspect command: sizes from headers, damage as exit code 2."""

import json
import os
import pathlib

import pytest

from ds4jax import testing
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.convert import convert
from ds4jax.checkpoint.safetensors import SafetensorsSource, open_checkpoint
from ds4jax.cli import inspect

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"


def inspected(capsys, *arguments: str) -> tuple[int, dict | None, str, str]:
    code = inspect.main(["ds4jax-inspect", *arguments])
    printed = capsys.readouterr()
    last = printed.out.splitlines()[-1] if printed.out else None
    return code, last and json.loads(last), printed.out, printed.err


@pytest.mark.parametrize(
    ("name", "tensors", "whole", "main"),
    [
        ("flash", 69_187, 159_609_485_896, 156_015_698_140),
        ("pro", 145_116, 864_704_792_696, 850_748_205_004),
    ],
)
def test_sizes_of_a_config_alone(capsys, name, tensors, whole, main):
    code, result, out, _ = inspected(capsys, f"--checkpoint={CONFIGS / name}.json")
    assert code == 0
    assert (result["tensors"], result["file_bytes"], result["main_bytes"]) == (tensors, whole, main)
    assert result["components"]["experts"]["nbytes"] == whole - sum(
        part["nbytes"] for key, part in result["components"].items() if key != "experts"
    )
    assert f"{whole}" in out
    assert "experts" in out


def test_base_experts_are_larger(capsys):
    checkpoint = f"--checkpoint={CONFIGS / 'flash.json'}"
    _, fp4, _, _ = inspected(capsys, checkpoint)
    _, fp8, _, _ = inspected(capsys, checkpoint, "--experts=fp8")
    assert fp8["expert_bytes"] / fp4["expert_bytes"] == pytest.approx(1.88, abs=0.01)


def test_folder_is_inspected_without_reading_weights(capsys, tmp_path, monkeypatch):
    folder = testing.write_checkpoint(tmp_path / "c", shards=3)

    def read(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(SafetensorsSource, "read_into", read)
    code, result, out, err = inspected(capsys, f"--checkpoint={folder}")
    assert code == 0
    header = keys.official_header(testing.tiny_config())
    assert result["tensors"] == len(header)
    assert result["file_bytes"] == sum(info.nbytes for info in header.values())
    assert result["components"]["mtp.0"]["by_dtype"]["I8"] == 16 * 3 * 128 * 64
    assert out.splitlines()[0].split() == ["component", "tensors", "bytes", "GiB", "by", "dtype"]
    assert err.splitlines() == [
        "skipped: mtp.* (MTP draft model, 135 tensors): not used by prefill"
    ]


def test_converted_folder_has_the_sizes_of_its_source(capsys, tmp_path):
    folder = testing.write_checkpoint(tmp_path / "c")
    with open_checkpoint(folder) as source:
        convert(source, tmp_path / "out")
    _, first, _, _ = inspected(capsys, f"--checkpoint={folder}")
    _, second, _, _ = inspected(capsys, f"--checkpoint={tmp_path / 'out'}")
    assert second["file_bytes"] == second["main_bytes"] == first["main_bytes"]
    del first["components"]["mtp.0"]
    assert second["components"] == first["components"]


def test_mistakes_end_with_code_2_and_a_message(capsys, tmp_path):
    code, _, out, err = inspected(capsys, f"--checkpoint={tmp_path / 'nowhere'}")
    assert (code, out) == (2, "")
    assert "nowhere does not exist: expected a folder" in err
    assert "Traceback" not in err
    code, _, _, err = inspected(capsys)
    assert code == 2
    assert "--checkpoint is missing" in err
    code, _, _, err = inspected(capsys, "--checkpiont=x")
    assert code == 2
    assert "checkpoint" in err
    code, _, _, err = inspected(capsys, "--checkpoint=x", "--experts=int4")
    assert code == 2
    assert "fp4" in err


def test_damaged_or_incomplete_folder_ends_with_code_2(capsys, tmp_path):
    folder = testing.write_checkpoint(tmp_path / "c", shards=3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hash_layers": 2}))
    code, _, out, err = inspected(capsys, f"--checkpoint={folder}")
    assert (code, out) == (2, "")
    assert "missing: layers.2.ffn.gate.bias" in err
    assert "unexpected: layers.2.ffn.gate.tid2eid" in err
    shard = next(folder.glob("*.safetensors"))
    os.truncate(shard, 100)
    code, _, _, err = inspected(capsys, f"--checkpoint={folder}")
    assert code == 2
    assert str(shard) in err


def test_help_lists_the_flags(capsys):
    assert inspect.main(["ds4jax-inspect", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--checkpoint" in out
    assert "--experts" in out
