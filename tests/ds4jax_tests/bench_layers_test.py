"""The layer bench on a tiny model, and the floors it compares with."""

import json
import pathlib

import jax
import numpy as np
import pytest

from ds4jax import cache, testing
from ds4jax.bench import layers
from ds4jax.cli import common
from ds4jax.config import PRESETS, LayerKind, ModelConfig

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FLASH = ModelConfig.from_json(CONFIGS / "flash.json")


def test_a_run_times_every_part_of_every_kind(tmp_path, capsys):
    code = layers.main(
        [
            "bench",
            f"--model={CONFIGS / 'tiny.json'}",
            f"--out_dir={tmp_path}",
            "--tokens=128",
            "--repeats=1",
        ]
    )
    assert code == common.OK
    record = json.loads((tmp_path / "layers.json").read_text())
    assert [row["kind"] for row in record["rows"]] == ["swa", "csa", "hca"]
    for row in record["rows"]:
        assert set(layers.PARTS) < set(row["parts"])
        assert row["seconds"] == pytest.approx(
            sum(row["parts"][name]["median_s"] for name in layers.PARTS)
        )
        assert 0 < row["floor_s"] < row["seconds"]
        assert row["parts"]["finite"]
        assert 0 < row["parts"]["distinct"] <= 16
    assert "hca at 0, 128 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--positions=-1", "--positions is '-1', expected whole numbers of at least 0"),
        ("--positions=1048575", "--positions has 1048575, expected at most 1040384 (what --tokens"),
        ("--tokens=0", "tokens=0: 0 is not a positive integer"),
        ("--repeats=0", "repeats=0: 0 is not a positive integer"),
        ("--model=none.json", "none.json does not exist"),
    ],
)
def test_mistakes_are_refused(flag, message, tmp_path, capsys):
    assert layers.main(["bench", f"--out_dir={tmp_path / 'out'}", flag]) == common.USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_layer_of_each_kind_is_taken():
    model = layers.one_of_each(FLASH)
    assert [model.kind(layer) for layer in range(model.num_hidden_layers)] == list(LayerKind)
    assert not model.is_hash(0)
    assert model.hidden_size == FLASH.hidden_size


def test_floors_follow_the_published_sizes():
    """Per token: 13.0e9 weights of 284e9 take part in every token of the whole model."""
    tokens = 8192
    total = 0.0
    for layer in range(FLASH.num_hidden_layers):
        work = layers.work(FLASH, layer, tokens, 0)
        total += sum(part.matrix_flops + part.float32_flops for part in work.values())
    # Two operations a weight; attention and indexer come on top.
    assert 2 * 12.0e9 < total / tokens < 2 * 18.0e9
    assert 0.15 < sum(part.floor_s for part in work.values()) * FLASH.num_hidden_layers < 0.5


def test_attention_work_grows_with_the_position_where_the_layer_looks_back():
    model = layers.one_of_each(FLASH)
    early, late = (
        [layers.work(model, layer, 1024, position)["attend"].matrix_flops for layer in range(3)]
        for position in (0, 65536)
    )
    window, sparse, dense = (b / a for a, b in zip(early, late, strict=True))
    assert window < 1.1
    assert sparse > 2
    assert dense > 1.2


def test_random_states_keep_shapes_and_have_contents():
    model = layers.one_of_each(testing.tiny_config())
    state = cache.empty_state(model, PRESETS["official"], 256).layers[1]
    made = layers.random_state(state, 3)
    assert jax.tree.structure(made) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(made), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert np.unique(np.asarray(after, np.float32)).size > 1
