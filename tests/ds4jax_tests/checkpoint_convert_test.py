"""Conversion: identical bits, aligned layout, resumption, refusals that leave nothing behind."""

import collections
import errno
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from ds4jax import testing
from ds4jax.checkpoint import convert as convert_module
from ds4jax.checkpoint import converted, keys, load, safetensors, storage
from ds4jax.checkpoint.convert import convert
from ds4jax.checkpoint.converted import ConvertedSource, is_converted
from ds4jax.checkpoint.source import CheckpointError
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ModelConfig

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
TINY = testing.tiny_config()
LAYERS = [f"experts/layer-{layer:05d}.bin" for layer in range(5)]


class Log:
    """Progress callback that remembers, and may stop the conversion after some pieces."""

    def __init__(self, stop_after: int | None = None):
        self.names: list[str] = []
        self.last = (0, 0)
        self._stop_after = stop_after

    def __call__(self, name: str, done: int, total: int) -> None:
        self.names.append(name)
        self.last = (done, total)
        if len(self.names) == self._stop_after:
            raise KeyboardInterrupt


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "resident" not in path.parts
    }


def assert_same_tensors(first, second):
    names = [name for name in first.names() if not name.startswith("mtp.")]
    assert set(second.names()) == set(names)
    one, two = first.read_many(names), second.read_many(names)
    for name in names:
        assert first.info(name) == second.info(name)
        assert one[name].dtype == two[name].dtype
        assert one[name].tobytes() == two[name].tobytes(), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A checkpoint in the published layout and its converted form; tests do not change them."""
    root = tmp_path_factory.mktemp("convert")
    checkpoint = testing.write_checkpoint(root / "official", seed=3, shards=3)
    with safetensors.open_checkpoint(checkpoint) as source:
        convert(source, root / "converted")
    return checkpoint, root / "converted"


@pytest.mark.parametrize("storage_form", ["official", "base", "float32"])
def test_every_tensor_keeps_its_bits(tmp_path, storage_form):
    checkpoint = testing.write_checkpoint(tmp_path / "in", seed=1, storage=storage_form)
    with safetensors.open_checkpoint(checkpoint) as source:
        log = Log()
        assert convert(source, tmp_path / "out", on_progress=log) == tmp_path / "out"
        assert log.names == ["resident", *LAYERS]
        assert log.last[0] == log.last[1]
        with ConvertedSource(tmp_path / "out") as converted_source:
            assert_same_tensors(source, converted_source)
            assert keys.check_complete(converted_source).skipped == ()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("case", ["quant", "f32", "f32-pro"])
def test_golden_checkpoints_keep_their_bits(tmp_path, case):
    with safetensors.open_checkpoint(GOLDEN / case) as source:
        convert(source, tmp_path / "out")
        with ConvertedSource(tmp_path / "out") as converted_source:
            assert_same_tensors(source, converted_source)
            assert converted_source.config == source.config


def test_modules_and_slabs_are_equal(finished):
    checkpoint, folder = finished
    with safetensors.open_checkpoint(checkpoint) as source, ConvertedSource(folder) as again:
        assert load.fingerprint(source) == load.fingerprint(again)
        pairs = [
            (load.load_resident(source), load.load_resident(again)),
            *(
                (
                    load.load_expert_slab(source, layer, ids),
                    load.load_expert_slab(again, layer, ids),
                )
                for layer, ids in ((0, range(16)), (4, [9, 2]))
            ),
        ]
    for first, second in pairs:
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_config_and_tokenizer_are_copied_unchanged(finished):
    checkpoint, folder = finished
    for name in ("config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert not (folder / "progress.json").exists()


def test_a_range_of_experts_is_one_aligned_range_per_component(finished):
    checkpoint, folder = finished
    with safetensors.open_checkpoint(checkpoint) as source, ConvertedSource(folder) as again:
        slab = load.load_expert_slab(source, 3, range(4, 9))
        components = again.components(3)
        assert list(components) == ["gate_up", "gate_up_scale", "down", "down_scale"]
        for field, component in components.items():
            assert component.extent.offset % 4096 == 0
            data = pathlib.Path(component.extent.path).read_bytes()
            assert len(data) % 4096 == 0
            begin = component.extent.offset + 4 * component.expert_bytes
            expected = np.asarray(getattr(slab, field)).tobytes()
            assert data[begin : begin + 5 * component.expert_bytes] == expected
            assert component.info.shape == (16, *getattr(slab, field).shape[1:])


def test_slab_layout_of_flash():
    """What the streamer sizes its buffers by."""
    flash = ModelConfig.from_json(ROOT / "configs" / "models" / "flash.json")
    components, nbytes = converted.slab_layout(flash, "fp4")
    assert nbytes == 3_422_552_064
    assert {name: component.expert_bytes for name, component in components.items()} == {
        "gate_up": 8_388_608,
        "gate_up_scale": 524_288,
        "down": 4_194_304,
        "down_scale": 262_144,
    }
    assert sum(c.expert_bytes for c in components.values()) == keys.expert_bytes(flash)


def test_extents_of_experts_and_ranges_of_residents(finished):
    _, folder = finished
    with ConvertedSource(folder) as source:
        for matrix in ("w1.weight", "w3.weight", "w3.scale", "w2.weight"):
            name = f"layers.2.ffn.experts.5.{matrix}"
            extent = source.extent(name)
            with open(extent.path, "rb") as file:
                file.seek(extent.offset)
                assert file.read(extent.nbytes) == source.read(name).tobytes()
        with pytest.raises(ValueError, match=r"norm\.weight lies in an Orbax checkpoint"):
            source.extent("norm.weight")
        part = np.empty(10, np.uint8)
        source.read_into("norm.weight", part, 7)
        whole = source.read("norm.weight").view(np.uint8)
        np.testing.assert_array_equal(part, whole[7:17])
        with pytest.raises(ValueError, match="were asked for"):
            source.read_into("norm.weight", part, 250)
        with pytest.raises(CheckpointError, match="has no tensor mtp"):
            source.info("mtp.0.enorm.weight")
    with pytest.raises(ValueError, match="after its checkpoint was closed"):
        source.read("layers.2.ffn.experts.5.w2.weight")


def test_synthetic_weights_convert_as_well(tmp_path):
    source = SyntheticSource(TINY, 5)
    with ConvertedSource(convert(source, tmp_path / "out")) as again:
        assert_same_tensors(source, again)
        assert again.config == TINY


def test_interrupted_conversion_goes_on_where_it_stopped(tmp_path, finished):
    checkpoint, whole = finished
    out = tmp_path / "out"
    with safetensors.open_checkpoint(checkpoint) as source:
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, on_progress=Log(stop_after=3))
        assert not out.exists()
        (tmp_path / "out.partial" / "resident.tmp").mkdir()  # debris of a crash
        (tmp_path / "out.partial" / LAYERS[3]).write_bytes(b"half")
        log = Log()
        convert(source, out, on_progress=log)
    assert log.names == LAYERS[2:]
    assert log.last[0] == log.last[1]
    assert not (out / "resident.tmp").exists()
    ours, theirs = files(out), files(whole)
    # Orbax writes other bytes every time; everything else is equal.
    ours.pop("index.json"), theirs.pop("index.json")
    assert ours == theirs


@pytest.mark.parametrize("piece", ["resident", LAYERS[0]])
def test_damaged_piece_of_an_interrupted_conversion_is_done_again(tmp_path, finished, piece):
    checkpoint, _ = finished
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with safetensors.open_checkpoint(checkpoint) as source:
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, on_progress=Log(stop_after=3))
        path = partial / piece
        if path.is_dir():
            path = max(path.rglob("d/*"), key=lambda file: file.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        log = Log()
        convert(source, out, on_progress=log)
        assert log.names == [piece, *LAYERS[2:]]
        with ConvertedSource(out) as again:
            assert_same_tensors(source, again)


def test_piece_whose_shard_was_replaced_is_done_again(tmp_path):
    checkpoint = testing.write_checkpoint(tmp_path / "in", seed=3, shards=12)
    out = tmp_path / "out"
    with safetensors.open_checkpoint(checkpoint) as source:
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, on_progress=Log(stop_after=4))
        shard = source.extent("layers.1.ffn.experts.8.w1.weight").path
        inside = {
            layer
            for layer in range(3)
            for expert in range(16)
            if source.extent(f"layers.{layer}.ffn.experts.{expert}.w2.scale").path == shard
        }
        assert 1 in inside
        assert len(inside) < 3
    os.utime(shard, ns=(1, 1))
    with safetensors.open_checkpoint(checkpoint) as source:
        log = Log()
        convert(source, out, on_progress=log)
    assert log.names == [LAYERS[layer] for layer in (*sorted(inside), 3, 4)]


def test_running_again_on_a_finished_folder_only_verifies(finished):
    checkpoint, folder = finished
    before = files(folder)
    log = Log()
    with safetensors.open_checkpoint(checkpoint) as source:
        convert(source, folder, on_progress=log)
    assert log.names == []
    assert files(folder) == before


def test_changed_bytes_of_a_finished_folder_are_found(tmp_path, finished):
    checkpoint, folder = finished
    shutil.copytree(folder, tmp_path / "out")
    with ConvertedSource(tmp_path / "out") as source:
        offset = source.components(1)["down_scale"].extent.offset + 3
    with open(tmp_path / "out" / LAYERS[1], "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    resident = max(
        (tmp_path / "out" / "resident").rglob("d/*"), key=lambda file: file.stat().st_size
    )
    resident.write_bytes(resident.read_bytes() + b"x")
    with (
        safetensors.open_checkpoint(checkpoint) as source,
        pytest.raises(CheckpointError, match="is damaged, delete it and convert again") as caught,
    ):
        convert(source, tmp_path / "out")
    assert caught.value.problems == (
        f"{tmp_path}/out/{LAYERS[1]}: down_scale has another SHA-256 than its index",
        f"{tmp_path}/out/resident has another SHA-256 than the index says",
    )


def test_folder_of_something_else_is_left_alone(tmp_path, finished):
    checkpoint, folder = finished
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "other.partial").mkdir()
    with safetensors.open_checkpoint(checkpoint) as source:
        with pytest.raises(CheckpointError, match="mine exists and is no conversion of this"):
            convert(source, tmp_path / "mine")
        with pytest.raises(CheckpointError, match=r"other\.partial exists and is no interrupted"):
            convert(source, tmp_path / "other")
    with pytest.raises(CheckpointError, match="converted exists and is no conversion of this"):
        convert(SyntheticSource(TINY, 99), folder)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_unfinished_conversion_of_another_checkpoint_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        convert(SyntheticSource(TINY, 1), tmp_path / "out", on_progress=Log(stop_after=1))
    with pytest.raises(CheckpointError, match=r"out\.partial was begun from another checkpoint"):
        convert(SyntheticSource(TINY, 2), tmp_path / "out")


def test_incomplete_source_writes_nothing(tmp_path):
    source = SyntheticSource(TINY, 1)
    source._infos.pop("norm.weight")
    with pytest.raises(CheckpointError, match=r"missing: norm\.weight"):
        convert(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class NaNScale(SyntheticSource):
    """One NaN among the scales of layer 1."""

    def read_into(self, name, buffer, start=0):
        super().read_into(name, buffer, start)
        if name == "layers.1.ffn.experts.2.w2.scale":
            buffer[9] = 255


def test_nan_scale_stops_the_conversion(tmp_path):
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.experts\.2\.w2\.scale\[2, 1\]"):
        convert(NaNScale(TINY, 0), tmp_path / "out")
    assert not (tmp_path / "out").exists()


Usage = collections.namedtuple("Usage", "total used free")


def test_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(
        CheckpointError, match=r"out\.partial needs 3\d{6} bytes, its disk has 1000"
    ):
        convert(SyntheticSource(TINY, 0), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_while_experts_are_written(tmp_path, monkeypatch):
    write = storage.write_exactly
    calls = iter(range(100))

    def full_at_last(file, array, offset):
        if next(calls) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, array, offset)

    monkeypatch.setattr(storage, "write_exactly", full_at_last)
    source = SyntheticSource(TINY, 0)
    with pytest.raises(CheckpointError, match=r"needs \d+ bytes, its disk has \d+ free: free"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    log = Log()
    convert(source, tmp_path / "out", on_progress=log)
    assert log.names == LAYERS[1:]


def test_disk_that_fills_up_inside_orbax(tmp_path, monkeypatch):
    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

    monkeypatch.setattr(storage.ocp, "save_async", full)
    with pytest.raises(CheckpointError, match=r"out\.partial needs \d+ bytes"):
        convert(SyntheticSource(TINY, 0), tmp_path / "out")


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(SyntheticSource(TINY, 0), tmp_path / "file" / "out")


def test_other_errors_are_not_mistaken_for_a_full_disk(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(storage.ocp, "save_async", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        convert(SyntheticSource(TINY, 0), tmp_path / "out")


def test_large_experts_are_written_in_steps(tmp_path, monkeypatch, finished):
    checkpoint, whole = finished
    monkeypatch.setattr(convert_module, "STEP_BYTES", 3 * keys.expert_bytes(TINY))
    with safetensors.open_checkpoint(checkpoint) as source:
        convert(source, tmp_path / "out")
    for name in LAYERS:
        assert (tmp_path / "out" / name).read_bytes() == (whole / name).read_bytes()
    indices = [json.loads((f / "index.json").read_text()) for f in (tmp_path / "out", whole)]
    assert indices[0]["experts"] == indices[1]["experts"]


def test_damaged_converted_folders_are_refused_when_opened(tmp_path, finished):
    _, folder = finished
    assert is_converted(folder)
    assert not is_converted(tmp_path)
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    (out / LAYERS[2]).unlink()
    os.truncate(out / LAYERS[4], 4096)
    with pytest.raises(CheckpointError) as caught:
        ConvertedSource(out)
    assert len(caught.value.problems) == 2
    assert f"{LAYERS[2]} is absent, expected 417792 bytes" in caught.value.problems[0]
    assert f"{LAYERS[4]} has 4096 bytes, expected 417792" in caught.value.problems[1]
    index = json.loads((out / "index.json").read_text())
    (out / "index.json").write_text(json.dumps({**index, "version": 2}))
    with pytest.raises(CheckpointError, match=r"has format and version \('ds4jax-converted', 2\)"):
        ConvertedSource(out)
    for text, message in (("{", "is not valid JSON"), ("[]", "holds list, expected an object")):
        (out / "index.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            ConvertedSource(out)
    (out / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json does not exist"):
        ConvertedSource(out)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"source": 5}, "source is 5, expected a string"),
        ({"expert_format": "fp5"}, "expert_format is 'fp5', expected one of fp4, fp8, bf16, f32"),
        ({"resident": {"sha256": "x"}}, r"resident\.tensors is absent"),
        (
            {"resident": {"sha256": "x", "tensors": {"a": ["F4", [1]]}}},
            r"resident\.tensors\.a is .*expected a dtype",
        ),
        (
            {"resident": {"sha256": "x", "tensors": {"a": ["F32", [-1]]}}},
            r"resident\.tensors\.a is .*expected a dtype and",
        ),
        ({"experts": [1]}, r"experts is \[1\], expected an object"),
    ],
)
def test_index_that_was_altered_is_refused(tmp_path, finished, change, expected):
    index = json.loads((finished[1] / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(CheckpointError, match=rf"index\.json: {expected}.*write it again"):
        ConvertedSource(tmp_path)


def test_experts_without_a_hash_are_found(tmp_path, finished):
    checkpoint, folder = finished
    shutil.copytree(folder, tmp_path / "out")
    index = json.loads((folder / "index.json").read_text())
    del index["experts"][LAYERS[1]]
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    with (
        safetensors.open_checkpoint(checkpoint) as source,
        pytest.raises(CheckpointError, match=rf"{LAYERS[1]}: gate_up has another SHA-256"),
    ):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (None, "pieces is None, expected an object"),
        ({"resident": 5}, "pieces.resident is 5, expected an object"),
        ({"resident": {"sha256": "x"}}, "pieces.resident.provenance is absent"),
    ],
)
def test_progress_that_was_altered_is_refused(tmp_path, finished, pieces, expected):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    with safetensors.open_checkpoint(finished[0]) as source:
        progress = {"source": load.fingerprint(source), "pieces": pieces}
        (partial / "progress.json").write_text(json.dumps(progress))
        with pytest.raises(CheckpointError, match=rf"progress\.json: {expected}"):
            convert(source, tmp_path / "out")


def test_pieces_that_no_conversion_has_are_done_again(tmp_path, finished):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    with safetensors.open_checkpoint(finished[0]) as source:
        layer = convert_module._Job(source, "fp4", tmp_path / "x", "")._provenance(LAYERS[0])
        pieces = {
            "../elsewhere": {"provenance": {}, "sha256": "x"},
            LAYERS[0]: {"provenance": layer, "sha256": "x"},
        }
        progress = {"source": load.fingerprint(source), "pieces": pieces}
        (partial / "progress.json").write_text(json.dumps(progress))
        (partial / "experts").mkdir()
        shutil.copy(finished[1] / LAYERS[0], partial / LAYERS[0])
        log = Log()
        convert(source, tmp_path / "out", on_progress=log)
    assert log.names == ["resident", *LAYERS]


def test_folder_name_that_the_system_refuses(tmp_path, finished):
    with (
        safetensors.open_checkpoint(finished[0]) as source,
        pytest.raises(CheckpointError, match=r"cannot be written \(File name too long\)"),
    ):
        convert(source, tmp_path / ("a" * 300))


def test_missing_resident_checkpoint_is_named(tmp_path, finished):
    _, folder = finished
    shutil.copytree(folder, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "resident")
    with (
        ConvertedSource(tmp_path / "out") as source,
        pytest.raises(CheckpointError, match="resident cannot be read as an Orbax checkpoint"),
    ):
        source.read("norm.weight")
