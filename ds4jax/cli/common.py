"""What all commands share: flags without globals, exit codes, one JSON line on stdout."""

import contextlib
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TextIO

from absl import flags

import streaming
from ds4jax.checkpoint.source import CheckpointError
from ds4jax.config import ConfigError
from ds4jax.report import OutputError
from ds4jax.text import PromptError
from sharding.cost import PlanError

OK, INTERNAL_ERROR, USER_ERROR, STOPPED = 0, 1, 2, 130

# Of a GPU's memory that JAX takes, three quarters unless told otherwise: all but what the driver,
# compiled code and tables of page-locked memory need. XLA_PYTHON_CLIENT_MEM_FRACTION overrides it.
MEMORY_FRACTION = "0.95"


class UsageError(ValueError):
    """A command line that cannot be run: names the flag and what was expected."""


USER_ERRORS = (CheckpointError, ConfigError, OutputError, PlanError, PromptError, UsageError)
# A checkpoint file that changes or fails during a run is the user's to mend as well.
_MENDABLE = (*USER_ERRORS, streaming.ReadError)


class _Help(Exception):
    """The user asked for help instead of a run."""


def exit_code(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Runs `command` on the arguments (sys.argv by default) and turns errors into exit codes.

    0 done; 2 something the user can mend, told in one message; 130 stopped by the user; 1 an error
    of this program, with its traceback.
    """
    try:
        with _log_to_stderr():
            return command(sys.argv if argv is None else argv)
    except _Help as help:
        print(help)
        return OK
    except _MENDABLE as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt as error:
        print(f"stopped: {str(error) or 'nothing was written'}", file=sys.stderr)
        return STOPPED
    except Exception as error:
        if (reason := _user_error_behind(error)) is not None:
            print(f"error: {reason}", file=sys.stderr)
            return USER_ERROR
        traceback.print_exc()
        if "RESOURCE_EXHAUSTED" in str(error):
            print(
                "error: the device ran out of memory: lower config.prefill.chunk_tokens, and see "
                "XLA_PYTHON_CLIENT_MEM_FRACTION for JAX's share of a GPU",
                file=sys.stderr,
            )
        return INTERNAL_ERROR


def _user_error_behind(error: BaseException) -> BaseException | None:
    """What a user can mend, if that is why a thread that moves experts had to give up."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, _MENDABLE):
        cause = cause.__cause__
    return cause


def parse_flags(flag_values: flags.FlagValues, argv: Sequence[str], doc: str) -> None:
    """Parses `argv`; raises UsageError for unknown flags (with the nearest name) and bad values.

    Every flag of `flag_values` is listed by --help, after `doc`.
    """
    flags.DEFINE_bool("help", False, "Show this help.", flag_values=flag_values)
    try:
        rest = flag_values(list(argv))[1:]
    except flags.Error as error:
        raise UsageError(f"{_expected(flag_values, error)} (--help lists all flags)") from None
    if flag_values["help"].value:
        raise _Help(_usage(flag_values, doc))
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: every argument is a --flag=value")


_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}


def _expected(flag_values: flags.FlagValues, error: flags.Error) -> str:
    """What absl says of a flag, with what was expected in place of how Python failed to read it."""
    text = str(error)
    name = re.match(r"flag --([^=]+)=", text)
    kind = _KINDS.get(flag_values[name[1]].flag_type()) if name else None
    cause = error.__context__
    if kind is None or cause is None or " is not " in str(cause):  # a limit, which says it
        return text
    return f"{text.removesuffix(str(cause))}expected {kind}"


def require_flag(flag_values: flags.FlagValues, name: str) -> str:
    """The value of a flag that has to be given."""
    value = flag_values[name].value
    if not value:
        raise UsageError(f"--{name} is missing: {flag_values[name].help}")
    return value


def whole_numbers(flag: str, values: Sequence[str], *, least: int = 1) -> list[int]:
    """The values of a list flag as integers; raises UsageError."""
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise UsageError(
            f"--{flag} is {','.join(values)!r}, expected whole numbers of at least {least}, "
            "comma separated"
        )
    return numbers


def require_positions(
    flag: str, tokens: Sequence[int], most: int, where: str = "the positions of the model"
) -> None:
    """Raises UsageError for prompt lengths that there is no room for."""
    if (longest := max(tokens)) > most:
        raise UsageError(f"--{flag} has {longest}, expected at most {most} ({where})")


def print_result(result: Mapping[str, Any]) -> None:
    """The result of a command: one line of JSON, the last one on stdout."""
    _line(json.dumps(result, ensure_ascii=False), sys.stdout)


def say(message: str) -> None:
    """A line for people, on stderr."""
    _line(message, sys.stderr)


def _line(text: str, stream: TextIO) -> None:
    """In one write also where output is not buffered: processes that share a stream print whole
    lines (``print`` writes the end of the line by itself)."""
    stream.write(f"{text}\n")
    stream.flush()


@contextlib.contextmanager
def _log_to_stderr() -> Generator[None]:
    """Shows the log lines of this program (some go through absl) and no others."""
    handler = logging.StreamHandler(sys.stderr)
    loggers = [logging.getLogger(name) for name in ("absl", "ds4jax", "streaming", "sharding")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def _usage(flag_values: flags.FlagValues, doc: str) -> str:
    lines = [doc.strip(), "", "Flags:"]
    for name in flag_values:
        flag = flag_values[name]
        kind = "" if flag.flag_type() == "bool" else f"={flag.flag_type().split()[-1].upper()}"
        lines += [f"  --{name}{kind}", f"      {flag.help}"]
    return "\n".join(lines)
