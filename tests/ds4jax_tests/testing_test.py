"""The public test doubles do what they promise."""

import pathlib

import numpy as np
import pytest
import tokenizers

from ds4jax import testing
from ds4jax.checkpoint import keys, safetensors
from ds4jax.checkpoint.source import config_text
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import LayerKind, ModelConfig

ROOT = pathlib.Path(__file__).parents[2]
TINY = testing.tiny_config()


def test_tiny_config_is_the_file_byte_for_byte():
    path = ROOT / "configs" / "models" / "tiny.json"
    assert path.read_text() == config_text(TINY)
    assert ModelConfig.from_json(path) == TINY


def test_tiny_config_has_every_kind_of_layer():
    assert TINY.num_hidden_layers == 5
    kinds = {(TINY.kind(layer), TINY.is_hash(layer)) for layer in range(5)}
    assert {kind for kind, _ in kinds} == set(LayerKind)
    assert {(LayerKind.CSA, True), (LayerKind.CSA, False), (LayerKind.HCA, False)} < kinds
    assert TINY.index_n_heads >= 16  # with fewer, exact ties of index scores are common


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_config_text_round_trips_published_configs(name, tmp_path):
    config = ModelConfig.from_json(ROOT / "configs" / "models" / f"{name}.json")
    (tmp_path / "config.json").write_text(config_text(config))
    assert ModelConfig.from_json(tmp_path / "config.json") == config


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("storage", ["official", "base", "float32"])
def test_written_checkpoint_is_complete(tmp_path, storage, shards):
    folder = testing.write_checkpoint(tmp_path / "new" / "folder", storage=storage, shards=shards)
    assert len(list(folder.glob("*.safetensors"))) == shards
    with safetensors.open_checkpoint(folder) as source:
        assert source.config == TINY
        contents = keys.check_complete(source)
        assert (
            contents.expert_format == {"official": "fp4", "base": "fp8", "float32": "f32"}[storage]
        )
        assert len(contents.skipped) == 1
        keys.check_mtp(source)


def test_same_seed_same_files(tmp_path):
    folders = [
        testing.write_checkpoint(tmp_path / str(i), seed=seed, shards=2)
        for i, seed in enumerate((8, 8, 9))
    ]
    files = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert files[0] == files[1]
    assert files[0].keys() == files[2].keys()
    assert files[0] != files[2]


def test_small_vocabulary_gets_no_tokenizer(tmp_path):
    with safetensors.open_checkpoint(ROOT / "tests" / "golden" / "quant") as source:
        folder = testing.write_checkpoint(tmp_path, source.config)
        assert not (folder / "tokenizer.json").exists()
        with safetensors.open_checkpoint(folder) as written:
            main = {name for name in source.names() if not name.startswith("mtp.")}
            assert {name for name in written.names() if not name.startswith("mtp.")} == main
            assert all(written.info(name) == source.info(name) for name in main)


def test_tokenizer_knows_every_byte_and_the_markup():
    tokenizer = tokenizers.Tokenizer.from_str(testing.byte_tokenizer())
    assert tokenizer.get_vocab_size() == testing.BYTE_VOCAB == TINY.vocab_size
    assert tokenizer.token_to_id("<｜begin▁of▁sentence｜>") == TINY.bos_token_id
    assert tokenizer.token_to_id("<｜end▁of▁sentence｜>") == TINY.eos_token_id
    text = "<｜begin▁of▁sentence｜>\x00\t Grüße,\n\n  日本🙂 <｜User｜>a  b</think>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    plain = text
    for token in testing.SPECIAL_TOKENS:
        plain = plain.replace(token, "")
    assert len(ids) == 3 + len(plain.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    every = [testing.BYTE_VOCAB - 256 + byte for byte in "é".encode()]
    assert tokenizer.encode("é").ids == every


def test_fake_clock_moves_only_when_told():
    clock = testing.FakeClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(1.5)
    pause = clock.sleep  # handed over where time.sleep is expected
    pause(0.5)
    assert clock() == 7.0
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_decoded_values_are_float32_or_integers():
    source = SyntheticSource(TINY, 0)
    assert testing.decoded(source, "layers.0.ffn.gate.tid2eid").dtype == np.int64
    for name in ("norm.weight", "layers.0.attn.wkv.weight", "layers.0.ffn.experts.0.w1.weight"):
        assert testing.decoded(source, name).dtype == np.float32
