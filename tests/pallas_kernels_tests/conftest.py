"""Helpers of the kernel tests: lowering for a GPU that is not there, and distances."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh


@pytest.fixture
def lower_for_gpu():
    """lower_for_gpu(function, *arguments): the module text of `function` lowered for an H200.

    Runs the whole Python side of the lowering (shapes, dtypes, primitives the backend has), not the
    GPU's own compiler.
    """
    device = AbstractDevice("NVIDIA H200", 132, "gpu")

    def lower(function, *arguments):
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
            lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    return lower


@pytest.fixture
def distance():
    """distance(got, wanted): relative Frobenius distance; both are finite at the same places."""

    def relative(got, wanted):
        got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        return np.linalg.norm(got[finite] - wanted[finite]) / np.linalg.norm(wanted[finite])

    return relative
