"""Sizes of a checkpoint by component and storage dtype. Reads headers only.

python -m ds4jax.cli.inspect --checkpoint=DIR
python -m ds4jax.cli.inspect --checkpoint=configs/models/flash.json [--experts=fp8]

A folder is checked for completeness; a model config alone gives the sizes of the published
format. The last line on stdout is JSON. Exit code 2: the checkpoint is incomplete or damaged.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from ds4jax.checkpoint import keys
from ds4jax.checkpoint.open import open_source
from ds4jax.cli import common
from ds4jax.config import ModelConfig

GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_inspect, argv)


def run() -> None:
    """The console script."""
    sys.exit(main())


def _inspect(argv: Sequence[str]) -> int:
    flag_values = flags.FlagValues()
    flags.DEFINE_string(
        "checkpoint", None, "Checkpoint folder, or a model config.json.", flag_values=flag_values
    )
    flags.DEFINE_enum(
        "experts",
        "fp4",
        ["fp4", "fp8"],
        "Expert format when only a config is given; fp8 is that of the Base models.",
        flag_values=flag_values,
    )
    common.parse_flags(flag_values, argv, __doc__ or "")
    path = pathlib.Path(common.require_flag(flag_values, "checkpoint"))
    if path.suffix == ".json":
        config = ModelConfig.from_json(path)
        infos = keys.official_header(config, str(flag_values["experts"].value))
    else:
        with open_source(path) as source:
            contents = keys.check_complete(source)
            config, infos = source.config, source.infos()
        for phrase in contents.skipped:
            common.say(f"skipped: {phrase}")
    sizes = keys.component_sizes(infos)
    totals = {
        "tensors": len(infos),
        "file_bytes": sum(size.nbytes for size in sizes.values()),
        "main_bytes": sum(s.nbytes for name, s in sizes.items() if not name.startswith("mtp.")),
        "expert_bytes": keys.expert_bytes(config, infos),
        "resident_bytes": keys.resident_bytes(config, infos),
    }
    print(f"{'component':<18} {'tensors':>8} {'bytes':>16} {'GiB':>9}  by dtype")
    for name, size in sizes.items():
        dtypes = ", ".join(f"{dtype} {nbytes}" for dtype, nbytes in size.by_dtype.items())
        print(f"{name:<18} {size.tensors:>8} {size.nbytes:>16} {size.nbytes / GIB:>9.3f}  {dtypes}")
    for name, value in totals.items():
        print(f"{name:<27} {value:>16}")
    components = {name: dataclasses.asdict(size) for name, size in sizes.items()}
    common.print_result({**totals, "components": components})
    return common.OK


if __name__ == "__main__":
    run()
