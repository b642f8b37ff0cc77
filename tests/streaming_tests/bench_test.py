"""The measuring program runs to its end on a CPU, with small sizes."""

import json

from streaming import bench


def test_every_part_of_the_measurement_works(tmp_path):
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
    assert results["routed"]["tokens_128"]["bytes_are_distinct"]


def test_part_that_is_out_of_time_is_skipped(tmp_path):
    made = bench.Bench(bench.TINY, tmp_path, seconds=-1)
    made.part("fill", made.fill)
    assert made.results["fill"] == {"skipped": "out of time"}
