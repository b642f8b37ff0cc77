"""Test doubles for users and for this package's own tests: a tiny model on disk, a fake clock."""

import hashlib
import json
import os
import pathlib
from typing import Literal

import jax
import numpy as np

from ds4jax.checkpoint import keys, safetensors
from ds4jax.checkpoint.source import TensorInfo, TensorSource, config_text
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ModelConfig, RopeScaling
from ds4jax.readings import PrefillResult
from pallas_kernels.codecs import host

# Special tokens come first, so that bos and eos have the ids of the released models.
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)
BYTE_VOCAB = len(SPECIAL_TOKENS) + 256

Storage = Literal["official", "base", "float32"]


def tiny_config() -> ModelConfig:
    """A model of five layers, all three attention kinds, hash and score routing.

    Widths are legal for every storage format, the prompt of a few hundred tokens makes the
    indexer choose, and the clamp of the experts is low enough to act. Equals
    `configs/models/tiny.json`.
    """
    return ModelConfig(
        vocab_size=BYTE_VOCAB,
        hidden_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        sliding_window=128,
        compress_ratios=(0, 0, 4, 128, 4, 0),
        rope_theta=10000,
        compress_rope_theta=160000,
        rope_scaling=RopeScaling("yarn", 16, 65536, 32, 1),
        max_position_embeddings=1048576,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        num_hash_layers=3,
        routed_scaling_factor=1.5,
        swiglu_limit=2.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
    )


def write_checkpoint(
    folder: str | os.PathLike[str],
    config: ModelConfig | None = None,
    seed: int = 0,
    *,
    storage: Storage = "official",
    shards: int = 1,
) -> pathlib.Path:
    """Writes a whole checkpoint of random weights in the published layout; returns its folder.

    config   `tiny_config()` when absent
    storage  "official": FP8 linears and FP4 experts; "base": FP8 experts; "float32": the values of
             "official", decoded, without scales
    shards   number of safetensors files; an index is written when there are several

    The folder also gets `config.json` and, when the vocabulary has room for all bytes, a
    byte-level `tokenizer.json`. The draft block `mtp.0` is included, as in the published files.
    """
    folder = pathlib.Path(folder)
    config = config or tiny_config()
    source = SyntheticSource(config, seed, experts="fp8" if storage == "base" else "fp4")
    folder.mkdir(parents=True, exist_ok=True)
    experts = {"official": "fp4", "base": "fp8", "float32": None}[storage]
    (folder / "config.json").write_text(config_text(config, experts), encoding="utf-8")
    if config.vocab_size >= BYTE_VOCAB:
        (folder / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    infos = dict(source.infos())
    if storage == "float32":
        infos = {
            name: info if info.dtype == "I64" else TensorInfo("F32", _value_shape(info))
            for name, info in infos.items()
            if not name.endswith(".scale")
        }
    names, weight_map = list(infos), {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        if shards == 1:
            file = safetensors.SINGLE_NAME
        safetensors.write_file(
            folder / file,
            {name: infos[name] for name in part},
            source.read if storage != "float32" else lambda name: decoded(source, name),
        )
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(info.nbytes for info in infos.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / safetensors.INDEX_NAME).write_text(json.dumps(index, indent=1))
    return folder


def _value_shape(info: TensorInfo) -> tuple[int, ...]:
    packed = info.dtype == "I8"
    return (*info.shape[:-1], info.shape[-1] * 2) if packed else info.shape


def decoded(source: TensorSource, name: str) -> np.ndarray:
    """The values of a tensor: float32 for every storage format, integers as they are."""
    info, array = source.info(name), source.read(name)
    if info.dtype == "I64":
        return array
    if info.dtype not in ("I8", "F8_E4M3"):
        return array.astype(np.float32)
    scales = source.read(keys.scale_name(name)).view(np.uint8)
    if info.dtype == "I8":
        return host.decode_fp4(array.view(np.uint8), scales)
    return host.decode_fp8(array, scales)


def byte_tokenizer() -> str:
    """A `tokenizer.json` with one token per byte after the special tokens; it merges nothing."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte, character in enumerate(_byte_characters()):
        vocabulary[character] = len(SPECIAL_TOKENS) + byte
    special = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
        ensure_ascii=False,
        indent=1,
    )


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in the ByteLevel scheme of the tokenizers library."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class FakeClock:
    """A clock that moves only when told to.

    Call it like `time.monotonic`; pass `sleep` where `time.sleep` is expected.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The current time in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        """Returns at once with the clock moved forward."""
        self.advance(seconds)


def result_hash(result: PrefillResult) -> str:
    """sha256 of the logits and of every array of the state: equal for equal bits."""
    assert result.logits is not None
    digest = hashlib.sha256(result.logits.tobytes())
    for leaf in jax.tree.leaves(result.state):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
