"""What happens during a run, as values; the bar, the plain lines and the metrics file subscribe.

An observer is any callable that takes an event. Events arrive in order, on the calling thread,
and their progress counts never decrease within one run.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@dataclasses.dataclass(frozen=True)
class WeightsLoaded:
    """Weights on the device so far: `done_bytes` of `total_bytes` as stored."""

    done_bytes: int
    total_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class PromptStarted:
    """A sequence of `tokens` tokens to read is next; `reused` more came with its state."""

    prompt: int
    prompts: int
    name: str
    tokens: int
    reused: int


@dataclasses.dataclass(frozen=True)
class ChunkDone:
    """The `tokens` tokens from `position` on have been read and their outputs delivered.

    prompt, chunk     index of the sequence in the run and of the chunk in the sequence
    rows              row shape that the chunk was padded to
    seconds           wall time of this chunk, compilation included
    compiled          programs compiled during this chunk, and `compile_seconds` for them
    done, total       tokens read so far and tokens to read in the whole run
    """

    prompt: int
    chunk: int
    position: int
    tokens: int
    rows: int
    seconds: float
    compiled: int
    compile_seconds: float
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class ProgramsAwaited:
    """The weights are there, programs that were begun meanwhile are still being compiled."""


@dataclasses.dataclass(frozen=True)
class ProgramsCompiled:
    """The programs that the prompts are known to need are there.

    seconds         that compiling each of them took, added up; several are compiled at once
    waited_seconds  of them that came after the weights
    """

    programs: int
    seconds: float
    waited_seconds: float


@dataclasses.dataclass(frozen=True)
class LayerDone:
    """A micro-batch of `chunks` chunks has been handed to the device up to and with `layer`.

    done, total  tokens times layers, so far and of the whole run
    """

    layer: int
    layers: int
    chunks: int
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class LayerPass:
    """What a pass did in one layer.

    seconds                device time of all chunks
    distinct_experts       experts that a row of the pass chose
    moved_bytes            of streamed experts
    stall_seconds          the device waited for a slab; dispatch_wait_seconds the host for files
    waited_for             the expert that the longest of these waits ended with
    """

    layer: int
    seconds: float
    distinct_experts: int
    moved_bytes: int
    stall_seconds: float
    dispatch_wait_seconds: float
    waited_for: int | None


@dataclasses.dataclass(frozen=True)
class PassDone:
    """A micro-batch of `chunks` chunks with `tokens` tokens has been through these layers."""

    tokens: int
    chunks: int
    layers: tuple[LayerPass, ...]


Event = (
    WeightsLoaded
    | ProgramsAwaited
    | ProgramsCompiled
    | PromptStarted
    | ChunkDone
    | LayerDone
    | PassDone
)
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The observer that does nothing."""


def fan_out(*observers: Observer) -> Observer:
    """One observer that passes every event to all of `observers`, in this order."""

    def observe(event: Event) -> None:
        for observer in observers:
            observer(event)

    return observe


def chunk_metrics(event: ChunkDone) -> dict[str, Any]:
    """The line of metrics.jsonl for a chunk; every quantity has its unit in the key."""
    return {
        "schema": "ds4jax.chunk/1",
        "prompt_index": event.prompt,
        "chunk_index": event.chunk,
        "position_tokens": event.position,
        "chunk_tokens": event.tokens,
        "row_shape_tokens": event.rows,
        "seconds_s": round(event.seconds, 6),
        "rate_tokens_per_s": round(event.tokens / event.seconds, 3) if event.seconds else None,
        "compiled_programs": event.compiled,
        "compile_s": round(event.compile_seconds, 6),
        "done_tokens": event.done,
        "total_tokens": event.total,
    }


def layer_metrics(event: PassDone, number: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl for pass `number`, one per layer."""
    return [
        {
            "schema": "ds4jax.layer/1",
            "pass_index": number,
            "layer_index": layer.layer,
            "pass_tokens": event.tokens,
            "pass_chunks": event.chunks,
            "seconds_s": round(layer.seconds, 6),
            "distinct_experts": layer.distinct_experts,
            "moved_bytes": layer.moved_bytes,
            "stall_s": round(layer.stall_seconds, 6),
            "dispatch_wait_s": round(layer.dispatch_wait_seconds, 6),
            "waited_for_expert_index": layer.waited_for,
        }
        for layer in event.layers
    ]


def jsonl(file: IO[str]) -> Observer:
    """Writes a JSON line per chunk, and one per layer of every pass, to `file`, flushed."""
    number = 0

    def observe(event: Event) -> None:
        nonlocal number
        match event:
            case ChunkDone():
                lines = [chunk_metrics(event)]
            case PassDone():
                lines, number = layer_metrics(event, number), number + 1
            case _:
                return
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()

    return observe


def plain(
    stream: IO[str], interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic
) -> Observer:
    """Plain lines for logs: the ends of every phase, and between them one per `interval_s`."""
    last_line_s = clock()

    def observe(event: Event) -> None:
        nonlocal last_line_s
        match event:
            case PromptStarted():
                line, due = _start_line(event), True
            case WeightsLoaded():
                due = event.done_bytes >= event.total_bytes
                line = f"loaded {_gib(event.done_bytes)} of {_gib(event.total_bytes)}"
                if event.seconds:
                    line += f" at {event.done_bytes / event.seconds / 1e9:.2f} GB/s"
            case ProgramsAwaited():
                line, due = "compiling programs", True
            case ProgramsCompiled():
                due = True
                line = (
                    f"compiled {event.programs} programs in {event.seconds:.1f} s of work, "
                    f"{event.waited_seconds:.1f} s of waiting"
                )
            case ChunkDone():
                due = event.chunk == 0 or event.done == event.total
                line = (
                    f"read {event.done} of {event.total} tokens "
                    f"({100 * event.done / event.total:.0f} %), "
                    f"{event.tokens / max(event.seconds, 1e-9):.1f} tokens/s in the last chunk"
                )
                if event.compiled:
                    line += f", {event.compile_seconds:.1f} s of it compiling"
            case LayerDone():
                due = False
                line = (
                    f"layer {event.layer + 1} of {event.layers} on {event.chunks} chunks "
                    f"({100 * event.done / event.total:.0f} %)"
                )
            case PassDone():
                return
        if due or clock() - last_line_s >= interval_s:
            last_line_s = clock()
            stream.write(line + "\n")
            stream.flush()

    return observe


class Bar:
    """A progress bar for terminals; use as a context manager around the run."""

    def __init__(self, stream: IO[str]):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._tasks: dict[str, Any] = {}
        self._rate = ""

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case WeightsLoaded():
                rate = f"{event.done_bytes / max(event.seconds, 1e-9) / 1e9:.2f} GB/s"
                self._update("weights", event.done_bytes, event.total_bytes, rate)
            case PromptStarted():
                self._progress.console.print(_start_line(event), highlight=False)
            case ChunkDone():
                rate = f"{event.tokens / max(event.seconds, 1e-9):.1f} tokens/s"
                self._rate = rate
                self._update("prefill", event.done, event.total, rate)
            case LayerDone():
                done = event.done / event.layers
                self._update("prefill", done, event.total // event.layers, self._rate)

    def _update(self, phase: str, done: float, total: int, rate: str) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total, rate="")
        self._progress.update(self._tasks[phase], completed=done, total=total, rate=rate)


def _start_line(event: PromptStarted) -> str:
    line = f"prompt {event.prompt + 1} of {event.prompts} ({event.name}): {event.tokens} tokens"
    return f"{line}, {event.reused} reused from the saved state" if event.reused else line


def _gib(count: int) -> str:
    return f"{count / 2**30:.3f} GiB"
