"""The probe on CPU devices, its parts with a fake clock, and the machine file."""

import contextlib
import json
import pathlib
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized

from sharding import probe
from sharding.cost import LayerCost, PlanError, Problem, make_schedules
from sharding.machine import machine_rows, read_machine
from sharding.search import device_types
from sharding.split import plan_stages

TINY = probe.Settings(
    sizes=(4096, 65536), repeats=2, in_flight_bytes=131072, matmul_size=32, compute_ms=0.01,
    disk_bytes=probe.MIB,
)  # fmt: skip


class FakeClock:
    """Every look at it is one second later."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return float(self.now)


class CpuTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with tempfile.TemporaryDirectory() as folder:
            cls.lines = []
            cls.result = probe.probe(
                jax.devices()[:2], settings=TINY, disk_folder=folder, say=cls.lines.append
            )
            cls.left_over = list(pathlib.Path(folder).iterdir())

    def test_is_json_and_measures_what_a_cpu_has(self):
        result = json.loads(json.dumps(self.result))
        self.assertEqual((result["schema"], result["platform"]), (1, "cpu"))
        self.assertLen(result["devices"], 2)
        for row in result["devices"]:
            self.assertGreater(row["memory_bytes_per_s"], 0)
            self.assertGreater(row["matmul_flops_per_s"]["bfloat16"], 0)
            self.assertGreater(row["matmul_flops_per_s"]["float32"], 0)
        self.assertEqual([(x["source"], x["target"]) for x in result["links"]], [(0, 1), (1, 0)])
        for link in result["links"]:
            self.assertEqual([step["bytes"] for step in link["ladder"]], list(TINY.sizes))
            for step in link["ladder"]:
                self.assertGreaterEqual(step["best_bytes_per_s"], step["bytes_per_s"])
        self.assertEqual(result["all_links"]["copies"], 2)
        for name in ("write", "cold", "warm"):
            self.assertGreater(result["disk"][f"{name}_bytes_per_s"], 0)
        self.assertEqual(self.left_over, [])
        self.assertNotEmpty(self.lines)

    def test_says_what_it_could_not_measure(self):
        missing = {row["what"]: row["why"] for row in self.result["not_measured"]}
        for what in ("host to device", "device to host", "overlap of upload and compute"):
            self.assertIn("memory is host memory", missing[what])
        self.assertIn("memory of device 0", missing)
        self.assertIn("memory node of device 1", missing)

    def test_one_device_without_disk(self):
        result = probe.probe(jax.devices()[:1], settings=TINY, numa_root="/nowhere")
        missing = {row["what"] for row in result["not_measured"]}
        self.assertContainsSubset({"links between devices", "disk", "memory nodes"}, missing)
        self.assertEqual((result["links"], result["numa"]), ([], []))

    def test_a_part_that_fails_is_noted_and_the_rest_goes_on(self):
        result = probe.probe(
            jax.devices()[:1], settings=TINY, disk_folder="/nowhere/at/all", numa_root="/nowhere"
        )
        missing = {row["what"]: row["why"] for row in result["not_measured"]}
        self.assertIn("FileNotFoundError", missing["disk"])
        self.assertNotEmpty(result["devices"])


class PartsTest(parameterized.TestCase):
    """The host link functions, which the whole probe leaves out on CPUs."""

    def setUp(self):
        super().setUp()
        self.run_ = probe.Probe(TINY, FakeClock())
        self.device = jax.devices()[0]
        self.buffer = np.zeros(65536, np.uint8)

    def test_upload_ladder_counts_bytes_in_flight(self):
        ladder = self.run_.host_to_device(self.device, self.buffer)
        # Every repeat takes one second of this clock.
        self.assertEqual([step["bytes_per_s"] for step in ladder], [4096, 65536])
        self.assertEqual([step["in_flight"] for step in ladder], [32, 2])
        self.assertEqual([step["in_flight_bytes_per_s"] for step in ladder], [131072, 131072])

    def test_downloads_and_rates(self):
        ladder = self.run_.device_to_host(self.device)
        self.assertEqual([step["bytes_per_s"] for step in ladder], [4096, 65536])
        self.assertEqual(self.run_.memory_rate(self.device)["per_s"], 2 * 65536)
        self.assertEqual(
            self.run_.product_rate(self.device, np.dtype("float32"))["per_s"], 2 * 32**3
        )

    def test_overlap_is_a_share(self):
        measured = self.run_.overlap(self.device, self.buffer)
        # One second each, and one together: all of it hidden.
        self.assertEqual(measured["hidden"], 1.0)

    def test_registered_memory_is_locked_only_while_it_is_used(self):
        log = []

        @contextlib.contextmanager
        def register(array):
            log.append(("lock", array.ctypes.data % 4096, array.nbytes))
            yield
            log.append(("unlock",))

        result = {"devices": [{}, {}]}
        buffer = probe._host_buffer(TINY)
        probe._probe_host_links(
            self.run_, result, jax.devices()[:2], buffer, register, None, lambda text: None
        )
        self.assertEqual(log, [("lock", 0, 65536), ("unlock",)])
        for row in result["devices"]:
            self.assertSameElements(row["host_to_device"], ["pageable", "registered"])
            self.assertSameElements(row["overlap"], ["pageable", "registered"])
        self.assertEqual(result["host_to_all_devices"]["registered"]["copies"], 2)

    def test_downloads_go_into_registered_memory_where_there_is_a_way(self):
        copied = []

        def download(array, buffer):
            copied.append((array.nbytes, buffer.nbytes))
            np.copyto(buffer, np.asarray(array))

        result = {"devices": [{}]}
        buffer = probe._host_buffer(TINY)
        buffer[:] = 7
        probe._probe_host_links(
            self.run_, result, [self.device], buffer, contextlib.nullcontext, download, print
        )
        rows = result["devices"][0]["device_to_host"]
        self.assertEqual([row["bytes"] for row in rows["registered"]], list(TINY.sizes))
        self.assertSameElements(copied, [(nbytes, nbytes) for nbytes in TINY.sizes])
        self.assertFalse(buffer.any())
        self.assertEqual(self.run_.missing, [])

    def test_memory_that_cannot_be_locked_is_noted(self):
        @contextlib.contextmanager
        def register(array):
            raise RuntimeError("no driver")
            yield

        result = {"devices": [{}]}
        buffer = probe._host_buffer(TINY)
        probe._probe_host_links(
            self.run_, result, [self.device], buffer, register, None, lambda text: None
        )
        self.assertIn(
            {"what": "host links, registered memory", "why": "RuntimeError: no driver"},
            self.run_.missing,
        )
        self.assertEqual(list(result["devices"][0]["host_to_device"]), ["pageable"])

    def test_settings_are_checked(self):
        for options in ({"sizes": ()}, {"sizes": (100,)}, {"repeats": 0}):
            with self.assertRaisesRegex(ValueError, "expected sizes of at least 4096"):
                probe.Settings(**options)


class NumaTest(absltest.TestCase):
    def test_nodes_and_devices_from_the_system_tree(self):
        root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for node in (1, 0):
            folder = root / "devices" / "system" / "node" / f"node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{16 * node}-{16 * node + 15}\n")
            (folder / "meminfo").write_text(f"Node {node} MemTotal:       {1000 + node} kB\n")
            (folder / "distance").write_text("10 21\n" if node == 0 else "21 10\n")
        device = root / "bus" / "pci" / "devices" / "0000:1b:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text("1\n")
        self.assertEqual(
            probe.numa_nodes(root),
            [
                {"node": 0, "cpus": "0-15", "memory_bytes": 1024000, "distances": [10, 21]},
                {"node": 1, "cpus": "16-31", "memory_bytes": 1025024, "distances": [21, 10]},
            ],
        )
        self.assertEqual(probe.numa_node_of("0000:1B:00.0", root), 1)
        (device / "numa_node").write_text("-1\n")  # a machine that does not say
        self.assertIsNone(probe.numa_node_of("0000:1b:00.0", root))
        self.assertIsNone(probe.numa_node_of("0000:ff:00.0", root))


def ladder(rate):
    return [
        {"bytes": 13_369_344, "bytes_per_s": rate // 2, "in_flight_bytes_per_s": rate * 9 // 10},
        {"bytes": 1 << 30, "bytes_per_s": rate, "in_flight_bytes_per_s": rate},
    ]


def machine(count=2, **changes):
    """Two devices as measured on two H200s of one host."""
    return {
        "schema": 1,
        "platform": "cuda",
        "devices": [
            {
                "id": i,
                "memory_bytes": 140 * 10**9,
                "memory_bytes_per_s": 4 * 10**12,
                "matmul_flops_per_s": {"bfloat16": (700 + i) * 10**12},
                "host_to_device": {
                    "pageable": ladder(9 * 10**9),
                    "registered": ladder((53 + i) * 10**9),
                },
            }
            for i in range(count)
        ],
        "links": [
            {"source": i, "target": j, "ladder": ladder((326 + i) * 10**9)}
            for i in range(count)
            for j in range(count)
            if i != j
        ],
    } | changes


class MachineTest(parameterized.TestCase):
    def folder(self):
        return pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_rows_of_two_equal_devices_are_one_type(self):
        rows = machine_rows(machine(), expert_bytes=13_369_344)
        self.assertEqual([d.host_link_bytes_per_s for d in rows.devices], [53 * 10**9] * 2)
        self.assertEqual([d.speed_permille for d in rows.devices], [1000] * 2)
        self.assertEqual(rows.link_bytes_per_s[0][1], 326 * 10**9)
        self.assertEqual({p.bytes_per_s for p in rows.peers}, {326 * 9 * 10**8})
        self.assertEqual({(p.owner, p.peer) for p in rows.peers}, {(0, 1), (1, 0)})
        # 13 MB take 1/9 longer than at the best rate.
        self.assertBetween(rows.upload_overhead_ns, 27_000, 29_000)
        self.assertEqual(rows.hosts[0].bytes_per_s, 0)
        self.assertEqual(rows.notes, ())
        problem = Problem(
            layers=(LayerCost(10, 10, 10, 4),) * 3,
            devices=rows.devices,
            schedules=make_schedules(
                [100], 10, layers=3, compute_ns=lambda layer, tokens: 5 * tokens,
                distinct=lambda layer, tokens: 4, stream_bytes=8,
            ),
            expert_bytes=13_369_344,
            link_bytes_per_s=rows.link_bytes_per_s,
            upload_overhead_ns=rows.upload_overhead_ns,
            hosts=rows.hosts,
            peers=rows.peers,
        )  # fmt: skip
        self.assertEqual(device_types(problem), [(0, 1)])
        self.assertIn("cuda:0", str(plan_stages(problem)))

    def test_a_slower_device_and_a_shared_host_link(self):
        described = machine(
            host_to_all_devices={"registered": {"bytes": 1, "copies": 2, "bytes_per_s": 60 * 10**9}}
        )
        described["devices"][1]["matmul_flops_per_s"]["bfloat16"] = 350 * 10**12
        rows = machine_rows(described, expert_bytes=13_369_344)
        self.assertEqual([d.speed_permille for d in rows.devices], [1000, 500])
        self.assertEqual(rows.hosts[0].bytes_per_s, 60 * 10**9)

    def test_what_was_not_measured_is_assumed_and_said(self):
        described = machine(links=[])
        del described["devices"][0]["host_to_device"]["registered"]
        described["devices"][1]["host_to_device"] = {}
        rows = machine_rows(described, expert_bytes=13_369_344)
        self.assertEqual(rows.devices[0].host_link_bytes_per_s, 9 * 10**9)
        self.assertEqual(rows.devices[1].host_link_bytes_per_s, 4 * 10**12)
        self.assertEqual(rows.link_bytes_per_s[1][0], 10**9)
        self.assertEqual(rows.peers, ())
        self.assertLen(rows.notes, 4)

    def test_a_cpu_probe_gives_rows_when_memory_is_given(self):
        measured = probe.probe(jax.devices()[:2], settings=TINY)
        with self.assertRaisesRegex(PlanError, "give memory_bytes"):
            machine_rows(measured, expert_bytes=1000)
        rows = machine_rows(measured, memory_bytes=[10**9] * 2, expert_bytes=1000)
        self.assertLen(rows.devices, 2)
        self.assertIn("no host link was measured", rows.notes[0])

    def test_products_have_to_be_measured(self):
        described = machine()
        described["devices"][0]["matmul_flops_per_s"] = {}
        with self.assertRaisesRegex(PlanError, "probe the machine again"):
            machine_rows(described, expert_bytes=1000)

    def test_files_that_are_no_machine_files(self):
        folder = self.folder()
        with self.assertRaisesRegex(PlanError, "does not exist: make it with"):
            read_machine(folder / "none.json")
        for content, message in (
            ("{", "cannot be read"),
            ("[]", "schema None"),
            ('{"schema": 2}', "schema 2, expected 1"),
            ('{"schema": 1}', "has no"),
            ('{"schema": 1, "devices": [], "links": [], "platform": "cpu"}', "has no"),
        ):
            path = folder / "machine.json"
            path.write_text(content)
            with self.assertRaisesRegex(PlanError, message):
                read_machine(path)
        path.write_text(json.dumps(machine()))
        self.assertEqual(read_machine(path), machine())

    @parameterized.parameters(
        (("devices",), 5, "devices is 5, expected a list"),
        (("devices", 0), None, r"devices\[0\] is None, expected an object"),
        (("devices", 0, "id"), [1], r"devices\[0\].id is \[1\], expected a whole number"),
        (("devices", 1, "id"), 0, r"devices have the ids \[0, 0\], expected different ones"),
        (("devices", 1, "memory_bytes"), -1, r"devices\[1\].memory_bytes is -1, expected a number"),
        (("devices", 0, "memory_bytes_per_s"), float("nan"), "memory_bytes_per_s is nan, expected"),
        (("devices", 0, "matmul_flops_per_s", "bfloat16"), float("inf"), "bfloat16 is inf, expect"),
        (("devices", 0, "matmul_flops_per_s", "bfloat16"), True, "bfloat16 is True, expected"),
        (("devices", 0, "host_to_device", "registered"), {}, "registered is {}, expected a list"),
        (
            ("links", 0, "ladder", 0, "bytes_per_s"),
            "9",
            r"ladder\[0\].bytes_per_s is '9', expected",
        ),
        (("links", 0, "ladder", 0), {"bytes": 1}, r"ladder\[0\].bytes_per_s is absent"),
        (("disk",), [], "disk is \\[\\], expected an object"),
    )
    def test_values_that_no_machine_has_are_named(self, place, value, message):
        described = machine()
        part = described
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = value
        path = self.folder() / "machine.json"
        path.write_text(json.dumps(described))
        with self.assertRaisesRegex(PlanError, rf"machine\.json: .*{message}.*: mend it, or make"):
            read_machine(path)

    @parameterized.parameters("[" * 100_000, '{"schema": ' + "1" * 5000 + "}")
    def test_json_that_python_refuses(self, content):
        path = self.folder() / "machine.json"
        path.write_text(content)
        with self.assertRaisesRegex(PlanError, "cannot be read as a machine file"):
            read_machine(path)

    def test_edited_rates_may_be_written_with_a_point_and_left_out_as_null(self):
        described = machine(disk=None, host_to_all_devices=None)
        for row in described["devices"]:
            row["memory_bytes"] = float(row["memory_bytes"])
            row["matmul_flops_per_s"]["bfloat16"] = 700e12
            row["host_to_device"]["pageable"] = None
            for step in row["host_to_device"]["registered"]:
                step["bytes_per_s"], step["in_flight_bytes_per_s"] = 53.5e9, None
        path = self.folder() / "machine.json"
        del described["devices"][1]["host_to_device"]["pageable"]
        path.write_text(json.dumps(described))
        rows = machine_rows(read_machine(path), expert_bytes=13_369_344)
        self.assertEqual([d.host_link_bytes_per_s for d in rows.devices], [53_500_000_000] * 2)
        self.assertEqual(rows.upload_overhead_ns, 0)
        for device in rows.devices:
            self.assertIsInstance(device.memory_bytes, int)


if __name__ == "__main__":
    absltest.main()
