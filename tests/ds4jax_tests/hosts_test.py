"""A run in several processes: what they agree on, and that all of it ends as it should.

That the bits are those of one process is shown beside the splits, in pipeline_test.py.
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import typing

import jax
import numpy as np
import pytest

import streaming
from ds4jax import engine as engines
from ds4jax import hosts, testing
from ds4jax import plan as planning
from ds4jax.checkpoint import convert
from ds4jax.checkpoint.load import load_resident
from ds4jax.checkpoint.safetensors import open_checkpoint
from ds4jax.checkpoint.source import config_text
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.cli import prefill
from ds4jax.config import ConfigError, ModelConfig
from ds4jax.passes import PassReport
from ds4jax.report import array_hash
from ds4jax.run_config import PipelineConfig, RunConfig
from sharding import launcher
from sharding.cost import PlanError
from streaming.ledger import LayerRow, Prediction
from streaming.trace import Span

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = str(pathlib.Path(__file__).with_name("launched_prefill.py"))
LIMIT_S = 240.0
CHUNK = 48


class Worker:
    """The connection to a launcher, without one: values that processes have set."""

    def __init__(self, rank: int, world: int, values: dict[str, str] | None = None):
        self.rank, self.world, self.local_world = rank, world, world
        self.host, self.values = "localhost", {} if values is None else values

    def set(self, key: str, value: str) -> None:
        assert key not in self.values
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]


@pytest.mark.parametrize(
    ("split", "world", "wanted"),
    [
        ("2,4", 2, [{0: range(2)}, {1: range(2, 6)}]),
        ("1,2,1,2", 2, [{0: range(1), 1: range(1, 3)}, {2: range(3, 4), 3: range(4, 6)}]),
        (None, 1, [{0: range(6)}]),
    ],
)
def test_stages_are_dealt_out_evenly(split, world, wanted):
    options = PipelineConfig(split=split)
    assert wanted == [
        hosts.Hosts(Worker(rank, world)).own_stages(options, 6) for rank in range(world)
    ]


@pytest.mark.parametrize(("split", "world"), [(None, 2), ("2,2,2", 2), ("3,3", 4)])
def test_a_number_of_processes_that_does_not_fit_is_refused(split, world):
    options = PipelineConfig(split=split)
    stages = len(options.stages(6))
    message = f"has {stages} stages and the run has {world} processes: expected as many"
    for rank in range(world):
        with pytest.raises(ConfigError, match=message):
            hosts.Hosts(Worker(rank, world)).own_stages(options, 6)


class Exchange(dict):
    """Values that processes in threads wait for."""

    def __init__(self):
        super().__init__()
        self._changed = threading.Condition()

    def __setitem__(self, key: str, value: str) -> None:
        with self._changed:
            super().__setitem__(key, value)
            self._changed.notify_all()

    def __getitem__(self, key: str) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self, LIMIT_S)
            return super().__getitem__(key)


def settle(
    memories: list[list[int]], different: dict[str, object] | None = None, **options: object
) -> list[tuple[RunConfig, dict[int, range]]]:
    """What every process makes of an automatic split; their devices have these memories.

    different  settings of the last process
    """
    config = dataclasses.replace(
        testing.tiny_config(), num_hidden_layers=6, compress_ratios=(0, 0, 4, 128, 4, 0, 0)
    )
    source, values, world = SyntheticSource(config, seed=0), Exchange(), len(memories)
    local = jax.devices()

    def one(rank: int) -> tuple[RunConfig, dict[int, range]]:
        mine = hosts.Hosts(Worker(rank, world, values))
        budgets = iter(memories[rank])
        mine.memory = lambda *_: planning.Memory(next(budgets), 1 << 40)
        own = different if different is not None and rank == world - 1 else {}
        keys = {"pipeline.split": "auto", "prefill.chunk_tokens": CHUNK} | options | own
        run = RunConfig().replace(keys)
        devices = local[: len(memories[rank])]
        settled = mine.settle(source, run, devices, [16 * CHUNK], 8192)
        return settled, mine.own_stages(settled.pipeline, 6)

    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        return [each.result() for each in [pool.submit(one, rank) for rank in range(world)]]


GIB = 1 << 30


@pytest.mark.parametrize("memories", [[[GIB], [GIB]], [[GIB, GIB], [GIB]], [[GIB]] * 4])
def test_every_process_comes_to_the_same_plan(memories):
    settled = settle(memories)
    assert len({config.pipeline.split for config, _ in settled}) == 1
    ranges = [layers for _, own in settled for layers in own.values()]
    assert [layer for each in ranges for layer in each] == [*range(6)]
    for (config, own), memory in zip(settled, memories, strict=True):
        stages = len(config.pipeline.stages(6))
        assert len(own) == len(memory)
        indices = config.pipeline.device_indices(stages, len(memory), list(own))
        assert indices == [*range(len(memory))]


def test_layers_go_where_there_is_memory():
    small = 72_000_000  # of workspace mostly
    split = [len(own[stage]) for stage, (_, own) in enumerate(settle([[GIB], [small]]))]
    assert split[0] > split[1] >= 1


def test_processes_that_come_to_different_plans_are_named():
    with pytest.raises(ConfigError, match=r"process 1 differs from process 0 in the plan of the"):
        settle([[GIB], [GIB]], {"streaming.order": "layer_major"})


def test_more_devices_than_layers_are_refused():
    with pytest.raises(PlanError, match="8 devices in order and 6 layers"):
        settle([[GIB] * 4, [GIB] * 4])


def test_an_automatic_split_has_no_stages_before_it_is_planned():
    with pytest.raises(ConfigError, match=r"config\.pipeline\.split is auto: expected the layers"):
        hosts.Hosts(Worker(0, 2)).own_stages(PipelineConfig(split="auto"), 6)


def test_devices_are_those_of_the_process_that_has_the_stage():
    options = PipelineConfig(split="1,2,1,2", devices="0,1,1,0")
    assert options.device_indices(4, 2) == [0, 1, 1, 0]
    assert options.device_indices(4, 2, [2, 3]) == [1, 0]
    assert PipelineConfig(split="1,2,1,2").device_indices(4, 2, [2, 3]) == [0, 1]
    with pytest.raises(ConfigError, match="expected 4 indices from 0 to 0"):
        options.device_indices(4, 1, [2, 3])


def test_processes_that_differ_are_told_in_what():
    values: dict[str, str] = {}
    first, second, other = (hosts.Hosts(Worker(rank, 2, values)) for rank in (0, 1, 1))
    first.agree("the run", {"config.prefill": {"chunk_tokens": 48}, "jax": "1", "python": "3"})
    second.agree("the run", {"config.prefill": {"chunk_tokens": 48}, "jax": "1", "python": "3"})
    with pytest.raises(
        ConfigError, match=r"process 1 differs from process 0 in config\.prefill, jax"
    ):
        other.agree("the run", {"config.prefill": {}, "jax": "2", "python": "3"})
    ids = np.arange(5, dtype=np.int32)
    first.agree_on_prompts([ids, ids])
    first.agree_on_prompts([ids])
    second.agree_on_prompts([ids, ids])
    with pytest.raises(ConfigError, match="in the tokens of the prompts"):
        second.agree_on_prompts([ids[::-1]])


def test_memory_of_a_host_is_divided_by_its_processes():
    (device, *_), alone = jax.devices(), hosts.Hosts(Worker(0, 1)).memory(jax.devices()[0], None)
    shared = hosts.Hosts(Worker(1, 4)).memory(device, None)
    assert shared.device_bytes < alone.device_bytes / 3
    assert shared.host_bytes < alone.host_bytes / 3
    assert hosts.Hosts(Worker(1, 4)).memory(device, 1000).device_bytes == 1000


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_plans_are_the_same_after_the_journey(fraction):
    source = SyntheticSource(testing.tiny_config(), seed=0)
    keys = {} if fraction is None else {"streaming.resident_fraction": fraction}
    config = RunConfig().replace({"prefill.chunk_tokens": CHUNK, **keys})
    plan = planning.make_plan(source, config, jax.devices()[0], 100, 8192, range(1, 3))
    values: dict[str, str] = {}
    part = hosts.Part((plan,), (7,), 2**40)
    other = dataclasses.replace(part, device_ids=(2048,))
    second = hosts.Hosts(Worker(1, 2, values))
    values["Part 0"] = json.dumps(hosts.to_plain(part))
    assert second.share(other) == [part, other]


def test_endings_are_shared():
    values: dict[str, str] = {}
    pins = streaming.pinned.PinReport(100, 0, 0.5, 7, ("an error",))
    told = [hosts.Ending((1, 2), 3, (pins,)), hosts.Ending((4, 5), None, ())]
    values["Ending 0"] = json.dumps(hosts.to_plain(told[0]))
    assert hosts.Hosts(Worker(1, 2, values)).share(told[1]) == told


def test_reports_are_the_same_after_the_journey():
    row = LayerRow(1, 3, 30, None, 0.25, 0.0, 7)
    amounts = {
        name: 1.5 if hint is float else 2
        for name, hint in typing.get_type_hints(streaming.Ledger).items()
        if hint in (int, float)
    }
    ledger = streaming.Ledger(
        **amounts,
        predicted=Prediction({"ram": 3}, {"ram": 30}, 4, 40, False),
        complete=True,
        moved_items={"ram": 3},
        moved_bytes={"ram": 30},
        storage_bytes=None,
        budget_bytes=50,
        copy_gb_per_s=(1.25, 3.0),
        layers=(row,),
        spans=(Span("copy", "copy L1", 0.5, 0.75, {"layer": 1, "bytes": 30}),),
    )
    counts = np.arange(6).reshape(2, 3)
    report = PassReport((0.5, 0.25), (0.25, 0.5), counts, (3, 2), (ledger,))
    told = json.loads(json.dumps(hosts.to_plain((report, report))))
    got = hosts.from_plain(tuple[PassReport, ...], told)
    assert len(got) == 2
    assert got[1].ledgers == (ledger,)
    assert (got[1].counts.dtype, got[1].counts.tolist()) == (np.int64, counts.tolist())
    assert dataclasses.replace(got[1], counts=counts) == dataclasses.replace(report, counts=counts)


def test_tensors_of_other_processes_are_not_read(tmp_path, monkeypatch):
    config = testing.tiny_config()
    source = SyntheticSource(config, seed=0)
    read, original = set(), source.read_many
    monkeypatch.setattr(source, "read_many", lambda names: read.update(names) or original(names))
    (device, *_) = jax.devices()
    loaded = load_resident(source, device=[None, None, device, device, None])
    assert {name.split(".")[1] for name in read} == {"2", "3"}
    for number, block in enumerate(loaded.blocks):
        kinds = {isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(block)}
        assert kinds == {number in (2, 3)}
    assert not isinstance(loaded.embed, jax.Array)
    read.clear()
    load_resident(source, device=[None] * 4 + [device])
    assert {name for name in read if not name.startswith("layers.4.")} == {
        *("head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")
    }


# With processes


@pytest.fixture
def command(tmp_path) -> list[str]:
    """The flags of a run over sixteen chunks and two stages."""
    config = dataclasses.replace(
        testing.tiny_config(), num_hidden_layers=2, compress_ratios=(0, 0, 0)
    )
    (tmp_path / "model.json").write_text(config_text(config, "fp4"), encoding="utf-8")
    np.save(tmp_path / "ids.npy", np.arange(16 * CHUNK, dtype=np.int32) % config.vocab_size)
    return [
        f"--checkpoint=synthetic:{tmp_path / 'model.json'}",
        f"--tokens={tmp_path / 'ids.npy'}",
        f"--out_dir={tmp_path / 'run'}",
        f"--config.prefill.chunk_tokens={CHUNK}",
        "--config.numerics.preset=oracle",
        "--config.pipeline.split=1,1",
    ]


def start(
    processes: int, job: str, rank: int, command: list[str], grace_s: int = 2
) -> subprocess.Popen:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDING_", "XLA_FLAGS"))}
    return subprocess.Popen(
        [
            sys.executable, "-m", "sharding.launcher", f"--processes={processes}",
            "--heartbeat_s=0.2", f"--grace_s={grace_s}",
            "--", sys.executable, PROGRAM, job, str(rank), *command,
        ],
        env=environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), once no process of the run holds the pipes any more."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def left(tmp_path: pathlib.Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_a_wrong_number_of_processes_is_refused_before_loading(command, tmp_path):
    code, out, err = finish(start(3, "none", 0, command))
    assert (code, out) == (2, "")
    assert "has 2 stages and the run has 3 processes" in err
    assert "loaded" not in err
    assert left(tmp_path) == ["ids.npy", "model.json"]


@pytest.mark.slow
def test_processes_with_different_flags_are_refused(command, tmp_path):
    code, out, err = finish(start(2, "differ", 1, command))
    assert (code, out) == (2, "")
    assert "process 1 differs from process 0 in config.prefill: start all" in err
    assert left(tmp_path) == ["ids.npy", "model.json"]


def read(
    command: list[str], processes: int, out: str, tokens: pathlib.Path, *flags: str
) -> dict[str, object]:
    """The record of the command in so many processes, over the ids of a file."""
    folder = tokens.parent / out
    flags = (*command, f"--tokens={tokens}", f"--out_dir={folder}", *flags)
    if processes == 1:
        # One process has both stages on its device.
        assert prefill.main(["ds4jax-prefill", *flags, "--config.pipeline.devices=0,0"]) == 0
    else:
        code, _, err = finish(start(processes, "none", 0, list(flags)))
        assert code == 0, err
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2), (2, 2)])
def test_a_state_goes_on_in_any_number_of_processes(saving, loading, command, tmp_path):
    whole, half = tmp_path / "ids.npy", tmp_path / "half.npy"
    np.save(half, np.load(whole)[: 8 * CHUNK + 5])
    read(command, saving, "first", half, "--config.prefill.save_state")
    state = tmp_path / "first" / "state" / "0"
    assert left(tmp_path / "first" / "state") == ["0"]
    folders = ["layers0to0", "layers1to1"] if saving == 2 else ["arrays"]
    assert left(state) == [*folders, "state.json"]
    rest = read(command, loading, "rest", whole, f"--resume_from={tmp_path / 'first'}")
    assert rest["tokens_reused"] == 8 * CHUNK + 5
    # A chunk may end anywhere with these numerics, whose limits are those of float32.
    read(command, 1, "whole", whole)
    logits = [np.load(tmp_path / name / "logits.npy") for name in ("rest", "whole")]
    np.testing.assert_allclose(*logits, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_the_same_state_gives_the_same_bits_in_any_number_of_processes(command, tmp_path):
    whole, half = tmp_path / "ids.npy", tmp_path / "half.npy"
    np.save(half, np.load(whole)[: 8 * CHUNK])
    shas = set()
    for saving, loading in ((1, 1), (2, 1), (1, 2), (2, 2)):
        out = f"first{saving}"
        if not (tmp_path / out).exists():
            read(command, saving, out, half, "--config.prefill.save_state")
        rest = read(command, loading, f"{out}{loading}", whole, f"--resume_from={tmp_path / out}")
        shas.add(rest["outputs"]["logits.npy"]["sha256"])
    shas.add(read(command, 1, "whole", whole)["outputs"]["logits.npy"]["sha256"])
    assert len(shas) == 1


@pytest.mark.slow
def test_a_stopped_run_goes_on_from_its_state(command, tmp_path):
    save = "--config.prefill.save_state"
    code, _, err = finish(start(2, "interrupt", 1, [*command, save], grace_s=60))
    assert code == 130, err
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "interrupted"
    assert 0 < record["tokens_read"] < 16 * CHUNK
    ids = tmp_path / "ids.npy"
    rest = read(command, 1, "rest", ids, f"--resume_from={tmp_path / 'run'}")
    whole = read(command, 1, "whole", ids)
    assert rest["tokens_reused"] == record["tokens_read"]
    assert rest["outputs"]["logits.npy"] == whole["outputs"]["logits.npy"]


@pytest.mark.slow
def test_processes_continue_a_prompt_with_the_same_tokens(command, tmp_path):
    code, out, err = finish(start(2, "generate", 0, command))
    assert code == 0, err
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    with engines.load(command[0].partition("=")[2], {"prefill.chunk_tokens": CHUNK,
                      "numerics.preset": "oracle"}, prompt_tokens=CHUNK) as engine:  # fmt: skip
        wanted = engine.generate(np.load(tmp_path / "ids.npy")[:CHUNK], 4)
    assert [each["tokens"] for each in told] == [wanted.tokens.tolist()] * 2
    shas = {each["sha256"] for each in told if each["rows"]}
    assert shas == {array_hash(wanted.logits, "<f4")}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_killed_in_the_middle_is_named_and_nothing_is_left(rank, command, tmp_path):
    code, out, err = finish(start(2, "kill", rank, command))
    assert time.time() - float(re.search(r"killed at ([\d.]+)", err)[1]) < 30
    assert (code, out) == (launcher.EXIT_KILLED, "")
    named = rf"launcher 0: process {rank} \(pid \d+\) was killed by signal 9 \(SIGKILL\)"
    assert re.search(named, err), err
    assert "all processes of this host have ended, exit code 16" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_each_process_reads_its_part_of_a_checkpoint(command, tmp_path):
    """Published and converted folders give the same logits."""
    config = ModelConfig.from_json(tmp_path / "model.json")
    folders = [testing.write_checkpoint(tmp_path / "published", config), tmp_path / "converted"]
    convert.convert(open_checkpoint(folders[0]), folders[1])
    shas = set()
    for folder in folders:
        flags = [f"--checkpoint={folder}", "--overwrite"]
        code, out, err = finish(start(2, "none", 0, [*command, *flags]))
        assert code == 0, err
        shas.add(json.loads(out.splitlines()[-1])["outputs"]["logits.npy"]["sha256"])
    assert len(shas) == 1


def test_a_second_engine_in_the_processes_of_a_run_is_refused():
    alone = hosts.Hosts(Worker(0, 1))
    alone.agree("the run", {"x": 1})
    with pytest.raises(RuntimeError, match="load one engine"):
        alone.agree("the run", {"x": 2})


def test_a_process_that_is_ended_while_it_leaves_keeps_its_code():
    code = (
        "import signal; from ds4jax import hosts; "
        "signal.signal(signal.SIGALRM, hosts._terminated); "
        "signal.setitimer(signal.ITIMER_REAL, 0.1); hosts.leave(2)"
    )
    environ = {**os.environ, "SHARDING_COORDINATOR": "nowhere:0", "SHARDING_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_stage_ends_all_processes(rank, command):
    code, out, err = finish(start(2, "fail", rank, command))
    assert (code, out) == (1, "")
    assert "RuntimeError: a stage that fails" in err
    assert "all processes of this host have ended, exit code 1" in err


@pytest.mark.slow
def test_a_handoff_that_does_not_come_ends_the_run(command):
    timeout = "--config.pipeline.handoff_timeout_s=2"
    code, out, err = finish(start(2, "hang", 0, [*command, timeout]))
    assert (code, out) == (1, "")
    assert "receiving unit 1 of request 0, stage 1" in err
    assert "the peer lives, and nothing came from it within 2.0 s" in err
    assert re.search(r"launcher 0: process 1 \(pid \d+\) ended with code 1", err), err


@pytest.mark.slow
def test_an_interrupted_launcher_ends_processes_with_their_chunk(command, tmp_path):
    code, out, err = finish(start(2, "interrupt", 1, command, grace_s=60))
    assert (code, out) == (130, "")
    assert "the launcher of host 0 got SIGINT" in err
    assert re.search(r"stopped: after \d+ tokens; nothing was written", err), err
    assert left(tmp_path) == ["ids.npy", "model.json"]


@pytest.mark.slow
def test_an_interrupted_launcher_ends_processes_that_hang(command):
    process = start(2, "hang", 0, command)
    while "hangs" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (130, "")
    assert "all processes of this host have ended, exit code 130" in err
