"""Dotted flags: generated for every key, typed, and stronger than the file."""

import pytest
from absl import flags

from ds4jax.flags import config_from_flags, define_config_flags
from ds4jax.run_config import leaves


def parsed(*arguments: str) -> flags.FlagValues:
    flag_values = flags.FlagValues()
    define_config_flags(flag_values)
    flag_values(["program", *arguments])
    return flag_values


def test_there_is_one_flag_for_every_key_with_its_default_in_the_help():
    flag_values = parsed()
    for leaf in leaves():
        flag = flag_values[leaf.key]
        assert flag.help.startswith(leaf.help)
        if leaf.default not in (None, ()):
            assert f"Default: {leaf.default}." in flag.help
        for choice in leaf.choices or ():
            assert choice in flag.help


def test_flags_beat_the_file_and_the_file_beats_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[prefill]\nchunk_tokens = 5\nlogits = "all"\n[numerics]\npreset = "oracle"')
    flag_values = parsed(f"--config={path}", "--config.prefill.chunk_tokens=9")
    config = config_from_flags(flag_values, {"config.prefill.logits": "none"})
    assert config.prefill.chunk_tokens == 9
    assert config.numerics.preset == "oracle"
    assert config.prefill.logits == "none"


def test_values_are_typed():
    config = config_from_flags(
        parsed(
            "--config.numerics.simulate=q1,q3",
            "--config.prefill.save_state",
            "--config.prefill.max_tokens=12",
            "--config.prompt.text=one, with a comma",
            "--config.prompt.text=two",
        ),
        {},
    )
    assert config.numerics.simulate == ("q1", "q3")
    assert config.prefill.save_state is True
    assert config.prefill.max_tokens == 12
    assert config.prompt.text == ("one, with a comma", "two")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--config.prefill.chunk_tokns=3", "Did you mean: config.prefill.chunk_tokens"),
        ("--config.prefill.chunk_tokens=many", "config.prefill.chunk_tokens=many"),
        ("--config.prefill.save_state=perhaps", "config.prefill.save_state=perhaps"),
    ],
)
def test_wrong_flags_are_named(argument, expected):
    with pytest.raises(flags.Error, match=expected):
        parsed(argument)
