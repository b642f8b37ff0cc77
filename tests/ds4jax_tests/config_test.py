"""config.json of a model: values that cannot be are refused with field, value and expectation."""

import copy
import json
import math
import pathlib

import pytest

from ds4jax.config import ConfigError, ModelConfig

MODELS = pathlib.Path(__file__).parents[2] / "configs" / "models"
TINY = json.loads((MODELS / "tiny.json").read_text())
MAY_BE_ZERO = ("num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id")
FIXED = ("num_key_value_heads", "n_shared_experts")  # only the released value is implemented
INTEGERS = [key for key, value in TINY.items() if type(value) is int and key not in FIXED]
NUMBERS = [
    *(key for key, value in TINY.items() if type(value) is float),
    *("rope_theta", "compress_rope_theta"),
    *(f"rope_scaling.{key}" for key in ("factor", "beta_fast", "beta_slow")),
]


def problem(changes):
    """What is said about the tiny config with `changes`; a dot separates nested keys."""
    raw = copy.deepcopy(TINY)
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = raw
        for parent in parents:
            place = place[parent]
        place[last] = value
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(raw)
    return str(caught.value)


@pytest.mark.parametrize("name", ["flash", "pro", "tiny"])
def test_published_configs_are_accepted(name):
    ModelConfig.from_json(MODELS / f"{name}.json").validate()


@pytest.mark.parametrize(
    "key",
    [key for key in INTEGERS if key not in ("rope_theta", "compress_rope_theta")]
    + ["rope_scaling.original_max_position_embeddings"],
)
def test_sizes_are_integers_in_range(key):
    least = 0 if key in MAY_BE_ZERO else 1
    for value in (least - 1, -5, 1.5, True, "8", None, [1], 2**31):
        assert problem({key: value}) == (
            f"config: {key} is {value!r}, expected an integer from {least} to 2147483647"
        )


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_are_positive_and_finite_in_float32(key):
    for value in (0, -1.0, math.nan, math.inf, True, "8", None, [1], 1e39, 1e-50):
        assert problem({key: value}) == (
            f"config: {key} is {value!r}, expected a number from 1e-37 to 1e+38"
        )
    assert "expected a number from" in problem({key: 10**400})


@pytest.mark.parametrize("key", [*FIXED, "hidden_act", "scoring_func", "norm_topk_prob"])
def test_what_only_one_value_is_implemented_of(key):
    assert problem({key: 2}) == f"config: {key} is 2, only {TINY[key]!r} is implemented"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17, expected at most n_routed_exp"),
        ({"eos_token_id": 264}, "eos_token_id is 264, expected less than vocab_size 264"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5, expected a multiple of 2"),
        ({"qk_rope_head_dim": 31}, "qk_rope_head_dim is 31, expected a multiple of 2"),
        ({"head_dim": 16}, "qk_rope_head_dim is 32, expected at most head_dim 16"),
        ({"index_head_dim": 48}, "index_head_dim is 48, expected a power of two"),
        ({"compress_rope_theta": 1}, "compress_rope_theta is 1, expected a number above 1"),
        ({"rope_scaling.beta_slow": 33}, "beta_slow is 33, expected at most beta_fast 32"),
        ({"rope_scaling": None}, "rope_scaling is None, expected the keys"),
        ({"rope_scaling.type": "linear"}, "rope_scaling.type is 'linear', expected 'yarn'"),
        ({"compress_ratios": 4}, "compress_ratios is 4, expected a list"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 values for 5 layers"),
        ({"compress_ratios": [0, 4, -4, 0, 0]}, "compress_ratios is [0, 4, -4, 0, 0], expected"),
        ({"compress_ratios": [0, 4, "4", 0, 0]}, "compress_ratios is [0, 4, '4', 0, 0], expected"),
        (
            {"quantization_config.weight_block_size": [32, 32]},
            "quantization_config.weight_block_size is [32, 32], only [128, 128] is implemented",
        ),
    ],
)
def test_fields_that_contradict(changes, expected):
    assert expected in problem(changes)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for place, expected in (
        (tmp_path, "cannot be read"),
        (tmp_path / "none.json", "does not exist"),
        (tmp_path / "list.json", "holds list, expected one object"),
        (tmp_path / "text.json", "is not JSON"),
        (tmp_path / "deep.json", "is not JSON"),
        (tmp_path / "digits.json", "is not JSON"),
    ):
        (tmp_path / "deep.json").write_text("[" * 100_000)
        (tmp_path / "digits.json").write_text("1" * 5000)
        (tmp_path / "list.json").write_text("[]")
        (tmp_path / "text.json").write_text("{")
        with pytest.raises(ConfigError, match=f"{place.name}.* {expected}"):
            ModelConfig.from_json(place)


def test_a_missing_key_is_named_with_the_nearest_one():
    raw = {**TINY, "index_top_k": TINY["index_topk"]}
    del raw["index_topk"]
    with pytest.raises(ConfigError, match="index_topk is missing; did it get renamed to index_top"):
        ModelConfig.from_json(raw)
