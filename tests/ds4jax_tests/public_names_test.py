"""What users import: every public name from `ds4jax` itself, made on first use."""

import pathlib
import subprocess
import sys

import pytest

import ds4jax
from ds4jax.cli import common


@pytest.mark.parametrize("name", ds4jax.__all__)
def test_public_name_is_there_and_is_its_module_s_own(name):
    value = getattr(ds4jax, name)
    assert name in dir(ds4jax)
    if isinstance(value, type):
        assert (value.__module__, value.__name__) == (ds4jax._PUBLIC[name], name)


def test_list_of_public_names_is_complete():
    assert sorted(ds4jax.__all__) == sorted(ds4jax._PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        ds4jax.laod  # noqa: B018


def test_every_error_that_users_can_mend_is_public():
    own = {error for error in common.USER_ERRORS if error is not common.UsageError}
    public = {getattr(ds4jax, name) for name in ds4jax.__all__ if name.endswith("Error")}
    assert own == public
    assert all(issubclass(error, ValueError) for error in own)


def test_import_alone_loads_no_model_code():
    program = "import sys, ds4jax; print(*({'flax', 'ds4jax.engine'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
