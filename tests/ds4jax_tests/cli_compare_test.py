"""The command ds4jax-compare: numbers of a comparison, and what cannot be compared."""

import json
import os

import numpy as np
import pytest

from ds4jax import report
from ds4jax.cli import compare


def write_run(folder, arrays: dict[str, np.ndarray], **changes):
    folder.mkdir()
    outputs = {}
    for name, rows in arrays.items():
        with report.ArrayWriter(folder / f"{name}.npy", rows.dtype, rows.shape[1:]) as writer:
            writer.append(rows)
            outputs[f"{name}.npy"] = {"rows": len(rows), "sha256": writer.close()}
    record = {
        "schema": report.RUN_SCHEMA,
        "status": "complete",
        "checkpoint": {"path": str(folder), "fingerprint": "f", "vocab_size": 5},
        "config": {"numerics": {"preset": "oracle"}},
        "numerics": "float32+none",
        "versions": {"jax": "1"},
        "device": {"platform": "cpu", "peak_bytes": 1},
        "prompts": [{"prompt_sha256": "p", "tokens_read": 600}],
        "outputs": outputs,
    }
    (folder / report.RUN_FILE).write_text(json.dumps(record | changes))
    return folder


@pytest.fixture
def logits():
    return np.random.default_rng(0).standard_normal((600, 5)).astype(np.float32)


def compared(a, b, capsys) -> tuple[int, dict | None, str]:
    code = compare.main(["ds4jax-compare", f"--a={a}", f"--b={b}"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else None, printed.err


def test_equal_runs_are_equal_in_every_bit(tmp_path, logits, capsys):
    a, b = (write_run(tmp_path / name, {"logits": logits}) for name in "ab")
    code, found, err = compared(a, b, capsys)
    assert code == 0
    assert found["equal"]
    assert (found["rows"], found["max_abs_difference"]) == (600, 0.0)
    assert found["first_differing_row"] is None
    assert found["top1_agreement"] == 1.0
    assert found["settings_that_differ"] == {}
    assert "600 rows, equal in every bit" in err


def test_differences_are_measured_over_blocks(tmp_path, logits, capsys):
    other = logits.copy()
    other[300, 2] += 0.25
    other[599] = 0.0
    other[599, (np.argmax(logits[599]) + 1) % 5] = 1.0
    a = write_run(tmp_path / "a", {"logits": logits})
    b = write_run(tmp_path / "b", {"logits": other}, numerics="bfloat16+none")
    code, found, err = compared(a, b, capsys)
    assert code == 0
    assert not found["equal"]
    assert found["first_differing_row"] == 300
    assert found["max_abs_difference"] == pytest.approx(np.abs(logits - other).max())
    agreement = np.mean(logits.argmax(-1) == other.argmax(-1))
    assert found["top1_agreement"] == pytest.approx(agreement)
    assert agreement < 1
    assert found["settings_that_differ"] == {"numerics": ["float32+none", "bfloat16+none"]}
    assert "numerics: float32+none / bfloat16+none" in err


def test_logprobs_are_compared_with_their_most_likely_tokens(tmp_path, capsys):
    def arrays(first: float, token: int) -> dict[str, np.ndarray]:
        values = np.array([first, -2.0, np.nan], np.float32)
        tokens = np.array([[token, 1], [2, 3], [4, 0]], np.int32)
        return {"logprobs": values, "top_logprobs": values[:, None] * [1, 2], "top_tokens": tokens}

    a = write_run(tmp_path / "a", arrays(-1.0, 0))
    b = write_run(tmp_path / "b", arrays(-1.5, 3))
    code, found, _ = compared(a, b, capsys)
    assert code == 0
    assert found["values"] == "logprobs"
    assert found["max_abs_difference"] == 0.5  # a NaN in both is no difference
    assert found["top1_agreement"] == pytest.approx(2 / 3)


def test_nan_against_a_number_is_an_infinite_difference(tmp_path, capsys):
    values = np.zeros((2, 5), np.float32)
    broken = values.copy()
    broken[1, 3] = np.nan
    a = write_run(tmp_path / "a", {"logits": values})
    b = write_run(tmp_path / "b", {"logits": broken})
    _, found, _ = compared(a, b, capsys)
    assert found["max_abs_difference"] == np.inf
    assert found["first_differing_row"] == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"prompts": [{"prompt_sha256": "q", "tokens_read": 600}]}, "their prompts differ"),
        ({"prompts": [{"prompt_sha256": "p", "tokens_read": 3}]}, "their tokens read differ"),
        ({"checkpoint": {"vocab_size": 6}}, "their vocabulary size differ, 5 and 6"),
        ({"outputs": {}}, "their output files differ"),
        ({"schema": "other/1"}, "has the schema 'other/1', expected 'ds4jax.run/1'"),
        ({"checkpoint": None}, "run.json: checkpoint is None, expected an object"),
        ({"prompts": [{}]}, "run.json: prompts[0].prompt_sha256 is absent: the file was changed"),
        ({"outputs": {"logits.npy": 5}}, "run.json: outputs.logits.npy is 5, expected an object"),
    ],
)
def test_incomparable_runs_are_refused(tmp_path, logits, capsys, changes, expected):
    a = write_run(tmp_path / "a", {"logits": logits})
    b = write_run(tmp_path / "b", {"logits": logits}, **changes)
    code, found, err = compared(a, b, capsys)
    assert (code, found) == (2, None)
    assert err.startswith("error: ")
    assert expected in err


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.unlink(), "cannot be read ([Errno 2] No such file or directory"),
        (lambda path: path.write_bytes(b""), "cannot be read (No data left in file)"),
        (lambda path: os.truncate(path, 300), "cannot be read ("),
        (lambda path: np.save(path, np.array([1, "a"], object)), "cannot be read ("),
        (lambda path: np.save(path, np.full(600, "a")), "is <U1 of shape [600], expected rows"),
        (lambda path: np.save(path, np.float32(1)), "is float32 of shape [], expected rows"),
    ],
)
def test_arrays_that_cannot_be_read_are_named(tmp_path, logits, capsys, damage, expected):
    a, b = (write_run(tmp_path / name, {"logits": logits}) for name in "ab")
    damage(b / "logits.npy")
    code, found, err = compared(a, b, capsys)
    assert (code, found) == (2, None)
    assert err.startswith(f"error: {b / 'logits.npy'} {expected}")


def test_runs_without_output_or_record_are_refused(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, {}) for name in "ab")
    code, _, err = compared(a, b, capsys)
    assert code == 2
    assert "have no output (config.prefill.logits=none)" in err
    code, _, err = compared(a, tmp_path / "c", capsys)
    assert code == 2
    assert "run.json does not exist: expected the --out_dir of a run" in err
    (a / report.RUN_FILE).write_text("{")
    assert compared(a, b, capsys)[0] == 2


def test_both_folders_have_to_be_given(capsys):
    assert compare.main(["ds4jax-compare", "--a=x"]) == 2
    assert "--b is missing: Folder of the second run." in capsys.readouterr().err
