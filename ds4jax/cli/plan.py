"""Tells how a run would be laid out: split, bytes by use, residents, time. Reads no weights.

python -m ds4jax.cli.plan --config=configs/runs/NAME.toml --checkpoint=DIR --prompt_tokens=N[,N...]
    [--host_bytes=N] [--config.SECTION.KEY=VALUE ...]

The machine may be another one: config.machine.file describes it (python -m ds4jax.cli.probe writes
such files), config.memory.device_bytes limits the memory of its devices, --host_bytes that of its
host; what is not given is taken from this machine. config.pipeline.split=auto splits the layers
over config.pipeline.devices. The last line on stdout is JSON. Exit code 2: nothing fits (the
message has the missing bytes and settings that would fit), or the checkpoint is incomplete.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from ds4jax import accounts
from ds4jax.cache import capacity_for
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.open import open_source
from ds4jax.cli import common
from ds4jax.flags import config_from_flags, define_config_flags
from ds4jax.machine import planned_machine
from ds4jax.plan import RunPlan, binding, plan_run, stage_indices
from ds4jax.rows import Prompts
from ds4jax.run_config import RunConfig
from sharding import split

GIB = 2**30
_ANY_DEVICES = 1 << 16
SCHEMA = "ds4jax.plan/2"
USES = {
    "weights_bytes": "weights without routed experts",
    "resident_bytes": "experts that stay",
    "slab_bytes": "experts on their way",
    "state_bytes": "states of sequences",
    "micro_batch_bytes": "micro-batch between layers",
    "handoff_bytes": "micro-batches between stages",
    "workspace_bytes": "workspace of a chunk",
    "total_bytes": "together",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_plan, argv)


def run() -> None:
    """The console script."""
    sys.exit(main())


def _plan(argv: Sequence[str]) -> int:
    flag_values = flags.FlagValues()
    define_config_flags(flag_values)
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Checkpoint folder (published or converted), or synthetic:NAME.",
        flag_values=flag_values,
    )
    flags.DEFINE_list(
        "prompt_tokens", None, "Tokens of each prompt, comma separated.", flag_values=flag_values
    )
    flags.DEFINE_integer(
        "host_bytes",
        None,
        "Host memory for streamed experts. Default: what is free here.",
        lower_bound=0,
        flag_values=flag_values,
    )
    common.parse_flags(flag_values, argv, __doc__ or "")
    checkpoint = common.require_flag(flag_values, "checkpoint")
    prompts = common.whole_numbers(
        "prompt_tokens", common.require_flag(flag_values, "prompt_tokens")
    )
    config = config_from_flags(flag_values, {})
    with open_source(checkpoint, config.synthetic) as source:
        keys.check_complete(source)
        common.require_positions("prompt_tokens", prompts, source.config.max_position_embeddings)
        if (room := config.prefill.max_tokens) is not None:
            common.require_positions("prompt_tokens", prompts, room, "config.prefill.max_tokens")
        capacity = capacity_for(config, source.config, max(prompts))
        item = keys.expert_bytes(source.config, source.infos())
        count = _device_count(config, source.config.num_hidden_layers)
        machine = planned_machine(config, item, count, flag_values["host_bytes"].value)
        found = plan_run(source, config, machine, prompts, capacity, recommend=True)
    record = _record(found, config, prompts)
    for text in _lines(found, record):
        print(text)
    common.print_result(
        {
            "schema": SCHEMA,
            "checkpoint": checkpoint,
            "prompt_tokens": prompts,
            "capacity_tokens": capacity,
            **record,
        }
    )
    return common.OK


def _device_count(config: RunConfig, layers: int) -> int | None:
    """Devices that the machine needs for the split that is asked for; None for what there is."""
    if config.pipeline.automatic and config.pipeline.devices is None:
        return None
    return max(stage_indices(config, layers, _ANY_DEVICES)) + 1


def _record(found: RunPlan, config: RunConfig, prompts: Sequence[int]) -> dict[str, Any]:
    """The plan in plain values."""
    choice, machine = found.choice, found.run.machine
    item, predicted = found.run.item_bytes, found.predict(Prompts.of(*prompts))
    names = [machine.devices[stage.range.device].name for stage in choice.stages]
    stages = accounts.plan_record(found.stages, names)
    passes = choice.schedule.passes
    for stage, plan, priced in zip(stages, found.stages, choice.stages, strict=True):
        device = machine.devices[priced.range.device]
        stage["place"] = found.places[choice.stages.index(priced)]
        stage["expert_bytes"] = item
        stage["device_bytes"] = device.memory_bytes
        stage["streamed_bytes_per_pass"] = sum(map(len, plan.experts.residency.streamed)) * item
        stage["streamed_bytes"] = passes * stage["streamed_bytes_per_pass"]
        stage["link_bytes_per_s"] = device.host_link_bytes_per_s
        stage["binding"] = binding(plan, config, item)
        stage["compute_s"] = priced.compute_ns / 1e9
        stage["copy_s"] = priced.stream_ns / 1e9
        stage["handoff_s"] = priced.handoff_ns / 1e9
        stage["pass_s"] = priced.time_ns / 1e9
    return {
        "device_bytes": [device.memory_bytes for device in machine.devices],
        "host_bytes": machine.host_bytes,
        "passes": passes,
        "split": [len(plan.layers) for plan in found.stages],
        "devices": list(found.places),
        "binding_resource": choice.binding,
        "predicted_s": predicted.seconds,
        "predicted_compute_s": predicted.compute_s,
        "predicted_copy_s": predicted.copy_s,
        "predicted_bubble_s": predicted.bubble_s,
        "predicted_bytes": dict(predicted.moved_bytes),
        "tie_count": choice.tie_count,
        "ties": [_alternative(tie, machine.devices) for tie in choice.ties],
        "runners_up": [_alternative(other, machine.devices) for other in choice.runners_up],
        "recommended": [
            {"setting": setting, "predicted_s": ns / 1e9} for setting, ns in choice.suggestions
        ],
        "neighbours": accounts.neighbours(found),
        "assumed": list(machine.notes),
        "stages": stages,
    }


def _alternative(other: split.Alternative, devices: Sequence[Any]) -> dict[str, Any]:
    """Another plan; without a split only a bound of its time is known."""
    return {
        "predicted_s": other.objective_ns / 1e9,
        "at_least": other.bound,
        "micro_batch_tokens": other.schedule.micro_batch_tokens,
        "split": [stage.end - stage.begin for stage in other.stages],
        "devices": [devices[stage.device].name for stage in other.stages],
    }


def _lines(found: RunPlan, record: Mapping[str, Any]) -> list[str]:
    """The plan for people."""
    moved = ", ".join(f"{n} bytes from {tier}" for tier, n in record["predicted_bytes"].items())
    lines = [
        f"predicted {record['predicted_s']:.3f} s: slowest stage computes "
        f"{record['predicted_compute_s']:.3f} s, copies {record['predicted_copy_s']:.3f} s, waits "
        f"{record['predicted_bubble_s']:.3f} s; {moved or 'nothing'} moved",
        f"binding resource: {record['binding_resource']}",
        f"{found.choice.schedule}",
    ]
    for stage in record["stages"]:
        lines += _stage_lines(stage, record)
    count = record["tie_count"]
    lines.append(f"plans of this time: {'too many to count' if count is None else count}")
    lines += [f"  {_alternative_line(tie)}" for tie in record["ties"][1:]]
    lines.append("runners-up:" if record["runners_up"] else "runners-up: none")
    lines += [f"  {_alternative_line(other)}" for other in record["runners_up"][:8]]
    for each in record["neighbours"]:
        taken = ", taken" if each["chosen"] else ""
        lines.append(f"neighbours, {each['neighbours']}: {each['predicted_s']:.3f} s{taken}")
    for each in record["recommended"]:
        lines.append(
            f"would be faster, and give other bits: --{each['setting']} "
            f"({each['predicted_s']:.3f} s)"
        )
    return lines + [f"assumed: {note}" for note in record["assumed"]]


def _alternative_line(other: Mapping[str, Any]) -> str:
    places = " | ".join(
        f"{name} {count}" for name, count in zip(other["devices"], other["split"], strict=True)
    )
    bound = "at least " if other["at_least"] else ""
    return (
        f"{bound}{other['predicted_s']:.3f} s, micro-batch {other['micro_batch_tokens']} tokens"
        + (f": {places} layers" if places else "")
    )


def _stage_lines(stage: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    first, count, price = stage["first_layer"], stage["layers"], stage["price"]
    lines = [f"{stage['device']}: layers {first} to {first + count - 1}"]
    usable = stage["device_bytes"]
    for key, text in USES.items():
        lines.append(f"  {text:<32}{price[key]:>16} bytes {price[key] / GIB:>9.3f} GiB")
    lines.append(f"  {'of':<32}{usable:>16} bytes {usable / GIB:>9.3f} GiB")
    moved, experts = stage["streamed_bytes_per_pass"], stage["experts_per_layer"]
    residents = sorted(set(stage["residents_per_layer"]))
    rows = {
        "order": f"{stage['order']}, {stage['micro_batch_tokens']} tokens share a pass",
        "residents": f"{' or '.join(map(str, residents))} of {experts} experts in every layer",
        "pass": f"{stage['pass_s']:.3f} s = compute {stage['compute_s']:.3f} s beside copies "
        f"{stage['copy_s']:.3f} s, hand-off {stage['handoff_s']:.3f} s; {record['passes']} passes",
    }
    if moved:
        rate = stage["link_bytes_per_s"]
        source = f"{stage['tier']} at {rate / 1e9:.1f} GB/s"
        if (peer := stage["peer"]) is not None:
            held, relayed = (
                sum(peer[f"{kind}_experts_per_layer"]) * stage["expert_bytes"]
                for kind in ("held", "relayed")
            )
            source += f", {held} of them from device {peer['device']}, {relayed} through it"
        rows |= {
            "streamed": f"{moved} bytes a pass from {source}, "
            f"{stage['streamed_bytes']} bytes in all",
            "ahead": f"{stage['window_slabs']} slabs, all slabs within "
            f"{stage['slab_budget_bytes']} bytes",
            "host memory": f"{stage['host_store_bytes']} of {record['host_bytes']} bytes",
        }
    if stage["activations"] == "host":
        waiting = f"{stage['host_activation_bytes']} bytes of host memory"
        rows["micro-batch"] = f"waits between layers in {waiting}, copied beside the compute"
    rows["what binds"] = stage["binding"]
    return lines + [f"  {name:<12} {text}" for name, text in rows.items()]


if __name__ == "__main__":
    run()
