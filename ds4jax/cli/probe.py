"""Measures this machine for plans: links, copies, products, memory nodes, disk.

python -m ds4jax.cli.probe --out=machine.json [--disk=DIR]

The file is read by plans and runs. What cannot be measured here is listed in it with the reason.
The last line on stdout is JSON. Exit code 2: a flag is wrong, or the file cannot be written.
"""

import contextlib
import pathlib
import sys
from collections.abc import Generator, Sequence

import jax
import numpy as np
from absl import flags

from ds4jax import report
from ds4jax.cli import common
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
    common.parse_flags(values, argv, __doc__ or "")
    out = pathlib.Path(common.require_flag(values, "out"))
    if not out.parent.is_dir():
        raise report.OutputError(f"--out is {out}: the folder {out.parent} does not exist")
    if (disk := values["disk"].value) is not None and not pathlib.Path(disk).is_dir():
        raise common.UsageError(f"--disk is {disk!r}, expected an existing folder")
    register, addresses = _cuda()
    measured = probe.probe(
        register=register, pci_addresses=addresses, disk_folder=disk, say=common.say
    )
    report.write_json(out, measured)
    for row in measured["not_measured"]:
        common.say(f"not measured: {row['what']}: {row['why']}")
    keys = ("platform", "devices", "links", "disk", "not_measured")
    common.print_result({"out": str(out)} | {key: measured.get(key) for key in keys})
    return common.OK


def _cuda() -> tuple[probe.Register | None, list[str] | None]:
    """How to page-lock memory, and the PCI addresses of JAX's devices; None without CUDA."""
    devices = jax.local_devices()
    if devices[0].platform not in ("gpu", "cuda"):
        return None, None
    try:
        drivers = [CudaDriver(device.local_hardware_id) for device in devices]
    except PinError as error:
        common.say(f"no registered memory: {error}")
        return None, None

    @contextlib.contextmanager
    def register(array: np.ndarray) -> Generator[None]:
        drivers[0].register(array.ctypes.data, array.nbytes)
        try:
            yield
        finally:
            drivers[0].unregister(array.ctypes.data)

    return register, [driver.pci_address() for driver in drivers]


if __name__ == "__main__":
    run()
