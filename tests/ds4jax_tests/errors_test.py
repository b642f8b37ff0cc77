"""What users get wrong, through the command line: one message, exit code 2, and no output folder.

Each message has the file or key, the value found, what was expected and what to do.
"""

import errno
import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from ds4jax import admission, events, testing
from ds4jax import report as reports
from ds4jax.cli import prefill
from ds4jax.config import ModelConfig

CHUNK = 48
IDS = np.random.default_rng(1).integers(0, testing.BYTE_VOCAB, 60).astype(np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    return testing.write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def copy(checkpoint, tmp_path) -> pathlib.Path:
    """A checkpoint that may be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.fixture
def fails(tmp_path, capsys):
    """Runs the command, asserts that it fails as a user's mistake, and returns the message."""

    def run(checkpoint, *arguments: str) -> str:
        flags = [
            f"--checkpoint={checkpoint}",
            f"--out_dir={tmp_path / 'run'}",
            "--config.numerics.preset=oracle",
            *(
                []
                if any("chunk" in a for a in arguments)
                else [f"--config.prefill.chunk_tokens={CHUNK}"]
            ),
            *arguments,
        ]
        code = prefill.main(["ds4jax-prefill", *flags])
        printed = capsys.readouterr()
        assert code == 2, printed.err
        assert printed.out == ""
        assert "Traceback" not in printed.err
        assert not (tmp_path / "run").exists()
        assert not list(tmp_path.glob(".run*"))
        errors = [line for line in printed.err.split("error: ") if line]
        return errors[-1]

    return run


def test_unknown_flag_suggests_the_nearest(fails, checkpoint):
    message = fails(checkpoint, "--config.prefill.chunk_tokns=3", "--prompt=x")
    assert "Did you mean: config.prefill.chunk_tokens" in message


def test_unknown_key_in_the_file_suggests_the_nearest(fails, checkpoint, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[prefill]\nchunk_token = 3\n")
    message = fails(checkpoint, f"--config={path}", "--prompt=x")
    assert f"{path}: unknown key config.prefill.chunk_token, did you mean" in message


def test_chunk_size_zero(fails, checkpoint):
    message = fails(checkpoint, "--config.prefill.chunk_tokens=0", "--prompt=x")
    assert "config.prefill.chunk_tokens is 0, expected a whole number of at least 1" in message


def test_arguments_that_are_no_flags(fails, checkpoint):
    assert "unexpected argument 'x'" in fails(checkpoint, "x")


def test_flags_that_have_to_be_given(capsys):
    assert prefill.main(["ds4jax-prefill"]) == 2
    assert "error: --checkpoint is missing: Checkpoint folder" in capsys.readouterr().err


def test_wrong_path(fails, tmp_path):
    message = fails(tmp_path / "nowhere", "--prompt=x")
    assert str(tmp_path / "nowhere") in message
    assert "does not exist" in message


def test_truncated_shard(fails, copy):
    path = copy / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    message = fails(copy, "--prompt=x")
    assert "model.safetensors" in message
    assert str(path.stat().st_size) in message


def header_of(path: pathlib.Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(path: pathlib.Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_header_larger_than_the_file(fails, copy):
    path = copy / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])
    message = fails(copy, "--prompt=x")
    assert "model.safetensors" in message
    assert str(1 << 40) in message


def test_overlapping_offsets(fails, copy):
    path = copy / "model.safetensors"
    header, data = header_of(path)
    header["norm.weight"]["data_offsets"] = header["layers.0.attn_norm.weight"]["data_offsets"]
    write_header(path, header, data)
    message = fails(copy, "--prompt=x")
    assert "overlap" in message
    assert "norm.weight" in message


def test_scale_that_is_no_number(fails, copy):
    path = copy / "model.safetensors"
    header, data = header_of(path)
    begin, _ = header["layers.1.attn.wq_a.scale"]["data_offsets"]
    write_header(path, header, data[:begin] + b"\xff" + data[begin + 1 :])
    message = fails(copy, "--prompt=x")
    assert "layers.1.attn.wq_a.scale" in message
    assert "NaN" in message


@pytest.mark.parametrize(
    "streaming",
    [
        (),
        ("--config.streaming.resident_fraction=0",),
        ("--config.streaming.resident_fraction=0", "--config.streaming.tier=disk"),
    ],
    ids=["resident", "ram", "disk"],
)
def test_expert_scale_that_is_no_number(streaming, fails, copy):
    """Wherever the expert is kept until it is used."""
    path, name = copy / "model.safetensors", "layers.2.ffn.experts.3.w2.scale"
    header, data = header_of(path)
    _, end = header[name]["data_offsets"]
    write_header(path, header, data[: end - 1] + b"\xff" + data[end:])
    message = fails(copy, "--prompt=x", *streaming)
    assert name in message
    assert "NaN (byte 255)" in message
    assert "fetch the checkpoint again" in message


def test_file_that_shrinks_while_experts_are_read_from_it(fails, copy, monkeypatch):
    def shrink(event: events.Event) -> None:
        if isinstance(event, events.LayerDone):
            os.truncate(copy / "model.safetensors", 1000)

    monkeypatch.setattr(events, "jsonl", lambda file: shrink)
    flags = ("resident_fraction=0", "tier=disk", "window=0", "order=layer_major")
    message = fails(copy, "--prompt=x", *(f"--config.streaming.{flag}" for flag in flags))
    assert re.search(r"reading \w+ of item \d+, layer \d failed: .*model\.safetensors", message)
    assert "load the model again" in message or "fetch the file again" in message


def test_missing_and_unexpected_tensors_are_listed_together(fails, copy):
    path = copy / "model.safetensors"
    header, data = header_of(path)
    header["norm.weigh"] = header.pop("norm.weight")
    write_header(path, header, data)
    message = fails(copy, "--prompt=x")
    assert "missing: norm.weight [128] BF16" in message
    assert "unexpected: norm.weigh\n" in message


def test_another_architecture_is_named(fails, copy):
    path = copy / "config.json"
    path.write_text(path.read_text().replace("deepseek_v4", "deepseek_v41"))
    message = fails(copy, "--prompt=x")
    assert "DeepSeek-V4.1" in message
    assert "this engine runs 'deepseek_v4' only" in message


def test_prompt_that_is_empty_or_missing(fails, checkpoint, tmp_path):
    assert "no prompt: give one of --prompt=TEXT" in fails(checkpoint)
    (tmp_path / "empty.txt").touch()
    message = fails(checkpoint, f"--prompt_file={tmp_path / 'empty.txt'}")
    assert "the prompt is empty" in message
    np.save(tmp_path / "none.npy", np.zeros(0, np.int32))
    message = fails(checkpoint, f"--tokens={tmp_path / 'none.npy'}")
    assert "tokens has no tokens: expected at least one to read" in message
    (tmp_path / "two.jsonl").write_text('{"tokens": [1]}\n{"tokens": []}\n')
    message = fails(checkpoint, f"--prompts_file={tmp_path / 'two.jsonl'}")
    assert "two.jsonl:2 has no tokens: expected at least one to read" in message


def test_token_outside_the_vocabulary(fails, checkpoint, tmp_path):
    np.save(tmp_path / "ids.npy", np.array([1, 999]))
    message = fails(checkpoint, f"--tokens={tmp_path / 'ids.npy'}")
    assert "tokens: token 1 has the id 999, expected 0 to 263" in message


def test_prompt_longer_than_the_positions_of_the_model(fails, copy, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 50}))
    np.save(tmp_path / "ids.npy", IDS)
    message = fails(copy, f"--tokens={tmp_path / 'ids.npy'}")
    assert "ends at position 60, expected at most 50 (max_position_embeddings" in message


def test_model_that_cannot_fit_is_refused_with_the_missing_bytes(fails, tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "host_bytes", lambda: 24 * 2**30)
    np.save(tmp_path / "ids.npy", IDS)
    message = fails("synthetic:flash", f"--tokens={tmp_path / 'ids.npy'}")
    assert "this run needs" in message
    assert "are missing. The weights alone do not fit" in message


def test_text_for_a_checkpoint_without_a_tokenizer(fails):
    message = fails("synthetic:tiny", "--prompt=x")
    assert "tokenizer.json does not exist" in message
    assert "--tokens" in message


def test_output_folder_that_is_something_else(fails, checkpoint, tmp_path):
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "file").touch()
    message = fails(checkpoint, "--prompt=x", f"--out_dir={keep}", "--overwrite")
    assert f"{keep} exists and holds no run.json" in message
    assert (keep / "file").exists()
    assert f"{keep} exists already" in fails(checkpoint, "--prompt=x", f"--out_dir={keep}")


def test_output_folder_that_the_system_refuses(fails, checkpoint):
    message = fails(checkpoint, "--prompt=x", "--out_dir=/")
    assert "--out_dir: / is the root of the file system: take another folder" in message
    message = fails(checkpoint, "--prompt=x", f"--out_dir={'a' * 300}")
    assert "cannot be written (File name too long): take another --out_dir" in message


def test_profile_folder_that_cannot_be_made(fails, checkpoint):
    place = checkpoint / "config.json" / "profile"
    message = fails(checkpoint, "--prompt=x", f"--profile_dir={place}")
    assert f"--profile_dir: {place} cannot be made" in message


def test_disk_without_room_for_the_output(fails, checkpoint, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = fails(checkpoint, "--prompt=x", "--config.prefill.logits=all")
    assert "the output takes 2112 bytes and 100 are free, 2012 are missing" in message


def test_disk_that_fills_up_while_writing(fails, checkpoint, monkeypatch):
    def append(self, rows) -> None:
        with reports.disk_errors(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(reports.ArrayWriter, "append", append)
    message = fails(checkpoint, "--prompt=x")
    assert "logits.npy: the disk is full" in message


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory) -> pathlib.Path:
    """A run that saved its state after the 60 tokens of IDS."""
    folder = tmp_path_factory.mktemp("saved")
    np.save(folder / "ids.npy", IDS)
    flags = [
        f"--checkpoint={checkpoint}",
        f"--out_dir={folder / 'run'}",
        f"--tokens={folder / 'ids.npy'}",
        "--config.numerics.preset=oracle",
        f"--config.prefill.chunk_tokens={CHUNK}",
        "--config.prefill.save_state",
    ]
    assert prefill.main(["ds4jax-prefill", *flags]) == 0
    return folder / "run"


def tokens(folder: pathlib.Path, ids: np.ndarray) -> str:
    np.save(folder / "more.npy", ids)
    return f"--tokens={folder / 'more.npy'}"


def test_resuming_at_another_position(fails, checkpoint, saved, tmp_path):
    resume = f"--resume_from={saved}"
    message = fails(checkpoint, resume, tokens(tmp_path, IDS[:50]))
    assert "at position 60, the prompt has 50 tokens" in message
    message = fails(checkpoint, resume, tokens(tmp_path, IDS))
    assert "has read all 60 tokens of the prompt: expected a longer prompt" in message
    other = np.append(IDS[::-1], IDS).astype(np.int32)
    assert "tokens_sha256" in fails(checkpoint, resume, tokens(tmp_path, other))


def test_resuming_with_another_model_or_setting(fails, saved, tmp_path):
    longer = tokens(tmp_path, np.append(IDS, IDS))
    other = testing.write_checkpoint(tmp_path / "other", seed=1)
    resume = f"--resume_from={saved}"
    assert "weights is" in fails(other, resume, longer)
    message = fails(other, resume, longer, "--config.numerics.simulate=q1")
    assert "numerics is 'float32+none' in the state, 'float32+q1' in this run" in message
    config = ModelConfig.from_json(other / "config.json")
    assert config.swiglu_limit == 2.0
    text = (other / "config.json").read_text().replace('"swiglu_limit": 2.0', '"swiglu_limit": 3.0')
    (other / "config.json").write_text(text)
    assert "model.swiglu_limit is 2.0 in the state, 3.0 in" in fails(other, resume, longer)


def test_resuming_from_nothing_or_with_several_prompts(fails, checkpoint, saved, tmp_path):
    longer = tokens(tmp_path, np.append(IDS, IDS))
    message = fails(checkpoint, f"--resume_from={tmp_path}", longer)
    assert "holds no saved state, expected a run made with config.prefill.save_state" in message
    message = fails(checkpoint, f"--resume_from={'a' * 300}", longer)
    assert "holds no saved state" in message
    lines = json.dumps({"tokens": IDS.tolist()}) + "\n"
    (tmp_path / "two.jsonl").write_text(lines * 2)
    message = fails(
        checkpoint, f"--resume_from={saved}", f"--prompts_file={tmp_path / 'two.jsonl'}"
    )
    assert "--resume_from continues one prompt, 2 were given" in message


def test_error_of_the_program_itself_has_exit_code_1(checkpoint, tmp_path, monkeypatch, capsys):
    def broken(*_: object, **options: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("ds4jax.engine.load", broken)
    flags = [f"--checkpoint={checkpoint}", f"--out_dir={tmp_path / 'run'}", "--prompt=x"]
    assert prefill.main(["ds4jax-prefill", *flags]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "lower config.prefill.chunk_tokens" in err
    assert not list(tmp_path.iterdir())
