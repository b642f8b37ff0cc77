"""The model against transformers' DeepSeek-V4, on random tiny models, layer by layer and whole.

The other side runs as a process of its own, see tests/oracle/README.md; without its environment
these tests fail, they do not skip. Configurations are drawn so that no field keeps the value it
has in the released models: the stored golden data cannot tell a field from a constant.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache, model, testing
from ds4jax.checkpoint import load, safetensors
from ds4jax.config import OVERLAPPED_RATIO, PRESETS, ModelConfig, RopeScaling
from pallas_kernels.routed_experts import ExpertSlab

pytestmark = pytest.mark.oracle

ROOT = pathlib.Path(__file__).parents[1]
PYTHON = ROOT / ".oracle" / "bin" / "python"
GOLDEN = ROOT / "tests" / "golden" / "f32"
NUMERICS = PRESETS["oracle"]
TOKENS = 203  # 203 mod 4 = 3: the last overlapped block stays open
ROWS = 64  # chunks are padded to this many rows

# Relative L2 error per position. Measured: 9e-7 for a layer, 3.3e-6 for logits; two transformers
# runs on different processors differ by 3e-6 on logits, by summation order alone.
LAYER_LIMIT = 5e-6
LOGITS_LIMIT = 1e-5
# No selection may be closer than this, or rounding could decide it; the token seeds see to that.
MIN_GAP = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """A random model: `schedule` flash (two window layers first) or pro (two coarse ones)."""

    schedule: str
    seed: int
    token_seed: int

    def __str__(self) -> str:
        return f"{self.schedule}-{self.seed}"

    @property
    def config(self) -> ModelConfig:
        return random_config(self.schedule, self.seed)

    @property
    def tokens(self) -> np.ndarray:
        random = np.random.default_rng([self.seed, self.token_seed])
        return random.integers(0, self.config.vocab_size, TOKENS).astype(np.int32)


CASES = [
    Case("flash", 0, 6),
    Case("flash", 1, 4),
    Case("flash", 2, 1),
    Case("pro", 0, 2),
    Case("pro", 1, 5),
    Case("pro", 2, 2),
]


def random_config(schedule: str, seed: int) -> ModelConfig:
    """Draws every field that transformers lets vary; five layers of all kinds of a schedule."""
    random = np.random.default_rng([seed, schedule == "pro"])

    def pick(*values):
        return values[random.integers(len(values))]

    ratio = pick(6, 8, 16, 32, 128)
    first = {"flash": 0, "pro": ratio}[schedule]
    groups = pick(1, 2, 4)
    return ModelConfig(
        num_hidden_layers=5,
        compress_ratios=(first, first, OVERLAPPED_RATIO, ratio, OVERLAPPED_RATIO, 0),
        vocab_size=pick(97, 256, 320),
        hidden_size=pick(32, 64, 96),
        num_attention_heads=groups * pick(1, 2, 3),
        head_dim=pick(32, 48, 64),
        qk_rope_head_dim=pick(8, 16, 32),
        q_lora_rank=pick(24, 32, 64),
        o_groups=groups,
        o_lora_rank=pick(8, 16, 32),
        sliding_window=pick(5, 16, 33),
        rope_theta=pick(500.0, 20000.0),
        compress_rope_theta=pick(7000.0, 90000.0),
        rope_scaling=RopeScaling("yarn", pick(3.0, 8.0, 40.0), pick(32, 64, 256), 24.0, 2.0),
        max_position_embeddings=4096,
        # Fewer heads than 16 make exact ties of zero scores common.
        index_n_heads=pick(16, 24),
        index_head_dim=pick(32, 64),
        index_topk=pick(3, 8, 12),
        n_routed_experts=pick(8, 12, 16),
        num_experts_per_tok=pick(2, 3, 6),
        moe_intermediate_size=pick(32, 64),
        num_hash_layers=pick(0, 1, 4),
        routed_scaling_factor=pick(1.0, 2.0, 3.5),
        swiglu_limit=pick(0.5, 1.0, 2.0),
        hc_mult=pick(2, 3, 4),
        hc_sinkhorn_iters=pick(2, 5, 9),
        hc_eps=pick(1e-4, 1e-3),
        rms_norm_eps=pick(1e-4, 1e-2),
    )


def run_oracle(*pairs: tuple[pathlib.Path, pathlib.Path]) -> None:
    assert PYTHON.exists(), f"{PYTHON} does not exist: make oracle"
    program = ROOT / "tests" / "oracle" / "reference.py"
    arguments = [str(path) for pair in pairs for path in pair]
    # The variables that jax needs here do not concern torch.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [PYTHON, program, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """One folder a case, by name: checkpoint, tokens and the oracle's expected.npz."""
    made = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp(str(case))
        testing.write_checkpoint(folder, case.config, seed=case.seed, storage="float32")
        np.save(folder / "tokens.npy", case.tokens)
        made[str(case)] = folder
    run_oracle(*((folder, folder / "expected.npz") for folder in made.values()))
    return made


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Both sides of a case: our modules and experts, and what the oracle computed."""

    transformer: model.Transformer
    slabs: tuple[ExpertSlab, ...]
    tokens: np.ndarray
    expected: dict[str, np.ndarray]

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    def empty(self) -> list[cache.LayerState]:
        return list(cache.empty_state(self.config, NUMERICS, TOKENS).layers)

    def run(
        self, layer: int, streams: jax.Array, state: cache.LayerState, chunk: cache.Chunk
    ) -> "Output":
        where = jnp.arange(self.config.n_routed_experts, dtype=jnp.int32)
        return run_block(
            self.transformer.blocks[layer], streams, state, chunk, self.slabs[layer], where
        )


@functools.cache
def load_case(folder: pathlib.Path) -> Loaded:
    source = safetensors.open_checkpoint(folder)
    config = source.config
    experts = range(config.n_routed_experts)
    slabs = tuple(
        jax.tree.map(jnp.asarray, load.load_expert_slab(source, layer, experts))
        for layer in range(config.num_hidden_layers)
    )
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    tokens = np.load(folder / "tokens.npy")
    return Loaded(load.load_resident(source), slabs, tokens, expected)


@pytest.fixture(
    # With --dist loadgroup the tests of a case share a worker, and so its compiled blocks.
    params=[pytest.param(str(case), marks=pytest.mark.xdist_group(str(case))) for case in CASES]
)
def loaded(request: pytest.FixtureRequest, folders: dict[str, pathlib.Path]) -> Loaded:
    return load_case(folders[request.param])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a block did with a chunk; `entries` on CSA layers only."""

    streams: jax.Array
    state: cache.LayerState
    experts: jax.Array
    weights: jax.Array
    entries: jax.Array | None


@jax.jit
def run_block(block, streams, state, chunk, slab, where) -> Output:
    attended, _, entries = block.attend_and_select(streams, state, chunk, NUMERICS)
    routing = block.route(attended, chunk, NUMERICS)
    streams, state = block(streams, state, chunk, (slab,), where, NUMERICS)
    return Output(streams, state, routing.ids, routing.weights, entries)


@jax.jit
def run_embedding(transformer, tokens) -> jax.Array:
    return transformer.embed_tokens(tokens, NUMERICS)


@jax.jit
def run_head(transformer, streams) -> jax.Array:
    return transformer.logits(streams)


def relative_error(actual: jax.Array, expected: np.ndarray) -> np.ndarray:
    """L2 norm of the difference over that of `expected`, per row."""
    flat = expected.reshape(len(expected), -1).astype(np.float64)
    difference = np.asarray(actual, np.float64).reshape(flat.shape) - flat
    return np.linalg.norm(difference, axis=-1) / np.linalg.norm(flat, axis=-1)


def split(name: str) -> list[int]:
    """Chunk lengths that add up to TOKENS."""
    starts = {"uneven": [3, 1, 5, 2], "sevens": [7] * 29, "ones": [1] * TOKENS}[name]
    rest = TOKENS - sum(starts)
    return starts + [ROWS] * (rest // ROWS) + [rest % ROWS] * (rest % ROWS > 0)


def chunks(tokens: np.ndarray, lengths: list[int]) -> list[cache.Chunk]:
    ends = np.cumsum(lengths)
    assert ends[-1] == len(tokens)
    return [
        cache.make_chunk(tokens[end - length : end], int(end - length), ROWS)
        for end, length in zip(ends, lengths, strict=True)
    ]


def test_oracle_reproduces_the_stored_values(tmp_path: pathlib.Path):
    """Another torch or transformers than the one that made the golden data still agrees."""
    run_oracle((GOLDEN, tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as actual, np.load(GOLDEN / "expected.npz") as stored:
        rows = stored["logit_positions"]
        assert relative_error(actual["logits"][rows], stored["logits"]).max() < LOGITS_LIMIT
        for name in ("router_experts", "csa_layers", "csa_topk"):
            np.testing.assert_array_equal(actual[name], stored[name], err_msg=name)
        print("oracle:", *actual["versions"])


def test_no_selection_is_a_tie(loaded: Loaded):
    """A precondition of the exact comparisons below; if it fails, choose another token seed."""
    gaps = [loaded.expected[name].min(initial=np.inf) for name in ("router_gap", "csa_gap")]
    assert min(gaps) > MIN_GAP, gaps


def test_each_layer_alone(loaded: Loaded):
    """Fed with the oracle's streams, so that no error of an earlier layer can hide or add up."""
    expected, config = loaded.expected, loaded.config
    chunk = cache.make_chunk(loaded.tokens, 0, TOKENS)
    sparse = expected["csa_layers"].tolist()
    for layer, state in enumerate(loaded.empty()):
        where = f"layer {layer}, ratio {config.layer_ratios[layer]}"
        output = loaded.run(layer, jnp.asarray(expected["streams"][layer]), state, chunk)
        order = np.argsort(output.experts, axis=-1)
        experts = np.take_along_axis(np.asarray(output.experts), order, axis=-1)
        weights = np.take_along_axis(np.asarray(output.weights), order, axis=-1)
        np.testing.assert_array_equal(experts, expected["router_experts"][layer], where)
        np.testing.assert_allclose(
            weights, expected["router_weights"][layer], rtol=5e-6, err_msg=where
        )
        if layer in sparse:
            np.testing.assert_array_equal(
                output.entries, expected["csa_topk"][sparse.index(layer)], where
            )
        error = relative_error(output.streams, expected["streams"][layer + 1])
        assert error.max() < LAYER_LIMIT, f"{where}: {error.max():.1e} at {error.argmax()}"


@pytest.mark.parametrize("name", ["uneven", "sevens"])
def test_each_layer_alone_in_chunks(loaded: Loaded, name: str):
    expected = loaded.expected
    for layer, state in enumerate(loaded.empty()):
        outputs = []
        for chunk in chunks(loaded.tokens, split(name)):
            start, length = int(chunk.position), int(chunk.length)
            rows = np.zeros((ROWS, *expected["streams"].shape[2:]), np.float32)
            rows[:length] = expected["streams"][layer][start : start + length]
            output = loaded.run(layer, jnp.asarray(rows), state, chunk)
            state = output.state
            outputs.append(np.asarray(output.streams[:length]))
        error = relative_error(np.concatenate(outputs), expected["streams"][layer + 1])
        assert error.max() < LAYER_LIMIT, f"layer {layer}: {error.max():.1e} at {error.argmax()}"


def logits(loaded: Loaded, pieces: list[cache.Chunk]) -> np.ndarray:
    """Logits of every position, computed chunk by chunk."""
    states = loaded.empty()
    rows = []
    for chunk in pieces:
        streams = run_embedding(loaded.transformer, chunk.tokens)
        for layer, state in enumerate(states):
            output = loaded.run(layer, streams, state, chunk)
            streams, states[layer] = output.streams, output.state
        rows.append(np.asarray(run_head(loaded.transformer, streams))[: int(chunk.length)])
    return np.concatenate(rows)


def test_whole_model(loaded: Loaded):
    actual = logits(loaded, [cache.make_chunk(loaded.tokens, 0, TOKENS)])
    assert relative_error(actual, loaded.expected["logits"]).max() < LOGITS_LIMIT


@pytest.mark.parametrize("name", ["uneven", "sevens", "ones"])
def test_whole_model_in_chunks(loaded: Loaded, name: str):
    actual = logits(loaded, chunks(loaded.tokens, split(name)))
    assert relative_error(actual, loaded.expected["logits"]).max() < LOGITS_LIMIT


# (key of config.json, schedule, layer that depends on it, other value): a field that some module
# took as a constant would leave the layer unchanged.
OTHER_VALUES = [
    ("rms_norm_eps", "flash", 0, lambda value: 1.1 * value),
    ("hc_eps", "flash", 0, lambda value: 2 * value),
    ("hc_sinkhorn_iters", "flash", 0, lambda value: value + 1),
    ("rope_theta", "flash", 0, lambda value: 1.01 * value),
    ("sliding_window", "flash", 0, lambda value: value + 1),
    ("swiglu_limit", "flash", 0, lambda value: 1.01 * value),
    ("routed_scaling_factor", "flash", 0, lambda value: 1.01 * value),
    ("compress_rope_theta", "pro", 0, lambda value: 1.01 * value),
    ("rope_scaling", "pro", 0, lambda value: {**value, "factor": 1.1 * value["factor"]}),
    ("rope_scaling", "pro", 0, lambda value: {**value, "beta_fast": 2.0}),
    ("index_topk", "pro", 2, lambda value: value + 1),
]


@pytest.mark.parametrize(("key", "schedule", "layer", "other"), OTHER_VALUES)
def test_field_reaches_its_layer(key, schedule, layer, other, folders, tmp_path: pathlib.Path):
    """With another value of the field the comparison fails by far: the limits mean something."""
    folder = folders[f"{schedule}-0"]
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config[key] = other(config[key])
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    changed = load_case(tmp_path)
    chunk = cache.make_chunk(changed.tokens[:ROWS], 0, ROWS)
    streams = changed.expected["streams"][layer, :ROWS]
    output = changed.run(layer, jnp.asarray(streams), changed.empty()[layer], chunk)
    error = relative_error(output.streams, changed.expected["streams"][layer + 1, :ROWS])
    assert error.max() > 10 * LAYER_LIMIT, error.max()
