"""Pipelines of toy stages: order, bounds, errors, cancellation, equal bits for every split."""

import hashlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from sharding.pipeline import Pipeline, PipelineCancelled, PipelineError, Stage, Unit

LAYERS, WIDTH, CHUNK = 6, 32, 8
WAIT_S = 30.0  # bound of every wait; reached only by a bug


@jax.jit
def layer(weight, state, x):
    """A layer with a running state: later chunks depend on earlier ones, on the same device."""
    y = jnp.tanh(jnp.dot(x, weight, precision=jax.lax.Precision.HIGHEST) + state)
    return x + y, state + y.mean(axis=0, keepdims=True)


def make_weights():
    rng = np.random.default_rng(6)
    return rng.standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / 4


class ToyStage:
    """Layers [begin, end) of the toy model on one device."""

    def __init__(self, weights, device):
        self.weights = [jax.device_put(weight, device) for weight in weights]
        self.states = [jax.device_put(jnp.zeros((1, WIDTH)), device) for _ in weights]

    def run(self, microbatch, chunk, x):
        for i, weight in enumerate(self.weights):
            x, self.states[i] = layer(weight, self.states[i], x)
        return x


def toy_inputs(tokens):
    rng = np.random.default_rng(tokens)
    rows = np.zeros((-(-tokens // CHUNK) * CHUNK, WIDTH), np.float32)
    rows[:tokens] = rng.standard_normal((tokens, WIDTH))
    return rows.reshape(-1, CHUNK, WIDTH)


def run_split(bounds, devices, tokens, **options):
    """sha256 of the outputs of a split at `bounds` (with 0 and LAYERS)."""
    weights, chunks = make_weights(), toy_inputs(tokens)
    stages = [
        Stage(f"stage {i}", ToyStage(weights[a:b], device).run, device)
        for i, ((a, b), device) in enumerate(zip(itertools.pairwise(bounds), devices, strict=True))
    ]
    outputs = []
    timeline = Pipeline(stages, **options).run(
        [Unit(i, 0) for i in range(len(chunks))],
        lambda microbatch, chunk: jnp.asarray(chunks[microbatch]),
        lambda microbatch, chunk, x: outputs.append(np.asarray(x)),
    )
    assert len(timeline.events) == len(stages) * len(chunks)
    return hashlib.sha256(np.concatenate(outputs)[:tokens].tobytes()).hexdigest()


def all_bounds(most):
    for count in range(1, most + 1):
        for cuts in itertools.combinations(range(1, LAYERS), count - 1):
            yield (0, *cuts, LAYERS)


class EqualBitsTest(parameterized.TestCase):
    @parameterized.parameters((1,), (CHUNK - 3,), (5 * CHUNK + 3,))
    def test_every_split_over_one_to_four_devices(self, tokens):
        devices = jax.devices()
        shas = {run_split(b, devices[: len(b) - 1], tokens) for b in all_bounds(4)}
        self.assertLen(shas, 1)

    def test_a_stage_per_layer_and_stages_on_one_device(self):
        devices = jax.devices()
        one = run_split((0, LAYERS), devices[:1], 40)
        self.assertEqual(run_split(range(LAYERS + 1), devices[:LAYERS], 40), one)
        self.assertEqual(run_split((0, 2, 4, 6), devices[:1] * 3, 40), one)

    def test_bounds_do_not_change_bits(self):
        devices = jax.devices()[:3]
        one = run_split((0, 2, 4, 6), devices, 80)
        for ahead, depth in ((1, 1), (1, 4), (5, 1)):
            self.assertEqual(
                run_split((0, 2, 4, 6), devices, 80, run_ahead=ahead, handoff_depth=depth), one
            )


class OrderTest(parameterized.TestCase):
    @parameterized.product(ahead=(1, 3), depth=(1, 2))
    def test_stages_move_along_diagonals(self, ahead, depth):
        calls, lock = [], threading.Lock()

        def run_of(stage):
            def run(microbatch, chunk, x):
                with lock:
                    calls.append((stage, microbatch))
                return x + 1

            return run

        devices = jax.devices()
        count = 4
        stages = [Stage(f"{i}", run_of(i), devices[i]) for i in range(count)]
        units = [Unit(i, 0) for i in range(12)]
        results = []
        Pipeline(stages, run_ahead=ahead, handoff_depth=depth).run(
            units,
            lambda microbatch, chunk: jnp.full((4,), microbatch),
            lambda microbatch, chunk, x: results.append((microbatch, int(x[0]))),
        )
        self.assertEqual(results, [(i, i + count) for i in range(12)])
        for stage in range(count):
            self.assertEqual([u for s, u in calls if s == stage], list(range(12)))
        position = {call: at for at, call in enumerate(calls)}
        for stage, unit in itertools.product(range(count - 1), range(12)):
            # Called only after its predecessor on this stage and the same unit one stage before.
            self.assertLess(position[stage, unit], position[stage + 1, unit])
            # One more may be taken by the next stage and wait for its bound there.
            behind = unit - depth - 2
            if behind >= 0:
                self.assertLess(position[stage + 1, behind], position[stage, unit])

    def test_a_stage_may_donate_its_inputs(self):
        donate = jax.jit(lambda x: x * 2, donate_argnums=0)
        device = jax.devices()[0]
        stages = [Stage(f"{i}", lambda m, c, x: donate(x), device) for i in range(3)]
        results = []
        Pipeline(stages).run(
            [Unit(i, 0) for i in range(6)],
            lambda m, c: jnp.full((8,), m + 1, jnp.int32),
            lambda m, c, x: results.append(int(x[0])),
        )
        self.assertEqual(results, [8 * (i + 1) for i in range(6)])

    def test_trees_and_host_scalars_pass_through(self):
        devices = jax.devices()

        def run(microbatch, chunk, inputs):
            x, position, extra = inputs["x"], inputs["position"], inputs["extra"]
            self.assertIsInstance(position, int)
            return {"x": x + position, "position": position + 1, "extra": extra}

        stages = [Stage(f"{i}", run, devices[i]) for i in range(2)]
        got = []
        Pipeline(stages).run(
            [Unit(0, 0), Unit(0, 1)],
            lambda m, c: {"x": jnp.zeros(2, jnp.int32), "position": 10 * c, "extra": None},
            lambda m, c, tree: got.append((int(tree["x"][0]), tree["position"], tree["extra"])),
        )
        self.assertEqual(got, [(1, 2, None), (21, 12, None)])

    def test_an_idle_stage_prefetches_for_the_unit_it_waits_for(self):
        asked = threading.Event()
        seen = []

        def prefetch(microbatch, chunk):
            seen.append((microbatch, chunk))
            asked.set()

        def source(microbatch, chunk):
            self.assertTrue(asked.wait(WAIT_S))  # nothing can arrive before it was asked
            return jnp.zeros(1)

        stages = [
            Stage("a", lambda m, c, x: x, jax.devices()[0]),
            Stage("b", lambda m, c, x: x, jax.devices()[1], prefetch=prefetch),
        ]
        Pipeline(stages).run([Unit(3, 7)], source, lambda m, c, x: None)
        self.assertEqual(seen, [(3, 7)])


class ErrorTest(parameterized.TestCase):
    def pipeline(self, fail_stage=None, fail_unit=None, **options):
        self.aborted = []

        def run_of(stage):
            def run(microbatch, chunk, x):
                if (stage, microbatch) == (fail_stage, fail_unit):
                    raise KeyError("broken")
                return x + 1

            return run

        devices = jax.devices()
        return Pipeline(
            [
                Stage(f"stage {i}", run_of(i), devices[i], abort=lambda i=i: self.aborted.append(i))
                for i in range(3)
            ],
            **options,
        )

    def run_toy(self, pipeline, units=8, **options):
        results = []
        pipeline.run(
            [Unit(i, 0) for i in range(units)],
            options.get("source", lambda m, c: jnp.zeros(2, jnp.int32)),
            options.get("sink", lambda m, c, x: results.append(int(x[0]))),
        )
        return results

    @parameterized.product(stage=(0, 1, 2), unit=(0, 5))
    def test_the_first_error_names_the_stage_and_all_threads_end(self, stage, unit):
        before = threading.active_count()
        pipeline = self.pipeline(stage, unit)
        with self.assertRaisesRegex(
            PipelineError, f"stage {stage} failed at micro-batch {unit}, chunk 0: KeyError"
        ) as caught:
            self.run_toy(pipeline)
        self.assertEqual(caught.exception.stage, f"stage {stage}")
        self.assertEqual(caught.exception.unit, Unit(unit, 0))
        self.assertIsInstance(caught.exception.__cause__, KeyError)
        self.assertEqual(threading.active_count(), before)
        self.assertEqual(sorted(self.aborted), [0, 1, 2])

    def test_a_run_after_an_error_is_not_affected(self):
        pipeline = self.pipeline(1, 2)
        with self.assertRaises(PipelineError):
            self.run_toy(pipeline)
        self.assertEqual(self.run_toy(pipeline, units=2), [3, 3])

    def test_source_and_sink_are_named(self):
        def broken(*args):
            raise OSError("gone")

        with self.assertRaisesRegex(PipelineError, "source failed at micro-batch 0"):
            self.run_toy(self.pipeline(), source=broken)
        with self.assertRaisesRegex(PipelineError, "sink failed at micro-batch 0"):
            self.run_toy(self.pipeline(), sink=broken)

    def test_an_error_inside_a_computation_names_its_stage(self):
        def explode(x):
            raise RuntimeError("inside")

        run = jax.jit(
            lambda x: jax.pure_callback(explode, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        )
        stages = [
            Stage("good", lambda m, c, x: x, jax.devices()[0]),
            Stage("bad", lambda m, c, x: run(x), jax.devices()[1]),
        ]
        with self.assertRaisesRegex(PipelineError, "bad failed at micro-batch 0"):
            Pipeline(stages).run(
                [Unit(0, 0)], lambda m, c: jnp.zeros(2), lambda m, c, x: np.asarray(x)
            )

    def test_a_blocked_stage_is_released_by_abort(self):
        gate = threading.Event()

        def blocked(microbatch, chunk, x):
            self.assertTrue(gate.wait(WAIT_S))
            return x

        def fails(microbatch, chunk, x):
            raise ValueError("second stage")

        stages = [
            Stage("blocked", lambda m, c, x: blocked(m, c, x) if m else x, abort=gate.set),
            Stage("fails", fails),
        ]
        with self.assertRaisesRegex(PipelineError, "fails failed at micro-batch 0"):
            Pipeline(stages).run(
                [Unit(0, 0), Unit(1, 0)], lambda m, c: jnp.zeros(1), lambda m, c, x: None
            )

    def test_a_thread_that_does_not_stop_is_named(self):
        gate, entered = threading.Event(), threading.Event()

        def deaf(microbatch, chunk, x):
            entered.set()
            gate.wait(WAIT_S)
            return x

        def source(microbatch, chunk):
            if microbatch:
                self.assertTrue(entered.wait(WAIT_S))
                raise ValueError("no more")
            return jnp.zeros(1)

        with self.assertRaises(PipelineError) as caught:
            Pipeline([Stage("deaf", deaf)], stop_timeout_s=0.01).run(
                [Unit(0, 0), Unit(1, 0)], source, lambda m, c, x: None
            )
        gate.set()
        self.assertIn("still running after 0.01 s: deaf", caught.exception.__notes__[0])

    def test_cancel_from_another_thread(self):
        pipeline = self.pipeline()
        results = []

        def sink(microbatch, chunk, x):
            results.append(microbatch)
            if microbatch == 2:
                thread = threading.Thread(target=pipeline.cancel)
                thread.start()
                thread.join()

        with self.assertRaisesRegex(PipelineCancelled, "cancelled after 2 of 50 units") as caught:
            self.run_toy(pipeline, units=50, sink=sink)
        self.assertEqual(results, [0, 1, 2])
        self.assertEqual(caught.exception.completed, 2)
        pipeline.cancel()  # nothing runs: nothing happens

    def test_an_interrupt_passes_through(self):
        def interrupted(*args):
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            self.run_toy(self.pipeline(), sink=interrupted)
        self.assertEqual(sorted(self.aborted), [0, 1, 2])

    def test_arguments_are_checked(self):
        stage = Stage("a", lambda m, c, x: x)
        for stages, options, message in (
            ([], {}, "at least one"),
            ([stage, stage], {}, "all different"),
            ([stage], {"run_ahead": 0}, "run_ahead=0"),
            ([stage], {"handoff_depth": 0}, "handoff_depth=0"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                Pipeline(stages, **options)


class TimelineTest(absltest.TestCase):
    def test_busy_time_starts_when_work_and_inputs_are_there(self):
        ticks = itertools.count()
        lock = threading.Lock()

        def clock():
            with lock:
                return next(ticks)

        stages = [Stage(f"{i}", lambda m, c, x: x + 1, jax.devices()[i]) for i in range(2)]
        timeline = Pipeline(stages, clock=clock).run(
            [Unit(i, 0) for i in range(5)], lambda m, c: jnp.zeros(1), lambda m, c, x: None
        )
        ready = {(e.stage, e.step): e.ready_ns for e in timeline.events}
        for stage in range(2):
            intervals = timeline.busy(stage)
            self.assertLen(intervals, 5)
            for (_, end), (begin, _) in itertools.pairwise(intervals):
                self.assertLessEqual(end, begin)
            total = timeline.ended_ns - timeline.started_ns
            self.assertEqual(timeline.busy_ns(stage) + timeline.idle_ns(stage), total)
        for step, (begin, end) in enumerate(timeline.busy(1)):
            self.assertGreaterEqual(begin, min(ready[0, step], end))
        rows = timeline.chrome_events()
        self.assertLen(rows, 10)
        self.assertEqual(rows[0]["name"], "micro-batch 0 chunk 0")


@pytest.mark.slow
class ManySplitsTest(absltest.TestCase):
    def test_every_split_over_up_to_six_devices_repeatedly(self):
        devices = jax.devices()
        shas = {
            run_split(bounds, devices[: len(bounds) - 1], 77)
            for _ in range(3)
            for bounds in all_bounds(6)
        }
        self.assertLen(shas, 1)


if __name__ == "__main__":
    absltest.main()
