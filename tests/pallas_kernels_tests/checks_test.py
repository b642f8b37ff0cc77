"""What the doors refuse before anything is traced: one message with the argument and its value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_linear import block_linear
from pallas_kernels.compressor import compress, empty_carry
from pallas_kernels.hyper_connections import pre
from pallas_kernels.indexer import indexer_scores, prepare_queries, select_entries
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.top_k import top_k
from pallas_kernels.window_attention import window_attention

TOKENS, ENTRIES = 3, 6


def arguments(tokens: int = TOKENS, entries: int = ENTRIES) -> dict:
    """Small operands of each operation by its function."""
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    rope = (normal(tokens, 8), normal(tokens, 8))
    index = {
        "queries": normal(tokens, 2, 32),
        "keys": normal(entries, 32),
        "weights": normal(tokens, 2),
        "position": 20,
    }
    attended = {
        "q": normal(tokens, 2, 32),
        "window_kv": normal(7 + tokens, 32),
        "compressed": normal(entries, 32),
        "sink": normal(2),
        "position": 20,
        "window": 8,
        "scale": 0.2,
    }
    return {
        block_linear: {
            "x": normal(tokens, 128),
            "weight": jnp.ones((64, 128), jnp.float8_e4m3fn),
            "scales": jnp.full((1, 1), 127, jnp.uint8),
            "quantize_input": True,
            "dtype": jnp.float32,
        },
        compress: {
            "values": normal(tokens, 16),
            "gates": normal(tokens, 16),
            "carry": empty_carry(16, ratio=4, overlap=True),
            "position": 0,
            "length": tokens,
            "ratio": 4,
            "overlap": True,
        },
        indexer_scores: index,
        pre: {
            "streams": normal(tokens, 2, 16),
            "fn": normal(8, 32),
            "base": normal(8),
            "scale": normal(3),
            "iterations": 2,
            "eps": 1e-6,
            "norm_eps": 1e-6,
        },
        prepare_queries: {"queries": index["queries"], "rope": rope, "quantise": True},
        select_entries: {**index, "k": 2},
        sparse_attention: {**attended, "indices": jnp.zeros((tokens, 2), jnp.int32)},
        top_k: {"scores": normal(tokens, entries), "k": 2},
        window_attention: {**attended, "ratio": 4, "rope": rope},
    }


OPERATIONS = sorted(arguments(), key=lambda operation: operation.__name__)


def arrays_of(operation) -> list[str]:
    return [name for name, value in arguments()[operation].items() if isinstance(value, jax.Array)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_array_is_named(operation):
    for name in arrays_of(operation):
        for value in ("x", [1.0], 3):
            with pytest.raises(ValueError, match=rf"{name} is .*, expected an array \["):
                operation(**{**arguments()[operation], name: value})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_other_dtypes_are_named(operation):
    for name in arrays_of(operation):
        operands = arguments()[operation]
        operands[name] = operands[name].astype(jnp.float16)
        with pytest.raises(ValueError, match=rf"{name} is float16, expected"):
            operation(**operands)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_calls_without_a_row_are_refused(operation):
    with pytest.raises(ValueError, match="expected at least 1 on every axis"):
        operation(**arguments(tokens=0)[operation])
    if operation in (indexer_scores, select_entries, sparse_attention, top_k, window_attention):
        with pytest.raises(ValueError, match="expected at least 1 on every axis"):
            operation(**arguments(entries=0)[operation])


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if "position" in arguments()[op]])
def test_positions_are_whole_numbers(operation):
    for value, found in (
        (1.5, "1.5"),
        (-1, "-1"),
        (2**31, "2147483648"),
        (None, "None"),
        ("3", "'3'"),
        (True, "True"),
        (jnp.zeros(3, jnp.int32), r"int32\[3\]"),
        (jnp.float32(3), r"float32\[\]"),
    ):
        with pytest.raises(ValueError, match=rf"position is {found}, expected a whole number"):
            operation(**{**arguments()[operation], "position": value})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_row_and_arrays_of_numpy_give_what_arrays_of_jax_give(operation):
    operands = arguments(tokens=1)[operation]
    if operation is sparse_attention:
        operands["indices"] = operands["indices"].at[0, 1].set(-1)
    on_host = {
        name: np.asarray(value) if isinstance(value, jax.Array) else value
        for name, value in operands.items()
    }
    for one, other in zip(
        jax.tree.leaves(operation(**operands)), jax.tree.leaves(operation(**on_host)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_more_rows_than_there_are_cannot_be_compressed():
    with pytest.raises(ValueError, match="length is 4, expected at most the 3 rows of values"):
        compress(**{**arguments()[compress], "length": 4})


def test_scales_have_the_grid_of_their_weight():
    operands = arguments()[block_linear]
    with pytest.raises(ValueError, match=r"scales has shape \(2, 1\) \[1, 1\], expected 1 on axis"):
        block_linear(**{**operands, "scales": jnp.full((2, 1), 127, jnp.uint8)})


def test_rotations_of_more_channels_than_a_query_has_are_refused():
    wide = tuple(jnp.ones((TOKENS, 17), jnp.float32) for _ in "cs")
    with pytest.raises(ValueError, match="cos has 17 channel pairs, expected at most 16"):
        prepare_queries(**{**arguments()[prepare_queries], "rope": wide})
