"""Reads prompts with a DeepSeek-V4 checkpoint and writes logits, metrics and a report.

python -m ds4jax.cli.prefill --config=configs/runs/NAME.toml --checkpoint=DIR --out_dir=DIR
    [--prompt=TEXT | --prompt_file=F | --prompts_file=F.jsonl | --tokens=F.npy]
    [--resume_from=DIR] [--config.SECTION.KEY=VALUE ...]

The output folder appears when the run is complete: run.json, report.html (the run in pictures),
metrics.jsonl (a line per chunk, and one per layer of every pass), profile.json (how often each
expert was used), timeline.json where experts were streamed, logits.npy (float32 [rows, vocab]; with
logits=logprobs instead logprobs.npy, top_logprobs.npy and top_tokens.npy), and state/ with
save_state. The last line on stdout is run.json; everything else goes to stderr. Exit code 0: done;
2: something you can mend; 130: stopped; 1: an internal error.

With `python -m sharding.launcher --processes=N --` in front of it, N processes share the stages of
config.pipeline.split; the last one writes the folder.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from ds4jax import hosts as processes
from ds4jax.cli import common
from ds4jax.flags import config_from_flags, define_config_flags
from ds4jax.job import PrefillJob, run_job, summary

_PROMPT_FLAGS = {"prompt": "text", "prompt_file": "file", "prompts_file": None, "tokens": None}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_prefill, argv)


def run() -> None:
    """The console script."""
    processes.leave(main())


def _prefill(argv: Sequence[str]) -> int:
    flag_values = flags.FlagValues()
    _define_flags(flag_values)
    common.parse_flags(flag_values, argv, __doc__ or "")
    job = PrefillJob(
        checkpoint=common.require_flag(flag_values, "checkpoint"),
        out_dir=common.require_flag(flag_values, "out_dir"),
        config=config_from_flags(flag_values, _prompt_overrides(flag_values)),
        resume_from=flag_values["resume_from"].value,
        overwrite=bool(flag_values["overwrite"].value),
    )
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", common.MEMORY_FRACTION)
    with processes.joined() as hosts, _profile(flag_values["profile_dir"].value, hosts):
        result = run_job(job, sys.stderr, hosts)
        if hosts is None or hosts.last:
            common.say(summary(result, job.out_dir))
            common.print_result(result)
    return common.OK if result["status"] == "complete" else common.STOPPED


def _define_flags(flag_values: flags.FlagValues) -> None:
    define_config_flags(flag_values)
    for name, help in (
        ("checkpoint", "Checkpoint folder (published or converted), or synthetic:NAME."),
        ("out_dir", "Folder to write; it must not exist yet."),
        ("prompt", "Prompt text; takes the place of the prompt in the config file."),
        ("prompt_file", "UTF-8 file with one prompt."),
        ("prompts_file", "JSON lines with several prompts, see --config.prompt.prompts_file."),
        ("tokens", "A .npy file with token ids."),
        (
            "resume_from",
            "Earlier run (or state folder of one) whose saved state holds the beginning of this "
            "prompt.",
        ),
        ("profile_dir", "Folder for a JAX profiler trace of the run."),
    ):
        flags.DEFINE_string(name, None, help, flag_values=flag_values)
    flags.DEFINE_bool(
        "overwrite", False, "Replace --out_dir if it holds an earlier run.", flag_values=flag_values
    )


def _prompt_overrides(flag_values: flags.FlagValues) -> dict[str, Any]:
    """The prompt flags as configuration; given one, prompts in the file do not count."""
    given = {
        key or name: flag_values[name].value
        for name, key in _PROMPT_FLAGS.items()
        if flag_values[name].present
    }
    if not given:
        return {}
    none = {"text": (), "file": None, "prompts_file": None, "tokens": None}
    return {f"config.prompt.{key}": value for key, value in (none | given).items()}


def _profile(
    folder: str | None, hosts: processes.Hosts | None
) -> contextlib.AbstractContextManager[Any]:
    """Traces into `folder` if one is given; what cannot be written is refused before the run."""
    if not folder:
        return contextlib.nullcontext()
    if hosts is not None:
        folder = os.path.join(folder, f"process{hosts.rank}")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise common.UsageError(
            f"--profile_dir: {folder} cannot be made ({error.strerror}): take another folder"
        ) from None
    return jax.profiler.trace(folder)


if __name__ == "__main__":
    run()
