"""Compares the outputs of two runs of the same prompts.

python -m ds4jax.cli.compare --a=RUN_DIR --b=RUN_DIR

Prints the largest difference, the first position that differs and how often the most likely token
agrees. Settings that differ between the runs are listed. The last line on stdout is JSON. Exit
code 0: compared (whatever came out); 2: the runs cannot be compared.
"""

import sys
from collections.abc import Sequence

from absl import flags

from ds4jax.cli import common
from ds4jax.compare import compare_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return common.exit_code(_compare, argv)


def run() -> None:
    """The console script."""
    sys.exit(main())


def _compare(argv: Sequence[str]) -> int:
    flag_values = flags.FlagValues()
    flags.DEFINE_string("a", None, "Folder of the first run.", flag_values=flag_values)
    flags.DEFINE_string("b", None, "Folder of the second run.", flag_values=flag_values)
    common.parse_flags(flag_values, argv, __doc__ or "")
    result = compare_runs(
        common.require_flag(flag_values, "a"), common.require_flag(flag_values, "b")
    )
    for setting, (first, second) in result["settings_that_differ"].items():
        common.say(f"{setting}: {first} / {second}")
    if result["equal"]:
        common.say(f"{result['rows']} rows, equal in every bit")
    else:
        common.say(
            f"{result['rows']} rows: largest difference {result['max_abs_difference']:.3g}, first "
            f"at row {result['first_differing_row']}, most likely token equal in "
            f"{100 * result['top1_agreement']:.2f} %"
        )
    common.print_result(result)
    return common.OK


if __name__ == "__main__":
    run()
