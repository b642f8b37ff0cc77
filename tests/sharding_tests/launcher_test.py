"""The launcher with real processes: exit codes, who died, and that nothing is left running.

Workers and their children inherit the launcher's stdout, which is a pipe here: reading it to its
end proves that all of them have ended.
"""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from sharding import launcher

WORKER = str(pathlib.Path(__file__).with_name("launched.py"))
ROOT = str(pathlib.Path(__file__).parents[2])
LIMIT_S = 90.0
SHORT = ("--timeout_s=2",)  # only where silence is waited for: this machine may be busy


def start(processes, job, argument="", *, flags=()):
    environ = os.environ | {"PYTHONPATH": ROOT}
    for name in list(environ):
        if name.startswith("SHARDING_"):
            del environ[name]
    return subprocess.Popen(
        [
            sys.executable, "-m", "sharding.launcher", f"--processes={processes}",
            "--heartbeat_s=0.1", "--grace_s=1", *flags,
            "--", sys.executable, WORKER, job, argument,
        ],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process):
    """(exit code, stdout, stderr) once nobody holds the pipes any more."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class OneHostTest(parameterized.TestCase):
    @parameterized.parameters(1, 4)
    def test_processes_find_each_other(self, processes):
        code, out, err = finish(start(processes, "values"))
        self.assertEqual((code, err), (0, ""))
        wanted = " ".join(str(rank * 10) for rank in range(processes))
        self.assertEqual(
            sorted(out.splitlines()), [f"{r}/{processes} {r} {wanted}" for r in range(processes)]
        )

    def test_processes_that_never_join_are_watched_for_their_exit(self):
        self.assertEqual(finish(start(2, "alone")), (0, "alone\n" * 2, ""))

    @parameterized.named_parameters(
        ("code", "code", 7, "ended with code 7"),
        ("killed", "kill", launcher.EXIT_KILLED, r"was killed by signal 9 \(SIGKILL\)"),
        ("frozen", "freeze", launcher.EXIT_SILENT, r"\(host 0\) gave no sign of life for \d"),
    )
    def test_the_first_failure_ends_all_and_is_named(self, job, wanted, reason):
        begin = time.monotonic()
        code, out, err = finish(start(3, job, "1", flags=SHORT if job == "freeze" else ()))
        self.assertLess(time.monotonic() - begin, 30.0)
        self.assertEqual(code, wanted)
        self.assertRegex(err, f"launcher 0: process 1 .*{reason}")
        self.assertIn(f"all processes of this host have ended, exit code {wanted}", err)
        self.assertLen(re.findall("^started", out, re.MULTILINE), 3)

    def test_children_of_a_process_that_ended_are_ended(self):
        # Process 0 ends well and leaves a child; process 1 then never ends by itself.
        process = start(1, "leave", "0")
        self.assertEqual(finish(process)[0], 0)

    @parameterized.parameters((signal.SIGTERM, 143), (signal.SIGINT, 130))
    def test_signals_stop_all_processes_even_deaf_ones(self, number, wanted):
        process = start(2, "deaf", "0")
        while "waiting" not in process.stdout.readline():
            pass
        process.send_signal(number)
        code, _, err = finish(process)
        self.assertEqual(code, wanted)
        self.assertIn(f"the launcher of host 0 got {number.name}", err)

    def test_a_second_signal_comes_to_the_processes_as_well(self):
        process = start(2, "twice", "0", flags=["--grace_s=1000"])
        for word in ("waiting", "interrupted"):
            while word not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
        self.assertEqual(finish(process)[0], 130)

    def test_processes_end_when_their_launcher_is_killed(self):
        process = start(2, "wait", "0")
        while "waiting" not in process.stdout.readline():
            pass
        process.kill()
        _, _, err = finish(process)
        self.assertIn("the launcher is gone, stopping", err)

    def test_usage(self):
        for flags, job, message in (
            ([], [], "no command"),
            (["--processes=0"], ["true"], "at least 1"),
            (["--hosts=2"], ["true"], "--coordinator=HOST:PORT"),
            (["--hosts=2", "--host_index=2"], ["true"], "expected 0..1"),
            (["--coordinator=here"], ["true"], "--coordinator is 'here', expected HOST:PORT"),
            (["--coordinator=here:70000"], ["true"], "is 'here:70000', expected HOST:PORT"),
            (["--heartbeat_s=30"], ["true"], "--heartbeat_s is 30 and --timeout_s 20, expected"),
        ):
            result = subprocess.run(
                [sys.executable, "-m", "sharding.launcher", "--processes=1", *flags, "--", *job],
                env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            self.assertEqual(result.returncode, 2)
            self.assertIn(message, result.stderr)

    def test_a_stranger_at_the_port_does_not_end_the_run(self):
        address = f"127.0.0.1:{free_port()}"
        process = start(1, "twice", "0", flags=[f"--coordinator={address}", "--grace_s=1000"])
        while "waiting" not in process.stdout.readline():
            pass
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n\xff\n")
            link.settimeout(LIMIT_S)
            self.assertEqual(link.recv(1), b"")
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            process.stdout.readline()
        self.assertEqual(finish(process)[0], 130)

    def test_a_port_that_is_taken_is_a_mistake_of_the_user(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            code, out, err = finish(start(1, "alone", flags=[f"--coordinator={address}"]))
        self.assertEqual((code, out), (2, ""))
        self.assertStartsWith(err, f"launcher 0: --coordinator is '{address}', where this host")
        self.assertIn("already in use", err)
        self.assertEqual(err.count("\n"), 1)

    @parameterized.parameters((None, ["0,1", "2,3"]), ("7,5,3,1", ["3,1", "7,5"]))
    def test_each_process_sees_its_own_gpus(self, visible, wanted):
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        with mock.patch.dict(os.environ, environ):
            if visible is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            code, out, err = finish(start(2, "gpus", flags=["--gpus_per_process=2"]))
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(sorted(out.splitlines()), wanted)

    def test_more_gpus_than_there_are_is_a_mistake_of_the_user(self):
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "4"}):
            code, _, err = finish(start(2, "gpus", flags=["--gpus_per_process=1"]))
        self.assertEqual(code, 2)
        self.assertIn("CUDA_VISIBLE_DEVICES is '4', expected at least 2 GPUs", err)

    def test_a_command_that_does_not_exist(self):
        self.assertEqual(launcher.main(["--processes=2", "--", "/no/such/command"]), 2)

    def test_join_outside_of_a_launcher(self):
        with self.assertRaisesRegex(launcher.LaunchError, "start this process with"):
            launcher.join({})


class ManyHostsTest(parameterized.TestCase):
    """Two launchers on this machine stand for two hosts."""

    def pair(self, job, argument="", *, flags=()):
        flags = ["--hosts=2", f"--coordinator=127.0.0.1:{free_port()}", *flags]
        return [start(2, job, argument, flags=[*flags, f"--host_index={i}"]) for i in range(2)]

    def finish_all(self, processes):
        results = [None] * len(processes)

        def collect(i):
            results[i] = finish(processes[i])

        threads = [threading.Thread(target=collect, args=(i,)) for i in range(len(processes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def test_ranks_run_over_hosts_and_all_end_together(self):
        results = self.finish_all(self.pair("values"))
        self.assertEqual([(code, err) for code, _, err in results], [(0, ""), (0, "")])
        self.assertEqual(
            sorted("".join(out for _, out, _ in results).splitlines()),
            [f"{rank}/4 {rank % 2} 0 10 20 30" for rank in range(4)],
        )

    @parameterized.parameters("0", "3")
    def test_a_failure_on_either_host_is_named_on_both(self, rank):
        for code, _, err in self.finish_all(self.pair("kill", rank)):
            self.assertEqual(code, launcher.EXIT_KILLED)
            self.assertRegex(err, f"process {rank} .*SIGKILL")

    def test_a_frozen_process_of_the_other_host_is_named(self):
        for code, _, err in self.finish_all(self.pair("freeze", "2", flags=SHORT)):
            self.assertEqual(code, launcher.EXIT_SILENT)
            self.assertRegex(err, r"process 2 \(host 1\) gave no sign of life")

    @parameterized.parameters(0, 1)
    def test_a_lost_host_is_named_and_its_processes_end(self, lost):
        pair = self.pair("wait", "0")
        while "waiting" not in pair[0].stdout.readline():
            pass
        pair[lost].kill()
        results = self.finish_all(pair)
        self.assertEqual(results[1 - lost][0], launcher.EXIT_LOST)
        self.assertIn(f"the launcher of host {lost} is gone", results[1 - lost][2])

    def test_a_host_that_never_comes_is_named(self):
        process = start(
            1, "alone",
            flags=["--hosts=2", f"--coordinator=127.0.0.1:{free_port()}", "--join_timeout_s=0.5"],
        )  # fmt: skip
        code, _, err = finish(process)
        self.assertEqual(code, launcher.EXIT_LOST)
        self.assertIn("host 1 did not connect within 0.5 s", err)


class PipelineTest(parameterized.TestCase):
    """Stages in processes under jax.distributed."""

    def shas(self, processes, kinds):
        """sha256 by kind of hand-off, of runs with `processes` and with one process."""
        found = []
        runs = [start(processes, "pipeline", ",".join(kinds)), start(1, "pipeline", "socket")]
        for run in runs:
            code, out, err = finish(run)
            self.assertEqual(code, 0, err)
            found += re.findall(r"^(\w+) ([0-9a-f]{64}) over (\d)$", out, re.MULTILINE)
        self.assertEqual([kind for kind, _, _ in found], [*kinds, "socket"])
        self.assertEqual([count for _, _, count in found], [str(processes)] * len(kinds) + ["1"])
        return {sha for _, sha, _ in found}

    def test_two_processes_give_the_bits_of_one(self):
        self.assertLen(self.shas(2, ["socket", "transfer", "permute", "device_put"]), 1)

    @pytest.mark.slow
    def test_four_processes_give_the_bits_of_one(self):
        self.assertLen(self.shas(4, ["socket", "transfer", "permute"]), 1)

    def test_a_killed_stage_of_two_is_named(self):
        self.check_killed(2)

    @pytest.mark.slow
    def test_a_killed_stage_of_four_is_named(self):
        self.check_killed(4)

    def check_killed(self, processes):
        process = start(processes, "pipeline_dies", "3")
        code, _, err = finish(process)
        # The other stages fail as well when they lose their peer; that is not the cause.
        self.assertEqual(code, launcher.EXIT_KILLED, err)
        self.assertRegex(err, rf"launcher 0: process {processes - 1} .*SIGKILL")


if __name__ == "__main__":
    absltest.main()
