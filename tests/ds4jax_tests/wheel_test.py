"""The built package, away from this checkout: it brings its configs and runs its commands."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
WHAT_BUILDS = ("ds4jax", "pallas_kernels", "sharding", "streaming", "configs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the files of the wheel, built from a copy so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in WHAT_BUILDS:
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=no_caches)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *offline)
    subprocess.run([*pip, "--target", folder / "site", folder / "source"], check=True)
    return folder / "site"


def run(site, folder, *command):
    """stdout of `python -m ...` in `folder`, with the packages of `site` only."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_the_configs(site):
    for kind in ("models", "runs"):
        wanted = sorted(path.name for path in (ROOT / "configs" / kind).iterdir())
        assert sorted(path.name for path in (site / "ds4jax/_configs" / kind).iterdir()) == wanted
    assert not (site / "configs").exists()


def test_model_configs_have_names_away_from_the_checkout(site, tmp_path):
    found = run(site, tmp_path, "ds4jax.cli.inspect", "--checkpoint=synthetic:flash")
    assert json.loads(found.splitlines()[-1])["file_bytes"] == 159_609_485_896


def test_it_runs_a_prompt(site, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(20, dtype=np.int32))
    found = run(
        site,
        tmp_path,
        "ds4jax.cli.prefill",
        f"--config={site / 'ds4jax/_configs/runs/cpu_tiny.toml'}",
        "--checkpoint=synthetic:tiny",
        "--tokens=tokens.npy",
        "--out_dir=out",
    )
    assert json.loads(found.splitlines()[-1])["tokens_read"] == 20
    assert np.load(tmp_path / "out" / "logits.npy").shape == (1, 264)
