"""ds4jax-prefill as a process of a run that goes wrong: launched_prefill.py JOB RANK ARGUMENTS.

The process of that rank does the job when it comes to its second micro-batch (hang: to its first).
"""

import os
import signal
import sys
import threading
import time

from ds4jax import hosts, stages
from ds4jax.cli import prefill
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


def main(job: str, rank: str, *arguments: str) -> int:
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
