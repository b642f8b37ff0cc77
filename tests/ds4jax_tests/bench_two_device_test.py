"""The bench of two devices on a tiny model and CPU devices; its parts on made-up numbers."""

import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from ds4jax.bench import links, overlap, peer_read, two_device
from ds4jax.bench.overlap import Kernel
from ds4jax.cli import common
from sharding import probe

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny.json"


def run(out_dir: Path, *arguments: str) -> tuple[int, dict]:
    code = two_device.main(
        [
            "bench",
            f"--out_dir={out_dir}",
            f"--model={TINY}",
            "--layers=2",
            "--chunk_tokens=40",
            "--prompt_tokens=40,90",
            *arguments,
        ]
    )
    return code, json.loads((out_dir / "two_device.json").read_text())["sections"]


@pytest.mark.slow
def test_sections_give_one_output_and_stand_beside_their_prediction(tmp_path, capsys):
    names = "one,pipeline,two_owners,relay,peer_memory,one_streamed,pipeline_streamed,peer_read"
    names += ",planned_memory,planned_relay,planned_none"
    code, found = run(tmp_path, f"--sections={names}", "--budget_s=1000")
    assert code == common.OK
    assert list(found) == names.split(",")
    for name, section in found.items():
        if name == "peer_read":
            assert "the kernel needs two Hopper GPUs" in section["reason"]
            continue
        assert "reason" not in section
        assert all(row["same_sha"] for row in section["rows"].values())
        assert all(row["predicted_bytes_equal"] for row in section["rows"].values())
        assert all(len(row["all_seconds"]) == 3 for row in section["rows"].values())
        parts = section["load"]
        assert 0 < parts["dense_s"] + parts["experts_s"] + parts["awaited_s"] <= parts["seconds"]
    assert "expected 2" in found["two_owners"]["side_by_side"]["reason"]
    for name in ("pipeline", "pipeline_streamed"):
        for row in found[name]["against"].values():
            assert row["predicted_s"] > 0
            assert 0 <= row["predicted_bubble_share"] < 1
    relay = found["relay"]["moved_bytes"]
    assert set(relay) == {"relay", "ram"}
    assert relay["relay"] == relay["ram"]
    assert set(found["peer_memory"]["moved_bytes"]) == {"peer"}
    # Links are not measured here: those of two H200 stand in, on which the experts of a layer are
    # so small that everything hides.
    for name in ("planned_memory", "planned_relay", "planned_none"):
        times = {row["neighbours"]: row["predicted_s"] for row in found[name]["neighbours"]}
        assert times[found[name]["taken"]] <= times["none"]
    assert found["planned_none"]["taken"] == "none"
    assert found["one_streamed"]["items"] == 8
    text = capsys.readouterr().err
    assert text.count("same_sha True") == 18
    assert "copies_alone_gb_per_s" in text


@pytest.mark.slow
def test_two_processes_and_one_that_is_killed(tmp_path):
    code, found = run(tmp_path, "--sections=one,processes", "--budget_s=1000")
    assert code == common.OK
    section = found["processes"]
    assert section["exit_code"] == 0
    assert section["split"] == "auto"
    assert len(section["layers"]) == 2
    assert section["same_sha"]
    killed = section["killed"]
    assert killed["exit_code"] == 16
    assert killed["seconds_to_end"] < 30
    assert str(killed["victim"]) in killed["named"][0]
    assert killed["left_running"] == []


def test_no_budget_leaves_everything_out(tmp_path):
    _, found = run(tmp_path, "--sections=one,pipeline", "--budget_s=0")
    assert [section["reason"][:9] for section in found.values()] == ["left out:"] * 2


@pytest.fixture
def bench(tmp_path) -> two_device.Bench:
    return two_device.Bench(tmp_path, "synthetic:tiny", 2, 40, [40], float("inf"), "")


def test_section_that_fails_or_hangs_leaves_its_reason(bench, monkeypatch):
    release = threading.Event()

    def hang(bench):
        bench.partial["load"] = {"seconds": 1}
        release.wait()
        return {}

    def fail(bench):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(two_device, "GRACE_S", 0)
    hung = two_device.run_section(bench, "a", two_device.Section(hang, 0.01, 0))
    assert hung["reason"] == "not done after 0 s, and goes on"
    assert hung["load"] == {"seconds": 1}
    failed = two_device.run_section(bench, "b", two_device.Section(fail, 10, 0))
    assert failed["reason"] == "RuntimeError: first line"
    assert failed["beside"] == ["a"]
    release.set()
    while two_device._working():
        pass
    assert "beside" not in two_device.run_section(bench, "c", two_device.Section(fail, 10, 0))
    assert "first line" in two_device.table({"b": failed})


@pytest.mark.slow
def test_section_that_is_cut_keeps_its_rows_and_ends_before_the_next(bench, monkeypatch):
    reads = []

    def measure(bench):
        with bench.load() as engine:
            prefill = engine.prefill

            def read(ids):
                reads.append(len(ids))
                if len(reads) == 6:
                    bench.ends = float("-inf")
                return prefill(ids)

            monkeypatch.setattr(engine, "prefill", read)
            return {"rows": bench.measure(engine, [40, 80])}

    found = two_device.run_section(bench, "a", two_device.Section(measure, 1000, 0))
    assert found["reason"] == "not done after 1000 s"
    assert reads == [40] * 4 + [80] * 2
    assert list(found["rows"]) == ["40"]
    assert found["rows"]["40"]["first_programs"] >= 0
    assert found["load"]["programs"] > 0
    assert not two_device._working()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sections=nothing", "--sections has ['nothing'], expected some of links"),
        ("--prompt_tokens=0", "expected whole numbers of at least 1"),
        ("--prompt_tokens=x", "--prompt_tokens is 'x', expected whole numbers of at least 1"),
        ("--prompt_tokens=9,3", "--prompt_tokens has [9, 3], expected them ascending"),
        ("--prompt_tokens=99999999999", "expected at most 1048576 (the positions of the model)"),
        ("--chunk_tokens=0", "chunk_tokens=0: 0 is not"),
        ("--model=none.json", "none.json does not exist"),
        ("--layers=1", "flag --layers=1: 1 is not integer >= 2"),
        ("--layers=9", "--layers is 9, expected at most 5"),
    ],
)
def test_mistakes_are_refused(flag, message, tmp_path, capsys):
    code = two_device.main(["bench", f"--out_dir={tmp_path / 'out'}", f"--model={TINY}", flag])
    assert code == common.USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_flags_of_the_kernel_that_reads_a_neighbour(capsys):
    assert peer_read.main(["peer_read", "--tiles=0"]) == common.USER_ERROR
    assert "error: flag --tiles=0: 0 is not a positive integer" in capsys.readouterr().err
    assert peer_read.main(["peer_read", "--help"]) == common.OK
    assert "--tiles=INT" in capsys.readouterr().out


def test_links_of_two_devices():
    settings = probe.Settings(sizes=(4096, 8192), repeats=1, in_flight_bytes=8192, matmul_size=16)
    found = links.measure(jax.devices()[:2], settings)
    assert [row["bytes"] for row in found["peer_0_to_1"]] == [4096, 8192]
    assert found["peer_both_gb_per_s"] > 0
    assert found["host_to_both_gb_per_s"] > 0
    assert not found["host_registered"]
    assert [row["compute_on"] for row in found["peer_beside_compute"]] == ["source", "target"]


def test_calls_of_two_owners_are_matched_by_their_kernels():
    cold, hot = [], []
    for call in range(3):
        at = 1000.0 * call
        cold += [Kernel("gate", at, at + 100), Kernel("down", at + 100, at + 200)]
        hot += [Kernel("gate", at + 50, at + 150), Kernel("down", at + 150, at + 250)]
        hot += [Kernel("fusion", at, at + 1)] * 2
        cold.append(Kernel("fusion", at, at + 1))
    found = overlap.pairs(hot, cold, 3)
    assert found["kernels"] == ["gate", "down"]
    assert found["overlapping_calls"] == 3
    assert found["overlap_share"] == pytest.approx(0.75)
    assert found["start_gap_us_median"] == pytest.approx(0.05)
    assert found["hot_ms_median"] == found["cold_ms_median"] == pytest.approx(2e-4)
    with pytest.raises(ValueError, match="no kernel ran a multiple of 7 times"):
        overlap.pairs(hot, cold, 7)


@pytest.mark.parametrize("remote", [False, True])
def test_peer_kernel_compiles_for_two_gpus_without_multicast(remote):
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = AbstractMesh((2,), (peer_read.AXIS,), (AxisType.Auto,), abstract_device=device)
    shape = jax.ShapeDtypeStruct((2 * 132 * 4 * peer_read.ROWS, peer_read.COLUMNS), jnp.int32)
    program = peer_read.program(mesh, 132, remote=remote)
    text = program.trace(shape).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "multimem" not in text


def test_peer_kernel_says_why_it_does_not_run(capsys):
    assert peer_read.main(["peer_read"]) == 0
    assert "the kernel needs two Hopper GPUs" in json.loads(capsys.readouterr().out)["reason"]
