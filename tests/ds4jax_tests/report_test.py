"""Output files: arrays that grow row by row, and folders that are whole or absent."""

import errno
import hashlib
import json
import os
import pathlib

import numpy as np
import pytest

from ds4jax import report


def test_array_written_in_parts_is_the_array(tmp_path):
    rows = np.arange(35, dtype=np.float32).reshape(7, 5)
    writer = report.ArrayWriter(tmp_path / "x.npy", np.dtype(np.float32), (5,))
    for part in (rows[:3], rows[3:3], rows[3:]):
        writer.append(part)
    sha = writer.close()
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), rows)
    assert sha == hashlib.sha256(rows.tobytes()).hexdigest()
    assert writer.rows == 7


def test_rows_can_be_scalars_and_many(tmp_path):
    writer = report.ArrayWriter(tmp_path / "x.npy", np.dtype(np.int32), ())
    for start in range(0, 12000, 1000):
        writer.append(np.arange(start, start + 1000, dtype=np.int32))
    writer.close()
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), np.arange(12000, dtype=np.int32))


def test_full_disk_names_the_file_and_what_to_do():
    path, full = pathlib.Path("/dev/full"), r"/dev/full: the disk is full .* free some space"
    with (
        report.ArrayWriter(path, np.dtype(np.float32), (1024,)) as writer,
        pytest.raises(report.OutputError, match=full),
    ):
        writer.append(np.zeros((512, 1024), np.float32))


def test_full_disk_anywhere_in_a_run_is_reported_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(report.OutputError, match="the disk is full"),
        report.output_folder(tmp_path / "run", overwrite=False),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_found_before_writing(tmp_path):
    report.require_space(tmp_path, 1)
    with pytest.raises(report.OutputError, match=r"the output takes \d+ bytes .* are missing"):
        report.require_space(tmp_path / "not" / "there", 1 << 60)


def test_folder_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "a" / "run"
    with report.output_folder(target, overwrite=False) as folder:
        (folder / "x").write_text("x")
        assert not target.exists()
    assert (target / "x").read_text() == "x"
    assert [path.name for path in target.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_comes_up_meanwhile_is_kept_and_so_is_the_output(overwrite, tmp_path):
    target = tmp_path / "run"
    other = tmp_path / f"run-{os.getpid()}"

    def write() -> None:
        with report.output_folder(target, overwrite=overwrite) as folder:
            (folder / "x").write_text("x")
            target.mkdir()
            (target / "theirs").write_text("y")

    with pytest.raises(report.OutputError, match=f"during the run: the output is in {other}"):
        write()
    assert sorted(tmp_path.iterdir()) == [target, other]
    assert ((target / "theirs").read_text(), (other / "x").read_text()) == ("y", "x")


def test_nothing_remains_of_a_block_that_raises(tmp_path):
    def fail() -> None:
        with report.output_folder(tmp_path / "run", overwrite=False) as folder:
            (folder / "x").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept_unless_it_is_a_run_and_may_be_replaced(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    with report.output_folder(target, overwrite=False) as folder:  # an empty folder is no loss
        (folder / report.RUN_FILE).write_text("1")
    with (
        pytest.raises(report.OutputError, match="exists already"),
        report.output_folder(target, overwrite=False),
    ):
        pass
    with report.output_folder(target, overwrite=True) as folder:
        (folder / report.RUN_FILE).write_text("2")
        assert (target / report.RUN_FILE).read_text() == "1"
    assert (target / report.RUN_FILE).read_text() == "2"
    (target / report.RUN_FILE).unlink()
    (target / "precious").write_text("x")
    with (
        pytest.raises(report.OutputError, match=r"holds no run\.json"),
        report.output_folder(target, overwrite=True),
    ):
        pass
    assert (target / "precious").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(report.OutputError, match=r"file.* cannot be written"),
        report.output_folder(tmp_path / "file" / "run", overwrite=False),
    ):
        pass


def test_json_is_replaced_in_one_step(tmp_path):
    report.write_json(tmp_path / "x.json", {"a": 1})
    report.write_json(tmp_path / "x.json", {"a": "é"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": "é"}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_json_that_cannot_be_put_in_place_leaves_nothing(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(report.OutputError, match="cannot be written"):
        report.write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        report.write_json(tmp_path / "y.json", {"a": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_versions_name_what_can_change_bits():
    assert {"python", "jax", "jaxlib", "numpy", "ds4jax", "commit"} <= set(report.versions())
