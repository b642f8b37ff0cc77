"""The outputs of micro-batches that have left the last layer, and the events that tell of them."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax

from ds4jax import accounts, events, passes
from ds4jax.activations import on_device
from ds4jax.plan import Plan
from ds4jax.readings import Reading, Slice
from ds4jax.run_config import PrefillConfig
from ds4jax.runner import COMPILED, tiles
from ds4jax.stages import Stage


class Outputs:
    """Makes the output rows of one call and accounts for its micro-batches.

    stage     the last one, whose device has the head
    plans     of all stages of the run
    mode      which rows, a value of config.prefill.logits
    readings  of the sequences that have been begun, by their index
    compiled  row shapes whose head is compiled; grows
    """

    def __init__(
        self,
        stage: Stage,
        plans: Sequence[Plan],
        options: PrefillConfig,
        mode: str,
        readings: Mapping[int, Reading],
        compiled: set[int],
        on_event: events.Observer,
    ):
        self._stage, self._plans = stage, plans
        self._options, self._mode = options, mode
        self._readings, self._compiled, self._on_event = readings, compiled, on_event

    def announce(self, slices: Sequence[Slice]) -> None:
        """Says which sequences begin with these chunks."""
        for piece in slices:
            job, reading = piece.job, self._readings[piece.job.index]
            if not reading.announced:
                reading.announced = True
                self._on_event(
                    events.PromptStarted(
                        job.index, job.prompts, job.name, len(job.ids), reading.reused
                    )
                )

    def tell_pass(self, slices: Sequence[Slice], report: passes.PassReport, end_layer: int) -> None:
        """Says how a micro-batch went that has come to `end_layer`."""
        self.announce(slices)
        for index in {piece.job.index for piece in slices}:
            self._readings[index].passes.append(report)
        tokens = sum(piece.length for piece in slices)
        self._on_event(accounts.pass_done(report, self._plans, end_layer, tokens, len(slices)))

    def deliver(
        self,
        slices: Sequence[Slice],
        streams: Sequence[jax.Array],
        report: passes.PassReport,
        wall_seconds: float,
        compiled: Callable[[], tuple[int, float]],
    ) -> None:
        """Makes the outputs of a micro-batch that has left the last layer.

        wall_seconds  what it took up to here
        compiled      tells the programs and seconds of compilation that belong to it
        """
        self.tell_pass(slices, report, self._stage.runner.config.num_hidden_layers)
        device_seconds = sum(report.work_seconds)
        for piece, leaving, seconds in zip(slices, streams, report.work_seconds, strict=True):
            reading, began = self._readings[piece.job.index], time.perf_counter()
            with jax.default_device(self._stage.device):
                self._put_rows(piece, leaving, reading)
            self._compiled.add(piece.rows)
            programs, compile_seconds = compiled()
            compiled = COMPILED.measure()
            reading.read += piece.length
            event = events.ChunkDone(
                prompt=piece.job.index,
                chunk=piece.first // self._options.chunk_tokens,
                position=reading.reused + piece.first,
                tokens=piece.length,
                rows=piece.rows,
                # Chunks of a micro-batch share its wall time by the device time each one took.
                seconds=wall_seconds * seconds / device_seconds + time.perf_counter() - began,
                compiled=programs,
                compile_seconds=compile_seconds,
                done=piece.job.done_before + piece.first + piece.length,
                total=piece.job.run_tokens,
            )
            reading.chunks.append(event)
            self._on_event(event)

    def _put_rows(self, piece: Slice, streams: jax.Array, reading: Reading) -> None:
        """Makes the output rows of a chunk, at most 128 at a time."""
        mode, runner, rows = self._mode, self._stage.runner, piece.length
        # The head is compiled for every row shape, so that the next prompt compiles nothing.
        if mode == "none" or (mode == "last" and not piece.ends and len(streams) in self._compiled):
            return
        streams = on_device(streams, self._stage.device)
        if mode == "last":
            row = runner.logits(streams, rows - 1, rows)
            if piece.ends:
                reading.put("logits", row)
        elif mode == "all":
            for first, stop in tiles(rows):
                reading.put("logits", runner.logits(streams, first, stop))
        elif mode == "logprobs":
            top = self._options.top_logprobs
            for first, stop in tiles(rows):
                part = runner.logprobs(streams, first, stop, piece.following, top)
                reading.put("logprobs", part.next_token)
                reading.put("top_logprobs", part.top)
                reading.put("top_tokens", part.tokens)
