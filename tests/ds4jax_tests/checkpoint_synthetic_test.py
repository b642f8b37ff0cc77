"""Made-up weights: the same bits every time, any range alone, magnitudes that stay sane."""

import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache, testing
from ds4jax.checkpoint import keys, load, synthetic
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import PRESETS, ConfigError, ModelConfig

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FLASH = ModelConfig.from_json(CONFIGS / "flash.json")
PRO = ModelConfig.from_json(CONFIGS / "pro.json")
TINY = testing.tiny_config()


def test_bits_never_change():
    """Published results of synthetic runs rest on these bits."""
    digest = hashlib.sha256()
    source = SyntheticSource(TINY, 7)
    for name in source.names():
        digest.update(source.read(name).tobytes())
    assert digest.hexdigest() == "ed293fee8e0fd81674c35e00f2357251377bcddf2b875f45e3c9023e75614c3f"


def test_seed_and_name_change_the_bits():
    name = "layers.3.ffn.experts.0.w1.weight"
    first = SyntheticSource(TINY, 0).read(name)
    np.testing.assert_array_equal(first, SyntheticSource(TINY, 0).read(name))
    for other in (
        SyntheticSource(TINY, 1).read(name),
        SyntheticSource(TINY, 0).read("layers.3.ffn.experts.1.w1.weight"),
        SyntheticSource(TINY, 0).read("layers.4.ffn.experts.0.w1.weight"),
    ):
        assert (first != other).mean() > 0.98


@pytest.mark.parametrize(
    "name",
    [
        "layers.2.ffn.gate.tid2eid",  # I64
        "layers.2.attn.wq_b.weight",  # F8_E4M3
        "layers.2.attn.attn_sink",  # F32
        "layers.2.attn_norm.weight",  # BF16
        "layers.2.ffn.experts.3.w2.scale",  # F8_E8M0
        "layers.2.ffn.experts.3.w2.weight",  # I8
        "layers.0.hc_attn_scale",  # three elements
    ],
)
def test_any_range_equals_the_slice_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(synthetic, "WORDS_PER_STEP", 64)
    source = SyntheticSource(TINY, 3)
    whole = source.read(name).reshape(-1).view(np.uint8)
    rng = np.random.default_rng(len(name))
    for _ in range(50):
        start, stop = np.sort(rng.integers(0, len(whole) + 1, 2))
        part = np.empty(stop - start, np.uint8)
        source.read_into(name, part, int(start))
        np.testing.assert_array_equal(part, whole[start:stop])
    with pytest.raises(ValueError, match="were asked for"):
        source.read_into(name, np.empty(2, np.uint8), len(whole) - 1)


def test_threads_do_not_disturb_each_other():
    source = SyntheticSource(TINY, 5)
    names = source.names()[:60] * 3
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parallel = list(pool.map(lambda name: source.read(name).tobytes(), names))
    assert parallel == [source.read(name).tobytes() for name in names]


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_real_sizes_allocate_only_what_is_asked_for(config):
    source = SyntheticSource(config, 0)
    name = "head.weight"
    nbytes = source.info(name).nbytes
    assert nbytes > 1e9
    buffer = np.empty(1 << 20, np.uint8)
    tracemalloc.start()
    try:
        source.read_into(name, buffer, nbytes - len(buffer))
        source.read_into("layers.1.ffn.gate.tid2eid", buffer[:100], 6_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
    # The mantissas of the last page again, straight from the hash.
    words = np.arange((nbytes - 4096) // 4, nbytes // 4, dtype=np.uint32)
    words = synthetic.hash_words(words, synthetic.tensor_key(0, name))
    mantissas = np.uint32(0x007F007F)
    found = buffer[-4096:].view(np.uint32)
    np.testing.assert_array_equal(words & mantissas, found & mantissas)


def test_hash_is_the_same_on_a_device():
    """A device can make the same weights, since only 32-bit integer operators are used."""
    index = np.arange(0xFFFFFF00, 0xFFFFFF00 + 256, dtype=np.int64).astype(np.uint32)
    index = np.concatenate([index, np.arange(1000, dtype=np.uint32)])
    key = synthetic.tensor_key(11, "some.tensor")
    on_device = jax.jit(lambda index: synthetic.hash_words(index, key))(jnp.asarray(index))
    np.testing.assert_array_equal(synthetic.hash_words(index.copy(), key), np.asarray(on_device))


def test_bits_of_the_hash_are_balanced():
    """Every input bit flips every output bit about half of the time."""
    rng = np.random.default_rng(0)
    index = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    key = synthetic.tensor_key(0, "x")
    base = synthetic.hash_words(index.copy(), key)
    for bit in range(32):
        flipped = synthetic.hash_words(index ^ np.uint32(1 << bit), key) ^ base
        share = (flipped[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)).mean(0)
        assert np.abs(share - 0.5).max() < 0.1, bit


@pytest.mark.parametrize("config", [TINY, FLASH, PRO], ids=["tiny", "flash", "pro"])
def test_token_tables_hold_distinct_experts_and_use_them_all(config):
    source = SyntheticSource(config, 2)
    info = source.info("layers.1.ffn.gate.tid2eid")
    rows = min(info.shape[0], 20_000)
    table = np.empty((rows, info.shape[1]), np.int64)
    source.read_into("layers.1.ffn.gate.tid2eid", table.reshape(-1).view(np.uint8))
    assert (np.diff(np.sort(table, axis=1), axis=1) > 0).all()
    assert set(table.ravel()) == set(range(config.n_routed_experts))


@pytest.mark.parametrize("experts", [1, 2, 3, 7])
def test_token_tables_of_few_experts(experts):
    config = dataclasses.replace(
        TINY, n_routed_experts=experts, num_experts_per_tok=min(experts, 3)
    )
    table = SyntheticSource(config, 0).read("layers.0.ffn.gate.tid2eid")
    assert (np.diff(np.sort(table, axis=1), axis=1) > 0).all()
    assert table.min() == 0
    assert table.max() == experts - 1


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_values_are_finite_and_matrices_keep_magnitudes(experts):
    source = SyntheticSource(TINY, 0, experts=experts)
    for name, spec in (keys.expected_tensors(TINY) | keys.mtp_tensors(TINY)).items():
        values = testing.decoded(source, name)
        assert np.isfinite(values).all(), name
        if (
            len(spec.shape) == 2
            and spec.component not in ("embed", "routers")
            and ".ape" not in name
        ):
            gain = float(np.sqrt(np.mean(values**2) * spec.shape[1]))
            assert 0.4 < gain < 2.5, (name, gain)


def test_scales_vary_inside_a_tensor():
    """A transposed or shifted scale grid must show."""
    source = SyntheticSource(FLASH, 0)
    assert len(np.unique(source.read("layers.0.attn.wq_a.scale").view(np.uint8))) == 2
    assert len(np.unique(source.read("layers.0.ffn.experts.0.w1.scale").view(np.uint8))) == 4


def test_config_text_says_how_experts_are_stored():
    for experts in ("fp4", "fp8"):
        text = SyntheticSource(TINY, 0, experts=experts).config_text()
        assert json.loads(text)["expert_dtype"] == experts


def test_provenance_names_the_seed_and_options():
    assert SyntheticSource(TINY, 4).provenance(["norm.weight"]) == {"synthetic": [4, 5, 0]}


@pytest.mark.slow
def test_activations_stay_near_one_through_43_layers():
    ratios = (0, 0, *(4, 128) * 20, 4)
    config = dataclasses.replace(
        TINY, num_hidden_layers=43, compress_ratios=(*ratios, 0), n_routed_experts=8
    )
    source = SyntheticSource(config, 0)
    numerics = PRESETS["oracle"]
    transformer = load.load_resident(source)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 256).astype(np.int32)
    chunk = cache.make_chunk(tokens, 0, 256)
    streams = transformer.embed_tokens(chunk.tokens, numerics)
    where = jnp.arange(config.n_routed_experts, dtype=jnp.int32)
    run = jax.jit(
        lambda block, streams, state, slab: block(streams, state, chunk, (slab,), where, numerics)
    )
    states = cache.empty_state(config, numerics, 256).layers
    sizes = []
    for layer, (block, state) in enumerate(zip(transformer.blocks, states, strict=True)):
        slab = jax.device_put(load.load_expert_slab(source, layer, range(8)))
        streams, _ = run(block, streams, state, slab)
        sizes.append(float(jnp.sqrt(jnp.mean(streams * streams))))
    assert min(sizes) > 0.5
    assert max(sizes) < 20, sizes
    logits = np.asarray(transformer.logits(streams))
    assert 0.3 < logits.std() < 5


def test_layers_share_experts_and_nothing_else():
    source = SyntheticSource(TINY, 0, distinct_layers=2)
    alone = SyntheticSource(TINY, 0)
    assert [source.expert_origin(layer) for layer in range(5)] == [0, 1, 0, 1, 0]
    assert [alone.expert_origin(layer) for layer in range(5)] == list(range(5))
    for name in ("ffn.experts.3.w2.weight", "ffn.experts.3.w1.scale"):
        first, other, third = (source.read(f"layers.{n}.{name}").tobytes() for n in range(3))
        assert first == third != other
        assert first == alone.read(f"layers.0.{name}").tobytes()
    for name in ("ffn.gate.weight", "ffn.shared_experts.w1.weight"):
        assert (
            source.read(f"layers.0.{name}").tobytes() != source.read(f"layers.2.{name}").tobytes()
        )


@pytest.mark.parametrize(("experts", "chosen"), [(256, 6), (384, 6), (16, 4)])
def test_shares_fall_with_the_rank(experts, chosen):
    shares = synthetic.zipf_shares(experts, chosen)
    assert shares.sum() == pytest.approx(chosen)
    free = (shares < 0.98) & (shares > 1e-4)
    np.testing.assert_allclose(
        (shares * np.arange(1, experts + 1))[free], shares[free][0] * (1 + np.flatnonzero(free)[0])
    )


def test_biases_make_tokens_choose_by_the_law():
    """Router inputs as they are in the model: normed, with the norm weights of the source."""
    config = dataclasses.replace(TINY, hidden_size=1024, n_routed_experts=128)
    source = SyntheticSource(config, 0, routing="zipf")
    rng = np.random.default_rng(5)
    inputs = rng.standard_normal((4000, 1024), np.float32)
    inputs *= source.read("layers.4.ffn_norm.weight").astype(np.float32)
    weight = source.read("layers.4.ffn.gate.weight").astype(np.float32)
    scores = np.sqrt(np.log1p(np.exp(inputs @ weight.T))) + source.read("layers.4.ffn.gate.bias")
    ids = np.argsort(-scores, axis=1)[:, : config.num_experts_per_tok]
    found = np.sort(np.bincount(ids.reshape(-1), minlength=128))[::-1] / len(inputs)
    wanted = synthetic.zipf_shares(128, config.num_experts_per_tok)
    # The threshold is common to all experts only on average.
    np.testing.assert_allclose(found[:40], wanted[:40], rtol=0.35)
    assert found[:4].sum() / found.sum() == pytest.approx(wanted[:4].sum() / wanted.sum(), rel=0.1)
    other = source.read("layers.3.ffn.gate.bias")
    assert np.argmax(other) != np.argmax(source.read("layers.4.ffn.gate.bias"))


def test_prompts_have_runs_and_prefixes():
    ids = synthetic.prompt_ids(20_000, 5000, "zipf")
    np.testing.assert_array_equal(ids[:300], synthetic.prompt_ids(300, 5000, "zipf"))
    runs = np.flatnonzero(np.diff(ids)).size + 1
    assert len(ids) / runs == pytest.approx(synthetic.RUN_TOKENS, rel=0.15)
    most = np.sort(np.bincount(ids))[::-1]
    assert most[0] / len(ids) == pytest.approx(1 / np.sum(1 / np.arange(1, 5001)), rel=0.3)
    uniform = synthetic.prompt_ids(20_000, 5000, "uniform")
    np.testing.assert_array_equal(uniform[:300], synthetic.prompt_ids(300, 5000, "uniform"))
    assert len(np.unique(uniform)) > 4800


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distinct_layers": 0}, "distinct_layers is 0, expected at least 1"),
        ({"routing": "zipff"}, "routing is 'zipff', expected one of uniform, zipf"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticSource(TINY, 0, **options)
