"""ds4jax-prefill as a process of a run that goes wrong: launched_prefill.py JOB RANK ARGUMENTS.

The process of that rank does the job when it comes to its second micro-batch (hang: to its first).
The job generate continues a prompt instead, through the engine, and prints what came of it.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

from ds4jax import engine, hosts, stages
from ds4jax.cli import prefill
from ds4jax.cli.common import print_result
from ds4jax.report import array_hash
from sharding import launcher


def misbehave(job: str, number: int) -> None:
    if job == "hang" and number == 0:
        print("hangs", file=sys.stderr, flush=True)
        threading.Event().wait()
    if job == "kill" and number == 1:
        print(f"killed at {time.time()}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "interrupt" and number == 1:
        os.kill(os.getppid(), signal.SIGINT)
    if job == "fail" and number == 1:
        raise RuntimeError("a stage that fails")


def generate(checkpoint: str, tokens: str) -> int:
    config = {
        "prefill.chunk_tokens": 48,
        "numerics.preset": "oracle",
        "pipeline.split": "1,1",
    }
    ids = np.load(tokens)[:48]
    with (
        hosts.joined() as processes,
        engine.load(checkpoint, config, prompt_tokens=48, hosts=processes) as loaded,
    ):
        found = loaded.generate(ids, 4)
        told = {"tokens": found.tokens.tolist(), "rows": len(found.logits)}
        print_result({**told, "sha256": array_hash(found.logits, "<f4")})
    return 0


def main(job: str, rank: str, *arguments: str) -> int:
    if job == "generate":
        checkpoint, tokens, *_ = (flag.partition("=")[2] for flag in arguments)
        return generate(checkpoint, tokens)
    run, calls = stages.Stage.run, []

    def patched(self, *args, **kwargs):
        if os.environ["SHARDING_RANK"] == rank:
            misbehave(job, len(calls))
        calls.append(None)
        return run(self, *args, **kwargs)

    stages.Stage.run = patched
    if job == "differ" and os.environ["SHARDING_RANK"] == rank:
        arguments = (*arguments, "--config.prefill.chunk_tokens=32")
    return prefill.main(["ds4jax-prefill", *arguments])


if __name__ == "__main__":
    assert launcher.launched()
    hosts.leave(main(*sys.argv[1:]))
