"""What every file of the repository has to obey, whatever it computes."""

import ast
import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LEAVES = ("pallas_kernels", "sharding", "streaming")
PACKAGES = ("ds4jax", *LEAVES)
BASE = {"absl", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "orbax", "rich"}
# Packages of extras: a module may need them only inside the function that uses them.
OPTIONAL = {"tokenizers", "matplotlib"}
ALLOWED = {
    "ds4jax": BASE | set(LEAVES),
    "pallas_kernels": {"jax", "jaxlib", "ml_dtypes", "numpy"},
    "sharding": {"jax", "jaxlib", "numpy"},
    "streaming": {"jax", "jaxlib", "ml_dtypes", "numpy"},
}
MAX_BYTES = 4 << 20
UNWANTED = {
    "a path of one machine": r"/(?:root|work|home)/|/opt/\w|/tmp/\w+/",
    "an unfinished mark": r"\b(?:TODO|FIXME|XXX|HACK)\b",
    "a reference to a tracker entry of this project": r"(?i)\bissues? (?:#\s*)?\d+\b",
}


@functools.cache
def tracked() -> tuple[pathlib.Path, ...]:
    """Files git knows; a source archive without git has no such list and fails here plainly."""
    output = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return tuple(ROOT / name for name in output.split("\0") if name and (ROOT / name).is_file())


def modules(package: str) -> list[pathlib.Path]:
    return sorted((ROOT / package).rglob("*.py"))


def relative(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields (imported module, whether at module level) for every absolute import."""
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            yield name, id(node) in top


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_carries_its_ownership_marker(leaf: str):
    text = (ROOT / leaf / "__init__.py").read_text()
    assert re.search(r'^OWNER = "ds4jax"$', text, re.MULTILINE), f"{leaf}/__init__.py"


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("content", ["", "import a_module_nobody_has"])
def test_foreign_package_of_a_leaf_name_is_reported_with_its_file(leaf, content, tmp_path):
    foreign = tmp_path / leaf / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text(content)
    done = subprocess.run(
        [sys.executable, "-c", "import ds4jax"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(foreign.parent) in done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_what_it_may(package: str):
    stdlib = sys.stdlib_module_names
    wrong = []
    for path in modules(package):
        for name, at_top in imports(ast.parse(path.read_text(), str(path))):
            head = name.partition(".")[0]
            allowed = ALLOWED[package] | {package}
            if package == "ds4jax" and not at_top:
                allowed = allowed | OPTIONAL
            if head not in stdlib and head not in allowed:
                wrong.append(f"{relative(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_jax_sharding_is_taken_by_name():
    """`from jax import sharding` would shadow the package of that name."""
    wrong = []
    for path in itertools.chain.from_iterable(modules(package) for package in PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "jax"
                and any(alias.name == "sharding" for alias in node.names)
            ):
                wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong, wrong


def test_oracle_program_imports_nothing_of_the_engine():
    heads = {
        name.partition(".")[0]
        for path in (ROOT / "tests" / "oracle").glob("*.py")
        for name, _ in imports(ast.parse(path.read_text()))
    }
    assert not heads & set(PACKAGES)


def test_tests_are_plain_folders_of_test_modules():
    """A package or another name there would shadow ours, or not be collected."""
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        known = path.name.endswith("_test.py") or path.name == "conftest.py"
        if not known and 'if __name__ == "__main__":' not in path.read_text():
            wrong.append(f"{relative(path)} is no test module and no program of a test")
    assert not wrong, "\n".join(wrong)
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert not folders & {*PACKAGES, "queue", "types", "io", "select"}


def test_tests_do_not_sleep():
    wrong = []
    for path in (ROOT / "tests").rglob("*_test.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                if name == "sleep" or (isinstance(node.func, ast.Name) and node.func.id == "sleep"):
                    wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong, wrong


def test_every_op_has_a_reference_and_tests():
    # The codecs are plain JAX and numpy throughout: they have no kernel to be a reference of.
    folders = [
        path.parent
        for path in (ROOT / "pallas_kernels").glob("*/__init__.py")
        if path.parent.name != "codecs"
    ]
    assert folders
    for folder in folders:
        assert (folder / "reference.py").is_file(), f"{relative(folder)} has no reference.py"
    for folder in [*folders, ROOT / "pallas_kernels" / "codecs"]:
        found = list((ROOT / "tests" / "pallas_kernels_tests").glob(f"{folder.name}*_test.py"))
        assert found, f"no tests/pallas_kernels_tests/{folder.name}*_test.py"


def test_every_golden_folder_names_its_source():
    folders = [path for path in (ROOT / "tests" / "golden").iterdir() if path.is_dir()]
    assert folders
    missing = [relative(folder) for folder in folders if not (folder / "SOURCE.md").is_file()]
    assert not missing, missing


def test_run_configurations_parse_and_state_their_command():
    from ds4jax.run_config import RunConfig

    paths = sorted((ROOT / "configs" / "runs").glob("*.toml"))
    assert paths
    for path in paths:
        header = "".join(
            itertools.takewhile(
                lambda line: line.startswith("#"),
                path.read_text(encoding="utf-8").splitlines(keepends=True),
            )
        )
        assert relative(path) in header, f"{relative(path)}: no header comment with its command"
        assert isinstance(RunConfig.from_toml(path), RunConfig)


def test_no_tracked_file_is_large():
    large = {
        relative(path): path.stat().st_size for path in tracked() if path.stat().st_size > MAX_BYTES
    }
    assert not large, large


def test_text_files_hold_nothing_that_belongs_elsewhere():
    wrong = []
    for path in tracked():
        if path == pathlib.Path(__file__) or path.name == "LICENSE":
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for (what, pattern), (number, line) in itertools.product(
            UNWANTED.items(), enumerate(lines, 1)
        ):
            if re.search(pattern, line):
                wrong.append(f"{relative(path)}:{number} has {what}: {line.strip()[:80]}")
    assert not wrong, "\n".join(wrong)


def test_only_one_configuration_file_for_the_tools():
    others = {"setup.py", "setup.cfg", "ruff.toml", ".ruff.toml", "pytest.ini", "tox.ini"}
    others |= {".importlinter", "pyrefly.toml", "mypy.ini", "pyrightconfig.json"}
    assert not others & {relative(path) for path in tracked()}


@pytest.mark.parametrize(("name", "most"), [("README.md", 100), ("WORKSPACE.md", 150)])
def test_page_stays_short(name: str, most: int):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def test_readme_points_at_the_map_and_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for needed in ("make prefill", "make test", "WORKSPACE.md"):
        assert needed in text, needed


def _expand(pattern: str) -> list[str]:
    """Expands a{b,c}d as a shell does."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    return [
        path
        for choice in match[1].split(",")
        for path in _expand(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def named_paths(text: str) -> set[str]:
    """Paths in backticks: they begin with an entry of the root, or end as a source file does."""
    entries = {path.name for path in ROOT.iterdir()}
    found = set()
    for span in re.findall(r"`([^`\n]+)`", text):
        for pattern in _expand(span) if re.fullmatch(r"[\w.{},*/-]+", span) else []:
            head = pattern.partition("/")[0]
            slash_known = "/" in pattern and head in entries
            source = re.search(r"\.(?:py|md|toml|sh)$", pattern) and not pattern.startswith("/")
            if (slash_known or source) and not pattern.startswith("run"):
                found.add(pattern)
    return found


@pytest.mark.parametrize(
    "name", ["README.md", "WORKSPACE.md", *sorted(map(relative, (ROOT / "docs").glob("*.md")))]
)
def test_paths_named_on_the_page_exist(name: str):
    paths = named_paths((ROOT / name).read_text(encoding="utf-8"))
    missing = sorted(path for path in paths if not list(ROOT.glob(path)))
    assert not missing, f"{name} names {missing}"


def test_map_lists_every_key_of_the_configuration_and_no_other():
    from ds4jax.run_config import leaves

    text = (ROOT / "WORKSPACE.md").read_text(encoding="utf-8")
    spans = re.findall(r"`(config\.\w+\.[\w.{},]+)`", text)
    listed = {key for span in spans for key in _expand(span)}
    assert listed == {leaf.key for leaf in leaves()}


def test_quick_commands_of_the_map_answer():
    """Commands of WORKSPACE.md that end in `# quick` are started with --help, all at once."""
    text = (ROOT / "WORKSPACE.md").read_text(encoding="utf-8")
    commands = sorted(set(re.findall(r"^.*?python -m ([\w.]+).*# quick\s*$", text, re.MULTILINE)))
    assert len(commands) >= 3, commands
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, "--help"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for module in commands
    ]
    for module, process in zip(commands, running, strict=True):
        out, err = process.communicate(timeout=120)
        # absl exits with 1 after --help.
        assert process.returncode in (0, 1), f"{module}: {err}"
        assert "--" in out, f"{module} --help printed {out!r}, {err!r}"
        assert "Traceback" not in err, f"{module}: {err}"


def test_a_gpu_for_the_tests_has_cpu_devices_beside_it():
    told = "import os, runpy; runpy.run_path('tests/conftest.py'); e = os.environ; "
    told += "print(e['JAX_PLATFORMS'], e['XLA_FLAGS'])"
    for given, wanted in (("cuda", "cuda,cpu"), ("cuda,cpu", "cuda,cpu"), ("cpu", "cpu")):
        environment = {**os.environ, "JAX_PLATFORMS": given, "XLA_FLAGS": ""}
        done = subprocess.run(
            [sys.executable, "-c", told],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [wanted, "--xla_force_host_platform_device_count=8"]


@pytest.mark.slow
def test_a_machine_with_one_device_collects_every_test():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu1", "tests"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "streaming_tests/gpu_test.py::" in done.stdout


def find_python(path: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `make` does to find its interpreter, with only `path` on PATH."""
    return subprocess.run(
        ["/bin/sh", ROOT / "tools" / "find_python.sh"],
        env={"PATH": str(path), "HOME": str(path), **variables},
        capture_output=True,
        text=True,
    )


def test_a_python_is_found_on_path_in_pyenv_and_through_uv_or_asked_for(tmp_path):
    empty, old = tmp_path / "empty", tmp_path / "old"
    for folder in (empty, old):
        folder.mkdir()
        (folder / "cat").symlink_to(shutil.which("cat"))
    refused = find_python(empty)
    assert refused.returncode == 1
    assert "needs Python >= 3.12 and none was found" in refused.stderr
    assert "apt install python3.12" in refused.stderr
    for name in ("python3.12", "python3"):
        (old / name).write_text("#!/bin/sh\nexit 1\n")
        (old / name).chmod(0o755)
    pyenv = tmp_path / "pyenv" / "versions" / "3.13.1" / "bin" / "python3"
    pyenv.parent.mkdir(parents=True)
    pyenv.symlink_to(sys.executable)
    found = find_python(old, PYENV_ROOT=str(tmp_path / "pyenv"))
    assert found.stdout.strip() == str(pyenv)
    (old / "uv").write_text(f"#!/bin/sh\necho {sys.executable}\n")
    (old / "uv").chmod(0o755)
    assert find_python(old).stdout.strip() == sys.executable
    (empty / "python3.14").symlink_to(sys.executable)
    assert find_python(empty).stdout.strip() == str(empty / "python3.14")
    assert find_python(old, PYTHON=sys.executable).stdout.strip() == sys.executable
    refused = find_python(empty, PYTHON=str(old / "python3"))
    assert refused.returncode == 1
    assert "is not a Python >= 3.12" in refused.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_built_package_would_contain_it(name: str):
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"{name}*" in build["tool"]["setuptools"]["packages"]["find"]["include"]
