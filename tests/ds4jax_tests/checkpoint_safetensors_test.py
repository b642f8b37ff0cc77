"""The safetensors reader: exact bytes in ranges, and every kind of damage told from headers."""

import concurrent.futures
import json
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

from ds4jax import testing
from ds4jax.checkpoint import safetensors
from ds4jax.checkpoint.open import open_source
from ds4jax.checkpoint.source import DTYPES, CheckpointError, TensorInfo, config_text
from ds4jax.config import ConfigError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def write_raw(path: pathlib.Path, header: bytes | dict, data: bytes, length: int | None = None):
    """A file with any header text, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(config_text(testing.tiny_config()))
    return tmp_path


def test_every_dtype_reads_back_its_bytes(folder):
    rng = np.random.default_rng(0)
    data = {name: rng.bytes(3 * 4 * dtype.itemsize) for name, dtype in DTYPES.items()}
    infos = {name: TensorInfo(name, (3, 4)) for name in DTYPES}
    safetensors.write_file(
        folder / "model.safetensors", infos, lambda name: np.frombuffer(data[name], np.uint8)
    )
    with safetensors.open_checkpoint(folder) as source:
        assert source.infos() == infos
        for name, dtype in DTYPES.items():
            array = source.read(name)
            assert array.dtype == dtype
            assert array.shape == (3, 4)
            assert array.tobytes() == data[name]


def test_fp8_views_have_the_values_of_the_format():
    with safetensors.open_checkpoint(GOLDEN / "quant") as source:
        scales = source.read("layers.0.attn.wq_b.scale")
        assert scales.dtype == ml_dtypes.float8_e8m0fnu
        values = scales.astype(np.float32)
        np.testing.assert_array_equal(values, 2.0 ** (scales.view(np.uint8).astype(np.int32) - 127))


def test_ranges_equal_slices_of_the_whole_from_many_threads():
    with safetensors.open_checkpoint(GOLDEN / "quant") as source:
        name = "layers.0.ffn.experts.3.w1.weight"
        whole = source.read(name).view(np.uint8).reshape(-1)
        ranges = [(start, 1 + 37 * start % 900) for start in range(0, len(whole) - 1000, 97)]

        def read(span):
            buffer = np.empty(span[1], np.uint8)
            source.read_into(name, buffer, span[0])
            return buffer

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for (start, count), found in zip(ranges, pool.map(read, ranges), strict=True):
                np.testing.assert_array_equal(found, whole[start : start + count])


def test_extent_is_where_the_bytes_lie():
    with safetensors.open_checkpoint(GOLDEN / "quant") as source:
        extent = source.extent("layers.1.attn.wkv.weight")
        with open(extent.path, "rb") as file:
            file.seek(extent.offset)
            expected = source.read("layers.1.attn.wkv.weight").tobytes()
            assert file.read(extent.nbytes) == expected


def test_fill_takes_arrays_of_any_dtype_of_the_same_size():
    with safetensors.open_checkpoint(GOLDEN / "quant") as source:
        target = np.empty((2, 128, 128), np.uint8)
        names = [f"layers.0.ffn.experts.{expert}.w1.weight" for expert in (4, 1)]
        source.fill(zip(names, target, strict=True))
        for row, name in zip(target, names, strict=True):
            assert row.tobytes() == source.read(name).tobytes()
        with pytest.raises(ValueError, match="has 16384 bytes, the given array 128"):
            source.fill([(names[0], target[0, 0])])
        with pytest.raises(ValueError, match="contiguous: False"):
            source.fill([(names[0], np.empty((128, 256), np.uint8)[:, ::2])])


def test_reading_past_the_end_or_after_closing_is_refused():
    source = safetensors.open_checkpoint(GOLDEN / "quant")
    with pytest.raises(ValueError, match=r"has 512 bytes, bytes 500\.\.513 were asked for"):
        source.read_into("norm.weight", np.empty(13, np.uint8), 500)
    source.close()
    source.close()
    with pytest.raises(ValueError, match="after its checkpoint was closed"):
        source.read("norm.weight")


def test_unknown_tensor_is_named():
    with (
        safetensors.open_checkpoint(GOLDEN / "quant") as source,
        pytest.raises(CheckpointError, match=r"has no tensor layers\.9\.nope"),
    ):
        source.read("layers.9.nope")


def test_file_changed_after_opening_is_noticed(folder):
    infos = {"a": TensorInfo("U8", (1000,))}
    path = folder / "model.safetensors"
    safetensors.write_file(path, infos, lambda _: np.zeros(1000, np.uint8))
    with safetensors.open_checkpoint(folder) as source:
        source.read("a")
        os.utime(path, (1, 1))
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors changed after it was opened"
        ):
            source.read("a")


def test_file_cut_after_opening_is_noticed(folder):
    infos = {"a": TensorInfo("U8", (1000,))}
    path = folder / "model.safetensors"
    safetensors.write_file(path, infos, lambda _: np.zeros(1000, np.uint8))
    with safetensors.open_checkpoint(folder) as source:
        os.truncate(path, path.stat().st_size - 10)
        with pytest.raises(CheckpointError, match="ended 10 bytes early"):
            source.read("a")


def test_disk_error_while_reading_names_the_file(monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    with safetensors.open_checkpoint(GOLDEN / "quant") as source:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match=r"00006-of-00006.* cannot be read at offset"):
            source.read("norm.weight")


def test_wrong_paths_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist: expected a folder"):
        safetensors.open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file: expected a folder"):
        safetensors.open_checkpoint(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        safetensors.open_checkpoint(tmp_path)


def test_folder_without_or_with_ambiguous_shards_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"holds 0 \*\.safetensors files"):
        safetensors.open_checkpoint(folder)
    for name in ("a", "b"):
        write_raw(folder / f"{name}.safetensors", {}, b"")
    with pytest.raises(CheckpointError, match=r"holds 2 \*\.safetensors files and no model"):
        safetensors.open_checkpoint(folder)


DAMAGE = {
    "empty": (b"", b"", None, "has 8 bytes|not valid JSON"),
    "header larger than the file": (
        b"{}",
        b"",
        1 << 40,
        "announces a header of 1099511627776 bytes, the file has 10",
    ),
    "no JSON": (b"{'a': 1}", b"", None, "header is not valid JSON"),
    "no text": (b"\xff\xfe\xfd", b"", None, "header is not valid JSON"),
    "no object": (b"[1]", b"", None, "header holds list, expected one JSON object"),
    "tensor listed twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        None,
        "lists 'a' twice",
    ),
    "no entry": ({"a": {"dtype": "U8"}}, b"", None, "expected dtype, shape and data_offsets"),
    "unknown dtype": (
        {"a": entry("F4_E2M1", [2], 0, 1)},
        b"x",
        None,
        "tensor a has the unknown dtype 'F4_E2M1', expected one of BOOL, U8",
    ),
    "dtype that is no name": (
        {"a": entry(["U8"], [1], 0, 1)},
        b"x",
        None,
        r"has the unknown dtype \['U8'\]",
    ),
    "number without end": (b'{"a":' + b"1" * 5000 + b"}", b"", None, "header is not valid JSON"),
    "negative shape": ({"a": entry("U8", [-1], 0, 1)}, b"x", None, r"has the shape \[-1\]"),
    "offsets in reverse": (
        {"a": entry("U8", [1], 1, 0)},
        b"x",
        None,
        r"has the data_offsets \[1, 0\]",
    ),
    "offsets of a wrong type": (
        {"a": entry("U8", [1], 0, True)},
        b"x",
        None,
        r"has the data_offsets \[0, True\]",
    ),
    "size and shape disagree": (
        {"a": entry("BF16", [3], 0, 4)},
        b"xxxx",
        None,
        r"occupies 4 bytes, shape \[3\] of BF16 needs 6",
    ),
    "overlap": (
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)},
        b"xxxxxx",
        None,
        "tensor b begins at byte .* and overlaps a",
    ),
    "gap": (
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 4, 6)},
        b"xxxxxx",
        None,
        "tensor b begins at byte .* and leaves a gap after a",
    ),
    "truncated": (
        {"a": entry("U8", [10], 0, 10)},
        b"xxx",
        None,
        "7 bytes are missing, fetch it again",
    ),
    "longer than described": ({"a": entry("U8", [1], 0, 1)}, b"xx", None, "describes only"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_file_is_refused_by_name(folder, kind):
    header, data, length, message = DAMAGE[kind]
    path = folder / "model.safetensors"
    write_raw(path, header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        safetensors.open_checkpoint(folder)
    assert str(path) in str(caught.value)


def test_file_of_a_few_bytes_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="has 3 bytes, too few"):
        safetensors.open_checkpoint(folder)


def test_unreadable_file_is_named(folder):
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        safetensors.open_checkpoint(folder)


def write_index(folder: pathlib.Path, weight_map: dict) -> None:
    (folder / safetensors.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_index_is_checked_against_the_shards(folder):
    one = {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 1, 2)}
    write_raw(folder / "1.safetensors", one, b"xy")
    write_raw(folder / "2.safetensors", {"c": entry("U8", [1], 0, 1)}, b"z")
    write_index(folder, {"a": "1.safetensors", "c": "1.safetensors", "d": "2.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        safetensors.open_checkpoint(folder)
    assert caught.value.problems == (
        f"{folder}/1.safetensors holds tensor b, which {safetensors.INDEX_NAME} does not list",
    )
    write_index(
        folder,
        {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors", "d": "2.safetensors"},
    )
    with pytest.raises(CheckpointError) as caught:
        safetensors.open_checkpoint(folder)
    assert len(caught.value.problems) == 2
    assert "puts tensor a into 2.safetensors, found in" in caught.value.problems[0]
    assert "puts tensor d into 2.safetensors, which lacks it" in caught.value.problems[1]


def test_tensor_in_two_shards_is_refused(folder):
    for name in ("1", "2"):
        write_raw(folder / f"{name}.safetensors", {"a": entry("U8", [1], 0, 1)}, b"x")
    write_raw(folder / "2.safetensors", {"a": entry("U8", [1], 0, 1)}, b"x")
    write_index(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"tensor a is in both .*1\.safetensors and .*2\.safet"
    ):
        safetensors.open_checkpoint(folder)


def test_all_absent_shards_are_listed_at_once(folder):
    write_index(folder, {"a": "1.safetensors", "b": "2.safetensors", "c": "../3.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        safetensors.open_checkpoint(folder)
    assert len(caught.value.problems) == 3
    assert "expected a plain file name" in caught.value.problems[0]
    assert "1.safetensors is absent" in caught.value.problems[1]


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_index_that_is_none_is_refused(folder, text):
    (folder / safetensors.INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"is not valid JSON|has no weight_map"):
        safetensors.open_checkpoint(folder)


def test_files_that_an_index_cannot_name_are_listed(folder):
    write_index(folder, {"a": 5, "b": None, "c": "", "d": "1.safetensors"})
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        safetensors.open_checkpoint(folder)
    assert [line.split(".json ")[1] for line in caught.value.problems] == [
        "puts tensor a into 5, expected a file name",
        "puts tensor b into None, expected a file name",
        "puts tensor c into '', expected a file name",
    ]


def test_paths_that_the_system_refuses_are_named(folder):
    (folder / safetensors.INDEX_NAME).mkdir()
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read \(Is a directory\)"):
        open_source(folder)
    with pytest.raises(CheckpointError, match=r"cannot be read \(File name too long\)"):
        open_source("a" * 300)


def test_all_damaged_shards_are_listed_at_once(folder):
    testing.write_checkpoint(folder, seed=1, shards=4)
    shards = sorted(folder.glob("model-*"))
    for shard in shards[1:3]:
        os.truncate(shard, shard.stat().st_size - 5)
    with pytest.raises(CheckpointError) as caught:
        safetensors.open_checkpoint(folder)
    assert len(caught.value.problems) == 2
    for shard, problem in zip(shards[1:3], caught.value.problems, strict=True):
        assert problem.startswith(str(shard))
        assert "5 bytes are missing" in problem


def test_open_files_are_closed_when_the_source_is_dropped(folder):
    testing.write_checkpoint(folder, seed=1, shards=3)
    before = len(os.listdir("/proc/self/fd"))
    source = safetensors.open_checkpoint(folder)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    del source
    assert len(os.listdir("/proc/self/fd")) == before


def test_writer_refuses_an_array_of_another_size(tmp_path):
    with pytest.raises(ValueError, match="a has 8 bytes"):
        safetensors.write_file(
            tmp_path / "x", {"a": TensorInfo("F32", (3,))}, lambda _: np.zeros(2, np.float32)
        )


def test_many_problems_are_grouped_in_the_message_and_kept_in_the_list():
    problems = [f"missing: layers.{layer}.x" for layer in range(300)] + ["unexpected: y"]
    error = CheckpointError.listing("title", problems)
    assert len(error.problems) == 301
    assert str(error).splitlines() == [
        "title (301 problems):",
        "  missing: layers.0.x (and 299 more like it)",
        "  unexpected: y",
    ]
