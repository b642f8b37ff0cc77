"""Micro-batches on several stages at once, in one process or in many."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from ds4jax import passes
from ds4jax.hosts import Handed, Hosts
from ds4jax.readings import Reading, Slice
from ds4jax.runner import COMPILED
from ds4jax.stages import Piece, Stage, merge_reports
from sharding import pipeline

# Takes a micro-batch that has left the last layer; see `outputs.Outputs.deliver`.
Deliver = Callable[
    [
        Sequence[Slice],
        Sequence[jax.Array],
        passes.PassReport,
        float,
        Callable[[], tuple[int, float]],
    ],
    None,
]


class Pipelined:
    """Takes the micro-batches of one call through all stages of this process.

    In a run of several processes its stages stand between the links to the others.

    stages    of this process, in the order of their layers
    hosts     the processes of the run, if there are several
    batches   all micro-batches, in order
    readings  of the sequences that have been begun, by their index
    begin     is told the chunks of a micro-batch before it enters the first stage
    deliver   is called for micro-batches that have left the last layer of the model
    stopped   asked before a micro-batch enters
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        hosts: Hosts | None,
        batches: Sequence[Sequence[Slice]],
        readings: Mapping[int, Reading],
        *,
        begin: Callable[[Sequence[Slice]], None],
        deliver: Deliver,
        stopped: Callable[[], bool],
    ):
        self._stages, self._hosts = stages, hosts
        self._batches, self._readings = batches, readings
        self._begin, self._deliver, self._stopped = begin, deliver, stopped
        self._reports: list[list[passes.PassReport]] = [[] for _ in batches]
        self._pieces: list[list[Piece]] = [[] for _ in batches]
        self._last_s = 0.0
        self._cut = len(batches)  # the first micro-batch that a stop keeps from being read

    def drive(self) -> None:
        """Reads all micro-batches, up to a stop; errors of a stage are raised as they are."""
        run = pipeline.Pipeline(
            [
                pipeline.Stage(
                    f"layers {stage.layers.start} to {stage.layers.stop - 1}",
                    functools.partial(self._run, stage),
                    # What another process has sent is on this device already, and nobody else's.
                    stage.device if index else None,
                    prefetch=functools.partial(self._prefetch, stage),
                )
                for index, stage in enumerate(self._stages)
            ]
        )
        units = [pipeline.Unit(n, 0) for n in range(len(self._batches))]
        hosts = self._hosts
        self._last_s = time.perf_counter()
        try:
            abort = hosts.close if hosts is not None else None
            run.run(units, self._source, self._sink, abort=abort)
            if hosts is not None:
                hosts.flush()
            return
        except pipeline.PipelineError as error:
            failed = error.__cause__ or error
        finally:
            for stage in self._stages:
                stage.abandon()
        raise failed  # out here: with its own cause, which tells whether a user can mend it

    def _source(self, number: int, chunk: int) -> tuple[jax.Array, ...]:
        """A micro-batch in front of the first stage: its streams, none before the embedding."""
        handed = self._enter(number)
        if handed is None:
            self._cut = min(self._cut, number)
            return ()
        batch = self._batches[number]
        self._begin(batch)
        self._pieces[number] = [
            piece.piece(self._readings[piece.job.index].reused) for piece in batch
        ]
        self._reports[number] = list(handed.reports)
        return handed.streams

    def _enter(self, number: int) -> Handed | None:
        """A micro-batch as it comes to the first stage of this process; None for a stop."""
        if self._hosts is not None and not self._hosts.first:
            return self._hosts.receive()
        # The first one is always read: a result is what a stopped run can go on from.
        return None if number >= self._cut or (number and self._stopped()) else Handed((), ())

    def _prefetch(self, stage: Stage, number: int, chunk: int) -> None:
        if number < self._cut:
            stage.prefetch([piece.ids for piece in self._batches[number]])

    def _run(
        self, stage: Stage, number: int, chunk: int, streams: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        if number < self._cut:
            pieces = self._pieces[number]
            batch = stage.prepare(pieces, streams or None)
            self._reports[number].append(stage.run(batch, pieces))
            streams = batch.streams
        if self._hosts is not None and self._hosts.queued and stage is self._stages[-1]:
            # Here, so that programs of the next micro-batch queue up behind the hand-off.
            self._leave(self._hosts, number, streams)
        return streams

    def _leave(self, hosts: Hosts, number: int, streams: tuple[jax.Array, ...]) -> None:
        """Hands a micro-batch, or word of a stop, to the next process."""
        stopped = number >= self._cut
        hosts.send(None if stopped else Handed(streams, tuple(self._reports[number])))

    def _sink(self, number: int, chunk: int, streams: tuple[jax.Array, ...]) -> None:
        """What becomes of a micro-batch behind the last stage."""
        hosts, stopped = self._hosts, number >= self._cut
        if hosts is not None and not hosts.last:
            if not hosts.queued:
                self._leave(hosts, number, streams)
            for piece in () if stopped else self._batches[number]:
                self._readings[piece.job.index].read += piece.length
            return
        if stopped:
            return
        report, now = merge_reports(self._reports[number]), time.perf_counter()
        wall, self._last_s = now - self._last_s, now
        self._deliver(self._batches[number], streams, report, wall, COMPILED.measure())
