"""Reading converted checkpoints: what a run wants, in the order in which it reads it.

A converted folder holds
  config.json and the tokenizer files, copied;
  resident/            one Orbax checkpoint, nested dicts by the parts of the published names;
  experts/layer-L.bin  the routed experts of a layer: all gate_up codes, all gate_up scales, all
                       down codes, all down scales. Experts follow each other without gaps, so a
                       range of experts is one range of bytes in each component, and components
                       begin on 4 KiB boundaries, as direct I/O and page-locking want;
  index.json           shapes and SHA-256 of all that.

Bits are those of the checkpoint it was made from. Draft models are left out.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ds4jax.checkpoint import keys, storage
from ds4jax.checkpoint.files import Extent, FolderSource
from ds4jax.checkpoint.source import DTYPES, READ_THREADS, CheckpointError, TensorInfo
from ds4jax.config import ModelConfig
from sharding import schema

FORMAT, VERSION = "ds4jax-converted", 1
INDEX_NAME = "index.json"
ALIGNMENT = 4096  # bytes

_TENSOR = schema.Leaf("a dtype and a shape", lambda value: _is_tensor(value))
_FORMATS = tuple(keys.EXPERT_FORMATS.values())
_INDEX = {
    "source": schema.TEXT,
    "expert_format": schema.Leaf(f"one of {', '.join(_FORMATS)}", lambda value: value in _FORMATS),
    "resident": {"sha256": schema.TEXT, "tensors": {"*": _TENSOR}},
    "experts": {"*": {"*": schema.TEXT}},
}


def _is_tensor(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    dtype, shape = value
    counts = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return counts and isinstance(dtype, str) and dtype in DTYPES


@dataclasses.dataclass(frozen=True)
class Component:
    """One matrix (or its scales) of all experts of a layer, in a slab file.

    info    stored dtype and shape [E, rows, columns]
    extent  where the bytes lie; expert e has those from e * expert_bytes on
    """

    info: TensorInfo
    extent: Extent

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.extent.nbytes // self.info.shape[0]


def slab_layout(
    config: ModelConfig, format: keys.ExpertFormat, path: str = ""
) -> tuple[dict[str, Component], int]:
    """Components of a slab file by the field names of `ExpertSlab`, and the bytes of the file."""
    specs = keys.expert_specs(config)
    dtype = keys.expert_dtype(format)
    components: dict[str, Component] = {}
    offset = 0
    for field, matrices in (("gate_up", ("w1", "w3")), ("down", ("w2",))):
        for suffix, info_of in (("", keys.stored_info), ("_scale", keys.scale_info)):
            infos = [info_of(specs[matrix], dtype) for matrix in matrices]
            if infos[0] is None:
                continue
            rows = sum(info.shape[0] for info in infos if info is not None)
            shape = (config.n_routed_experts, rows, infos[0].shape[1])
            info = TensorInfo(infos[0].dtype, shape)
            components[field + suffix] = Component(info, Extent(path, offset, info.nbytes))
            offset = _aligned(offset + info.nbytes)
    return components, offset


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def slab_name(layer: int) -> str:
    """File of a layer's experts, relative to the converted folder."""
    return f"experts/layer-{layer:05d}.bin"


_EXPERT_NAME = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)")


class ConvertedSource(FolderSource):
    """A converted folder, with the same tensors and bits as the checkpoint it was made from."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        folder = pathlib.Path(folder)
        self.index = read_index(folder)
        super().__init__(folder, ModelConfig.from_json(folder / "config.json"), {})
        self.expert_format: keys.ExpertFormat = self.index["expert_format"]
        self._layers = [
            slab_layout(self.config, self.expert_format, str(self.folder / slab_name(layer)))
            for layer in range(self.config.num_hidden_layers)
        ]
        self._resident = {
            name: TensorInfo(dtype, tuple(shape))
            for name, (dtype, shape) in self.index["resident"]["tensors"].items()
        }
        self._infos = {**self._resident, **self._expert_infos()}
        problems = []
        for layer, (_, nbytes) in enumerate(self._layers):
            path = self.folder / slab_name(layer)
            size = path.stat().st_size if path.is_file() else None
            if size == nbytes:
                self.files.open(str(path))
                continue
            found = "is absent" if size is None else f"has {size} bytes"
            problems.append(f"{path} {found}, expected {nbytes} bytes: convert again")
        if problems:
            raise CheckpointError.listing(f"{self.folder} is damaged", problems)

    def _expert_infos(self) -> dict[str, TensorInfo]:
        dtype = keys.expert_dtype(self.expert_format)
        infos: dict[str, TensorInfo] = {}
        for layer in range(self.config.num_hidden_layers):
            for expert in range(self.config.n_routed_experts):
                prefix = keys.expert_prefix(layer, expert)
                for matrix, spec in keys.expert_specs(self.config).items():
                    infos[f"{prefix}{matrix}.weight"] = keys.stored_info(spec, dtype)
                    scales = keys.scale_info(spec, dtype)
                    if scales is not None:
                        infos[f"{prefix}{matrix}.scale"] = scales
        return infos

    def components(self, layer: int) -> Mapping[str, Component]:
        """The slab file of a layer by the field names of `ExpertSlab`."""
        return self._layers[layer][0]

    def extent(self, name: str) -> Extent:
        """The file range of an expert's tensor; resident tensors have none (ValueError)."""
        self.info(name)
        match = _EXPERT_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} lies in an Orbax checkpoint, not in one range of a file")
        layer, expert, matrix, part = match.groups()
        field = ("down" if matrix == "w2" else "gate_up") + ("_scale" if part == "scale" else "")
        component = self.components(int(layer))[field]
        nbytes = self._infos[name].nbytes
        offset = component.extent.offset + int(expert) * component.expert_bytes
        # The rows of w3 follow those of w1.
        return Extent(component.extent.path, offset + (nbytes if matrix == "w3" else 0), nbytes)

    def provenance(self, names: Iterable[str]) -> dict[str, list[int]]:
        stamps: dict[str, list[int]] = {}
        for name in names:
            path = self.folder / "resident"
            if name not in self._resident:
                path = pathlib.Path(self.extent(name).path)
            status = path.stat()
            stamps[path.name] = [status.st_size, status.st_mtime_ns]
        return stamps

    def read_into(self, name: str, buffer: np.ndarray, start: int = 0) -> None:
        if name not in self._resident:
            super().read_into(name, buffer, start)
            return
        self.require_range(name, buffer, start)
        array = self._read_resident([name])[name]
        buffer[:] = array.reshape(-1).view(np.uint8)[start : start + buffer.nbytes]

    def read_many(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        names = list(names)
        arrays = super().read_many(name for name in names if name not in self._resident)
        return arrays | self._read_resident([name for name in names if name in self._resident])

    def _read_resident(self, names: list[str]) -> dict[str, np.ndarray]:
        if not names:
            return {}
        # Orbax restores to numpy where it is shown numpy arrays; untouched, these cost nothing.
        wanted = {
            name: np.empty(self._resident[name].shape, self._resident[name].numpy_dtype)
            for name in names
        }
        tree = storage.load_tree(self.folder / "resident", storage.nested(wanted))
        return {name: np.asarray(storage.at(tree, name)) for name in names}


def is_converted(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like a converted checkpoint."""
    return (pathlib.Path(folder) / INDEX_NAME).is_file()


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """The index of a converted folder; CheckpointError when it is none of this version."""
    index = storage.read_json(folder / INDEX_NAME)
    found = index.get("format"), index.get("version")
    if found != (FORMAT, VERSION):
        raise CheckpointError(
            f"{folder / INDEX_NAME} has format and version {found}, expected {(FORMAT, VERSION)}: "
            "convert the checkpoint again"
        )
    storage.require_form(folder / INDEX_NAME, index, _INDEX)
    return index


def verify(folder: pathlib.Path) -> None:
    """Hashes everything in a converted folder; CheckpointError lists what has changed."""
    source = ConvertedSource(folder)

    def layer_problems(layer: int) -> list[str]:
        name = slab_name(layer)
        changed = changed_components(
            source.components(layer), source.index["experts"].get(name, {})
        )
        return [f"{folder / name}: {field} has another SHA-256 than its index" for field in changed]

    with source, concurrent.futures.ThreadPoolExecutor(READ_THREADS) as pool:
        layers = pool.map(layer_problems, range(source.config.num_hidden_layers))
        problems = [problem for found in layers for problem in found]
        if storage.hash_folder(folder / "resident") != source.index["resident"]["sha256"]:
            problems.append(f"{folder / 'resident'} has another SHA-256 than the index says")
    if problems:
        raise CheckpointError.listing(f"{folder} is damaged, delete it and convert again", problems)


def changed_components(components: Mapping[str, Component], hashes: Mapping[str, str]) -> list[str]:
    """Names of the components whose bytes do not have the given SHA-256."""
    return [
        field
        for field, component in components.items()
        if storage.hash_range(
            component.extent.path, component.extent.offset, component.extent.nbytes
        )
        != hashes.get(field)
    ]
