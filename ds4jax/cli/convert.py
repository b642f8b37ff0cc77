"""Converts a checkpoint to the form that runs read fastest, with the same bits.

python -m ds4jax.cli.convert --checkpoint=DIR --out_dir=DIR

Resident weights go to an Orbax checkpoint, routed experts to files of page-aligned slabs, with
SHA-256 of everything. Run the same command again to go on after an interruption, or to verify a
finished folder. The last line on stdout is JSON. Exit code 2: the source is damaged, the folder
is something else, or the disk is full.
"""

import pathlib
import sys
import time
from collections.abc import Sequence

from absl import flags

from ds4jax.checkpoint.convert import convert
from ds4jax.checkpoint.open import open_source
from ds4jax.cli import common


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_convert, argv)


def run() -> None:
    """The console script."""
    sys.exit(main())


def _convert(argv: Sequence[str]) -> int:
    flag_values = flags.FlagValues()
    flags.DEFINE_string("checkpoint", None, "Checkpoint to convert.", flag_values=flag_values)
    flags.DEFINE_string("out_dir", None, "Folder to write.", flag_values=flag_values)
    common.parse_flags(flag_values, argv, __doc__ or "")
    checkpoint = common.require_flag(flag_values, "checkpoint")
    out_dir = common.require_flag(flag_values, "out_dir")
    began = time.perf_counter()
    written = []

    def report(name: str, done: int, total: int) -> None:
        written.append(name)
        common.say(f"{name}: {done} of {total} bytes ({100 * done / total:.1f} %)")

    with open_source(checkpoint) as source:
        try:
            folder = convert(source, out_dir, on_progress=report)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"finished files are kept in {out_dir}.partial, the same command goes on from there"
            ) from None
    if not written:
        common.say(f"{folder} is complete, its hashes are right")
    nbytes = sum(p.stat().st_size for p in pathlib.Path(folder).rglob("*") if p.is_file())
    common.print_result(
        {
            "out_dir": str(folder),
            "written": written,
            "folder_bytes": nbytes,
            "seconds_s": round(time.perf_counter() - began, 6),
        }
    )
    return common.OK


if __name__ == "__main__":
    run()
