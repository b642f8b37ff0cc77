"""A whole run: from prompts and a checkpoint to an output folder. What the command line calls."""

import contextlib
import dataclasses
import io
import os
import signal
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

import streaming
from ds4jax import accounts, events, page, report
from ds4jax import engine as engines
from ds4jax.cache import PausedPass, SequenceState
from ds4jax.checkpoint.load import fingerprint
from ds4jax.checkpoint.open import open_source
from ds4jax.checkpoint.source import TensorSource
from ds4jax.checkpoint.state import (
    RECORD_NAME,
    Part,
    complete_state,
    is_paused,
    load_paused,
    load_state,
    save_layers,
    save_paused,
    save_state,
    saved_bytes,
)
from ds4jax.checks import check_paused, check_prompt
from ds4jax.config import ConfigError, ModelConfig, Numerics
from ds4jax.engine import Engine
from ds4jax.hosts import Ending, Hosts, Saved
from ds4jax.readings import PrefillReport, PrefillResult
from ds4jax.run_config import RunConfig
from ds4jax.text import Prompt, PromptError, Tokenizer, read_prompts

METRICS_FILE = "metrics.jsonl"
PROFILE_FILE = "profile.json"  # how often each expert was used: config.streaming.resident_profile
PAGE_FILE = "report.html"  # the run as a person looks at it
TIMELINE_FILE = "timeline.json"  # for chrome://tracing or Perfetto
STATE_FOLDER = "state"


@dataclasses.dataclass(frozen=True)
class PrefillJob:
    """What to run: see the command `ds4jax-prefill` for the meaning of the fields."""

    checkpoint: str
    out_dir: str
    config: RunConfig
    resume_from: str | None = None
    overwrite: bool = False


def run_job(job: PrefillJob, stream: IO[str], hosts: Hosts | None = None) -> dict[str, Any]:
    """Runs `job`, writes its folder and returns the content of run.json.

    In a run of several processes, `hosts`, the last one does so; the others take part, print and
    write nothing, and return the status only.

    Progress goes to `stream`: a bar on a terminal, plain lines otherwise. After the first SIGINT
    the run ends with the current chunk, or with the current layer where several chunks go through
    the layers together, or with the micro-batches on their way through several stages; its folder
    is written only if the state is saved, with the status "interrupted", so that --resume_from can
    go on from there. Otherwise KeyboardInterrupt is raised and nothing remains.
    """
    if hosts is not None and not hosts.last:
        return _take_part(job, hosts)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_source(job.checkpoint, job.config.synthetic))
        prompts = read_prompts(job.config.prompt, lambda: Tokenizer(job.checkpoint))
        _check_prompts(prompts, source.config, job)
        begun = _restore(job, source, prompts, None if hosts is None else range(0))
        folder = stack.enter_context(report.output_folder(job.out_dir, overwrite=job.overwrite))
        report.require_space(folder, _output_bytes(job.config, source.config, prompts))
        metrics = stack.enter_context(open(folder / METRICS_FILE, "w", encoding="utf-8"))
        observers = (events.jsonl(metrics), stack.enter_context(_console(stream)))
        observe = events.fan_out(*observers)
        engine = stack.enter_context(
            engines.load(
                source,
                job.config,
                prompt_tokens=[len(prompt.ids) for prompt in prompts],
                on_event=observe,
                hosts=hosts,
            )
        )
        if hosts is not None:
            begun = _restore(job, source, prompts, engine.layers)
        states = _States(folder / STATE_FOLDER, prompts, engine, hosts)
        writers = stack.enter_context(_Writers(folder))
        stop = stack.enter_context(_stop_on_sigint(stream, len(engine.plans)))
        reports = []
        for result in _results(engine, prompts, begun, observe, writers, stop):
            reports.append(result.report)
            states.save(result)
        states.complete()
        interrupted = reports[-1].interrupted or len(reports) < len(prompts)
        if interrupted and not job.config.prefill.save_state:
            read = sum(part.tokens_read for part in reports)
            raise KeyboardInterrupt(
                f"after {read} tokens; nothing was written (config.prefill.save_state keeps the "
                "state of a stopped run)"
            )
        endings = None if hosts is None else hosts.share(_ending(engine, reports))
        outputs = writers.complete()
        result = run_record(job, engine, prompts, reports, outputs, interrupted, endings)
        _write_accounts(folder, engine, reports, result)
        report.write_json(folder / report.RUN_FILE, result)
        return result


def _take_part(job: PrefillJob, hosts: Hosts) -> dict[str, Any]:
    """What a process without the head does: the layers of its stages, for all prompts."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_source(job.checkpoint, job.config.synthetic))
        prompts = read_prompts(job.config.prompt, lambda: Tokenizer(job.checkpoint))
        _check_prompts(prompts, source.config, job)
        _restore(job, source, prompts, range(0))
        lengths = [len(prompt.ids) for prompt in prompts]
        engine = stack.enter_context(
            engines.load(source, job.config, prompt_tokens=lengths, hosts=hosts)
        )
        begun = _restore(job, source, prompts, engine.layers)
        states = _States(Path(), prompts, engine, hosts)
        stop = stack.enter_context(_stop_on_sigint(io.StringIO(), len(engine.plans)))
        writers = stack.enter_context(_Writers(Path()))
        reports = []
        for result in _results(engine, prompts, begun, events.ignore, writers, stop):
            reports.append(result.report)
            states.save(result)
        states.complete()
        interrupted = reports[-1].interrupted or len(reports) < len(prompts)
        if interrupted and not job.config.prefill.save_state:
            hosts.let_next_end()
            raise KeyboardInterrupt("the last process says how far the run came")
        hosts.share(_ending(engine, reports))
    return {"status": "interrupted" if interrupted else "complete"}


def _write_accounts(
    folder: Path, engine: Engine, reports: Sequence[PrefillReport], record: Mapping[str, Any]
) -> None:
    """The profile of used experts, what happened when, and the page that shows it."""
    passes = accounts.unique_passes(part.passes for part in reports)
    shown = accounts.typical_pass(passes)
    text = page.render(
        record,
        [chunk for part in reports for chunk in part.chunks],
        accounts.layer_seconds(passes, engine.model_config.num_hidden_layers),
        accounts.timeline(engine.plans, [passes[shown]]),
        (shown, len(passes)),
    )
    with report.disk_errors(folder):
        streaming.save_profile(folder / PROFILE_FILE, accounts.usage_counts(passes))
        if spans := accounts.timeline(engine.plans, passes):
            streaming.write_timeline(folder / TIMELINE_FILE, spans)
        (folder / PAGE_FILE).write_text(text, encoding="utf-8")


def _results(
    engine: Engine,
    prompts: list[Prompt],
    begun: SequenceState | PausedPass | None,
    observe: events.Observer,
    writers: "_Writers",
    stop: threading.Event,
) -> Iterator[PrefillResult]:
    if begun is None:
        yield from engine.prefill_many(
            [prompt.ids for prompt in prompts],
            names=[prompt.name for prompt in prompts],
            on_event=observe,
            sink=writers.append,
            stop=stop,
        )
        return
    paused = begun if isinstance(begun, PausedPass) else None
    state = begun.state if isinstance(begun, PausedPass) else begun
    yield engine.prefill(
        prompts[0].ids[state.position :],
        state if paused is None else None,
        paused=paused,
        on_event=observe,
        sink=writers.append,
        stop=stop,
        donate_state=True,
        name=prompts[0].name,
    )


class _Writers(contextlib.ExitStack):
    """The output arrays of a run, one file per name, made when the first rows arrive."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._writers: dict[str, report.ArrayWriter] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        if name not in self._writers:
            path = self._folder / f"{name}.npy"
            writer = report.ArrayWriter(path, rows.dtype, rows.shape[1:])
            self._writers[name] = self.enter_context(writer)
        self._writers[name].append(rows)

    def complete(self) -> dict[str, dict[str, Any]]:
        """Finishes the files: rows and sha256 of the data of each."""
        return {
            writer.path.name: {"rows": writer.rows, "sha256": writer.close()}
            for writer in self._writers.values()
        }


def _check_prompts(prompts: list[Prompt], model_config: ModelConfig, job: PrefillJob) -> None:
    """Refuses impossible prompts before any weight is read."""
    for prompt in prompts:
        check_prompt(prompt.ids, prompt.name, 0, model_config, job.config)
    if job.resume_from and len(prompts) > 1:
        raise PromptError(
            f"--resume_from continues one prompt, {len(prompts)} were given: pass the prompt whose "
            "beginning the state has read"
        )


def _restore(
    job: PrefillJob, source: TensorSource, prompts: Sequence[Prompt], layers: range | None
) -> SequenceState | PausedPass | None:
    """What was saved below `job.resume_from`, in host memory, if it begins the prompt.

    layers  that are restored; None for all
    """
    if job.resume_from is None:
        return None
    resume_from, config, ids = job.resume_from, job.config, prompts[0].ids
    root = Path(resume_from)
    # os.path takes what the system refuses to look at for absent.
    inside = sorted((root / STATE_FOLDER).glob("*")) if os.path.isdir(root) else []
    folders = [each for each in (root, *inside) if os.path.isfile(each / RECORD_NAME)]
    if not folders:
        raise ConfigError(
            f"--resume_from: {resume_from} holds no saved state, expected a run made with "
            "config.prefill.save_state or one of its folders state/N"
        )
    if len(folders) > 1:
        raise ConfigError(
            f"--resume_from: {resume_from} holds {len(folders)} states, expected one: name one of "
            f"{', '.join(str(folder) for folder in folders)}"
        )
    wanted = (source.config, config.numerics.resolve(), fingerprint(source), ids)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        if is_paused(folders[0]):
            paused = load_paused(folders[0], *wanted, config.prefill.chunk_tokens)
            options, model = config.pipeline, source.config
            # Here as well as in the engine: before any weight is read.
            stages = 1 if options.automatic else len(options.stages(model.num_hidden_layers))
            check_paused(paused, len(ids) - paused.state.position, model, config, stages)
            return paused
        state = load_state(folders[0], *wanted, layers=layers)
    if state.position == len(ids):
        raise PromptError(
            f"--resume_from: the state in {folders[0]} has read all {len(ids)} tokens of the "
            "prompt: expected a longer prompt, so that a token is left to read"
        )
    return state


class _States:
    """The states of a run as they are saved, below `root` of the last process if there are several.

    Nothing happens without config.prefill.save_state.
    """

    def __init__(self, root: Path, prompts: Sequence[Prompt], engine: Engine, hosts: Hosts | None):
        self._prompts, self._engine = prompts, engine
        self._hosts = hosts if hosts is not None and hosts.world > 1 else None
        self._root, self._count = root, 0
        self._parts: list[Part] = []
        self._positions: list[int] = []
        if engine.config.prefill.save_state and self._hosts is not None:
            self._root = Path(self._hosts.from_last("states", str(root.absolute())))
            if not self._root.parent.is_dir():
                raise ConfigError(
                    f"config.prefill.save_state: process {self._hosts.rank} does not see "
                    f"{self._root.parent}, where the last process writes: expected an --out_dir "
                    "that all hosts share"
                )

    def save(self, result: PrefillResult) -> None:
        """The state after the next prompt, or its layers of this process."""
        engine, number = self._engine, self._count
        self._count += 1
        if not engine.config.prefill.save_state:
            return
        folder, owner = self._root / str(number), self._owner(number)
        if self._hosts is not None:
            part = save_layers(folder, result.state, engine.model_config, engine.layers)
            self._parts.append(part)
            self._positions.append(result.state.position)
        elif result.paused is not None:
            save_paused(folder, result.paused, *owner, engine.config.prefill.chunk_tokens)
        else:
            save_state(folder, result.state, *owner)

    def complete(self) -> None:
        """Completes the states of which other processes have saved layers."""
        if self._hosts is None or not self._engine.config.prefill.save_state:
            return
        everywhere = self._hosts.share(Saved(tuple(self._parts), tuple(self._positions)))
        if len({saved.positions for saved in everywhere}) > 1:
            raise RuntimeError(f"processes stopped at {[each.positions for each in everywhere]}")
        for number, position in enumerate(self._positions if self._hosts.last else ()):
            parts = [saved.parts[number] for saved in everywhere]
            complete_state(self._root / str(number), parts, position, *self._owner(number))

    def _owner(self, number: int) -> tuple[ModelConfig, Numerics, str, np.ndarray]:
        engine = self._engine
        ids = self._prompts[number].ids
        return engine.model_config, engine.numerics, engine.fingerprint, ids


def _output_bytes(config: RunConfig, model_config: ModelConfig, prompts: list[Prompt]) -> int:
    """Bytes that the arrays and states of a run take on disk."""
    row_bytes = {
        "none": 0,
        "last": 0,
        "all": 4 * model_config.vocab_size,
        "logprobs": 4 + 8 * config.prefill.top_logprobs,
    }[config.prefill.logits]
    total = sum(len(prompt.ids) for prompt in prompts) * row_bytes
    if config.prefill.logits == "last":
        total = len(prompts) * 4 * model_config.vocab_size
    if config.prefill.save_state:
        numerics = config.numerics.resolve()
        total += sum(saved_bytes(model_config, numerics, len(prompt.ids)) for prompt in prompts)
    return total


def run_record(
    job: PrefillJob,
    engine: Engine,
    prompts: list[Prompt],
    reports: list[PrefillReport],
    outputs: dict[str, dict[str, Any]],
    interrupted: bool,
    endings: Sequence[Ending] | None = None,
) -> dict[str, Any]:
    """The content of run.json; keys of quantities end in their unit.

    endings  of all processes; None for a run in one
    """
    endings = [_ending(engine, reports)] if endings is None else endings
    peaks = [each.peak_bytes for each in endings]
    read = sum(part.tokens_read for part in reports)
    seconds = sum(part.seconds for part in reports)
    compiled = [part.compiled for part in reports]
    passes = accounts.unique_passes(part.passes for part in reports)
    device = report.device_facts(engine.device)
    names = [f"{each.device_kind} {each.id}" for each in engine.devices]
    return {
        "schema": report.RUN_SCHEMA,
        "status": "interrupted" if interrupted else "complete",
        "checkpoint": {
            "path": job.checkpoint,
            "fingerprint": engine.fingerprint,
            "layers": engine.model_config.num_hidden_layers,
            "vocab_size": engine.model_config.vocab_size,
        },
        "config": job.config.to_dict(),
        "numerics": str(engine.numerics),
        "versions": report.versions(),
        "device": device,
        "prompts": [
            {
                "name": part.name,
                "prompt_sha256": report.token_hash(prompt.ids),
                "tokens_read": part.tokens_read,
                "tokens_reused": part.tokens_reused,
                "seconds_s": round(part.seconds, 6),
                "rate_tokens_per_s": round(part.tokens_per_s, 3),
                "state_bytes": sum(each.state_bytes[number] for each in endings),
            }
            for number, (prompt, part) in enumerate(zip(prompts, reports, strict=False))
        ],
        "tokens_read": read,
        "tokens_reused": sum(part.tokens_reused for part in reports),
        "prefill_s": round(seconds, 6),
        "rate_tokens_per_s": round(read / seconds, 3) if seconds else 0.0,
        "load_s": round(engine.load_seconds, 6),
        "load_compiled_programs": engine.load_compiled[0],
        "load_compile_s": round(engine.load_compiled[1], 6),
        "compiled_programs": sum(programs for programs, _ in compiled),
        "compile_s": round(sum(seconds for _, seconds in compiled), 6),
        "bytes": {
            **dataclasses.asdict(engine.plan.price),
            "available_bytes": engine.available_bytes,
        },
        "plan": accounts.plan_record(engine.plans, names),
        "neighbours": [] if engine.run_plan is None else accounts.neighbours(engine.run_plan),
        "streaming": accounts.streaming_record(
            engine.plans, passes, [pins for each in endings for pins in each.page_locking]
        ),
        "experts": accounts.experts_record(passes),
        "wide_scale_experts": engine.wide_experts() if engine.numerics.q1 else None,
        "plan_error": accounts.plan_error(
            engine.plans,
            passes,
            None if None in peaks else sum(filter(None, peaks)),
            run_plan=None if interrupted else engine.run_plan,
            spans=[(part.tokens_reused, part.tokens_read) for part in reports],
            seconds=seconds,
        ),
        "outputs": outputs,
    }


def _ending(engine: Engine, reports: Sequence[PrefillReport]) -> Ending:
    """What this process has to tell of the run."""
    states = tuple(part.state_bytes for part in reports)
    return Ending(states, peak_bytes(engine), engine.page_locking)


def peak_bytes(engine: Engine) -> int | None:
    """Most bytes that were in use on this process's devices, summed up; None if one is silent."""
    here = jax.process_index()
    stats = [
        None if device.platform == "cpu" else device.memory_stats()
        for device in dict.fromkeys(engine.devices)
        if device.process_index == here
    ]
    peaks = [None if each is None else each.get("peak_bytes_in_use") for each in stats]
    return sum(filter(None, peaks)) if all(peaks) else None


def summary(record: Mapping[str, Any], out_dir: str) -> str:
    """The end of a run in a few lines for people."""
    reused = f" and reused {record['tokens_reused']}" if record["tokens_reused"] else ""
    files = [
        f"  {name}: {output['rows']} rows, sha256 {output['sha256']}"
        for name, output in record["outputs"].items()
    ]
    return "\n".join(
        [
            f"{record['status']}: read {record['tokens_read']} tokens{reused} in "
            f"{record['prefill_s']:.1f} s, {record['rate_tokens_per_s']:.1f} tokens/s "
            f"({record['compile_s']:.1f} s went into compiling {record['compiled_programs']} "
            f"programs), with {record['numerics']} on {record['device']['kind']}",
            *_streaming_lines(record["streaming"]),
            f"written to {out_dir}",
            *files,
        ]
    )


def _streaming_lines(streamed: Mapping[str, Any] | None) -> list[str]:
    if streamed is None:
        return []
    moved = ", ".join(
        f"{report.size(count)} from {'host memory' if tier == 'ram' else tier}"
        for tier, count in streamed["moved_bytes"].items()
    )
    overlap = streamed["overlap"]
    hidden = "" if overlap is None else f" (overlap {100 * overlap:.0f} %)"
    return [
        f"moved {moved or 'no experts'}: {streamed['copy_busy_s']:.1f} s of copying beside "
        f"{streamed['compute_busy_s']:.1f} s of computing{hidden}, {streamed['stall_s']:.1f} s of "
        "waiting for experts"
    ]


@contextlib.contextmanager
def _console(stream: IO[str]) -> Generator[events.Observer]:
    if not stream.isatty():
        yield events.plain(stream)
        return
    with events.Bar(stream) as bar:
        yield bar


@contextlib.contextmanager
def _stop_on_sigint(stream: IO[str], stages: int) -> Generator[threading.Event]:
    """An event that the first SIGINT sets; the second one interrupts at once."""
    end = "this chunk or layer" if stages == 1 else "the micro-batches that are on their way"
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print(f"stopping after {end}; once more to stop at once", file=stream, flush=True)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
