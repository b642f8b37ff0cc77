"""Prices and refusals: what does not fit is told before anything is allocated."""

import pathlib

import jax
import pytest

import ds4jax
from ds4jax import admission, cache, testing
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import PRESETS, ModelConfig

GIB = 2**30
MODELS = pathlib.Path(__file__).parents[2] / "configs" / "models"


class FakeDevice:
    """A GPU of 80 GiB of which JAX has taken a share."""

    platform, device_kind = "gpu", "Fake GPU"

    def __init__(self, limit_gib: float, used_gib: float = 0.0):
        self._stats = {
            "bytes_limit": int(limit_gib * GIB),
            "bytes_in_use": int(used_gib * GIB),
        }

    def memory_stats(self) -> dict[str, int]:
        return self._stats


def price(weights_gib: float, state_gib: float = 0.0, workspace_gib: float = 0.0):
    return admission.Price(*(int(part * GIB) for part in (weights_gib, state_gib, workspace_gib)))


def test_state_price_is_the_size_of_the_state():
    config, numerics = testing.tiny_config(), PRESETS["official"]
    found = admission.price(config, numerics, weights_bytes=7, rows=128, capacity_tokens=8192)
    state = cache.empty_state(config, numerics, 8192)
    assert found.state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert found.total_bytes == 7 + found.state_bytes + found.workspace_bytes


def test_workspace_grows_with_rows_and_covers_the_largest_activation():
    config, numerics = ModelConfig.from_json(MODELS / "flash.json"), PRESETS["official"]
    small, large = (admission.workspace_bytes(config, numerics, rows) for rows in (1024, 8192))
    assert small < large
    heads = 8192 * config.num_attention_heads * config.head_dim * 2
    assert 4 * heads < large < 20 * GIB


def test_what_fits_is_admitted_with_the_bytes_at_hand():
    assert admission.admit(price(50, 5, 5), FakeDevice(70, 2), "it") == 68 * GIB


def test_refusal_adds_up_and_tells_the_missing_bytes():
    with pytest.raises(
        admission.PlanError,
        match=r"this run needs 160\.00 GiB .*weights 150\.00 GiB.*state 4\.00 GiB.*workspace "
        r"6\.00 GiB.*Fake GPU has 60\.00 GiB.* free: 100\.00 GiB \(107374182400 bytes\) are "
        r"missing\. The weights alone do not fit",
    ):
        admission.admit(price(150, 4, 6), FakeDevice(60), "this run")


def test_refusal_of_a_large_workspace_names_the_keys_that_help(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.0")
    with pytest.raises(admission.PlanError, match=r"Lower config\.prefill\.chunk_tokens"):
        admission.admit(price(50, 20, 20), FakeDevice(80), "this run")


def test_share_that_jax_took_is_named_when_it_is_what_is_too_small(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    remedy = (
        r"JAX has taken 75% of the GPU's 80\.00 GiB.*: set XLA_PYTHON_CLIENT_MEM_FRACTION=0\.91"
    )
    with pytest.raises(admission.PlanError, match=remedy):
        admission.admit(price(60, 5, 5), FakeDevice(60), "this run")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(admission.PlanError, match=r"JAX has taken 50% of the GPU's 80\.00 GiB"):
        admission.admit(price(40, 5, 5), FakeDevice(40), "this run")


def test_host_memory_is_a_plausible_number_of_bytes():
    assert 2**20 < admission.host_bytes() < 2**50
    assert admission.device_bytes(jax.local_devices()[0]) == pytest.approx(
        admission.host_bytes(), rel=0.5
    )


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_real_model_on_a_small_machine_is_refused_and_not_tried(name, monkeypatch):
    monkeypatch.setattr(admission, "host_bytes", lambda: 24 * GIB)
    events = []
    with pytest.raises(admission.PlanError, match=r"GiB \(\d+ bytes\) are missing"):
        ds4jax.load(f"synthetic:{name}", on_event=events.append)
    assert not events


def test_state_that_does_not_fit_is_refused_when_the_length_is_known(monkeypatch):
    monkeypatch.setattr(admission, "host_bytes", lambda: 200 * 2**20)
    config = {"numerics.preset": "oracle", "prefill.chunk_tokens": 16}
    source = SyntheticSource(testing.tiny_config(), seed=0)
    with ds4jax.load(source, config) as loaded:
        monkeypatch.setattr(admission, "host_bytes", lambda: 80 * 2**20)
        with pytest.raises(admission.PlanError, match="the state of 1048576 tokens needs"):
            loaded.prefill([0] * 600_000)
    with pytest.raises(admission.PlanError, match="this run needs"):
        ds4jax.load(source, config, prompt_tokens=600_000)
