"""Stages: consecutive layers on one device each, with all that they need to take a micro-batch on.

A stage keeps the layer states of the sequences that are being read. What passes from stage to stage
is only the streams; a micro-batch is at one stage at a time, several of them are under way.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

import streaming
from ds4jax import passes
from ds4jax.activations import Moved, Shelf, on_device
from ds4jax.cache import LayerState, make_chunk
from ds4jax.config import Numerics
from ds4jax.experts import ExpertPool
from ds4jax.plan import Plan
from ds4jax.run_config import RunConfig, StreamingConfig
from ds4jax.runner import Runner


@dataclasses.dataclass(frozen=True)
class Piece:
    """A chunk of a sequence.

    sequence  key of the sequence, unlike those of any other call
    ids       i32 token ids; position of the first one; rows that the chunk is padded to
    """

    sequence: Hashable
    ids: np.ndarray
    position: int
    rows: int


class Stage:
    """Some layers of a loaded model on `device`."""

    def __init__(
        self,
        plan: Plan,
        device: jax.Device,
        runner: Runner,
        pool: ExpertPool,
        options: StreamingConfig,
    ):
        self.plan, self.device, self.runner, self.pool = plan, device, runner, pool
        self.options = options
        self.states: dict[Hashable, list[LayerState]] = {}
        self._tables = runner.expert_tables()
        # What `prefetch` has started, and for which tokens.
        self._begun: list[streaming.Step] | None = None
        self._begun_tokens: list[np.ndarray] = []
        self._notes = streaming.Notes(
            runner.config.n_routed_experts, by_callback=options.notes == "callback"
        )

    @property
    def layers(self) -> range:
        """The layers of the model that are here."""
        return self.plan.layers

    def reconfigured(self, numerics: Numerics, config: RunConfig) -> "Stage":
        """The same weights under another setting; see `Engine.reconfigured`."""
        other = copy.copy(self)
        other.runner, other.states = self.runner.with_numerics(numerics), {}
        other.options = config.streaming
        return other

    def take_state(self, sequence: Hashable) -> tuple[LayerState, ...]:
        """The states of a sequence, which the stage forgets."""
        return tuple(self.states.pop(sequence))

    def prepare(
        self, pieces: Sequence[Piece], streams: Sequence[jax.Array] | None, layer: int = 0
    ) -> passes.Pass:
        """A micro-batch in front of `layer`, which counts from the first one of the stage.

        streams  of every chunk, on the device of the stage or the host; None where the stage has
        the embedding.
        All chunks go to the device here, ahead of the slabs: a later copy would wait behind these.
        """
        sequences = list(dict.fromkeys(piece.sequence for piece in pieces))
        works: list[passes.Work] = []
        shelf: Shelf[jax.Array] = Shelf(
            len(pieces), self.device, on_host=self.plan.activations == "host"
        )
        with jax.default_device(self.device):
            for number, piece in enumerate(pieces):
                chunk = jax.device_put(
                    make_chunk(piece.ids, piece.position, piece.rows), self.device
                )
                entering = self.runner.embed(chunk) if streams is None else streams[number]
                if streams is not None:  # of a pass that was stopped, wherever they were kept
                    entering = on_device(entering, self.device)
                shelf.put(number, entering)
                works.append(passes.Work(sequences.index(piece.sequence), chunk, len(piece.ids)))
        return passes.Pass(works, shelf, [self.states[sequence] for sequence in sequences], layer)

    def prefetch(self, tokens: Sequence[np.ndarray]) -> None:
        """Starts to stream for the next micro-batch while the stage has nothing to compute.

        tokens  real ids of each chunk. `run` has to follow, or `abandon`; a run over other tokens
                gives it up.
        """
        if self._begun is None and self.plan.experts.streams:
            self._begun, self._begun_tokens = self._steps(0, tokens), list(tokens)
            self.pool.start(self._begun)
            self.pool.prefetch()

    def abandon(self) -> None:
        """Gives up what `prefetch` has started for a micro-batch that does not come."""
        if self._begun is not None:
            self._begun = None
            self.pool.abort()

    def run(
        self,
        batch: passes.Pass,
        pieces: Sequence[Piece],
        *,
        on_layer: Callable[[int], None] = lambda layer: None,
        paused: Callable[[], bool] = lambda: False,
    ) -> passes.PassReport:
        """Takes a prepared micro-batch through the layers; on_layer gets numbers of the model."""
        tokens = [piece.ids for piece in pieces]
        if batch.layer or not _equal(self._begun_tokens, tokens):
            self.abandon()
        begun, self._begun = self._begun, None
        with jax.default_device(self.device):
            report = passes.run(
                batch,
                self.runner,
                self.pool,
                begun or self._steps(batch.layer, tokens),
                self._notes,
                started=begun is not None,
                on_layer=lambda layer: on_layer(self.layers[layer]),
                paused=paused,
            )
        # Waits for experts say nothing about how long a layer computes.
        seconds = sum(report.work_seconds) - sum(ledger.stall_s for ledger in report.ledgers)
        layer_seconds = max(seconds, 0.0) / len(report.distinct)
        self.pool.measured(sum(map(len, tokens)), report.distinct, layer_seconds)
        return report

    def _steps(self, first_layer: int, tokens: Sequence[np.ndarray]) -> list[streaming.Step]:
        mode = self.options.mode
        if mode == "auto":
            mode = self.pool.preferred_mode(sum(map(len, tokens)))
        return passes.plan_steps(self.pool, mode, first_layer, tokens, self._tables)


def _equal(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def merge_reports(reports: Sequence[passes.PassReport]) -> passes.PassReport:
    """One report of a micro-batch from those of all stages; ledgers stay apart."""
    return passes.PassReport(
        tuple(map(sum, zip(*(report.work_seconds for report in reports), strict=True))),
        tuple(seconds for report in reports for seconds in report.layer_seconds),
        np.concatenate([report.counts for report in reports]),
        tuple(count for report in reports for count in report.distinct),
        tuple(ledger for report in reports for ledger in report.ledgers),
        sum((report.activations for report in reports), start=Moved()),
    )
