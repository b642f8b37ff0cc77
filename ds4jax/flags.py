"""Dotted absl flags generated from the configuration dataclass: every key is typed and in --help.

Each command owns its `FlagValues`; nothing is registered globally, so commands can be imported
and called side by side.
"""

from typing import Any

from absl import flags

from ds4jax.run_config import Leaf, RunConfig, leaves


def define_config_flags(flag_values: flags.FlagValues) -> None:
    """Registers `--config=FILE.toml` and one flag per key, such as --config.prefill.logits."""
    flags.DEFINE_string(
        "config",
        None,
        "TOML file with the run configuration; the keys below change single values of it.",
        flag_values=flag_values,
    )
    for leaf in leaves():
        _define(leaf, flag_values)


def config_from_flags(flag_values: flags.FlagValues, overrides: dict[str, Any]) -> RunConfig:
    """Defaults, then the TOML file, then the flags that were given, then `overrides`.

    Raises ConfigError as `RunConfig` does.
    """
    path = flag_values["config"].value
    config = RunConfig.from_toml(path) if path else RunConfig()
    given = {leaf.key: flag_values[leaf.key] for leaf in leaves()}
    values = {key: flag.value for key, flag in given.items() if flag.present}
    return config.replace(values | overrides)


def _define(leaf: Leaf, flag_values: flags.FlagValues) -> None:
    # The file decides when a flag is absent, so flags have no default of their own; the help
    # text tells the default of the key.
    default = "" if leaf.default in (None, ()) else f" Default: {leaf.default}."
    limits = f" One of: {', '.join(leaf.choices)}." if leaf.choices else ""
    help = f"{leaf.help}{limits}{default}"
    if leaf.type is bool:
        flags.DEFINE_bool(leaf.key, None, help, flag_values=flag_values)
    elif leaf.type is int:
        flags.DEFINE_integer(leaf.key, None, help, flag_values=flag_values)
    elif leaf.type is float:
        flags.DEFINE_float(leaf.key, None, help, flag_values=flag_values)
    elif leaf.type is str:
        flags.DEFINE_string(leaf.key, None, help, flag_values=flag_values)
    elif leaf.choices:
        flags.DEFINE_list(leaf.key, None, help, flag_values=flag_values)
    else:
        flags.DEFINE_multi_string(leaf.key, None, help, flag_values=flag_values)
