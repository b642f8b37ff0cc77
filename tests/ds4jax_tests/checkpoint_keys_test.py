"""The tensor table: published sizes to the byte, completeness both ways, variants recognised."""

import dataclasses
import functools
import json
import logging
import pathlib
from collections.abc import Mapping

import jax
import numpy as np
import pytest

from ds4jax import model, mtp, testing
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.source import CheckpointError, TensorInfo, TensorSource
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ModelConfig
from ds4jax.quant import QTensor

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FLASH = ModelConfig.from_json(CONFIGS / "flash.json")
PRO = ModelConfig.from_json(CONFIGS / "pro.json")
TINY = testing.tiny_config()


@functools.cache
def official_header(config: ModelConfig) -> Mapping[str, TensorInfo]:
    """The big ones take a while to build."""
    return keys.official_header(config)


class HeaderOnly(TensorSource):
    """Names and shapes; reading any data is a mistake."""

    def __init__(self, config: ModelConfig, infos: Mapping[str, TensorInfo]):
        self.config = config
        self._infos = dict(infos)

    def infos(self):
        return self._infos

    def read_into(self, name, buffer, start=0):
        raise AssertionError(f"{name} was read")

    def provenance(self, names):
        return {}


# Sizes of the published checkpoints; those of Flash were read from its files' headers and index.
TOTALS = {
    # config: whole file, main model, mtp.0, main model without experts
    "flash": (FLASH, 159_609_485_896, 156_015_698_140, 3_593_787_756, 8_845_959_388),
    "pro": (PRO, 864_704_792_696, 850_748_205_004, 13_956_587_692, 28_693_981_132),
}
COMPONENTS = {
    "flash": {
        "embed": 1_059_061_760,
        "head": 1_059_061_760,
        "attention": 4_599_478_144,
        "experts": 147_169_738_752,
        "norms": 43 * 16_384,
        "shared experts": 43 * 25_167_360,
    },
    "pro": {
        "embed": 1_853_358_080,
        "head": 1_853_358_080,
        "attention": 18_294_854_528,
        "experts": 822_054_223_872,
        "norms": 61 * 28_672,
        "shared experts": 61 * 66_064_320,
    },
}
LAYERS = {
    # config: CSA layer, HCA layer, then bytes by component of one layer
    "flash": (4, 3, 106_964_608, 16_794_624, 8_651_776, 13_112_064, 3_145_944, 2_097_152),
    "pro": (4, 3, 299_915_648, 29_377_536, 14_943_232, 20_845_568, 5_505_240, 5_505_024),
}


def layer_sizes(header: Mapping[str, TensorInfo], layer: int) -> dict[str, int]:
    prefix = f"layers.{layer}."
    part = {name: info for name, info in header.items() if name.startswith(prefix)}
    return {name: size.nbytes for name, size in keys.component_sizes(part).items()}


@pytest.mark.parametrize("name", TOTALS)
def test_published_totals_to_the_byte(name):
    config, whole, main, draft, without_experts = TOTALS[name]
    sizes = keys.component_sizes(official_header(config))
    assert sum(size.nbytes for size in sizes.values()) == whole
    assert sizes.pop("mtp.0").nbytes == draft
    assert sum(size.nbytes for size in sizes.values()) == main
    assert main - sizes["experts"].nbytes == without_experts
    for component, nbytes in COMPONENTS[name].items():
        assert sizes[component].nbytes == nbytes, component


def test_flash_tensor_counts():
    header = official_header(FLASH)
    assert len(header) == 69_187
    assert sum(name.startswith("mtp.0.") for name in header) == 1_575
    assert len(keys.official_header(FLASH, mtp=False)) == 67_612


def test_flash_sums_over_layers():
    sizes = keys.component_sizes(official_header(FLASH))
    assert sizes["compressors"].nbytes + sizes["indexers"].nbytes == 801_075_968
    sizes = keys.component_sizes(official_header(PRO))
    assert sizes["compressors"].nbytes + sizes["indexers"].nbytes == 1_969_933_312


@pytest.mark.parametrize("name", LAYERS)
def test_bytes_of_one_layer(name):
    config = TOTALS[name][0]
    csa, hca, attention, csa_compressor, hca_compressor, indexer, hyper, router = LAYERS[name]
    header = official_header(config)
    first, second = layer_sizes(header, csa), layer_sizes(header, hca)
    for sizes in (first, second):
        assert sizes["attention"] == attention
        assert sizes["hyper-connections"] == hyper
        assert sizes["routers"] == router + 4 * config.n_routed_experts
        assert sizes["experts"] == keys.expert_bytes(config) * config.n_routed_experts
    assert first["compressors"] == csa_compressor
    assert second["compressors"] == hca_compressor
    assert first["indexers"] == indexer
    assert "indexers" not in second
    assert layer_sizes(header, 0)["routers"] == router + 6_205_440


def test_bytes_of_a_layer_without_experts():
    flash, pro = official_header(FLASH), official_header(PRO)

    def resident(header, layer):
        sizes = layer_sizes(header, layer)
        return sum(sizes.values()) - sizes["experts"]

    assert resident(flash, 0) == 143_596_888
    assert resident(flash, 4) == 167_299_160
    assert resident(flash, 3) == 146_044_248
    assert resident(pro, 4) == 427_243_544
    assert resident(pro, 3) == 391_963_672


def test_bytes_of_experts():
    assert keys.expert_bytes(FLASH) == 13_369_344
    assert keys.expert_bytes(PRO) == 35_094_528
    assert keys.expert_bytes(FLASH) * 256 == 3_422_552_064
    assert keys.expert_bytes(PRO) * 384 == 13_476_298_752
    base = keys.official_header(FLASH, "fp8", mtp=False)
    assert keys.expert_bytes(FLASH, base) == 3 * (2048 * 4096 + 16 * 32)


@pytest.mark.parametrize("config", [FLASH, PRO, TINY], ids=["flash", "pro", "tiny"])
def test_resident_bytes_are_those_of_the_abstract_tree(config):
    leaves = jax.tree.leaves(model.abstract(config))
    expected = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert keys.resident_bytes(config) == expected


def tree_paths(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, QTensor)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves
    }


@pytest.mark.parametrize("config", [FLASH, PRO, TINY], ids=["flash", "pro", "tiny"])
def test_every_resident_tensor_has_one_place_in_the_tree_and_its_shape(config):
    specs = keys.expected_tensors(config).values()
    resident = [spec for spec in specs if spec.component != "experts"]
    assert {spec.path: spec.shape for spec in resident} == tree_paths(model.abstract(config))
    assert len({spec.path for spec in resident}) == len(resident)
    draft = [spec for spec in keys.mtp_tensors(config).values() if spec.path]
    assert {spec.path: spec.shape for spec in draft} == tree_paths(mtp.abstract_mtp(config))


@pytest.mark.parametrize("config", [FLASH, PRO, TINY], ids=["flash", "pro", "tiny"])
@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_published_header_is_complete(config, experts):
    contents = keys.check_complete(HeaderOnly(config, keys.official_header(config, experts)))
    assert contents.expert_format == experts


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_plain_values_without_scales_are_accepted(dtype):
    infos = {
        name: TensorInfo(spec.dtype if spec.dtype == "I64" else dtype, spec.shape)
        for name, spec in keys.expected_tensors(TINY).items()
    }
    contents = keys.check_complete(HeaderOnly(TINY, infos))
    assert contents.expert_format == {"BF16": "bf16", "F32": "f32"}[dtype]
    assert contents.skipped == ()


def test_each_dense_weight_may_choose_its_format():
    infos = keys.official_header(TINY)
    del infos["layers.1.attn.wo_a.scale"]
    infos["layers.1.attn.wo_a.weight"] = TensorInfo(
        "BF16", infos["layers.1.attn.wo_a.weight"].shape
    )
    keys.check_complete(HeaderOnly(TINY, infos))


def test_all_problems_are_listed_at_once():
    infos = keys.official_header(TINY)
    del infos["norm.weight"]
    del infos["layers.0.attn.wq_a.scale"]
    del infos["layers.2.ffn.experts.7.w2.weight"]
    infos["layers.3.attn.compressor.ape"] = TensorInfo("F32", (4, 64))
    infos["layers.1.attn_norm.weight"] = TensorInfo("F16", (128,))
    infos["layers.1.attn.wkv.scale"] = TensorInfo("F32", (1, 1))
    infos["layers.4.ffn.experts.0.w1.weight"] = TensorInfo("F8_E4M3", (128, 128))
    infos["layers.4.ffn.experts.0.w1.scale"] = TensorInfo("F8_E8M0", (1, 1))
    infos["layers.0.ffn.gate.bias"] = TensorInfo("F32", (16,))
    infos["model.layers.0.mlp.gate.weight"] = TensorInfo("BF16", (16, 128))
    infos["layers.0.attn_norm.scale"] = TensorInfo("F8_E8M0", (1, 1))
    with pytest.raises(CheckpointError) as caught:
        keys.check_complete(HeaderOnly(TINY, infos))
    assert set(caught.value.problems) == {
        "missing: norm.weight [128] BF16",
        "missing: layers.0.attn.wq_a.scale [1, 1] F8_E8M0",
        "missing: layers.2.ffn.experts.7.w2.weight [128, 128] I8",
        "wrong shape: layers.3.attn.compressor.ape is [4, 64], expected [128, 64]",
        "wrong dtype: layers.1.attn_norm.weight is F16, expected BF16 or F32",
        "wrong dtype: layers.1.attn.wkv.scale is F32, expected F8_E8M0",
        "experts are stored in several formats, expected one: I8 "
        "(layers.0.ffn.experts.0.w1.weight), F8_E4M3 (layers.4.ffn.experts.0.w1.weight)",
        "unexpected: layers.0.ffn.gate.bias",
        "unexpected: model.layers.0.mlp.gate.weight (a name of the transformers layout; the "
        "published names are needed)",
        "unexpected: layers.0.attn_norm.scale (scales beside a weight that is not quantised, or "
        "without one)",
    }
    assert str(caught.value).count("\n") == 10


def test_scales_beside_plain_weights_are_unexpected():
    infos = keys.official_header(TINY)
    infos["head.scale"] = TensorInfo("F8_E8M0", (3, 1))
    infos["layers.1.attn.wo_a.weight"] = TensorInfo(
        "BF16", infos["layers.1.attn.wo_a.weight"].shape
    )
    with pytest.raises(CheckpointError) as caught:
        keys.check_complete(HeaderOnly(TINY, infos))
    names = [problem.split()[1] for problem in caught.value.problems]
    assert names == ["layers.1.attn.wo_a.scale", "head.scale"]


def test_scale_grid_follows_the_dtype_of_the_weight():
    """An FP4 grid beside FP8 codes, or the other way round, would be read as nonsense."""
    for experts, wrong, right in (("fp8", [128, 4], [1, 1]), ("fp4", [1, 1], [128, 4])):
        infos = keys.official_header(TINY, experts)
        infos["layers.0.ffn.experts.5.w3.scale"] = TensorInfo("F8_E8M0", tuple(wrong))
        with pytest.raises(CheckpointError) as caught:
            keys.check_complete(HeaderOnly(TINY, infos))
        assert caught.value.problems == (
            f"wrong shape: layers.0.ffn.experts.5.w3.scale is {wrong}, expected {right}",
        )


def skipped_lines(infos: Mapping[str, TensorInfo], config: ModelConfig, caplog) -> list[str]:
    contents = keys.check_complete(HeaderOnly(config, infos))
    with caplog.at_level(logging.INFO, logger="absl"):
        contents.log_skipped()
    return [record.getMessage() for record in caplog.records]


def test_mtp_is_skipped_with_one_line(caplog):
    assert skipped_lines(official_header(FLASH), FLASH, caplog) == [
        "checkpoint: skipped mtp.* (MTP draft model, 1575 tensors): not used by prefill"
    ]


def test_dspark_release_loads_and_its_drafter_is_skipped_with_one_line(caplog):
    """The 0731 release: 46 ratios, DSpark fields, and a draft model without enorm."""
    published = json.loads((CONFIGS / "flash.json").read_text())
    published["compress_ratios"] += [0, 0]
    published |= {
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    config = ModelConfig.from_json(published)
    assert len(config.compress_ratios) == 46
    assert config.layer_ratios == FLASH.layer_ratios
    infos = keys.official_header(config, mtp=False)
    assert len(infos) == 67_612
    # Three window layers, and around them what feeds the first and ends the last.
    outer = ("e_proj", "h_proj", "enorm", "hnorm", "norm", "hc_head_fn", "hc_head_base")
    for name, info in official_header(FLASH).items():
        rest = name.removeprefix("mtp.0.")
        if name.startswith("mtp.") and rest.split(".")[0] not in (*outer, "hc_head_scale"):
            infos |= {f"mtp.{block}.{rest}": info for block in range(3)}
    for name in ("0.main_proj.weight", "0.main_proj.scale", "0.main_norm.weight", "2.norm.weight"):
        infos[f"mtp.{name}"] = TensorInfo("BF16", (4096,))
    for name in ("hc_head_fn", "hc_head_base", "hc_head_scale", "confidence_head.proj"):
        infos[f"mtp.2.{name}"] = TensorInfo("F32", (4,))
    for name in ("markov_w1", "markov_w2"):
        infos[f"mtp.2.markov_head.{name}"] = TensorInfo("BF16", (129280, 256))
    assert len(infos) == 72_317  # of the published index
    assert keys.drafter(infos) == "DSpark"
    assert skipped_lines(infos, config, caplog) == [
        "checkpoint: skipped mtp.* (DSpark draft model, 4705 tensors): not used by prefill"
    ]
    with pytest.raises(CheckpointError, match="has DSpark draft model, expected the multi-token"):
        keys.check_mtp(HeaderOnly(config, infos))


def test_image_bias_of_the_vision_variant_is_skipped_with_one_line(caplog):
    infos = keys.official_header(TINY, mtp=False)
    for layer in range(TINY.num_hidden_layers):
        infos[f"layers.{layer}.ffn.gate.bias_vl"] = TensorInfo("F32", (16,))
    assert keys.drafter(infos) is None
    assert skipped_lines(infos, TINY, caplog) == [
        "checkpoint: skipped ffn.gate.bias_vl (image routing bias, 5 tensors): text only"
    ]


def test_mtp_block_is_checked_when_it_is_asked_for():
    infos = keys.official_header(TINY)
    assert keys.check_mtp(HeaderOnly(TINY, infos)) == "fp4"
    del infos["mtp.0.hnorm.weight"]
    infos["mtp.0.extra"] = TensorInfo("F32", (1,))
    with pytest.raises(CheckpointError) as caught:
        keys.check_mtp(HeaderOnly(TINY, infos))
    assert caught.value.problems == (
        "missing: mtp.0.hnorm.weight [128] BF16",
        "unexpected: mtp.0.extra",
    )
    with pytest.raises(CheckpointError, match="has no draft model"):
        keys.check_mtp(HeaderOnly(TINY, keys.official_header(TINY, mtp=False)))


def test_config_decides_what_is_expected():
    """One more layer in the config than in the files: its tensors are missing, and only they."""
    deeper = dataclasses.replace(TINY, num_hidden_layers=6)
    with pytest.raises(CheckpointError) as caught:
        keys.check_complete(HeaderOnly(deeper, keys.official_header(TINY)))
    assert all(problem.startswith("missing: layers.5.") for problem in caught.value.problems)
    specs = [name for name in keys.expected_tensors(deeper) if name.startswith("layers.5.")]
    assert len(caught.value.problems) == len(specs)


def test_unknown_names_count_as_other():
    infos = {"layers.0.novelty": TensorInfo("F32", (2,)), "mtp.1.x": TensorInfo("U8", (3,))}
    sizes = keys.component_sizes(infos)
    assert {name: size.nbytes for name, size in sizes.items()} == {"mtp.1": 3, "other": 8}


def test_widths_that_fp4_cannot_hold_are_refused():
    config = dataclasses.replace(TINY, moe_intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"moe_intermediate_size .* is 48, expected a multip"):
        keys.check_complete(SyntheticSource(config, 0))


def test_expert_format_of_an_odd_dtype_is_refused():
    infos = keys.official_header(TINY)
    infos["layers.0.ffn.experts.0.w1.weight"] = TensorInfo("F64", (1,))
    with pytest.raises(CheckpointError, match="is F64, expected one of I8, F8_E4M3, BF16, F32"):
        keys.expert_format(HeaderOnly(TINY, infos))


def test_loaded_dtypes():
    specs = keys.expected_tensors(TINY)
    table, sink = specs["layers.0.ffn.gate.tid2eid"], specs["layers.0.attn.attn_sink"]
    assert keys.loaded_dtype(table, TensorInfo("I64", table.shape)) == np.int32
    assert keys.loaded_dtype(sink, TensorInfo("BF16", sink.shape)) == np.float32
    norm = specs["norm.weight"]
    assert keys.loaded_dtype(norm, TensorInfo("F32", norm.shape)) == np.float32
    assert keys.loaded_dtype(norm, TensorInfo("BF16", norm.shape)).itemsize == 2
