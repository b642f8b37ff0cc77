"""From files to modules and slabs: right place, right bits, and damage refused by name."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import model, mtp, testing
from ds4jax.checkpoint import keys, load, safetensors
from ds4jax.checkpoint.source import CheckpointError
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.quant import dequantize
from pallas_kernels.codecs import host

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = testing.tiny_config()


def assert_same_bits(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


class Patched(SyntheticSource):
    """Made-up weights with some tensors replaced."""

    def __init__(self, **arrays: np.ndarray):
        super().__init__(TINY, 0)
        self.arrays = arrays

    def read_into(self, name, buffer, start=0):
        if name in self.arrays:
            data = self.arrays[name].reshape(-1).view(np.uint8)
            buffer[:] = data[start : start + buffer.nbytes]
        else:
            super().read_into(name, buffer, start)


@pytest.mark.parametrize("case", ["quant", "f32", "f32-pro"])
def test_every_leaf_has_the_bits_of_its_tensor(case):
    with safetensors.open_checkpoint(GOLDEN / case) as source:
        transformer = load.load_resident(source)
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(transformer)
        }
        seen = set()
        for name, spec in keys.resident_tensors(source.config).items():
            stored = source.read(name)
            place = spec.path if spec.path in leaves else f"{spec.path}.codes"
            if stored.dtype == np.int64:
                np.testing.assert_array_equal(leaves[place], stored)
                assert leaves[place].dtype == np.int32
            else:
                assert leaves[place].tobytes() == stored.tobytes(), name
            seen.add(place)
            if keys.scale_name(name) in source.infos():
                scales = leaves[f"{spec.path}.scales"]
                assert scales.dtype == np.uint8
                assert scales.tobytes() == source.read(keys.scale_name(name)).tobytes()
                seen.add(f"{spec.path}.scales")
        assert seen == set(leaves)
        loaded = sum(leaf.nbytes for leaf in leaves.values())
        assert loaded == keys.resident_bytes(source.config, source.infos())


def test_quantised_checkpoint_loads_as_the_abstract_tree_says():
    transformer = load.load_resident(SyntheticSource(TINY, 0))
    expected = jax.tree_util.tree_leaves_with_path(model.abstract(TINY))
    found = jax.tree_util.tree_leaves_with_path(transformer)
    for (path, leaf), (found_path, array) in zip(expected, found, strict=True):
        assert path == found_path
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype), path


def test_scales_are_exponents_not_numbers():
    """Byte 120 is 2^-7; read as the number 120 it would give token salad without an error."""
    scales = np.full((1, 1), 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    codes = np.full((64, 128), 1.5, ml_dtypes.float8_e4m3fn)
    source = Patched(**{"layers.0.attn.wq_a.weight": codes, "layers.0.attn.wq_a.scale": scales})
    weight = load.load_resident(source).blocks[0].attn.wq_a.weight
    np.testing.assert_array_equal(dequantize(weight, jnp.float32), np.float32(1.5 * 2.0**-7))


def test_arrays_go_to_the_given_device():
    device = jax.devices()[3]
    transformer = load.load_resident(SyntheticSource(TINY, 0), device=device)
    assert {next(iter(leaf.devices())) for leaf in jax.tree.leaves(transformer)} == {device}


def test_float32_files_hold_the_values_of_the_official_ones(tmp_path):
    official = testing.write_checkpoint(tmp_path / "official", seed=4)
    plain = testing.write_checkpoint(tmp_path / "plain", seed=4, storage="float32")
    with (
        safetensors.open_checkpoint(official) as first,
        safetensors.open_checkpoint(plain) as second,
    ):
        for name in second.names():
            np.testing.assert_array_equal(second.read(name), testing.decoded(first, name))
        weights = [
            load.load_resident(source).blocks[2].attn.indexer.wq_b.weight
            for source in (first, second)
        ]
        np.testing.assert_array_equal(*(dequantize(weight, jnp.float32) for weight in weights))


def test_bfloat16_copies_of_float32_tensors_are_widened(tmp_path):
    folder = testing.write_checkpoint(tmp_path, seed=1)
    with safetensors.open_checkpoint(folder) as source:
        infos = dict(source.infos())
        name = "layers.1.attn.attn_sink"
        narrow = source.read(name).astype(ml_dtypes.bfloat16)
        infos[name] = dataclasses.replace(infos[name], dtype="BF16")
        safetensors.write_file(
            folder / "new", infos, lambda n: narrow if n == name else source.read(n)
        )
    os.replace(folder / "new", folder / "model.safetensors")
    with safetensors.open_checkpoint(folder) as source:
        sink = load.load_resident(source).blocks[1].attn.attn_sink
    assert sink.dtype == jnp.float32
    np.testing.assert_array_equal(sink, narrow.astype(np.float32))


def test_nan_scale_of_a_resident_weight_is_refused_with_its_position():
    scales = np.full((1, 1), 255, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.attn\.wo_b\.scale\[0, 0\] is NaN \(byte 255\), 1 such"
    ):
        load.load_resident(Patched(**{"layers.1.attn.wo_b.scale": scales}))


def test_nan_scale_of_an_expert_is_refused_with_its_position():
    scales = np.full((128, 4), 117, np.uint8)
    scales[77, 2] = scales[90, 1] = 255
    source = Patched(**{"layers.3.ffn.experts.9.w3.scale": scales})
    load.load_expert_slab(source, 3, [8, 10])
    with pytest.raises(
        CheckpointError,
        match=r"layers\.3\.ffn\.experts\.9\.w3\.scale\[77, 2\] is NaN \(byte 255\), 2 such scales",
    ):
        load.load_expert_slab(source, 3, [8, 9])


@pytest.mark.parametrize("value", [-1, 16, 1 << 40])
def test_token_table_that_names_no_expert_is_refused(value):
    table = np.zeros((TINY.vocab_size, 4), np.int64)
    table[200, 3] = value
    with pytest.raises(
        CheckpointError,
        match=rf"layers\.2\.ffn\.gate\.tid2eid\[200, 3\] is {value}, expected an expert 0\.\.15",
    ):
        load.load_resident(Patched(**{"layers.2.ffn.gate.tid2eid": table}))


def test_incomplete_checkpoint_is_refused_before_any_read(tmp_path):
    folder = testing.write_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 6
    (folder / "config.json").write_text(json.dumps(config))
    with safetensors.open_checkpoint(folder) as source:
        source.read_into = None  # any read would fail
        with pytest.raises(CheckpointError, match=r"missing: layers\.5\.attn"):
            load.load_resident(source)


@pytest.mark.parametrize(
    ("storage", "format"), [("official", "fp4"), ("base", "fp8"), ("float32", "f32")]
)
def test_slab_rows_are_the_experts_in_the_given_order(tmp_path, storage, format):
    folder = testing.write_checkpoint(tmp_path, seed=2, storage=storage)
    with safetensors.open_checkpoint(folder) as source:
        assert keys.expert_format(source) == format
        experts = [11, 0, 5]
        slab = load.load_expert_slab(source, 4, experts)
        slab.check()
        assert (slab.format, slab.experts, slab.width, slab.hidden) == (format, 3, 128, 128)
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(slab))
        assert total == 3 * keys.expert_bytes(source.config, source.infos())
        for row, expert in enumerate(experts):
            gate_up, down = slab.decode(jnp.int32(row), jnp.float32)
            values = {
                name: testing.decoded(source, f"layers.4.ffn.experts.{expert}.{name}.weight")
                for name in ("w1", "w2", "w3")
            }
            np.testing.assert_array_equal(gate_up, np.concatenate([values["w1"], values["w3"]]))
            np.testing.assert_array_equal(down, values["w2"])


def test_slab_can_be_read_into_given_memory():
    source = SyntheticSource(TINY, 0)
    out = load.empty_expert_slab(TINY, "fp4", 2)
    filled = load.load_expert_slab(source, 1, [3, 4], out)
    assert filled is out
    assert_same_bits(filled, load.load_expert_slab(source, 1, [3, 4]))
    with pytest.raises(ValueError, match="holds 2 fp4 experts, 3 fp4 experts of layer 1 were"):
        load.load_expert_slab(source, 1, [3, 4, 5], out)
    with pytest.raises(ValueError, match="holds 2 fp8 experts, 2 fp4 experts"):
        load.load_expert_slab(source, 1, [3, 4], load.empty_expert_slab(TINY, "fp8", 2))


def test_expert_that_does_not_exist_is_refused():
    with pytest.raises(CheckpointError, match=r"has no tensor layers\.1\.ffn\.experts\.16\.w1"):
        load.load_expert_slab(SyntheticSource(TINY, 0), 1, [16])


def test_mtp_block_loads_with_its_experts():
    source = SyntheticSource(TINY, 6)
    block = load.load_mtp(source)
    expected = jax.tree.leaves(mtp.abstract_mtp(TINY))
    for leaf, array in zip(expected, jax.tree.leaves(block), strict=True):
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
    stored = host.decode_fp8(
        source.read("mtp.0.e_proj.weight"), source.read("mtp.0.e_proj.scale").view(np.uint8)
    )
    np.testing.assert_array_equal(dequantize(block.e_proj.weight, jnp.float32), stored)
    np.testing.assert_array_equal(block.block.attn.attn_sink, source.read("mtp.0.attn.attn_sink"))
    slab = load.load_expert_slab(source, "mtp.0", [7])
    assert slab.down.tobytes() == source.read("mtp.0.ffn.experts.7.w2.weight").tobytes()


def test_partial_mtp_block_stops_only_its_own_loader():
    with safetensors.open_checkpoint(GOLDEN / "quant") as source:
        load.load_resident(source)
        with pytest.raises(CheckpointError, match=r"missing: mtp\.0\.attn\.wq_a\.weight"):
            load.load_mtp(source)


def test_fingerprint_tells_weights_and_configs_apart():
    source = SyntheticSource(TINY, 0)
    same = SyntheticSource(TINY, 0, mtp=False)  # the draft model does not count
    assert load.fingerprint(source) == load.fingerprint(same)
    for other in (
        SyntheticSource(TINY, 1),
        SyntheticSource(TINY, 0, experts="fp8"),
        SyntheticSource(dataclasses.replace(TINY, index_topk=65), 0),
        Patched(**{"layers.4.ffn.gate.bias": np.zeros(16, np.float32)}),
    ):
        assert load.fingerprint(source) != load.fingerprint(other)
