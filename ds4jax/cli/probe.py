"""Measures this machine for plans: links, copies, products, memory nodes, disk.

python -m ds4jax.cli.probe --out=machine.json [--disk=DIR] [--model=configs/models/NAME.json]

The file is read by plans and runs (config.machine.file). With a model, the parts of one layer of
each kind are timed as well, with random weights: plans then price compute and workspace by them.
What cannot be measured here is listed in it with the reason.
The last line on stdout is JSON. Exit code 2: a flag is wrong, or the file cannot be written.
"""

import contextlib
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from ds4jax import costs, report
from ds4jax.bench import layers
from ds4jax.cli import common
from ds4jax.config import PRESETS, ModelConfig
from sharding import probe
from streaming.pinned import CudaDriver, PinError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_probe, argv)


def run() -> None:
    """The console script."""
    sys.exit(main())


def _probe(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_string("out", None, "Machine file to write.", flag_values=values)
    flags.DEFINE_string("disk", None, "Folder of the disk to measure.", flag_values=values)
    flags.DEFINE_string(
        "model",
        None,
        "Model config whose layers are timed on the first device.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "layer_tokens", ["1024", "8192"], "Rows of the chunks of --model.", flag_values=values
    )
    flags.DEFINE_list(
        "layer_positions", ["0", "24576"], "Their first positions.", flag_values=values
    )
    common.parse_flags(values, argv, __doc__ or "")
    out = pathlib.Path(common.require_flag(values, "out"))
    if not out.parent.is_dir():
        raise report.OutputError(f"--out is {out}: the folder {out.parent} does not exist")
    if out.is_dir():
        raise report.OutputError(f"--out is {out}, a folder: expected the name of a file")
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent):  # measuring takes minutes
            pass
    except OSError as error:
        raise report.OutputError(
            f"--out is {out}: nothing can be written in {out.parent} ({error.strerror})"
        ) from None
    if (disk := values["disk"].value) is not None and not pathlib.Path(disk).is_dir():
        raise common.UsageError(f"--disk is {disk!r}, expected an existing folder")
    model = values["model"].value
    config = None if model is None else ModelConfig.from_json(model)
    given: Mapping[str, Any] = values.flag_values_dict()
    tokens = common.whole_numbers("layer_tokens", given["layer_tokens"])
    positions = common.whole_numbers("layer_positions", given["layer_positions"], least=0)
    cuda = _cuda()
    measured = probe.probe(**cuda, disk_folder=disk, say=common.say)
    if config is not None:
        measured["layers"] = _layers(config, measured["devices"][0], tokens, positions)
    report.write_json(out, measured)
    for row in measured["not_measured"]:
        common.say(f"not measured: {row['what']}: {row['why']}")
    keys = ("platform", "devices", "links", "disk", "not_measured")
    common.print_result({"out": str(out)} | {key: measured.get(key) for key in keys})
    return common.OK


def _layers(
    config: ModelConfig, device: Mapping[str, Any], tokens: Sequence[int], positions: Sequence[int]
) -> dict[str, Any]:
    """Times of one layer of each kind on the first device, as `costs.LayerTable` takes them."""
    numerics = PRESETS["official"]
    bench = layers.load(layers.one_of_each(config), numerics, jax.local_devices()[0])
    rows = []
    for count in tokens:
        for row in layers.measure(bench, count, positions, repeats=5):
            common.say(layers.table(row))
            rows.append(row)
    products = device["matmul_flops_per_s"]
    rates = costs.Rates(
        products.get("bfloat16", costs.H200.matrix_flops_per_s),
        products.get("float32", costs.H200.float32_flops_per_s),
        device.get("memory_bytes_per_s", costs.H200.bytes_per_s),
    )
    record = {
        "device": device["kind"],
        "numerics": str(numerics),
        "rates": dataclasses.asdict(rates),
        "widths": costs.widths(config),
        "rows": rows,
    }
    costs.LayerTable(record)  # what cannot be read is not written
    return record


def _cuda() -> dict[str, Any]:
    """How to page-lock memory and to copy into it, and PCI addresses; nothing without CUDA."""
    devices = jax.local_devices()
    if devices[0].platform not in ("gpu", "cuda"):
        return {}
    try:
        drivers = [CudaDriver(device.local_hardware_id) for device in devices]
    except PinError as error:
        common.say(f"no registered memory: {error}")
        return {}

    @contextlib.contextmanager
    def register(array: np.ndarray) -> Generator[None]:
        drivers[0].register(array.ctypes.data, array.nbytes)
        try:
            yield
        finally:
            drivers[0].unregister(array.ctypes.data)

    by_id = {device.id: driver for device, driver in zip(devices, drivers, strict=True)}

    def download(array: jax.Array, buffer: np.ndarray) -> None:
        (device,) = array.devices()
        source = array.unsafe_buffer_pointer()
        by_id[device.id].read(buffer.ctypes.data, source, buffer.nbytes)

    addresses = [driver.pci_address() for driver in drivers]
    return {"register": register, "download": download, "pci_addresses": addresses}


if __name__ == "__main__":
    run()
