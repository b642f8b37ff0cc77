"""The convert command: progress, resumption and refusals as a user sees them."""

import json

from ds4jax import testing
from ds4jax.checkpoint.converted import ConvertedSource
from ds4jax.checkpoint.safetensors import open_checkpoint
from ds4jax.cli import convert

PIECES = ["resident", *(f"experts/layer-{layer:05d}.bin" for layer in range(5))]


def converted(capsys, *arguments: str) -> tuple[int, dict | None, str]:
    code = convert.main(["ds4jax-convert", *arguments])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else None, printed.err


def test_folder_is_converted_then_verified(capsys, tmp_path):
    folder = testing.write_checkpoint(tmp_path / "in")
    flags = (f"--checkpoint={folder}", f"--out_dir={tmp_path / 'out'}")
    code, result, err = converted(capsys, *flags)
    assert code == 0
    assert result["written"] == PIECES
    assert result["out_dir"] == str(tmp_path / "out")
    assert "(100.0 %)" in err
    on_disk = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert result["folder_bytes"] == on_disk
    with open_checkpoint(folder) as source, ConvertedSource(tmp_path / "out") as again:
        for name in again.names()[::7]:
            assert again.read(name).tobytes() == source.read(name).tobytes()
    code, result, err = converted(capsys, *flags)
    assert (code, result["written"]) == (0, [])
    assert "is complete, its hashes are right" in err


def test_interruption_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    folder = testing.write_checkpoint(tmp_path / "in")
    flags = (f"--checkpoint={folder}", f"--out_dir={tmp_path / 'out'}")
    said = []

    def say(message: str) -> None:
        said.append(message)
        if len(said) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert.common, "say", say)
        code, result, err = converted(capsys, *flags)
    assert (code, result) == (130, None)
    assert f"kept in {tmp_path / 'out'}.partial, the same command goes on from there" in err
    code, result, _ = converted(capsys, *flags)
    assert (code, result["written"]) == (0, PIECES[2:])


def test_mistakes_end_with_code_2_and_a_message(capsys, tmp_path):
    folder = testing.write_checkpoint(tmp_path / "in")
    for flags, message in (
        ((f"--checkpoint={folder}",), "--out_dir is missing"),
        ((f"--out_dir={tmp_path / 'out'}",), "--checkpoint is missing"),
        ((f"--checkpoint={tmp_path}/no", f"--out_dir={tmp_path}/out"), "no does not exist"),
        (
            (f"--checkpoint={folder}", f"--out_dir={folder}"),
            "in exists and is no conversion of this checkpoint: choose another folder",
        ),
    ):
        code, result, err = converted(capsys, *flags)
        assert (code, result) == (2, None)
        assert message in err
        assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
