"""The measuring program runs to its end on a CPU, with small sizes."""

import json

import pytest

from streaming import bench


def test_every_part_of_the_measurement_works(tmp_path, capsys):
    results = bench.main(["--tiny", "--out", str(tmp_path)])
    wrong = {
        name: part
        for name, part in results.items()
        if isinstance(part, dict) and ("error" in part or "skipped" in part)
    }
    assert not wrong
    assert json.loads((tmp_path / "streaming_bench.json").read_text()) == results
    assert (tmp_path / "streaming_timeline_compute_bound.json").exists()
    assert results["policies"]["lru"]["bytes"] == 2 * results["policies"]["static"]["bytes"]
    for tokens in (128, 512, 2048):
        for draws in ("independent", "correlated"):
            assert results["routed"][f"tokens_{tokens}_{draws}"]["bytes_are_distinct"]
    assert results["failed"] == []
    # Every line of the table found what it names.
    assert [row["what"] for row in results["targets"] if row["found"] is None] == []
    out = capsys.readouterr().out
    assert "parts that failed or were left out: none" in out
    assert all(row["what"] in out for row in results["targets"])


def test_parts_bring_those_that_they_need_and_no_others(tmp_path, capsys):
    results = bench.main(["--tiny", "--out", str(tmp_path), "--parts=disk"])
    assert [name for name in bench.PARTS if name in results] == ["product", "disk"]
    warm = results["disk"]["preadv_warm"]["with_compute"]
    assert warm["units"] == 6
    assert len(warm["runs"]) == bench.TINY.disk_repeats
    assert (tmp_path / "streaming_timeline_preadv_warm.json").exists()
    out = capsys.readouterr().out
    assert "disk warm: overlap" in out
    assert "copy-bound" not in out
    assert bench.parts(["waves"]) == ["fill", "product", "pin", "copies_alone", "waves"]


def test_unknown_part_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--tiny", "--out", str(tmp_path), "--parts=disc"])
    assert "--parts names 'disc', expected some of fill, product" in capsys.readouterr().err


def test_part_that_is_out_of_time_is_skipped(tmp_path):
    made = bench.Bench(bench.TINY, tmp_path, seconds=-1)
    made.part("fill", made.fill)
    assert made.results["fill"] == {"skipped": "out of time"}
    assert made.failed == ["fill"]


def test_part_that_raises_is_told_and_the_others_go_on(tmp_path):
    made = bench.Bench(bench.TINY, tmp_path, seconds=60)

    def broken():
        raise MemoryError("refused")

    made.part("fill", broken)
    made.part("product", made.product)
    assert made.results["fill"] == {"error": "MemoryError: refused"}
    assert made.results["product"]["product_s"] > 0
    assert json.loads((tmp_path / "streaming_bench.json").read_text())["failed"] == ["fill"]


def test_part_that_never_ends_ends_the_program_with_what_is_known(tmp_path, monkeypatch, capsys):
    made, ended = bench.Bench(bench.TINY, tmp_path, seconds=60), []
    monkeypatch.setattr(bench.os, "_exit", ended.append)
    made.part("product", made.product)
    made.running = "disk"
    made.stuck()
    assert ended == [1]
    assert json.loads((tmp_path / "streaming_bench.json").read_text())["failed"] == ["disk"]
    assert "left out: disk" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        bench.main([f"--out={tmp_path / 'file' / 'out'}", "--tiny"])
    assert "a folder that cannot be made (Not a directory)" in capsys.readouterr().err


def run(wall, *copies):
    return {"wall_s": wall, "copies": copies, "copy_busy_s": wall, "compute_busy_s": 1.0}


def test_spread_is_divided_into_slow_copies_and_the_rest():
    """Units of 50 GB: a second each at the median rate of 50, two at 25."""
    told = bench._slow_copies([run(3.0, 50, 50, 50), run(4.0, 50, 25, 50), run(3.5, 50, 50)], 50e9)
    assert told["median_gb_per_s"] == 50
    assert told["count_by_run"] == [0, 1, 0]
    assert told["wall_difference_s"] == 1.0
    assert told["excess_difference_s"] == 1.0
    assert told["compute_busy_difference_s"] == 0.0
