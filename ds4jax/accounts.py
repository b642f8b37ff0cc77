"""The accounts of a run in plain values: what was planned, what moved, how the two differ.

Everything here is made from plans and pass reports; keys of quantities end in their unit.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

import streaming
from ds4jax import admission, events
from ds4jax.experts import ExpertPlan
from ds4jax.passes import PassReport
from ds4jax.plan import Plan, RunPlan
from ds4jax.rows import Prompts

# Amounts of a ledger that add up over passes and stages.
_SUMS = (
    "padding_bytes",
    "pageable_bytes",
    "table_bytes",
    "file_bytes",
    "read_padding_bytes",
    "slow_fills",
    "major_faults",
    "copy_busy_s",
    "compute_busy_s",
    "both_busy_s",
    "stall_s",
    "dispatch_wait_s",
    "wall_s",
)


def pass_done(
    report: PassReport, plans: Sequence[Plan], end_layer: int, tokens: int, chunks: int
) -> events.PassDone:
    """The event that tells of a pass; `end_layer` is the layer after its last one."""
    first_layer = end_layer - len(report.distinct)
    moved = dict(_ledger_rows(plans, [report]))
    lines = []
    for index, (seconds, distinct) in enumerate(
        zip(report.layer_seconds, report.distinct, strict=True)
    ):
        row = moved.get(first_layer + index)
        lines.append(
            events.LayerPass(
                layer=first_layer + index,
                seconds=seconds,
                distinct_experts=distinct,
                moved_bytes=row.bytes if row else 0,
                stall_seconds=row.stall_s if row else 0.0,
                dispatch_wait_seconds=row.dispatch_wait_s if row else 0.0,
                waited_for=row.waited_for if row else None,
            )
        )
    return events.PassDone(tokens, chunks, tuple(lines))


def unique_passes(reports: Iterable[Sequence[PassReport]]) -> list[PassReport]:
    """The passes of several sequences, each once: sequences of a micro-batch share theirs."""
    return list({id(part): part for parts in reports for part in parts}.values())


def plan_record(plans: Sequence[Plan], devices: Sequence[str]) -> list[dict[str, Any]]:
    """What was decided before the run, one table per stage."""
    return [
        {
            "device": device,
            "first_layer": plan.layers.start,
            "layers": len(plan.layers),
            "order": plan.order,
            "micro_batch_tokens": plan.micro_batch_tokens,
            "residents_per_layer": [len(chosen) for chosen in plan.experts.residency.resident],
            "experts_per_layer": plan.experts.residency.items,
            "tier": plan.experts.tier if plan.experts.streams else None,
            "window_slabs": plan.experts.resolved_window if plan.experts.streams else None,
            "slab_budget_bytes": plan.experts.slab_bytes,
            "host_store_bytes": plan.store_bytes,
            "peer": _peer_record(plan.experts),
            "activations": plan.activations,
            "host_activation_bytes": plan.host_activation_bytes,
            "locking_device_bytes": admission.locking_bytes(
                plan.store_bytes + plan.host_activation_bytes
            ),
            "price": {
                **dataclasses.asdict(plan.price),
                "total_bytes": plan.price.total_bytes,
            },
        }
        for plan, device in zip(plans, devices, strict=True)
    ]


def _peer_record(experts: ExpertPlan) -> dict[str, Any] | None:
    """What a neighbour device does for a stage; None without one."""
    shares = experts.peer
    if shares is None:
        return None
    return {
        "device": shares.device,
        "exchange": "collective" if shares.collective else "copy",
        "computed_experts_per_layer": [len(items) for items in experts.residency.elsewhere],
        "held_experts_per_layer": [len(items) for items in shares.held],
        "relayed_experts_per_layer": [len(items) for items in shares.relayed],
    }


def neighbours(found: RunPlan) -> list[dict[str, Any]]:
    """What devices without a stage may do for those with one, and what the run then takes."""
    best = found.choice.objective_ns
    names = [name for name, ns in found.neighbours if ns == best]
    return [
        {"neighbours": name, "predicted_s": ns / 1e9, "chosen": name in names[:1]}
        for name, ns in found.neighbours
    ]


def streaming_record(
    plans: Sequence[Plan],
    passes: Sequence[PassReport],
    locking: Sequence[streaming.pinned.PinReport],
) -> dict[str, Any] | None:
    """What was moved and what hid behind what, over all passes; None when nothing is streamed.

    locking  what page-locking host memory took, for every stage that streams

    predicted_bytes is `expected_bytes`, known_before_bytes the part of it that no router decided.
    """
    ledgers = [ledger for part in passes for ledger in part.ledgers]
    if not ledgers:
        return None
    totals = {name: sum(getattr(ledger, name) for ledger in ledgers) for name in _SUMS}
    storage = [ledger.storage_bytes for ledger in ledgers]
    least = min(totals["copy_busy_s"], totals["compute_busy_s"])
    rates = [rate for ledger in ledgers for rate in ledger.copy_gb_per_s if rate > 0]
    histogram: collections.Counter[str] = collections.Counter()
    for ledger in ledgers:
        histogram.update(ledger.histogram())
    return {
        "passes": len(passes),
        "complete": all(ledger.complete for ledger in ledgers),
        "exactly_predicted": all(ledger.predicted.exact for ledger in ledgers),
        "predicted_bytes": expected_bytes(plans, passes),
        "known_before_bytes": sum(sum(ledger.predicted.bytes.values()) for ledger in ledgers),
        "predicted_most_bytes": sum(ledger.predicted.most_bytes for ledger in ledgers),
        "moved_bytes": _by_tier(ledger.moved_bytes for ledger in ledgers),
        "moved_experts": _by_tier(ledger.moved_items for ledger in ledgers),
        **{name: _rounded(value) for name, value in totals.items()},
        "storage_bytes": None if None in storage else sum(filter(None, storage)),
        # Beside what the ledgers count: activations that wait in host memory between layers.
        "activations_to_host_bytes": sum(part.activations.to_host for part in passes),
        "activations_to_device_bytes": sum(part.activations.to_device for part in passes),
        "overlap": _rounded(totals["both_busy_s"] / least) if least > 0 else None,
        "peak_live_bytes": max(ledger.peak_live_bytes for ledger in ledgers),
        "peak_live_slabs": max(ledger.peak_live_units for ledger in ledgers),
        "registered_bytes": sum(part.registered_bytes for part in locking),
        "registration_s": _rounded(sum(part.seconds for part in locking)),
        "registration_device_bytes": sum(part.device_bytes for part in locking),
        "copy_gb_per_s": {
            "copies_by_rate": dict(
                sorted(histogram.items(), key=lambda x: int(x[0].split("-")[0]))
            ),
            "min": _rounded(min(rates, default=None)),
            "median": _rounded(statistics.median(rates) if rates else None),
            "max": _rounded(max(rates, default=None)),
        },
        "layers": _layer_table(plans, passes),
    }


def expected_bytes(plans: Sequence[Plan], passes: Sequence[PassReport]) -> dict[str, int]:
    """Bytes by tier that complete passes had to move, whatever was counted on the way.

    Where no router decided, what was known before the pass; otherwise the streamed experts that
    some row chose, by the routers' notes and the tables of layers that hash ids.
    """
    total: collections.Counter[str] = collections.Counter()
    for part in passes:
        for (_, plan), ledger in zip(_streaming_plans(plans), part.ledgers, strict=True):
            predicted, experts = ledger.predicted, plan.experts
            if predicted.exact:
                total.update(predicted.bytes)
                continue
            expert_bytes = predicted.most_bytes // predicted.most_items
            for tier, streamed in experts.by_tier.items():
                for layer, items in zip(plan.layers, streamed, strict=True):
                    chosen = np.count_nonzero(part.counts[layer, list(items)])
                    total[tier] += int(chosen) * expert_bytes
    return dict(total)


def _layer_table(plans: Sequence[Plan], passes: Sequence[PassReport]) -> list[dict[str, Any]]:
    """By layer: what moved, and how long what was waited for."""
    rows: dict[int, list[streaming.ledger.LayerRow]] = collections.defaultdict(list)
    for layer, row in _ledger_rows(plans, passes):
        rows[layer].append(row)
    return [
        {
            "layer": layer,
            "moved_bytes": sum(row.bytes for row in parts),
            "moved_experts": sum(row.items for row in parts),
            "stall_s": _rounded(sum(row.stall_s for row in parts)),
            "dispatch_wait_s": _rounded(sum(row.dispatch_wait_s for row in parts)),
            "waited_for_expert": max(
                parts, key=lambda row: row.stall_s + row.dispatch_wait_s
            ).waited_for,
        }
        for layer, parts in sorted(rows.items())
    ]


def experts_record(passes: Sequence[PassReport]) -> list[dict[str, Any]]:
    """By layer: how many distinct experts a pass used, and over the whole run."""
    used = [np.count_nonzero(part.counts, axis=1) for part in passes]
    over_all = np.count_nonzero(usage_counts(passes), axis=1)
    table = []
    for layer, total in enumerate(over_all.tolist()):
        # A pass that was resumed has not visited its first layers.
        visited = [int(counts[layer]) for counts in used if counts[layer]]
        table.append(
            {
                "layer": layer,
                "distinct_experts": total,
                "distinct_experts_per_pass_mean": _rounded(statistics.mean(visited or [0])),
                "distinct_experts_per_pass_max": max(visited, default=0),
            }
        )
    return table


def typical_pass(passes: Sequence[PassReport]) -> int:
    """Number of the pass that is worth looking at: the last of the largest, best not the first.

    The first one compiles programs, the last one may be a leftover.
    """
    candidates = range(1, len(passes)) if len(passes) > 1 else range(1)
    return max(candidates, key=lambda n: (len(passes[n].work_seconds), n))


def layer_seconds(passes: Sequence[PassReport], layers: int) -> list[float]:
    """Device time of every layer over all passes; a resumed pass has only the last ones."""
    total = np.zeros(layers)
    for part in passes:
        first = np.flatnonzero(part.counts.any(axis=1))[0]
        total[first : first + len(part.layer_seconds)] += part.layer_seconds
    return total.tolist()


def usage_counts(passes: Sequence[PassReport]) -> np.ndarray:
    """How many rows chose each expert, i64 [layers, E]."""
    return sum((part.counts for part in passes[1:]), start=passes[0].counts)


def plan_error(
    plans: Sequence[Plan],
    passes: Sequence[PassReport],
    peak_bytes: int | None,
    *,
    run_plan: RunPlan | None = None,
    spans: Sequence[tuple[int, int]] = (),
    seconds: float = 0.0,
) -> dict[str, Any]:
    """How far the plan was from what happened; None where it is not known.

    run_plan  what the run was planned to take, if it was read to its end in one process
    spans     (first position, tokens) of each sequence that was read, in `seconds`

    time      seconds minus those predicted, as a share of these; a first run compiles as well
    moved     bytes moved minus those predicted; where the router decides, minus the bound
    device    peak of the devices' memory minus the price of the plans
    """
    ledgers = [ledger for part in passes for ledger in part.ledgers]
    predicted = sum(ledger.predicted.most_bytes for ledger in ledgers)
    expected = None if run_plan is None else run_plan.predict(Prompts(tuple(spans)))
    exact = all(ledger.predicted.exact for ledger in ledgers)
    if expected is not None and expected.exact and exact:
        # Known before anything ran, whereas the ledgers' bound follows the passes that there were.
        predicted = sum(expected.moved_bytes.values())
    moved = sum(ledger.total_bytes for ledger in ledgers)
    price = sum(plan.price.total_bytes for plan in plans)
    return {
        "predicted_s": _rounded(None if expected is None else expected.seconds),
        "predicted_compute_s": _rounded(None if expected is None else expected.compute_s),
        "predicted_copy_s": _rounded(None if expected is None else expected.copy_s),
        "predicted_bubble_s": _rounded(None if expected is None else expected.bubble_s),
        "measured_s": _rounded(seconds),
        "time_error": None if expected is None else _rounded(seconds / expected.seconds - 1),
        "predicted_moved_bytes": predicted,
        "moved_bytes": moved,
        "moved_error_bytes": moved - predicted,
        "predicted_device_bytes": price,
        "peak_device_bytes": peak_bytes,
        "device_error_bytes": None if peak_bytes is None else peak_bytes - price,
        "device_error": None if peak_bytes is None else _rounded(peak_bytes / price - 1),
    }


def timeline(plans: Sequence[Plan], passes: Sequence[PassReport]) -> list[streaming.trace.Span]:
    """Copy, compute and wait spans of all passes; lanes carry the stage where there are several."""
    spans = []
    for part in passes:
        for (number, plan), ledger in zip(_streaming_plans(plans), part.ledgers, strict=True):
            for span in ledger.spans:
                arguments = dict(span.arguments)
                if "layer" in arguments:
                    arguments["layer"] += plan.layers.start
                lane = f"stage {number} {span.lane}" if len(plans) > 1 else span.lane
                spans.append(span._replace(lane=lane, arguments=arguments))
    return spans


def _streaming_plans(plans: Sequence[Plan]) -> list[tuple[int, Plan]]:
    """The stages that have a ledger, in the order in which a report has those."""
    return [(number, plan) for number, plan in enumerate(plans) if plan.experts.streams]


def _ledger_rows(
    plans: Sequence[Plan], passes: Sequence[PassReport]
) -> Iterator[tuple[int, streaming.ledger.LayerRow]]:
    """(layer of the model, row) of every ledger."""
    for part in passes:
        for (_, plan), ledger in zip(_streaming_plans(plans), part.ledgers, strict=True):
            for row in ledger.layers:
                yield plan.layers[row.layer], row


def _by_tier(amounts: Iterable[Any]) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for amount in amounts:
        total.update(amount)
    return dict(total)


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
