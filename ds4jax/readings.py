"""What is read and what came of it: sequences and their chunks, reports and results."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from ds4jax import events, passes
from ds4jax.cache import PausedPass, SequenceState
from ds4jax.costs import padded_rows
from ds4jax.runner import LogProbs
from ds4jax.stages import Piece

# Takes named rows as they are made: "logits", or "logprobs", "top_logprobs" and "top_tokens".
Sink = Callable[[str, np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class PrefillReport:
    """How one sequence was read.

    numerics       the numerics setting, for example "bfloat16+q1+q2+q3"
    tokens_read    tokens that went through the model; tokens_reused came with the state
    seconds        wall time of all chunks, compilation and output included
    chunks         one event per chunk
    passes         how each micro-batch went that chunks of this sequence were part of
    state_bytes    size of the state afterwards
    interrupted    whether reading was stopped before the last token
    """

    name: str
    numerics: str
    tokens_read: int
    tokens_reused: int
    seconds: float
    chunks: tuple[events.ChunkDone, ...]
    passes: tuple[passes.PassReport, ...]
    state_bytes: int
    interrupted: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens read per second of wall time; 0 when a stop came before the first ones."""
        return self.tokens_read / self.seconds if self.seconds else 0.0

    @property
    def compiled(self) -> tuple[int, float]:
        """Programs compiled while reading, and the seconds that took."""
        chunks = self.chunks
        return sum(c.compiled for c in chunks), sum(c.compile_seconds for c in chunks)


@dataclasses.dataclass(frozen=True)
class PrefillResult:
    """What reading a sequence gives.

    logits    float32 [rows, V]: one row in mode "last", one per token read in mode "all"; None in
              other modes and when a sink took the rows
    logprobs  in mode "logprobs" without a sink
    state     continues the sequence, see `Engine.prefill`; in a run of several processes each has
              the layers of its own stages, and only the last one has logits and logprobs
    paused    set when a stop came between two layers of a micro-batch: `Engine.prefill` takes it
              up again; `state` then belongs to it
    """

    logits: np.ndarray | None
    logprobs: LogProbs | None
    state: SequenceState
    report: PrefillReport
    paused: PausedPass | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One sequence to read, and its place in the run; another one is never equal to it.

    run_tokens  tokens of all sequences of the run; done_before those of the sequences before
    """

    ids: np.ndarray
    name: str
    index: int = 0
    prompts: int = 1
    done_before: int = 0
    run_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Slice:
    """A chunk of a job: tokens first..first + length, padded to `rows` rows."""

    job: Job
    first: int
    length: int
    rows: int

    @property
    def ends(self) -> bool:
        """Whether it is the last one of its job."""
        return self.first + self.length == len(self.job.ids)

    @property
    def ids(self) -> np.ndarray:
        """Its token ids, i32 [length]."""
        return self.job.ids[self.first : self.first + self.length]

    @property
    def following(self) -> np.ndarray:
        """The token after each row, i32 [rows]; -1 where there is none."""
        following = np.full(self.rows, -1, np.int32)
        after = self.job.ids[self.first + 1 : self.first + self.length + 1]
        following[: len(after)] = after
        return following

    def piece(self, reused: int) -> Piece:
        """What a stage needs to know of it; `reused` tokens of the sequence came with a state."""
        return Piece(self.job, self.ids, reused + self.first, self.rows)


def micro_batches(
    jobs: Sequence[Job],
    paused: Sequence[int],
    chunk_tokens: int,
    most_tokens: int,
    row_shapes: Sequence[int],
) -> Iterator[list[Slice]]:
    """The chunks of all jobs in order, as many at a time as pass through a layer together.

    paused       lengths of the chunks of a pass that was stopped: the first micro-batch
    most_tokens  of a micro-batch of whole chunks; a single chunk may be longer
    row_shapes   what chunks are padded to, ascending
    """

    def cut(job: Job, first: int, length: int) -> Slice:
        return Slice(job, first, length, padded_rows(length, row_shapes))

    batch: list[Slice] = []
    for length in paused:
        batch.append(cut(jobs[0], sum(piece.length for piece in batch), length))
    begun = sum(paused)
    if batch:
        yield batch
        batch = []
    for job in jobs:
        for first in range(begun, len(job.ids), chunk_tokens):
            if batch and (len(batch) + 1) * chunk_tokens > most_tokens:
                yield batch
                batch = []
            batch.append(cut(job, first, min(chunk_tokens, len(job.ids) - first)))
        begun = 0
    if batch:
        yield batch


class Reading:
    """What has been read of one job so far."""

    def __init__(self, job: Job, reused: int, sink: Sink | None):
        self.job, self.reused, self.read = job, reused, 0
        self.announced = False
        self.rows = _Rows()
        self.put = sink or self.rows.append
        self.chunks: list[events.ChunkDone] = []
        self.passes: list[passes.PassReport] = []

    def result(
        self, numerics: str, state: SequenceState, paused: PausedPass | None
    ) -> PrefillResult:
        """The result as of now."""
        report = PrefillReport(
            name=self.job.name,
            numerics=numerics,
            tokens_read=self.read,
            tokens_reused=self.reused,
            seconds=sum(chunk.seconds for chunk in self.chunks),
            chunks=tuple(self.chunks),
            passes=tuple(self.passes),
            state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
            interrupted=self.read < len(self.job.ids),
        )
        return PrefillResult(self.rows.logits(), self.rows.logprobs(), state, report, paused)


class _Rows:
    """Collects output rows in host memory when no sink takes them."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        self._parts.setdefault(name, []).append(rows)

    def _joined(self, name: str) -> np.ndarray:
        return np.concatenate(self._parts[name])

    def logits(self) -> np.ndarray | None:
        return self._joined("logits") if "logits" in self._parts else None

    def logprobs(self) -> LogProbs | None:
        if "logprobs" not in self._parts:
            return None
        names = ("logprobs", "top_logprobs", "top_tokens")
        return LogProbs(*(self._joined(name) for name in names))
