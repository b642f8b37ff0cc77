"""Writing converted checkpoints, see `converted` for the layout."""

import concurrent.futures
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from ds4jax.checkpoint import converted, keys, load, storage
from ds4jax.checkpoint.safetensors import SafetensorsSource
from ds4jax.checkpoint.source import READ_THREADS, CheckpointError, TensorSource
from sharding import schema

STEP_BYTES = 256 << 20  # experts of about this size are in memory at once
PROGRESS_NAME = "progress.json"
_PROGRESS = {
    "source": schema.TEXT,
    "pieces": {"*": {"provenance": schema.ANYTHING, "sha256": schema.ANYTHING}},
}
COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

# Called after every piece with its name, the bytes done so far and the bytes in all.
Progress = Callable[[str, int, int], None]


def convert(
    source: TensorSource,
    out_dir: str | os.PathLike[str],
    *,
    on_progress: Progress = lambda name, done, total: None,
) -> pathlib.Path:
    """Writes the converted form of a checkpoint to `out_dir` and returns the folder.

    Everything is written to `out_dir`.partial, which is renamed when it is whole. An interrupted
    conversion is continued by calling this again: pieces that are finished, whose source has not
    changed and whose hash is right are kept. A folder that is already complete is only verified.

    Raises CheckpointError for an incomplete or damaged source, a folder that is something else,
    and a full disk (before starting, when that can be told).
    """
    out_dir = pathlib.Path(out_dir)
    contents = keys.check_complete(source)
    with storage.write_errors_reported(out_dir, 0):  # its name may be too long, for example
        exists = out_dir.exists()
    identity = load.fingerprint(source)
    if exists:
        if (
            not converted.is_converted(out_dir)
            or converted.read_index(out_dir)["source"] != identity
        ):
            raise CheckpointError(
                f"{out_dir} exists and is no conversion of this checkpoint: choose another folder"
            )
        converted.verify(out_dir)
        return out_dir
    contents.log_skipped()
    partial = out_dir.with_name(out_dir.name + ".partial")
    job = _Job(source, contents.expert_format, partial, identity)
    job.remove_unfinished()
    storage.require_free(partial, job.missing_bytes)
    with storage.write_errors_reported(partial, job.missing_bytes):
        job.run(on_progress)
        os.replace(partial, out_dir)
        # Only now: until the rename an interrupted run must find it.
        (out_dir / PROGRESS_NAME).unlink()
    return out_dir


class _Job:
    """One conversion into a folder that may already hold some of its pieces."""

    def __init__(
        self,
        source: TensorSource,
        format: keys.ExpertFormat,
        folder: pathlib.Path,
        identity: str,
    ) -> None:
        self.source = source
        self.format: keys.ExpertFormat = format
        self.folder = folder
        self.identity = identity
        infos = source.infos()
        self.specs = keys.resident_tensors(source.config)
        scales = [keys.scale_name(name) for name in self.specs]
        self.resident = [name for name in (*self.specs, *scales) if name in infos]
        self.sizes = {"resident": sum(infos[name].nbytes for name in self.resident)}
        self.layers = {}
        for layer in range(source.config.num_hidden_layers):
            name = converted.slab_name(layer)
            self.layers[name] = layer
            _, self.sizes[name] = converted.slab_layout(source.config, format)
        self.pieces = self._finished()

    def _finished(self) -> dict[str, dict[str, Any]]:
        """Pieces of an interrupted conversion that can be kept."""
        path = self.folder / PROGRESS_NAME
        if not path.exists():
            if self.folder.exists():
                raise CheckpointError(
                    f"{self.folder} exists and is no interrupted conversion: delete it or choose "
                    "another folder"
                )
            return {}
        progress = storage.read_json(path)
        if progress.get("source") != self.identity:
            raise CheckpointError(
                f"{self.folder} was begun from another checkpoint: delete it or choose another "
                "folder"
            )
        storage.require_form(path, progress, _PROGRESS)
        pieces = {
            name: piece
            for name, piece in progress["pieces"].items()
            if name in self.sizes and piece["provenance"] == self._provenance(name)
        }
        with concurrent.futures.ThreadPoolExecutor(READ_THREADS) as pool:
            intact = pool.map(lambda name: self._intact(name, pieces[name]["sha256"]), pieces)
        return {name: pieces[name] for name, kept in zip(pieces, intact, strict=True) if kept}

    def remove_unfinished(self) -> None:
        """Deletes what an interrupted run left besides finished pieces."""
        kept = {self.folder / name for name in (*self.pieces, PROGRESS_NAME)}
        experts = self.folder / "experts"
        for path in [*self.folder.glob("*"), *experts.glob("*")]:
            if path in kept or path == experts:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _intact(self, name: str, sha256: Any) -> bool:
        path = self.folder / name
        if not path.exists():
            return False
        if name == "resident":
            return storage.hash_folder(path) == sha256
        components, nbytes = converted.slab_layout(self.source.config, self.format, str(path))
        whole = path.stat().st_size == nbytes and isinstance(sha256, dict)
        return whole and not converted.changed_components(components, sha256)

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be written."""
        return sum(size for name, size in self.sizes.items() if name not in self.pieces)

    def _provenance(self, piece: str) -> dict[str, list[int]]:
        if piece == "resident":
            return self.source.provenance(self.resident)
        weights = keys.expert_tensors(self.source.config, self.layers[piece])
        names = [*weights, *(keys.scale_name(name) for name in weights)]
        infos = self.source.infos()
        return self.source.provenance(name for name in names if name in infos)

    def run(self, on_progress: Progress) -> None:
        """Writes what is missing, then the index."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._save_progress()
        total = sum(self.sizes.values())
        done = total - self.missing_bytes
        for name, size in self.sizes.items():
            if name in self.pieces:
                continue
            entry = self._write_resident() if name == "resident" else self._write_slab(name)
            self.pieces[name] = {**entry, "provenance": self._provenance(name)}
            self._save_progress()
            done += size
            on_progress(name, done, total)
        self._write_rest()

    def _save_progress(self) -> None:
        progress = {"source": self.identity, "pieces": self.pieces}
        storage.write_json(self.folder / PROGRESS_NAME, progress)

    def _write_resident(self) -> dict[str, Any]:
        arrays = self.source.read_many(self.resident)
        for name, spec in self.specs.items():
            load.require_valid(name, spec, arrays, self.source.config)
        path = self.folder / "resident"
        storage.save_tree(path, storage.nested(arrays))
        return {"sha256": storage.hash_folder(path)}

    def _write_slab(self, name: str) -> dict[str, Any]:
        config = self.source.config
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        components, file_bytes = converted.slab_layout(config, self.format, str(path))
        hashes = {field: hashlib.sha256() for field in components}
        count = config.n_routed_experts
        step = max(1, min(count, STEP_BYTES // keys.expert_bytes(config, self.source.infos())))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(file, file_bytes)  # the last component is padded as well
            for first in range(0, count, step):
                experts = range(first, min(first + step, count))
                slab = load.load_expert_slab(self.source, self.layers[name], experts)
                for field, component in components.items():
                    array = np.asarray(getattr(slab, field))
                    offset = component.extent.offset + first * component.expert_bytes
                    storage.write_exactly(file, array, offset)
                    hashes[field].update(array.reshape(-1).view(np.uint8).data)
            os.fsync(file)
        finally:
            os.close(file)
        return {"sha256": {field: digest.hexdigest() for field, digest in hashes.items()}}

    def _write_rest(self) -> None:
        (self.folder / "config.json").write_text(self.source.config_text(), encoding="utf-8")
        if isinstance(self.source, SafetensorsSource):
            for name in COPIED_FILES:
                if (self.source.folder / name).exists():
                    shutil.copyfile(self.source.folder / name, self.folder / name)
        infos = self.source.infos()
        index = {
            "format": converted.FORMAT,
            "version": converted.VERSION,
            "source": self.identity,
            "expert_format": self.format,
            "resident": {
                "sha256": self.pieces["resident"]["sha256"],
                "tensors": {
                    name: [infos[name].dtype, list(infos[name].shape)] for name in self.resident
                },
            },
            "experts": {
                name: self.pieces[name]["sha256"] for name in self.sizes if name != "resident"
            },
        }
        storage.write_json(self.folder / converted.INDEX_NAME, index)
