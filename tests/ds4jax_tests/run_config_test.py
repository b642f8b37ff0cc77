"""Run configuration: files, overrides, limits, and messages that name the key."""

import pathlib

import pytest

from ds4jax.config import PRESETS, ConfigError, Numerics
from ds4jax.run_config import NumericsConfig, PromptConfig, RunConfig, leaves

ROOT = pathlib.Path(__file__).parents[2]


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_published_roundings_and_chunks_of_8192():
    config = RunConfig()
    assert config.prefill.chunk_tokens == 8192
    assert config.prefill.logits == "last"
    assert config.numerics.resolve() == PRESETS["official"]


def test_toml_tables_become_sections(tmp_path):
    path = write(
        tmp_path,
        '[numerics]\npreset = "oracle"\nsimulate = ["q2", "q1"]\n'
        '[prefill]\nchunk_tokens = 7\nsave_state = true\n[prompt]\ntext = ["a", "b"]\n',
    )
    config = RunConfig.from_toml(path)
    assert config.numerics.resolve() == Numerics("float32", ("q1", "q2"))
    assert (config.prefill.chunk_tokens, config.prefill.save_state) == (7, True)
    assert config.prompt.text == ("a", "b")


def test_to_dict_is_what_from_mapping_takes():
    config = RunConfig().replace({"prefill.max_tokens": 5, "numerics.simulate": ("none",)})
    assert RunConfig.from_mapping(config.to_dict()) == config


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs/runs").iterdir()))
def test_shipped_run_files_are_valid_and_start_with_their_command(name):
    path = ROOT / "configs/runs" / name
    RunConfig.from_toml(path)
    head = path.read_text(encoding="utf-8").split("\n[")[0]
    assert f"--config=configs/runs/{name}" in head


@pytest.mark.parametrize(
    ("preset", "compute", "simulate", "expected"),
    [
        ("oracle", None, None, Numerics("float32")),
        ("bfloat16", None, None, Numerics("bfloat16")),
        ("official", None, None, Numerics("bfloat16", ("q1", "q2", "q3"))),
        ("official", "float32", None, Numerics("float32", ("q1", "q2", "q3"))),
        ("official", None, ("none",), Numerics("bfloat16")),
        ("oracle", None, ("q3",), Numerics("float32", ("q3",))),
    ],
)
def test_compute_and_simulate_replace_parts_of_the_preset(preset, compute, simulate, expected):
    assert NumericsConfig(preset, compute, simulate).resolve() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"prefill": {"chunk_token": 3}},
            r"f.toml: unknown key config.prefill.chunk_token, did you mean "
            r"config.prefill.chunk_tokens\?",
        ),
        ({"prefil": {}}, r"unknown key config.prefil, did you mean config.prefill\?"),
        ({"chunk_tokens": 3}, r"chunk_tokens, did you mean config.prefill.chunk_tokens\?"),
        ({"zzz": 1}, r"unknown key config.zzz, expected one of config.numerics, config.prefill"),
        ({"prefill": 3}, "config.prefill is 3, expected a table of keys"),
        (
            {"prefill": {"chunk_tokens": 0}},
            "config.prefill.chunk_tokens is 0, expected a whole number of at least 1",
        ),
        ({"prefill": {"chunk_tokens": True}}, "chunk_tokens is True, expected a whole number"),
        ({"prefill": {"chunk_tokens": 1.5}}, "chunk_tokens is 1.5, expected a whole number"),
        (
            {"prefill": {"chunk_tokens": 2**31}},
            "chunk_tokens is 2147483648, expected at most 2147483647",
        ),
        (
            {"streaming": {"window": 10**20}},
            "window is 1(0){20}, expected at most 9007199254740992",
        ),
        (
            {"streaming": {"resident_fraction": float("nan")}},
            "config.streaming.resident_fraction is nan, expected a number of at least 0",
        ),
        (
            {"peer": {"devices": "1", "memory_fraction": float("nan")}},
            "memory_fraction is nan, exp",
        ),
        ({"streaming": {"resident_fraction": -0.5}}, "is -0.5, expected a number of at least 0"),
        ({"prefill": {"save_state": "yes"}}, "save_state is 'yes', expected true or false"),
        (
            {"prefill": {"logits": "lst"}},
            "config.prefill.logits is 'lst', expected one of last, all, none, logprobs",
        ),
        ({"numerics": {"preset": "f32"}}, "preset is 'f32', expected one of oracle, bfloat16"),
        ({"numerics": {"simulate": ["q4"]}}, "simulate is 'q4', expected one of q1, q2, q3, none"),
        ({"prompt": {"text": [3]}}, r"config.prompt.text is \[3\], expected a list of strings"),
        (
            {"prompt": {"text": "a", "file": "b"}},
            "the prompt is given 2 times, by config.prompt.text and config.prompt.file",
        ),
        (
            {"prompt": {"effort": "max", "form": "chat"}},
            "config.prompt.effort is 'max' with config.prompt.form 'chat', expected the form "
            "'thinking'",
        ),
    ],
)
def test_bad_values_name_key_value_and_what_would_do(values, expected):
    with pytest.raises(ConfigError, match=expected):
        RunConfig.from_mapping(values, "f.toml")


def test_none_stands_alone():
    with pytest.raises(ConfigError, match="'none' stands alone"):
        NumericsConfig(simulate=("q1", "none")).resolve()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[prefill", "is not TOML"),
        ("[prefill]\nx = 1", "unknown key"),
        ("x = " + "1" * 5000, "is not TOML"),
        ("x = " + "[" * 5000, "is not TOML"),
    ],
)
def test_bad_files_are_named(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=expected) as caught:
        RunConfig.from_toml(path)
    assert str(path) in str(caught.value)


def test_missing_file_says_where_files_are(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.toml does not exist; .* configs/runs"):
        RunConfig.from_toml(tmp_path / "no.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_toml(tmp_path)


def test_overrides_take_dotted_keys_with_and_without_prefix():
    config = RunConfig().replace({"prefill.logits": "all", "config.prefill.chunk_tokens": 3})
    assert (config.prefill.logits, config.prefill.chunk_tokens) == ("all", 3)
    assert config.numerics == RunConfig().numerics
    with pytest.raises(ConfigError, match=r"unknown key config.prefill.logit, did you mean"):
        RunConfig().replace({"prefill.logit": "all"})


def test_every_leaf_has_a_help_text():
    found = list(leaves())
    assert len(found) == len({leaf.key for leaf in found}) > 10
    assert all(leaf.help.endswith(".") and leaf.key.startswith("config.") for leaf in found)


def test_prompt_sources_lists_what_was_given():
    assert PromptConfig(tokens="x.npy").sources() == ["tokens"]
    assert PromptConfig().sources() == []
