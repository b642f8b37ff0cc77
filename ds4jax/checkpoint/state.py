"""Saved prefill state: what a later run needs to go on after the last token of this one.

A folder holds `arrays/`, an Orbax checkpoint with the state of every layer (compressed entries
without the unused rest of their buffers), and `state.json`, which says what the arrays belong to.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.cache import SequenceState, abstract_state
from ds4jax.checkpoint import storage
from ds4jax.checkpoint.source import CheckpointError
from ds4jax.config import ModelConfig, Numerics

FORMAT, VERSION = "ds4jax-state", 1
RECORD_NAME = "state.json"
ENTRY_BUFFERS = ("compressed", "index_keys")  # fields whose rows are entries, then unused


def save_state(
    folder: str | os.PathLike[str],
    state: SequenceState,
    config: ModelConfig,
    numerics: Numerics,
    weights: str,
    tokens: np.ndarray,
) -> pathlib.Path:
    """Saves a state to a new folder, which appears only when it is whole.

    weights  identifies the checkpoint, see `load.fingerprint`
    tokens   the prompt; its first `state.position` ids are those that the state has seen

    Raises CheckpointError when the folder exists or the disk is full.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} exists: choose another folder for the state")
    arrays = {
        path: np.asarray(_used_rows(path, leaf, config, state.position))
        for path, leaf in _leaves(state).items()
    }
    # Orbax does not take empty arrays; they carry nothing.
    arrays = {path: array for path, array in arrays.items() if array.size}
    nbytes = sum(array.nbytes for array in arrays.values())
    storage.require_free(folder, nbytes)
    partial = folder.with_name(folder.name + ".partial")
    with storage.write_errors_reported(folder, nbytes):
        partial.mkdir(parents=True, exist_ok=True)
        storage.save_tree(partial / "arrays", storage.nested(arrays))
        record = {
            "format": FORMAT,
            "version": VERSION,
            "arrays_sha256": storage.hash_folder(partial / "arrays"),
            **_record(config, numerics, weights, state.position, tokens),
        }
        storage.write_json(partial / RECORD_NAME, record)
        os.replace(partial, folder)
    return folder


def load_state(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    numerics: Numerics,
    weights: str,
    tokens: np.ndarray,
) -> SequenceState:
    """Restores a state in order to continue `tokens` from its position.

    The buffers have room for the tokens seen; see `cache.grow_state`. Raises CheckpointError,
    with every value that differs, when the state is of another model, other weights or numerics,
    or of tokens that `tokens` does not begin with; and when the folder is damaged.
    """
    folder = pathlib.Path(folder)
    record = storage.read_json(folder / RECORD_NAME)
    if (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{folder / RECORD_NAME} has format {record.get('format')!r} and version "
            f"{record.get('version')!r}, expected {FORMAT!r} and {VERSION}: save the state again"
        )
    position = record["position"]
    if position > len(tokens):
        raise CheckpointError(
            f"the state in {folder} is at position {position}, the prompt has {len(tokens)} "
            "tokens: a state continues a prompt that begins with the tokens it has seen"
        )
    wanted = _record(config, numerics, weights, position, tokens)
    problems = list(_differences("", {key: record.get(key) for key in wanted}, wanted))
    if problems:
        raise CheckpointError.listing(f"the state in {folder} is of another run", problems)
    if storage.hash_folder(folder / "arrays") != record["arrays_sha256"]:
        raise CheckpointError(
            f"{folder / 'arrays'} has changed since it was written: save it again"
        )
    template = abstract_state(config, numerics, position)
    shapes = {
        path: _used_rows(path, leaf, config, position) for path, leaf in _leaves(template).items()
    }
    saved = {path: np.empty(s.shape, s.dtype) for path, s in shapes.items() if 0 not in s.shape}
    tree = storage.load_tree(folder / "arrays", storage.nested(saved))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(template)
    restored = []
    for key_path, leaf in leaves:
        path = _path(key_path)
        buffer = np.zeros(leaf.shape, leaf.dtype)
        if path in saved:
            rows = np.asarray(storage.at(tree, path))
            buffer[: len(rows)] = rows
        restored.append(jnp.asarray(buffer))
    return dataclasses.replace(jax.tree_util.tree_unflatten(treedef, restored), position=position)


def _record(
    config: ModelConfig, numerics: Numerics, weights: str, position: int, tokens: np.ndarray
) -> dict[str, Any]:
    """What a state belongs to, in the types that JSON gives back."""
    seen = np.ascontiguousarray(tokens[:position], "<i4")
    record = {
        "model": dataclasses.asdict(config),
        "weights": weights,
        "numerics": str(numerics),
        "position": position,
        "tokens_sha256": hashlib.sha256(seen.tobytes()).hexdigest(),
    }
    return json.loads(json.dumps(record))


def _differences(prefix: str, saved: Any, wanted: Any) -> list[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        keys = sorted(saved.keys() | wanted.keys())
        return [
            line
            for key in keys
            for line in _differences(f"{prefix}.{key}".strip("."), saved.get(key), wanted.get(key))
        ]
    return (
        [] if saved == wanted else [f"{prefix} is {saved!r} in the state, {wanted!r} in this run"]
    )


def _path(key_path: Any) -> str:
    return jax.tree_util.keystr(key_path, simple=True, separator=".")


def _leaves(state: SequenceState) -> dict[str, Any]:
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _used_rows(path: str, leaf: Any, config: ModelConfig, position: int) -> Any:
    """The rows of a leaf (array or ShapeDtypeStruct) that hold something at `position`."""
    _, layer, *_, field = path.split(".")
    if field not in ENTRY_BUFFERS:
        return leaf
    rows = position // config.layer_ratios[int(layer)]
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)
    return leaf[:rows]
