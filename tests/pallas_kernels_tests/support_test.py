"""Refusals name the device and what a kernel needs; timings keep compilation apart."""

import contextlib
import importlib
import io
import itertools
import math
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import bench, checks, support


def gpu(capability):
    return types.SimpleNamespace(platform="gpu", compute_capability=capability)


class UnsupportedTest(parameterized.TestCase):
    @parameterized.parameters(
        ("reference", "cpu", None),
        ("portable", "cpu", "NVIDIA GPU"),
        ("sm90", "cpu", "NVIDIA GPU"),
        ("portable", "7.5", "8.0"),
        ("portable", None, "8.0"),
        ("portable", "8.9", None),
        ("portable", "9.0", None),
        ("sm90", "8.9", "9.0"),
        ("sm90", "10.0", "9.0"),
        ("sm90", "9.0", None),
    )
    def test_reason(self, implementation, device, reason):
        device = jax.devices("cpu")[0] if device == "cpu" else gpu(device)
        found = support.unsupported(implementation, device)
        if reason is None:
            self.assertIsNone(found)
        else:
            self.assertIn(reason, found)

    def test_interpreters_run_anywhere(self):
        device = jax.devices("cpu")[0]
        self.assertIsNone(support.unsupported("sm90", device, interpret=True))

    def test_unknown_names_and_refusals_raise(self):
        device = jax.devices("cpu")[0]
        with pytest.raises(ValueError, match="'triton'"):
            support.unsupported("triton", device)
        with pytest.raises(NotImplementedError, match="'sm90' refused: too small"):
            support.require("sm90", "too small")
        support.require("sm90", None)

    def test_default_device_follows_the_config(self):
        self.assertEqual(support.default_device(), jax.devices()[0])
        other = jax.devices()[-1]
        with jax.default_device(other):
            self.assertEqual(support.default_device(), other)


class PickTest(parameterized.TestCase):
    @parameterized.parameters(
        ("9.0", {"sm90": None, "portable": None}, "sm90"),
        ("9.0", {"sm90": "too narrow", "portable": None}, "portable"),
        ("9.0", {"sm90": "too narrow", "portable": "float32"}, "tiled"),
        ("8.9", {"sm90": None, "portable": None}, "portable"),
        ("9.0", None, "sm90"),
        ("9.0", "float32", "tiled"),
    )
    def test_the_best_kernel_that_takes_the_call_is_chosen(self, capability, refusal, chosen):
        with mock.patch.object(support, "default_device", return_value=gpu(capability)):
            self.assertEqual(checks.pick("attention", None, refusal), chosen)

    def test_a_refused_kernel_says_why(self):
        refusals = {"sm90": "too narrow", "portable": None}
        with mock.patch.object(support, "default_device", return_value=gpu("9.0")):
            self.assertEqual(checks.pick("attention", "portable", refusals), "portable")
            with pytest.raises(NotImplementedError, match="sm90 cannot run this call: too narrow"):
                checks.pick("attention", "sm90", refusals)


class MeasureTest(parameterized.TestCase):
    def test_compilation_is_apart(self):
        ticks = itertools.accumulate([0.0, 9.0, 0.0, 1.0, 0.0, 3.0, 0.0, 2.0])
        calls = []
        timing = bench.measure(calls.append, 1, runs=3, calls_per_run=2, clock=lambda: next(ticks))
        self.assertEqual(timing, bench.Timing(9.0, 0.5, 1.0, 1.5, 3))
        self.assertLen(calls, 8)
        self.assertEqual(timing.as_dict()["median_s"], 1.0)

    def test_counts_are_checked(self):
        with pytest.raises(ValueError, match="runs=0"):
            bench.measure(lambda: None, runs=0)

    @parameterized.parameters(
        ("pallas_kernels.block_linear.bench", "--out=/nowhere/x.json", "'/nowhere/x.json' is no f"),
        ("pallas_kernels.routed_experts.bench", "--out=/tmp", "'/tmp' is no file that can be wri"),
        ("pallas_kernels.routed_experts.bench", "--tokens=0", "'0' is no whole number of at least"),
        ("pallas_kernels.bench_attention", "--runs=x", "'x' is no whole number of at least 1"),
    )
    def test_flags_are_checked_before_anything_is_measured(self, module, flag, message):
        main = importlib.import_module(module).main
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit, match="2"):
            main([flag, *([] if flag.startswith("--out") else ["--out=x.json"])])
        self.assertIn(message, stderr.getvalue())

    def test_distance_is_relative_and_shows_what_is_not_finite(self):
        wanted = jnp.asarray([[3.0, 4.0]])
        self.assertAlmostEqual(bench.distance(wanted.astype(jnp.bfloat16), wanted), 0.0)
        self.assertAlmostEqual(bench.distance(wanted + jnp.float32([[0, 1]]), wanted), 0.2, 6)
        for value in (jnp.inf, jnp.nan):
            self.assertFalse(math.isfinite(bench.distance(wanted.at[0, 0].set(value), wanted)))

    def test_origin_tells_how_numbers_came_about(self):
        origin = bench.origin("somewhere.bench", ["--out=x"])
        self.assertEqual(origin["command"], "python -m somewhere.bench --out=x")
        self.assertEqual(origin["jax"], jax.__version__)


if __name__ == "__main__":
    absltest.main()
