"""Saved prefill state: what a later run needs to go on after the last token of this one.

A folder holds `arrays/`, an Orbax checkpoint with the state of every layer (compressed entries
without the unused rest of their buffers), and `state.json`, which says what the arrays belong to.
In a run of several processes each saves its own layers, `layers0to2/` for example, and the last one
completes the folder; it is read with any split and number of processes. A run that was stopped
between two layers of a micro-batch saves the streams of its chunks as well.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.cache import PausedPass, SequenceState, abstract_state
from ds4jax.checkpoint import storage
from ds4jax.checkpoint.source import CheckpointError
from ds4jax.config import ModelConfig, Numerics
from sharding import schema

FORMAT, VERSION = "ds4jax-state", 2
RECORD_NAME = "state.json"
NOTE_BYTES = 1024  # what Orbax writes about an array, at the most
_LAYERS = schema.Leaf(
    "a first layer and the last one + 1",
    lambda value: isinstance(value, list) and [type(each) for each in value] == [int, int],
)
_FORM = {  # the rest of the record has to equal that of the run
    "position": schema.COUNT,
    "parts": [{"layers": _LAYERS, "folder": schema.TEXT, "sha256": schema.TEXT}],
    "paused?": {
        "layer": schema.COUNT,
        "tokens": [schema.ONE_OR_MORE],
        "stream_shapes": [[schema.COUNT]],
    },
}
ENTRY_BUFFERS = ("compressed", "index_keys")  # fields whose rows are entries, then unused


@dataclasses.dataclass(frozen=True)
class Part:
    """Some layers of a state: first and last + 1, the folder of their arrays, its hash, bytes."""

    layers: range
    folder: str
    sha256: str
    nbytes: int


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
    arrays = _used(state, config, [state.position] * len(state.layers))
    return _save(folder, arrays, _record(config, numerics, weights, state.position, tokens))


def save_layers(
    folder: str | os.PathLike[str], state: SequenceState, config: ModelConfig, layers: range
) -> Part:
    """Saves the layers of a process for a state in `folder`, which `complete_state` makes appear.

    state  None in place of other layers
    Raises CheckpointError as `save_state` does.
    """
    arrays = _used(state, config, [state.position] * len(state.layers))
    name = f"layers{layers.start}to{layers.stop - 1}"
    return _save_part(pathlib.Path(folder), name, arrays, layers)


def complete_state(
    folder: str | os.PathLike[str],
    parts: Sequence[Part],
    position: int,
    config: ModelConfig,
    numerics: Numerics,
    weights: str,
    tokens: np.ndarray,
) -> pathlib.Path:
    """Makes a folder appear whose layers `save_layers` has saved, all of them, in any processes.

    position  of the state; the other arguments and errors are those of `save_state`
    """
    record = _record(config, numerics, weights, position, tokens)
    return _complete(pathlib.Path(folder), parts, record)


def save_paused(
    folder: str | os.PathLike[str],
    paused: PausedPass,
    config: ModelConfig,
    numerics: Numerics,
    weights: str,
    tokens: np.ndarray,
    chunk_tokens: int,
) -> pathlib.Path:
    """Saves a sequence that was stopped between two layers, as `save_state` does between chunks.

    tokens  the prompt, from position 0 on; chunk_tokens is that of the run
    """
    position, chunks = paused.state.position, paused.tokens
    end = position + sum(chunks)
    arrays = _used(paused.state, config, _positions(config, paused.layer, position, end))
    streams = {f"streams.{i}": np.asarray(part) for i, part in enumerate(paused.streams)}
    arrays |= streams
    record = _paused_record(config, numerics, weights, position, tokens, chunk_tokens, chunks)
    place = {
        "layer": paused.layer,
        "tokens": list(chunks),
        "stream_shapes": [list(part.shape) for part in streams.values()],
    }
    return _save(folder, arrays, {**record, "paused": place})


def saved_bytes(config: ModelConfig, numerics: Numerics, position: int) -> int:
    """Bytes that `save_state` puts on disk for a state that has seen `position` tokens.

    The arrays, which Orbax may still compress, and what it notes of each.
    """
    template = abstract_state(config, numerics, position)
    arrays = [
        _used_rows(path, leaf, config, [position] * len(template.layers))
        for path, leaf in _leaves(template).items()
    ]
    return sum(math.prod(array.shape) * array.dtype.itemsize + NOTE_BYTES for array in arrays)


def is_paused(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds what `save_paused` wrote."""
    return "paused" in _read_record(pathlib.Path(folder))


def load_state(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    numerics: Numerics,
    weights: str,
    tokens: np.ndarray,
    layers: range | None = None,
) -> SequenceState:
    """Restores a state in order to continue `tokens` from its position.

    layers  that are restored, in a run of several processes; None stands for the others

    The buffers have room for the tokens seen; see `cache.grow_state`. Raises CheckpointError,
    with every value that differs, when the state is of another model, other weights or numerics,
    or of tokens that `tokens` does not begin with; and when the folder is damaged.
    """
    folder = pathlib.Path(folder)
    record = _read_record(folder)
    if "paused" in record:
        raise CheckpointError(f"{folder} holds a pass that was stopped, expected a state")
    position = record["position"]
    _require_tokens(folder, position, len(tokens))
    _require_same(folder, record, _record(config, numerics, weights, position, tokens))
    template = abstract_state(config, numerics, position)
    if layers is not None:
        kept: Any = tuple(layer if n in layers else None for n, layer in enumerate(template.layers))
        template = dataclasses.replace(template, layers=kept)
    state, _ = _restore(folder, record, template, config, [position] * len(template.layers))
    return dataclasses.replace(state, position=position)


def load_paused(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    numerics: Numerics,
    weights: str,
    tokens: np.ndarray,
    chunk_tokens: int,
) -> PausedPass:
    """Restores what `save_paused` wrote in order to continue `tokens` in the middle of a pass.

    Raises CheckpointError as `load_state` does, and for another chunk size.
    """
    folder = pathlib.Path(folder)
    record = _read_record(folder)
    place = record.get("paused")
    if place is None:
        raise CheckpointError(f"{folder} holds a state, expected a pass that was stopped")
    position, chunks = record["position"], place["tokens"]
    end = position + sum(chunks)
    _require_tokens(folder, end, len(tokens))
    wanted = _paused_record(config, numerics, weights, position, tokens, chunk_tokens, chunks)
    _require_same(folder, record, wanted)
    template = abstract_state(config, numerics, end)
    positions = _positions(config, place["layer"], position, end)
    empty = [np.empty(shape, numerics.dtype) for shape in place["stream_shapes"]]
    state, streams = _restore(folder, record, template, config, positions, empty)
    state = dataclasses.replace(state, position=position)
    return PausedPass(place["layer"], state, streams, tuple(chunks))


def _positions(config: ModelConfig, layer: int, position: int, end: int) -> list[int]:
    """Tokens that each layer has seen in a pass over position..end that is in front of `layer`."""
    return [end if n < layer else position for n in range(config.num_hidden_layers)]


def _used(
    state: SequenceState, config: ModelConfig, positions: Sequence[int]
) -> dict[str, np.ndarray]:
    return {
        path: np.asarray(_used_rows(path, leaf, config, positions))
        for path, leaf in _leaves(state).items()
    }


def _save(
    folder: str | os.PathLike[str], arrays: dict[str, np.ndarray], record: dict[str, Any]
) -> pathlib.Path:
    folder = pathlib.Path(folder)
    part = _save_part(folder, "arrays", arrays, range(record["model"]["num_hidden_layers"]))
    return _complete(folder, [part], record)


def _partial(folder: pathlib.Path) -> pathlib.Path:
    """What a folder is called until it is whole."""
    return folder.with_name(folder.name + ".partial")


def _save_part(
    folder: pathlib.Path, name: str, arrays: dict[str, np.ndarray], layers: range
) -> Part:
    if folder.exists():
        raise CheckpointError(f"{folder} exists: choose another folder for the state")
    # Orbax does not take empty arrays; they carry nothing.
    arrays = {path: array for path, array in arrays.items() if array.size}
    nbytes = sum(array.nbytes for array in arrays.values())
    storage.require_free(folder, nbytes)
    place = _partial(folder) / name
    with storage.write_errors_reported(folder, nbytes):
        place.parent.mkdir(parents=True, exist_ok=True)
        storage.save_tree(place, storage.nested(arrays))
        return Part(layers, name, storage.hash_folder(place), nbytes)


def _complete(folder: pathlib.Path, parts: Sequence[Part], record: dict[str, Any]) -> pathlib.Path:
    plain = [
        {**dataclasses.asdict(part), "layers": [part.layers.start, part.layers.stop]}
        for part in parts
    ]
    whole = {"format": FORMAT, "version": VERSION, "parts": plain, **record}
    _require_all_layers(folder, whole)
    partial = _partial(folder)
    with storage.write_errors_reported(folder, 0):
        storage.write_json(partial / RECORD_NAME, whole)
        os.replace(partial, folder)
    return folder


def _read_record(folder: pathlib.Path) -> dict[str, Any]:
    record = storage.read_json(folder / RECORD_NAME)
    if (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{folder / RECORD_NAME} has format {record.get('format')!r} and version "
            f"{record.get('version')!r}, expected {FORMAT!r} and {VERSION}: save the state again"
        )
    storage.require_form(folder / RECORD_NAME, record, _FORM)
    return record


def _require_tokens(folder: pathlib.Path, position: int, tokens: int) -> None:
    if position > tokens:
        raise CheckpointError(
            f"the state in {folder} is at position {position}, the prompt has {tokens} "
            "tokens: a state continues a prompt that begins with the tokens it has seen"
        )


def _require_same(folder: pathlib.Path, record: dict[str, Any], wanted: dict[str, Any]) -> None:
    problems = list(_differences("", {key: record.get(key) for key in wanted}, wanted))
    if problems:
        raise CheckpointError.listing(f"the state in {folder} is of another run", problems)
    _require_all_layers(folder, record)


def _restore(
    folder: pathlib.Path,
    record: dict[str, Any],
    template: SequenceState,
    config: ModelConfig,
    positions: Sequence[int],
    streams: Sequence[np.ndarray] = (),
) -> tuple[SequenceState, tuple[jax.Array, ...]]:
    """The arrays of a folder: the state in buffers like those of `template`, and the streams."""
    shapes = {
        path: _used_rows(path, leaf, config, positions) for path, leaf in _leaves(template).items()
    }
    saved = {path: np.empty(s.shape, s.dtype) for path, s in shapes.items() if 0 not in s.shape}
    saved |= {f"streams.{i}": array for i, array in enumerate(streams)}
    found = _load_parts(folder, record["parts"], saved)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(template)
    restored = []
    for key_path, leaf in leaves:
        path = _path(key_path)
        buffer = np.zeros(leaf.shape, leaf.dtype)
        if path in saved:
            rows = np.asarray(found[path])
            buffer[: len(rows)] = rows
        restored.append(jnp.asarray(buffer))
    left = tuple(jnp.asarray(found[f"streams.{i}"]) for i in range(len(streams)))
    return jax.tree_util.tree_unflatten(treedef, restored), left


def _require_all_layers(folder: pathlib.Path, record: dict[str, Any]) -> None:
    spans, end = [part["layers"] for part in record["parts"]], 0
    for first, stop in spans:
        end = stop if first == end else -1
    if end != record["model"]["num_hidden_layers"]:
        raise CheckpointError(
            f"{folder / RECORD_NAME} has the layers {spans}, expected all from 0 to "
            f"{record['model']['num_hidden_layers']} in order: save it again"
        )


def _load_parts(
    folder: pathlib.Path, parts: Sequence[dict[str, Any]], wanted: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The arrays of a folder by path; raises CheckpointError for one that has changed."""
    found = {}
    for number, part in enumerate(parts):
        own = {
            path: array
            for path, array in wanted.items()
            if (path.startswith("streams.") and number == 0)
            or (path.startswith("layers.") and int(path.split(".")[1]) in range(*part["layers"]))
        }
        if not own:
            continue
        place = folder / part["folder"]
        if storage.hash_folder(place) != part["sha256"]:
            raise CheckpointError(f"{place} has changed since it was written: save it again")
        tree = storage.load_tree(place, storage.nested(own))
        found |= {path: storage.at(tree, path) for path in own}
    return found


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


def _paused_record(
    config: ModelConfig,
    numerics: Numerics,
    weights: str,
    position: int,
    tokens: np.ndarray,
    chunk_tokens: int,
    chunks: Sequence[int],
) -> dict[str, Any]:
    """What a paused pass belongs to: its tokens count as seen, and its chunks have to fit."""
    record = _record(config, numerics, weights, position + sum(chunks), tokens)
    return {**record, "position": position, "chunk_tokens": chunk_tokens}


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


def _used_rows(path: str, leaf: Any, config: ModelConfig, positions: Sequence[int]) -> Any:
    """The rows of a leaf (array or ShapeDtypeStruct) in use where layers have seen `positions`."""
    _, layer, *_, field = path.split(".")
    if field not in ENTRY_BUFFERS:
        return leaf
    rows = positions[int(layer)] // config.layer_ratios[int(layer)]
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)
    return leaf[:rows]
