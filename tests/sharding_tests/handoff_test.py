"""Hand-offs: copies between devices, and both ends of a link in one process."""

import contextlib
import socket
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from sharding.handoff import (
    DevicePutPayload,
    HandoffError,
    Listener,
    Receiver,
    Sender,
    SocketPayload,
    TransferPayload,
    connect,
    copy_tree,
    transfer_id,
)

WAIT_S = 30.0


def payloads(kind):
    """A payload object for either end."""
    if kind == "socket":
        return SocketPayload(), SocketPayload()
    devices = jax.devices()
    return TransferPayload(devices[0]), TransferPayload(devices[1])


@contextlib.contextmanager
def link(kind="socket", **options):
    """(sender on device 0, receiver on device 1)."""
    here, there = payloads(kind)
    listener = Listener()
    sender = connect(listener.address, here, stage=1, **options)
    receiver = listener.accept(there, jax.devices()[1], stage=1)
    with sender, receiver:
        yield sender, receiver


def in_thread(job, *args):
    result = []
    thread = threading.Thread(target=lambda: result.append(job(*args)), daemon=True)
    thread.start()
    return thread, result


def tree_of(step):
    return {
        "streams": jnp.arange(24, dtype=jnp.float32).reshape(4, 6).astype(jnp.bfloat16) + step,
        "tokens": jnp.arange(step + 1, dtype=jnp.int32),
        "codes": jnp.arange(8, dtype=jnp.uint8).view(jnp.float8_e4m3fn),
        "host": np.float32([[0.5]]),
        "empty": jnp.zeros((0, 3)),
        "position": 128 * step,
        "more": [None, (1.5, "text", True)],
    }


class CopyTest(absltest.TestCase):
    def test_arrays_move_and_other_leaves_stay(self):
        device = jax.devices()[3]
        moved = copy_tree({"x": jnp.arange(3), "n": 7, "none": None}, device)
        self.assertEqual(moved["x"].devices(), {device})
        np.testing.assert_array_equal(moved["x"], [0, 1, 2])
        self.assertEqual((moved["n"], moved["none"]), (7, None))

    def test_the_copy_on_the_same_device_is_another_buffer(self):
        x = jnp.arange(100)
        (copy,) = copy_tree((x,), x.device)
        self.assertNotEqual(copy.unsafe_buffer_pointer(), x.unsafe_buffer_pointer())
        copy.delete()
        self.assertFalse(x.is_deleted())


class IdTest(parameterized.TestCase):
    def test_orders_by_request_step_stage(self):
        ids = [transfer_id(*key) for key in ((0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0))]
        self.assertEqual(ids, sorted(ids))
        self.assertEqual(transfer_id(3, 5, 7), 3 << 32 | 5 << 8 | 7)

    @parameterized.parameters((0, 0, 256), (0, 1 << 24, 0), (1 << 31, 0, 0), (0, -1, 0))
    def test_what_does_not_fit_is_refused(self, *key):
        with self.assertRaisesRegex(ValueError, "expected 0"):
            transfer_id(*key)


class LinkTest(parameterized.TestCase):
    @parameterized.parameters("socket", "transfer")
    def test_trees_arrive_bit_exact_and_in_order(self, kind):
        with link(kind, depth=2) as (sender, receiver):

            def produce():
                for step in range(5):
                    sender.send(step, tree_of(step))
                sender.flush()

            thread, _ = in_thread(produce)
            for step in range(5):
                got, wanted = receiver.receive(step), tree_of(step)
                self.assertEqual(jax.tree.structure(got), jax.tree.structure(wanted))
                for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                    if isinstance(y, jax.Array | np.ndarray):
                        self.assertEqual(x.devices(), {jax.devices()[1]})
                        self.assertEqual((x.dtype, x.shape), (y.dtype, y.shape))
                        self.assertEqual(np.asarray(x).tobytes(), np.asarray(y).tobytes())
                    else:
                        self.assertEqual(x, y)
            thread.join(WAIT_S)
            self.assertFalse(thread.is_alive())

    def test_the_sender_waits_when_depth_units_are_not_taken(self):
        with link(depth=2) as (sender, receiver):
            sender.send(0, 0)
            sender.send(1, 1)
            thread, result = in_thread(sender.send, 2, 2)
            self.assertEqual(receiver.receive(0), 0)
            thread.join(WAIT_S)
            self.assertEqual(result, [None])  # only possible after unit 0 was acknowledged
            self.assertEqual([receiver.receive(1), receiver.receive(2)], [1, 2])
            sender.flush()

    def test_another_unit_than_expected_is_an_error(self):
        with link() as (sender, receiver):
            sender.send(4, 1)
            with self.assertRaisesRegex(HandoffError, "receiving unit 3 .* 0x401 arrived"):
                receiver.receive(3)

    def test_a_lost_peer_is_named_on_both_sides(self):
        with link() as (sender, receiver):
            sender.close()
            with self.assertRaisesRegex(HandoffError, "unit 0 of request 0, stage 1, peer 127"):
                receiver.receive(0)
        with link() as (sender, receiver):
            sender.send(0, 1)
            receiver.close()
            with self.assertRaisesRegex(HandoffError, "waiting for unit 0"):
                sender.flush()

    def test_a_peer_that_hangs_is_noticed_after_the_timeout(self):
        listener = Listener()
        sender = connect(listener.address, SocketPayload(), stage=1, unit_timeout_s=0.05)
        receiver = listener.accept(SocketPayload(), jax.devices()[1], stage=1, unit_timeout_s=0.05)
        with sender, receiver:
            with self.assertRaisesRegex(
                HandoffError, "receiving unit 0 .* nothing came from it within 0.05 s"
            ):
                receiver.receive(0)
            sender.send(0, 1)
            with self.assertRaisesRegex(HandoffError, "waiting for unit 0 .* within 0.05 s"):
                sender.flush()

    def test_the_end_of_the_peer_can_be_waited_for(self):
        with link(depth=2) as (sender, receiver):
            sender.send(0, 0)
            thread, result = in_thread(sender.wait_closed)
            self.assertEqual(receiver.receive(0), 0)
            self.assertEqual(result, [])
            receiver.close()
            thread.join(WAIT_S)
            self.assertEqual(result, [None])

    def test_close_releases_a_waiting_thread(self):
        with link() as (_, receiver):

            def wait():
                try:
                    receiver.receive(0)
                except HandoffError as error:
                    return str(error)

            thread, result = in_thread(wait)
            receiver.close()
            thread.join(WAIT_S)
            self.assertLen(result, 1)
            self.assertIn("receiving unit 0", result[0])

    def test_trees_of_other_types_are_refused(self):
        with link() as (sender, _), self.assertRaisesRegex(TypeError, "cannot hold a set"):
            sender.send(0, {"x": {1}})

    def test_unreachable_and_silent_peers(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with self.assertRaisesRegex(HandoffError, "stage 2 cannot be reached at 127.0.0.1"):
            connect(f"127.0.0.1:{port}", SocketPayload(), stage=2)
        with self.assertRaisesRegex(HandoffError, "no producer of stage 2"):
            Listener().accept(SocketPayload(), jax.devices()[0], stage=2, timeout_s=0.01)

    def test_a_wrong_acknowledgement_is_an_error(self):
        server = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        server.close()
        with Sender(ours, SocketPayload(), stage=0) as sender, theirs:
            sender.send(0, 1)
            theirs.sendall((99).to_bytes(8, "big"))
            with self.assertRaisesRegex(HandoffError, "id 0x63 acknowledged, expected 0x0"):
                sender.flush()

    def test_device_put_is_refused_with_more_than_two_processes(self):
        devices = jax.devices()
        DevicePutPayload(devices[0], devices[1])
        with (
            mock.patch.object(jax, "process_count", return_value=3),
            self.assertRaisesRegex(ValueError, "run of 3 processes: expected at most 2"),
        ):
            DevicePutPayload(devices[0], devices[1])

    def test_ends_can_be_built_from_sockets(self):
        server = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        server.close()
        device = jax.devices()[2]
        with (
            Sender(ours, SocketPayload(), stage=9, request=5) as sender,
            Receiver(theirs, SocketPayload(), device, stage=9, request=5) as receiver,
        ):
            sender.send(7, [jnp.ones(2)])
            (got,) = receiver.receive(7)
            self.assertEqual(got.devices(), {device})
            sender.flush()


if __name__ == "__main__":
    absltest.main()
