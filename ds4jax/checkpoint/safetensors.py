"""Reader and writer of the safetensors format, including the FP8 dtypes of DeepSeek-V4.

A file is: u64 little-endian header length n, n bytes of JSON (tensor name -> dtype, shape and
data_offsets relative to the end of the header), then the data without holes. A sharded checkpoint
adds `model.safetensors.index.json`, whose weight_map says which file holds which tensor.

Everything that headers can reveal is checked when a folder is opened; data is read in ranges.
"""

import collections
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ds4jax.checkpoint.files import Extent, FolderSource
from ds4jax.checkpoint.source import DTYPES, CheckpointError, TensorInfo
from ds4jax.config import ModelConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes of JSON; the limit of the format


class SafetensorsSource(FolderSource):
    """A checkpoint folder in the published layout; made by `open_checkpoint`."""

    def __init__(
        self,
        folder: pathlib.Path,
        config: ModelConfig,
        infos: Mapping[str, TensorInfo],
        extents: Mapping[str, Extent],
    ) -> None:
        super().__init__(folder, config, infos)
        self._extents = dict(extents)
        for path in {extent.path for extent in self._extents.values()}:
            self.files.open(path)

    def extent(self, name: str) -> Extent:
        self.info(name)
        return self._extents[name]

    def provenance(self, names: Iterable[str]) -> dict[str, list[int]]:
        paths = {self.extent(name).path for name in names}
        return {os.path.basename(path): list(self.files.stamps[path]) for path in sorted(paths)}


def open_checkpoint(folder: str | os.PathLike[str]) -> SafetensorsSource:
    """Opens a folder with `config.json` and one or more safetensors files.

    Reads headers only. Raises ConfigError for the config and CheckpointError, listing everything
    that is wrong with any file, for the rest.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint {folder} {what}: expected a folder with config.json and *.safetensors"
        )
    config = ModelConfig.from_json(folder / "config.json")
    problems: list[str] = []
    files, weight_map = _shards(folder)
    infos: dict[str, TensorInfo] = {}
    extents: dict[str, Extent] = {}
    for path in files:
        try:
            header = read_header(path)
        except OSError as error:
            problems.append(f"{path} cannot be read ({error.strerror})")
            continue
        except CheckpointError as error:
            problems.extend(error.problems)
            continue
        for name, (info, extent) in header.items():
            if name in extents:
                problems.append(
                    f"tensor {name} is in both {extents[name].path} and {path}: remove one"
                )
            elif weight_map is not None and name not in weight_map:
                problems.append(f"{path} holds tensor {name}, which {INDEX_NAME} does not list")
            infos[name], extents[name] = info, extent
    if weight_map is not None and not problems:
        for name, shard in weight_map.items():
            if name not in extents:
                problems.append(f"{INDEX_NAME} puts tensor {name} into {shard}, which lacks it")
            elif os.path.basename(extents[name].path) != shard:
                problems.append(
                    f"{INDEX_NAME} puts tensor {name} into {shard}, found in {extents[name].path}"
                )
    if problems:
        raise CheckpointError.listing(f"checkpoint {folder} is damaged", problems)
    return SafetensorsSource(folder, config, infos, extents)


def _shards(folder: pathlib.Path) -> tuple[list[str], dict[str, str] | None]:
    """Files of a checkpoint, and the weight_map if there is an index."""
    index = folder / INDEX_NAME
    if not index.exists():
        files = sorted(str(path) for path in folder.glob("*.safetensors"))
        if (folder / SINGLE_NAME).exists():
            files = [str(folder / SINGLE_NAME)]
        if len(files) != 1:
            raise CheckpointError(
                f"{folder} holds {len(files)} *.safetensors files and no {INDEX_NAME}: expected "
                "the index, or one file"
            )
        return files, None
    parsed = _parse_json(index.read_bytes(), str(index))
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map (tensor name -> file): fetch it again")
    names = sorted({str(value) for value in weight_map.values()})
    problems = [
        f"{index} puts tensor {name} into {value!r}, expected a file name"
        for name, value in weight_map.items()
        if not isinstance(value, str) or not value
    ]
    if problems:
        raise CheckpointError.listing(f"checkpoint {folder} is damaged", problems)
    for name in names:
        if os.path.basename(name) != name:
            problems.append(f"{index} names the file {name!r}: expected a plain file name")
        elif not (folder / name).is_file():
            count = sum(value == name for value in weight_map.values())
            problems.append(f"{folder / name} is absent, {INDEX_NAME} puts {count} tensors into it")
    if problems:
        raise CheckpointError.listing(f"checkpoint {folder} is incomplete", problems)
    return [str(folder / name) for name in names], weight_map


def _parse_json(text: bytes, where: str) -> Any:
    """Parses JSON; CheckpointError when it is none or an object repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            twice = counts.most_common(1)[0][0]
            raise CheckpointError(f"{where} lists {twice!r} twice: the file is malformed")
        return result

    try:
        return json.loads(text, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}): fetch it again") from None


def read_header(path: str | os.PathLike[str]) -> dict[str, tuple[TensorInfo, Extent]]:
    """Tensors of one safetensors file. Raises CheckpointError listing all that is wrong with it."""
    path = os.fspath(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path} has {size} bytes, too few for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(
                f"{path} announces a header of {length} bytes, the file has {size} and the format "
                f"allows {HEADER_LIMIT}: it is truncated or no safetensors file"
            )
        header = _parse_json(file.read(length), f"{path}: header")
    if not isinstance(header, dict):
        raise CheckpointError(
            f"{path}: header holds {type(header).__name__}, expected one JSON object"
        )
    header.pop("__metadata__", None)
    data_start = 8 + length
    entries: dict[str, tuple[TensorInfo, Extent]] = {}
    problems = []
    for name, entry in header.items():
        try:
            info, (begin, end) = _parse_entry(entry)
        except ValueError as error:
            problems.append(f"{path}: tensor {name} {error}")
            continue
        entries[name] = info, Extent(path, data_start + begin, end - begin)
    if not problems:
        problems = _layout_problems(path, entries, data_start, size)
    if problems:
        raise CheckpointError.listing(f"{path} is damaged", problems)
    return entries


def _parse_entry(entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """Checks one header entry by itself; ValueError says what is wrong."""
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"has the entry {entry!r}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"has the unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not _counts(shape):
        raise ValueError(f"has the shape {shape!r}, expected a list of integers >= 0")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"has the data_offsets {offsets!r}, expected [begin, end] in order")
    info = TensorInfo(dtype, tuple(shape))
    if offsets[1] - offsets[0] != info.nbytes:
        raise ValueError(
            f"occupies {offsets[1] - offsets[0]} bytes, shape {shape} of {dtype} needs "
            f"{info.nbytes}"
        )
    return info, (offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _layout_problems(
    path: str, entries: Mapping[str, tuple[TensorInfo, Extent]], data_start: int, size: int
) -> list[str]:
    """Tensors that overlap, leave holes, or do not end where the file ends."""
    problems = []
    reached, before = data_start, "the header"
    ordered = sorted(entries.items(), key=lambda item: (item[1][1].offset, item[1][1].nbytes))
    for name, (_, extent) in ordered:
        if extent.offset != reached:
            word = "overlaps" if extent.offset < reached else "leaves a gap after"
            problems.append(
                f"{path}: tensor {name} begins at byte {extent.offset} and {word} {before}, which "
                f"ends at byte {reached}"
            )
        if extent.offset + extent.nbytes >= reached:
            reached, before = extent.offset + extent.nbytes, name
    if reached > size:
        problems.append(
            f"{path} has {size} bytes, its header describes {reached}: {reached - size} bytes are "
            "missing, fetch it again"
        )
    elif reached < size:
        problems.append(f"{path} has {size} bytes, its header describes only {reached}")
    return problems


def write_file(
    path: str | os.PathLike[str],
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray],
) -> None:
    """Writes a safetensors file, one tensor in memory at a time.

    read  gives the array of a name; its bytes must be those of infos[name].
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in infos.items():
        end = offset + info.nbytes
        header[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data, as the published files do
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, info in infos.items():
            array = np.ascontiguousarray(read(name))
            if array.nbytes != math.prod(info.shape) * info.numpy_dtype.itemsize:
                raise ValueError(f"{name} has {array.nbytes} bytes, {info} was announced")
            file.write(array.reshape(-1).view(np.uint8).data)
