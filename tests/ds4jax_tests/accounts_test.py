"""Accounts: passes counted once, layers numbered as in the model, sums that are sums."""

import dataclasses

import numpy as np
import pytest

from ds4jax import accounts, plan, testing
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.machine import planned_machine
from ds4jax.passes import PassReport
from ds4jax.run_config import RunConfig
from streaming.ledger import LayerRow, Ledger, Prediction
from streaming.pinned import PinReport
from streaming.trace import Span


def plans(split: str = "2,3", fraction: float = 0.5) -> list[plan.Plan]:
    config = RunConfig().replace({"pipeline.split": split, "streaming.resident_fraction": fraction})
    source = SyntheticSource(testing.tiny_config(), seed=0)
    machine = planned_machine(config.replace({"memory.device_bytes": 10**9}), 26_112, 2, 10**9)
    return list(plan.plan_run(source, config, machine, [100], 8192).stages)


def ledger(layers: range, moved: int, **changes) -> Ledger:
    """The account of a stage; its layers count from 0."""
    values = dict.fromkeys((field.name for field in dataclasses.fields(Ledger)), 0)
    values |= {
        "predicted": Prediction({"ram": 1}, {"ram": moved}, 1, moved, True),
        "complete": True,
        "moved_items": {"ram": 1},
        "moved_bytes": {"ram": moved},
        "storage_bytes": 5,
        "copy_busy_s": 2.0,
        "compute_busy_s": 4.0,
        "both_busy_s": 1.5,
        "copy_gb_per_s": (47.0, 51.0),
        "layers": tuple(LayerRow(n, 1, moved, 3, 0.25 * n, 0.0, 7) for n in range(len(layers))),
        "spans": (Span("copy", "copy L0 step 0", 0.0, 1.0, {"layer": 0}),),
    }
    return Ledger(**values | changes)


def report(*ledgers: Ledger, visited: range = range(5), works: int = 1) -> PassReport:
    counts = np.zeros((5, 16), np.int64)
    counts[list(visited), :3] = 2
    seconds = tuple(1.0 + n for n in visited)
    return PassReport((sum(seconds),) * works, seconds, counts, (3,) * len(visited), ledgers)


def test_layers_of_later_stages_have_their_number_in_the_model():
    found = accounts.pass_done(
        report(ledger(range(2), 10), ledger(range(2, 5), 20)), plans(), 5, tokens=9, chunks=1
    )
    assert [line.layer for line in found.layers] == [0, 1, 2, 3, 4]
    assert [line.moved_bytes for line in found.layers] == [10, 10, 20, 20, 20]
    assert [line.stall_seconds for line in found.layers] == [0.0, 0.25, 0.0, 0.25, 0.5]
    spans = accounts.timeline(plans(), [report(ledger(range(2), 1), ledger(range(2, 5), 1))])
    assert [(span.lane, span.arguments["layer"]) for span in spans] == [
        ("stage 0 copy", 0),
        ("stage 1 copy", 2),
    ]


def test_resumed_pass_begins_where_it_was_stopped():
    found = accounts.pass_done(report(visited=range(3, 5)), plans("5", 1.0), 5, 9, 1)
    assert [line.layer for line in found.layers] == [3, 4]
    parts = [report(visited=range(3)), report(visited=range(3, 5))]
    assert accounts.layer_seconds(parts, 5) == [1.0, 2.0, 3.0, 4.0, 5.0]
    rows = accounts.experts_record(parts)
    assert [row["distinct_experts_per_pass_mean"] for row in rows] == [3] * 5


def test_sequences_of_a_micro_batch_share_their_passes():
    shared, own = report(), report()
    assert accounts.unique_passes([[shared], [shared, own]]) == [shared, own]
    np.testing.assert_array_equal(accounts.usage_counts([shared, own]), 2 * shared.counts)


def test_sums_are_over_passes_and_stages():
    parts = [report(ledger(range(2), 10), ledger(range(2, 5), 20))] * 2
    locking = [PinReport(100, 0, 0.5, 8, ()), PinReport(50, 0, 0.25, 4, ())]
    found = accounts.streaming_record(plans(), parts, locking)
    assert found["moved_bytes"] == found["predicted_bytes"] == {"ram": 60}
    assert found["moved_experts"] == {"ram": 4}
    assert (found["copy_busy_s"], found["both_busy_s"]) == (8.0, 6.0)
    assert found["overlap"] == 0.75
    assert found["storage_bytes"] == 20
    assert found["copy_gb_per_s"]["copies_by_rate"] == {"45-50": 4, "50-55": 4}
    assert found["copy_gb_per_s"]["median"] == 49.0
    assert (found["registered_bytes"], found["registration_s"]) == (150, 0.75)
    assert [row["moved_bytes"] for row in found["layers"]] == [20, 20, 40, 40, 40]
    assert found["layers"][4] == {
        "layer": 4,
        "moved_bytes": 40,
        "moved_experts": 2,
        "stall_s": 1.0,
        "dispatch_wait_s": 0,
        "waited_for_expert": 7,
    }
    unknown = [report(ledger(range(2), 10, storage_bytes=None), ledger(range(2, 5), 20))]
    assert accounts.streaming_record(plans(), unknown, locking)["storage_bytes"] is None


def test_every_quantity_of_the_record_has_its_unit():
    found = accounts.streaming_record(
        plans(), [report(ledger(range(2), 1), ledger(range(2, 5), 1))], []
    )
    units = ("_bytes", "_s", "_experts", "_slabs", "_gb_per_s", "_faults", "_fills")
    plain = {"passes", "complete", "exactly_predicted", "overlap", "layers"}
    assert not {key for key in found if not key.endswith(units)} - plain


def test_where_routers_decide_the_bytes_follow_from_what_they_chose():
    made = plans("2,3", 0.5)
    streamed = [set(items) for each in made for items in each.experts.residency.streamed]
    part = report(
        ledger(range(2), 70, predicted=Prediction({"ram": 2}, {"ram": 20}, 16, 160, False)),
        ledger(range(2, 5), 20),
    )
    part.counts[:] = 0
    part.counts[0, 3:12] = 1
    part.counts[1, 15] = 5
    part.counts[2, :] = 1  # a layer of the stage that moves whole layers
    chosen = len(streamed[0] & set(range(3, 12))) + len(streamed[1] & {15})
    assert chosen > 0
    assert accounts.expected_bytes(made, [part, part]) == {"ram": 2 * (10 * chosen + 20)}
    found = accounts.streaming_record(made, [part], [])
    assert found["predicted_bytes"] == {"ram": 10 * chosen + 20}
    assert found["known_before_bytes"] == 40
    assert not found["exactly_predicted"]


def test_nothing_streamed_has_no_record_and_no_timeline():
    assert accounts.streaming_record(plans("5", 1.0), [report()], []) is None
    assert accounts.timeline(plans("5", 1.0), [report()]) == []


@pytest.mark.parametrize(
    ("works", "expected"), [([4], 0), ([4, 4], 1), ([4, 4, 1], 1), ([1, 1, 4, 4, 2], 3)]
)
def test_pass_to_look_at_is_large_and_not_the_first(works, expected):
    assert accounts.typical_pass([report(works=count) for count in works]) == expected


def test_plan_error_is_what_happened_minus_what_was_planned():
    parts, made = [report(ledger(range(2), 10), ledger(range(2, 5), 20))], plans()
    price = sum(each.price.total_bytes for each in made)
    found = accounts.plan_error(made, parts, price + 7)
    assert (found["moved_error_bytes"], found["device_error_bytes"]) == (0, 7)
    assert accounts.plan_error(made, parts, None)["device_error_bytes"] is None


def test_plan_is_told_by_stage():
    first, second = accounts.plan_record(plans(), ["gpu 0", "gpu 1"])
    assert (first["first_layer"], first["layers"]) == (0, 2)
    assert (second["first_layer"], second["device"]) == (2, "gpu 1")
    assert second["residents_per_layer"] == [8] * 3
    assert (second["tier"], second["window_slabs"]) == ("ram", 1)
    assert second["price"]["total_bytes"] == sum(
        count for name, count in second["price"].items() if name != "total_bytes"
    )
