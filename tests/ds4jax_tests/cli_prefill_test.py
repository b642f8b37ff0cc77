"""The command ds4jax-prefill: what it writes, what it prints, how it goes on and how it stops."""

import hashlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

import streaming
from ds4jax import engine, events, testing, text
from ds4jax.cli import common, prefill

ROOT = pathlib.Path(__file__).parents[2]
CHUNK = 48
IDS = np.random.default_rng(1).integers(0, testing.BYTE_VOCAB, 130).astype(np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    return testing.write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def tokens(tmp_path) -> pathlib.Path:
    np.save(tmp_path / "ids.npy", IDS)
    return tmp_path / "ids.npy"


def run(checkpoint, out_dir, *arguments) -> int:
    return prefill.main(
        [
            "ds4jax-prefill",
            f"--checkpoint={checkpoint}",
            f"--out_dir={out_dir}",
            "--config.numerics.preset=oracle",
            f"--config.prefill.chunk_tokens={CHUNK}",
            *arguments,
        ]
    )


def record(out_dir) -> dict:
    return json.loads((out_dir / "run.json").read_text(encoding="utf-8"))


def metrics(out_dir) -> tuple[list[dict], list[dict]]:
    """The lines of metrics.jsonl: those of chunks and those of layers."""
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    kinds = ("ds4jax.chunk/1", "ds4jax.layer/1")
    chunks, layers = ([line for line in lines if line["schema"] == kind] for kind in kinds)
    assert len(chunks) + len(layers) == len(lines)
    return chunks, layers


def test_run_writes_report_metrics_and_logits(checkpoint, tokens, tmp_path, capsys):
    out = tmp_path / "run"
    assert run(checkpoint, out, f"--tokens={tokens}", "--config.prefill.logits=all") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "logits.npy",
        "metrics.jsonl",
        "profile.json",
        "report.html",
        "run.json",
    ]
    logits = np.load(out / "logits.npy")
    assert (logits.shape, logits.dtype) == ((130, testing.BYTE_VOCAB), np.float32)
    found = record(out)
    assert found["schema"] == "ds4jax.run/1"
    assert found["status"] == "complete"
    assert found["numerics"] == "float32+none"
    assert found["config"]["prefill"]["chunk_tokens"] == CHUNK
    assert (found["tokens_read"], found["tokens_reused"]) == (130, 0)
    assert found["rate_tokens_per_s"] == pytest.approx(130 / found["prefill_s"], rel=1e-3)
    assert found["outputs"] == {
        "logits.npy": {"rows": 130, "sha256": hashlib.sha256(logits.tobytes()).hexdigest()}
    }
    assert found["versions"]["jax"]
    assert found["device"]["platform"] == "cpu"
    assert found["bytes"]["weights_bytes"] > 0
    assert found["streaming"] is None
    chunks, layers = metrics(out)
    assert [line["done_tokens"] for line in chunks] == [48, 96, 130]
    assert [line["layer_index"] for line in layers] == [*range(5)] * 3
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == found
    assert len(printed.out.splitlines()) == 1
    assert "read 130 of 130 tokens (100 %)" in printed.err
    assert "skipped mtp.*" in printed.err


STREAMED = (
    "--config.streaming.resident_fraction=0.5",
    "--config.streaming.order=layer_major",
    "--config.streaming.mode=whole",
    f"--config.streaming.micro_batch_tokens={2 * CHUNK}",
)


def test_streamed_run_accounts_for_every_byte(checkpoint, tokens, tmp_path, capsys):
    out = tmp_path / "run"
    assert run(checkpoint, out, f"--tokens={tokens}", *STREAMED) == 0
    found = record(out)
    (plan,) = found["plan"]
    assert (plan["order"], plan["micro_batch_tokens"], plan["tier"]) == ("layer_major", 96, "ram")
    assert plan["residents_per_layer"] == [8] * 5
    assert plan["price"]["total_bytes"] <= found["bytes"]["available_bytes"]
    streamed = found["streaming"]
    expert = plan["price"]["resident_bytes"] // 40
    assert streamed["exactly_predicted"]
    assert streamed["moved_bytes"] == streamed["predicted_bytes"] == {"ram": 2 * 40 * expert}
    assert streamed["moved_experts"] == {"ram": 2 * 40}
    assert streamed["peak_live_bytes"] <= plan["slab_budget_bytes"]
    assert sum(streamed["copy_gb_per_s"]["copies_by_rate"].values()) == 2 * 5
    assert [row["moved_bytes"] for row in streamed["layers"]] == [2 * 8 * expert] * 5
    assert found["plan_error"]["moved_error_bytes"] == 0
    chunks, layers = metrics(out)
    assert [line["done_tokens"] for line in chunks] == [48, 96, 130]
    assert [(line["pass_index"], line["layer_index"]) for line in layers] == [
        (number, layer) for number in (0, 1) for layer in range(5)
    ]
    assert {line["moved_bytes"] for line in layers} == {8 * expert}
    counts = streaming.load_profile(out / "profile.json", 5, 16)
    assert counts.sum(axis=1).tolist() == [130 * 4] * 5  # four experts a token
    assert [row["distinct_experts"] for row in found["experts"]] == (counts > 0).sum(1).tolist()
    timeline = json.loads((out / "timeline.json").read_text())["traceEvents"]
    copies = [event for event in timeline if event["name"].startswith("copy L")]
    assert sum(event["args"]["bytes"] for event in copies) == streamed["moved_bytes"]["ram"]
    assert "pass 2 of 2" in (out / "report.html").read_text(encoding="utf-8")
    assert "of waiting for experts" in capsys.readouterr().err


def test_profile_of_a_run_chooses_the_residents_of_the_next(checkpoint, tokens, tmp_path):
    assert run(checkpoint, tmp_path / "first", f"--tokens={tokens}", *STREAMED) == 0
    profile = f"--config.streaming.resident_profile={tmp_path / 'first' / 'profile.json'}"
    routed = (*STREAMED[:2], "--config.streaming.mode=routed")
    assert run(checkpoint, tmp_path / "second", f"--tokens={tokens}", *routed, profile) == 0
    first, second = record(tmp_path / "first"), record(tmp_path / "second")
    assert second["outputs"] == first["outputs"]
    moved = second["streaming"]
    assert moved["predicted_bytes"] == moved["moved_bytes"]
    assert moved["known_before_bytes"] < sum(moved["predicted_bytes"].values())
    assert sum(moved["moved_bytes"].values()) <= 40 * (
        second["plan"][0]["price"]["resident_bytes"] // 40
    )


def test_every_kind_of_prompt_reaches_the_model(checkpoint, tmp_path):
    words = "Hello, wörld"
    (tmp_path / "p.txt").write_text(words, encoding="utf-8")
    ids = text.Tokenizer(checkpoint).encode(text.BEGIN + words)
    np.save(tmp_path / "p.npy", ids)
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": words}) + "\n", encoding="utf-8")
    (tmp_path / "p.toml").write_text(f'[prompt]\ntext = "{words}"\n', encoding="utf-8")
    hashes = set()
    for i, argument in enumerate(
        (
            f"--prompt={words}",
            f"--prompt_file={tmp_path / 'p.txt'}",
            f"--prompts_file={tmp_path / 'p.jsonl'}",
            f"--tokens={tmp_path / 'p.npy'}",
            f"--config={tmp_path / 'p.toml'}",
        )
    ):
        assert run(checkpoint, tmp_path / f"run{i}", argument) == 0
        found = record(tmp_path / f"run{i}")
        assert found["tokens_read"] == len(ids)
        hashes.add(found["outputs"]["logits.npy"]["sha256"])
    assert len(hashes) == 1


def test_prompt_on_the_command_line_replaces_the_one_in_the_file(checkpoint, tmp_path):
    (tmp_path / "p.toml").write_text('[prompt]\ntext = "not this"\nform = "chat"\n')
    out = tmp_path / "run"
    assert run(checkpoint, out, f"--config={tmp_path / 'p.toml'}", "--prompt=this") == 0
    assert record(out)["config"]["prompt"] == {
        "text": ["this"],
        "form": "chat",
        "effort": "none",
        "effort_texts": "original",
    }


def test_several_prompts_give_one_row_each_and_no_padding(checkpoint, tmp_path):
    lines = [{"tokens": IDS[:1].tolist(), "name": "one"}, {"tokens": IDS.tolist()}, {"text": "x"}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "run"
    assert run(checkpoint, out, f"--prompts_file={tmp_path / 'p.jsonl'}") == 0
    logits = np.load(out / "logits.npy")
    assert logits.shape == (3, testing.BYTE_VOCAB)
    found = record(out)["prompts"]
    assert [prompt["tokens_read"] for prompt in found] == [1, 130, 2]
    assert found[0]["name"] == "one"
    np.save(tmp_path / "ids.npy", IDS)
    assert run(checkpoint, tmp_path / "alone", f"--tokens={tmp_path / 'ids.npy'}") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "alone" / "logits.npy")[0], logits[1])


def test_logprobs_are_streamed_to_three_files(checkpoint, tokens, tmp_path):
    out = tmp_path / "run"
    arguments = ("--config.prefill.logits=logprobs", "--config.prefill.top_logprobs=2")
    assert run(checkpoint, out, f"--tokens={tokens}", *arguments) == 0
    shapes = {name: np.load(out / name).shape for name in record(out)["outputs"]}
    assert shapes == {
        "logprobs.npy": (130,),
        "top_logprobs.npy": (130, 2),
        "top_tokens.npy": (130, 2),
    }
    assert (
        run(checkpoint, tmp_path / "none", f"--tokens={tokens}", "--config.prefill.logits=none")
        == 0
    )
    assert record(tmp_path / "none")["outputs"] == {}


def test_resumed_run_reads_the_rest_and_gives_the_same_bits(checkpoint, tokens, tmp_path):
    np.save(tmp_path / "head.npy", IDS[: 2 * CHUNK])
    assert run(checkpoint, tmp_path / "whole", f"--tokens={tokens}") == 0
    save = "--config.prefill.save_state"
    assert run(checkpoint, tmp_path / "head", f"--tokens={tmp_path / 'head.npy'}", save) == 0
    resume = f"--resume_from={tmp_path / 'head'}"
    assert run(checkpoint, tmp_path / "rest", f"--tokens={tokens}", resume) == 0
    found = record(tmp_path / "rest")
    assert (found["tokens_read"], found["tokens_reused"]) == (130 - 2 * CHUNK, 2 * CHUNK)
    np.testing.assert_array_equal(
        np.load(tmp_path / "rest" / "logits.npy"), np.load(tmp_path / "whole" / "logits.npy")
    )
    by_folder = f"--resume_from={tmp_path / 'head' / 'state' / '0'}"
    assert run(checkpoint, tmp_path / "again", f"--tokens={tokens}", by_folder) == 0


def interrupt_at(monkeypatch, done: int, kind=events.ChunkDone) -> None:
    """Sends SIGINT to this process at the event of `kind` that counts `done`."""
    original = events.jsonl

    def jsonl(file):
        write = original(file)

        def observe(event: events.Event) -> None:
            write(event)
            if isinstance(event, kind) and event.done == done:
                os.kill(os.getpid(), signal.SIGINT)

        return observe

    monkeypatch.setattr(events, "jsonl", jsonl)


def test_interrupted_run_ends_with_its_chunk_and_leaves_nothing(
    checkpoint, tokens, tmp_path, monkeypatch, capsys
):
    interrupt_at(monkeypatch, CHUNK)
    handler = signal.getsignal(signal.SIGINT)
    assert run(checkpoint, tmp_path / "run", f"--tokens={tokens}") == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert [path.name for path in tmp_path.iterdir()] == ["ids.npy"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "stopping after this chunk" in printed.err
    assert "stopped: after 48 tokens; nothing was written" in printed.err


def test_interrupt_outside_of_reading_says_that_nothing_was_written(capsys):
    def command(argv: list[str]) -> int:
        raise KeyboardInterrupt

    assert common.exit_code(command, []) == 130
    assert capsys.readouterr().err == "stopped: nothing was written\n"


def test_interrupted_run_with_saved_state_can_be_resumed(
    checkpoint, tokens, tmp_path, monkeypatch, capsys
):
    out, save = tmp_path / "run", "--config.prefill.save_state"
    with monkeypatch.context() as patch:
        interrupt_at(patch, CHUNK)
        assert run(checkpoint, out, f"--tokens={tokens}", save) == 130
    assert record(out)["status"] == "interrupted"
    assert json.loads(capsys.readouterr().out)["tokens_read"] == CHUNK
    resume = f"--resume_from={out}"
    assert run(checkpoint, tmp_path / "rest", f"--tokens={tokens}", resume) == 0
    assert run(checkpoint, tmp_path / "whole", f"--tokens={tokens}") == 0
    np.testing.assert_array_equal(
        np.load(tmp_path / "rest" / "logits.npy"), np.load(tmp_path / "whole" / "logits.npy")
    )


@pytest.mark.parametrize("layer", [0, 2])
def test_run_interrupted_between_layers_is_resumed_with_the_same_bits(
    layer, checkpoint, tokens, tmp_path, monkeypatch, capsys
):
    """Two chunks are in the middle of the layers; the first run has no finished token to show."""
    out, arguments = tmp_path / "run", (f"--tokens={tokens}", "--config.prefill.logits=all")
    save = ("--config.prefill.save_state", *STREAMED)
    with monkeypatch.context() as patch:
        interrupt_at(patch, (layer + 1) * 2 * CHUNK, events.LayerDone)
        assert run(checkpoint, out, *arguments, *save) == 130
    found = record(out)
    assert (found["status"], found["tokens_read"]) == ("interrupted", 0)
    assert not found["streaming"]["complete"]
    assert len(metrics(out)[1]) == layer + 1
    assert json.loads((out / "state" / "0" / "state.json").read_text())["paused"]["layer"] == (
        layer + 1
    )
    resume = f"--resume_from={out}"
    assert run(checkpoint, tmp_path / "rest", *arguments, *STREAMED, resume) == 0
    assert record(tmp_path / "rest")["tokens_read"] == 130
    assert run(checkpoint, tmp_path / "whole", *arguments) == 0
    assert record(tmp_path / "rest")["outputs"] == record(tmp_path / "whole")["outputs"]
    capsys.readouterr()

    # Another run is refused with what differs, before any weight is read.
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(engine, "load", load)
    np.save(tmp_path / "other.npy", IDS[::-1])
    for flags, message in (
        (("--config.prefill.chunk_tokens=50", arguments[0]), "chunk_tokens is 48 in the state, 50"),
        (("--config.numerics.preset=bfloat16", arguments[0]), "numerics is 'float32+none' in the"),
        ((f"--tokens={tmp_path / 'other.npy'}",), "tokens_sha256 is"),
        (("--config.pipeline.split=2,3", arguments[0]), "resume without config.pipeline.split"),
    ):
        assert run(checkpoint, tmp_path / "refused", *STREAMED, resume, *flags) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "platform",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu1)],
)
def test_fresh_processes_give_the_same_bits(platform, checkpoint, tokens, tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": platform}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # each process compiles for itself
    hashes = set()
    for name in ("first", "second"):
        command = [sys.executable, "-m", "ds4jax.cli.prefill", f"--checkpoint={checkpoint}"]
        command += [f"--out_dir={tmp_path / name}", f"--tokens={tokens}"]
        command += ["--config.prefill.chunk_tokens=64", "--config.prefill.logits=all"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["numerics"] == "bfloat16+q1+q2+q3"
        hashes.add(found["outputs"]["logits.npy"]["sha256"])
    assert len(hashes) == 1


def test_profile_is_written_where_asked(checkpoint, tmp_path):
    profile = tmp_path / "profile"
    assert run(checkpoint, tmp_path / "run", "--prompt=x", f"--profile_dir={profile}") == 0
    assert list(profile.rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("name", "tell"),
    [("stdout", lambda: common.print_result({})), ("stderr", lambda: common.say("{}"))],
)
def test_a_line_is_one_write_for_processes_that_share_a_stream(name, tell, monkeypatch):
    writes = []

    class Pipe(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            writes.append(bytes(data))
            return len(data)

    unbuffered = io.TextIOWrapper(Pipe(), encoding="utf-8", write_through=True)
    monkeypatch.setattr(sys, name, unbuffered)
    tell()
    assert writes == [b"{}\n"]


def test_help_lists_every_key_and_is_no_error(capsys):
    assert prefill.main(["ds4jax-prefill", "--help"]) == 0
    printed = capsys.readouterr()
    assert "--config.prefill.chunk_tokens=INT" in printed.out
    assert "--resume_from=STRING" in printed.out
    assert printed.err == ""
