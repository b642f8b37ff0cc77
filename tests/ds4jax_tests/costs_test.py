"""Work of layer parts against sums over tokens, and tables of measured times."""

import copy
import dataclasses
import pathlib

import numpy as np
import pytest

from ds4jax import costs
from ds4jax.config import ModelConfig
from sharding.cost import PlanError

FLASH = ModelConfig.from_json(
    pathlib.Path(__file__).parents[2] / "configs" / "models" / "flash.json"
)
SWA, CSA, HCA = 0, 2, 3


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
@pytest.mark.parametrize(("tokens", "position"), [(1, 0), (100, 0), (333, 77), (8192, 24_576)])
def test_pairs_of_attention_are_those_of_every_token(layer, tokens, position):
    """Per token: the window, and of the entries that it sees those that attention reads."""
    config = FLASH
    ratio, window = config.layer_ratios[layer], config.sliding_window
    pairs = scores = 0
    for end in range(position + 1, position + tokens + 1):
        seen = end // ratio if ratio else 0
        pairs += min(end, window) + (min(seen, config.index_topk) if layer == CSA else seen)
        scores += seen if layer == CSA else 0
    flops = 4 * config.num_attention_heads * config.head_dim * pairs
    flops += 2 * config.index_n_heads * config.index_head_dim * scores
    found = costs.work(config, layer, tokens, position)["attend"]
    # The same call without attention: products of weights only.
    nothing = costs.work(dataclasses.replace(config, sliding_window=0), SWA, tokens, 0)["attend"]
    weights = found.matrix_flops - flops
    if layer == SWA:
        assert weights == pytest.approx(nothing.matrix_flops, rel=1e-9)
    assert weights > 0
    assert weights % (2 * tokens) == 0


def test_chunks_at_several_positions_are_worked_out_at_once():
    positions = np.array([0, 8192, 65_536])
    together = costs.work(FLASH, CSA, 8192, positions)["attend"]
    for at, position in enumerate(positions):
        alone = costs.work(FLASH, CSA, 8192, int(position))["attend"]
        assert together.matrix_flops[at] == alone.matrix_flops


def test_few_tokens_use_few_experts():
    assert costs.uniform_distinct(FLASH, 1) == pytest.approx(6)
    assert costs.uniform_distinct(FLASH, 128) == pytest.approx(243.7, abs=0.1)
    assert costs.uniform_distinct(FLASH, 8192) == pytest.approx(256)


def test_measured_layers_of_an_h200_are_given_back():
    table = costs.measured_h200()
    for row in table.rows:
        layer, q1 = {"swa": SWA, "csa": CSA, "hca": HCA}[row["kind"]], "numerics" not in row
        found = table.seconds(FLASH, layer, 8192, np.array([row["position"]]), costs.H200, q1=q1)
        for part in costs.PARTS:
            assert found[part][0] == pytest.approx(row["parts"][part]["median_s"], rel=1e-6)


def test_times_scale_with_rates_and_context():
    table = costs.measured_h200()
    half = costs.Rates(*(rate / 2 for rate in dataclasses.astuple(costs.H200)))
    positions = np.array([0, 50_000, 500_000])
    fast = table.seconds(FLASH, CSA, 8192, positions, costs.H200, q1=True)
    for part, slow in table.seconds(FLASH, CSA, 8192, positions, half, q1=True).items():
        np.testing.assert_allclose(slow, 2 * fast[part])
    assert np.all(np.diff(sum(fast.values())) > 0)


def test_products_in_bfloat16_are_priced_by_their_own_rows():
    table, positions = costs.measured_h200(), np.array([0, 122_880])
    slow, fast = (
        table.seconds(FLASH, CSA, 8192, positions, costs.H200, q1=q1) for q1 in (False, True)
    )
    np.testing.assert_array_equal(slow["route"], fast["route"])
    for part in ("attend", "experts", "finish"):
        assert np.all(slow[part] > fast[part])
    # What was not measured is priced by what was.
    rows = [row for row in table.rows if "numerics" not in row]
    one = costs.LayerTable({**table.to_json(), "rows": rows})
    assert one.measured(q1=True)
    assert not one.measured(q1=False)
    found = one.seconds(FLASH, CSA, 8192, positions, costs.H200, q1=False)
    assert all(np.array_equal(found[part], fast[part]) for part in costs.PARTS)


def test_a_table_that_is_not_complete_is_refused():
    record = copy.deepcopy(costs.measured_h200().to_json())
    del record["rows"][0]["parts"]["route"]["median_s"]
    with pytest.raises(PlanError, match=r"mine: the table .*not complete \(KeyError\('median_s'\)"):
        costs.LayerTable(record, "mine")
    with pytest.raises(PlanError, match="is empty"):
        costs.LayerTable({**record, "rows": []})


def test_temporaries_are_those_of_the_model_that_was_measured():
    record = copy.deepcopy(costs.measured_h200().to_json())
    for row in record["rows"]:
        row["position"] = min(row["position"], 24_576)
        row["parts"]["attend"]["temp_bytes"] = 1_000_000 + max(row["position"] - 8192, 0)
        row["parts"]["experts"].pop("temp_bytes", None)
    table = costs.LayerTable(record)
    assert table.temp_bytes(FLASH, CSA, "attend", 8192, 8192) == 1_000_000
    assert table.temp_bytes(FLASH, CSA, "attend", 16_384, 8192) == 2_000_000
    assert table.temp_bytes(FLASH, CSA, "attend", 128, 8192) == 1_000_000
    # They grow with the state from one that was measured to the next, and beyond the last.
    assert table.temp_bytes(FLASH, CSA, "attend", 8192, 32_768) == 1_016_384
    assert table.temp_bytes(FLASH, CSA, "attend", 8192, 20_480) == 1_008_192
    assert table.temp_bytes(FLASH, CSA, "attend", 8192, 57_344) == 1_032_768
    assert table.temp_bytes(FLASH, CSA, "experts", 8192, 8192) is None
    other = dataclasses.replace(FLASH, hidden_size=2048)
    assert table.temp_bytes(other, CSA, "attend", 8192, 8192) is None
