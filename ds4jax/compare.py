"""Compares the output arrays of two runs block by block, so that they need not fit in memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ds4jax.config import ConfigError
from ds4jax.report import RUN_FILE, RUN_SCHEMA
from sharding import schema

BLOCK_ROWS = 256

# What is read of run.json, beside the settings.
_FORM = {
    "prompts": [{"prompt_sha256": schema.TEXT, "tokens_read": schema.COUNT}],
    "checkpoint": {"vocab_size": schema.COUNT},
    "outputs": {"*": {"sha256": schema.TEXT}},
    **dict.fromkeys(("config", "numerics", "versions", "device"), schema.ANYTHING),
}


def compare_runs(first: str, second: str) -> dict[str, Any]:
    """Differences between two run folders with the same prompts and kind of output.

    Rows are those of the output files: one per prompt in mode "last", one per token read in the
    modes "all" and "logprobs". A NaN equals a NaN, and differs from a number by infinity.

    Raises ConfigError for folders that hold no complete run, other prompts, another kind of
    output or another number of rows.
    """
    records = [_record(folder) for folder in (first, second)]
    for name, found in (
        ("prompts", [[p["prompt_sha256"] for p in record["prompts"]] for record in records]),
        ("tokens read", [[p["tokens_read"] for p in record["prompts"]] for record in records]),
        ("vocabulary size", [record["checkpoint"]["vocab_size"] for record in records]),
        ("output files", [sorted(record["outputs"]) for record in records]),
    ):
        if found[0] != found[1]:
            raise ConfigError(
                f"{first} and {second} cannot be compared: their {name} differ, {_short(found[0])} "
                f"and {_short(found[1])}: expected two runs of the same prompts with the same "
                "config.prefill.logits"
            )
    names = sorted(records[0]["outputs"])
    if not names:
        raise ConfigError(
            f"{first} and {second} have no output (config.prefill.logits=none): nothing to compare"
        )
    values = "logits" if "logits.npy" in names else "logprobs"
    a, b = (_array(folder, f"{values}.npy") for folder in (first, second))
    if a.shape != b.shape:
        raise ConfigError(
            f"{first} and {second} cannot be compared: {values}.npy is {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    tops = None
    if values == "logprobs":
        tops = [_array(folder, "top_tokens.npy") for folder in (first, second)]
        if len(tops[0]) != len(a) or len(tops[1]) != len(a):
            raise ConfigError(
                f"{first} and {second} cannot be compared: top_tokens.npy has {len(tops[0])} and "
                f"{len(tops[1])} rows, logprobs.npy {len(a)}"
            )
    largest, first_row, agreeing = 0.0, None, 0
    for start in range(0, len(a), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        difference = _differences(np.asarray(a[rows]), np.asarray(b[rows]))
        differing = np.flatnonzero(difference > 0)
        largest = max(largest, float(difference.max(initial=0.0)))
        if first_row is None and differing.size:
            first_row = start + int(differing[0])
        if tops is None:
            agreeing += int(np.sum(a[rows].argmax(-1) == b[rows].argmax(-1)))
        else:
            agreeing += int(np.sum(tops[0][rows, 0] == tops[1][rows, 0]))
    hashes = [{n: r["outputs"][n]["sha256"] for n in names} for r in records]
    return {
        "schema": "ds4jax.compare/1",
        "a": first,
        "b": second,
        "values": values,
        "rows": len(a),
        "equal": hashes[0] == hashes[1],
        "max_abs_difference": largest,
        "first_differing_row": first_row,
        "top1_agreement": agreeing / len(a) if len(a) else 1.0,
        "settings_that_differ": _different_settings(*records),
    }


def _record(folder: str) -> dict[str, Any]:
    path = Path(folder) / RUN_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: expected the --out_dir of a run") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): run it again") from None
    if not isinstance(record, dict) or record.get("schema") != RUN_SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{path} has the schema {found!r}, expected {RUN_SCHEMA!r}")
    if (wrong := schema.problem(record, _FORM)) is not None:
        raise ConfigError(f"{path}: {wrong}: the file was changed, run it again")
    return record


def _array(folder: str, name: str) -> np.ndarray:
    """An output array of a run, left on disk."""
    path = Path(folder) / name
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): run it again") from None
    if not array.ndim or not np.issubdtype(array.dtype, np.number):
        raise ConfigError(
            f"{path} is {array.dtype} of shape {list(array.shape)}, expected rows of numbers: run "
            "it again"
        )
    return array


def _differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Largest absolute difference of each row, [rows] float64."""
    with np.errstate(invalid="ignore"):  # inf - inf of equal infinities
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    difference = np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))
    return difference.reshape(len(a), -1).max(axis=1)


def _different_settings(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    """Settings of the two runs that are not equal, by dotted key: [of a, of b]."""
    parts = ("checkpoint", "config", "numerics", "versions", "device")
    first, second = (_flatten({part: r[part] for part in parts}) for r in (a, b))
    ignored = {"checkpoint.path", "device.peak_bytes", "device.limit_bytes"}
    return {
        key: [first.get(key), second.get(key)]
        for key in sorted({*first, *second} - ignored)
        if first.get(key) != second.get(key)
    }


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}{key}.")
    return flat


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
