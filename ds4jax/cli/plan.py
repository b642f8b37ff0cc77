"""Tells how a run would be laid out: bytes by use, residents, what is streamed. Reads no weights.

python -m ds4jax.cli.plan --config=configs/runs/NAME.toml --checkpoint=DIR --prompt_tokens=N
    [--host_bytes=N] [--config.SECTION.KEY=VALUE ...]

The machine may be another one: config.memory.device_bytes is the memory of its device, --host_bytes
that of its host; what is not given is taken from this machine. The last line on stdout is JSON.
Exit code 2: nothing fits (the message has the missing bytes), or the checkpoint is incomplete.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from ds4jax import accounts, admission
from ds4jax.checkpoint import keys
from ds4jax.cli import common
from ds4jax.engine import capacity_tokens, open_source
from ds4jax.experts import LINK_BYTES_PER_S
from ds4jax.flags import config_from_flags, define_config_flags
from ds4jax.plan import Memory, binding, plan_stages

GIB = 2**30
SCHEMA = "ds4jax.plan/1"
USES = {
    "weights_bytes": "weights without routed experts",
    "resident_bytes": "experts that stay",
    "slab_bytes": "experts on their way",
    "state_bytes": "state of one sequence",
    "micro_batch_bytes": "micro-batch between layers",
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
    flags.DEFINE_integer(
        "prompt_tokens", None, "Tokens of the longest prompt.", flag_values=flag_values
    )
    flags.DEFINE_integer(
        "host_bytes",
        None,
        "Host memory for streamed experts. Default: what is free here.",
        flag_values=flag_values,
    )
    common.parse_flags(flag_values, argv, __doc__ or "")
    checkpoint = common.require_flag(flag_values, "checkpoint")
    prompt_tokens = int(common.require_flag(flag_values, "prompt_tokens"))
    config = config_from_flags(flag_values, {})
    device = jax.local_devices()[0]
    memory = Memory(
        config.memory.device_bytes or admission.device_bytes(device),
        flag_values["host_bytes"].value or admission.host_bytes(),
    )
    with open_source(checkpoint, config.synthetic) as source:
        keys.check_complete(source)
        capacity = capacity_tokens(config, source.config, prompt_tokens)
        item = keys.expert_bytes(source.config, source.infos())
        plans = plan_stages(source, config, device, prompt_tokens, capacity, memory)
    names = [f"stage {number}" for number in range(len(plans))]
    stages = accounts.plan_record(plans, names)
    passes = -(-prompt_tokens // min(plan.micro_batch_tokens for plan in plans))
    for stage, plan in zip(stages, plans, strict=True):
        stage["expert_bytes"] = item
        stage["streamed_bytes_per_pass"] = sum(map(len, plan.experts.residency.streamed)) * item
        stage["streamed_bytes"] = passes * stage["streamed_bytes_per_pass"]
        stage["binding"] = binding(plan, config, item)
        _print_stage(stage, memory, passes)
    common.print_result(
        {
            "schema": SCHEMA,
            "checkpoint": checkpoint,
            "prompt_tokens": prompt_tokens,
            "capacity_tokens": capacity,
            "device_bytes": memory.device_bytes,
            "host_bytes": memory.host_bytes,
            "passes": passes,
            "stages": stages,
        }
    )
    return common.OK


def _print_stage(stage: dict[str, Any], memory: Memory, passes: int) -> None:
    first, count = stage["first_layer"], stage["layers"]
    print(f"{stage['device']}: layers {first} to {first + count - 1}")
    price = stage["price"]
    for key, text in USES.items():
        print(f"  {text:<32}{price[key]:>16} bytes {price[key] / GIB:>9.3f} GiB")
    print(f"  {'of':<32}{memory.device_bytes:>16} bytes {memory.device_bytes / GIB:>9.3f} GiB")
    moved, experts = stage["streamed_bytes_per_pass"], stage["experts_per_layer"]
    residents = sorted(set(stage["residents_per_layer"]))
    lines = {
        "order": f"{stage['order']}, {stage['micro_batch_tokens']} tokens share a pass",
        "residents": f"{' or '.join(map(str, residents))} of {experts} experts in every layer",
        "passes": f"{passes} over the experts",
    }
    if moved:
        seconds = moved / LINK_BYTES_PER_S
        lines |= {
            "streamed": f"{moved} bytes a pass from {stage['tier']}, "
            f"{stage['streamed_bytes']} bytes in all",
            "ahead": f"{stage['window_slabs']} slabs, all slabs within "
            f"{stage['slab_budget_bytes']} bytes",
            "host memory": f"{stage['host_store_bytes']} of {memory.host_bytes} bytes",
            "link": f"{seconds:.3f} s a pass at {LINK_BYTES_PER_S / 1e9:.0f} GB/s: at most "
            f"{stage['micro_batch_tokens'] / seconds:.0f} tokens/s",
        }
    lines["what binds"] = stage["binding"]
    for name, text in lines.items():
        print(f"  {name:<12} {text}")


if __name__ == "__main__":
    run()
