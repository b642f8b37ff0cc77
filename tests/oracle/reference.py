"""Runs transformers' DeepSeek-V4 in float32 on tiny checkpoints and writes what it computed.

    .oracle/bin/python tests/oracle/reference.py CASE_DIR OUT.npz [CASE_DIR OUT.npz ...]

CASE_DIR holds `config.json` (published field names), float32 safetensors under the official names
and `tokens.npy` (int [T], first token at position 0). OUT.npz gets, with L layers, S streams:

    streams         f32 [L + 1, T, S, D]   residual streams before layer 0 and after every layer
    logits          f32 [T, V]
    router_experts  i32 [L, T, k]          chosen experts, ascending
    router_weights  f32 [L, T, k]          their weights, routed scaling factor included
    router_gap      f32 [L, T]             last chosen minus first rejected score (hash: inf)
    csa_layers      i32 [C]                layers with an indexer
    csa_topk        i32 [C, T, index_topk] chosen compressed entries, ascending, then -1
    csa_gap         f32 [C, T]             as router_gap; inf where nothing is rejected
    versions        str [2]                torch and transformers

This program imports nothing of the engine: it is the other side of the comparison.
"""

import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported

import numpy as np
import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

OVERLAPPED_RATIO = 4
SPARSE = "compressed_sparse_attention"
COARSE = "heavily_compressed_attention"
LAYER_TYPES = {0: "sliding_attention", OVERLAPPED_RATIO: SPARSE}


def load_config(folder: pathlib.Path) -> DeepseekV4Config:
    """Reads config.json; the layer schedule is always the explicit one of `compress_ratios`.

    transformers maps only the ratios 0, 4 and 128 and falls back to a schedule that is neither
    model's when the list is absent, so the schedule is spelled out here. One coarse ratio per
    model is all that its configuration can express.
    """
    raw = json.loads((folder / "config.json").read_text())
    ratios = raw.pop("compress_ratios")[: raw["num_hidden_layers"]]
    coarse = sorted(set(ratios) - set(LAYER_TYPES))
    if len(coarse) > 1:
        raise ValueError(f"{folder}: compress_ratios has {coarse}, the oracle can run one of them")
    raw["layer_types"] = [LAYER_TYPES.get(ratio, COARSE) for ratio in ratios]
    if coarse:
        raw["compress_rate_hca"] = coarse[0]
    config = DeepseekV4Config.from_dict(raw)
    # With a wrong one of these, results look plausible and every comparison is worthless.
    yarn = config.rope_parameters["compress"]
    assert yarn["rope_type"] == "yarn", yarn
    assert yarn["attention_factor"] == 1.0, yarn
    assert config.layer_types == raw["layer_types"], config.layer_types
    assert config.qk_rope_head_dim == raw["qk_rope_head_dim"], config.qk_rope_head_dim
    return config


def load_model(folder: pathlib.Path, config: DeepseekV4Config) -> DeepseekV4ForCausalLM:
    """Loads the official names through transformers' own conversion; every key has to match."""
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {name: sorted(map(str, found)) for name, found in info.items() if found}
    if problems:
        raise ValueError(f"{folder}: transformers could not place every tensor: {problems}")
    # Rotary tables take the dtype of the activations here: float32 weights keep them exact.
    wrong = [name for name, p in model.named_parameters() if p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"{folder}: not float32 after loading: {wrong}")
    return model.eval()


def select(scores: torch.Tensor, visible: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [T, k] of the k best visible scores (ascending, -1 at the end) and gaps [T].

    scores, visible are [T, N]; the gap is inf where no visible score is rejected.
    """
    count = scores.shape[1]
    masked = scores.masked_fill(~visible, float("-inf"))
    padded = torch.nn.functional.pad(masked, (0, max(0, k + 1 - count)), value=float("-inf"))
    values, ids = padded.topk(k + 1, dim=-1)
    ids = ids.masked_fill(values == float("-inf"), 2**31 - 1)[:, :k].sort(dim=-1).values
    ids = ids.masked_fill(ids == 2**31 - 1, -1)
    gap = torch.where(values[:, k] == float("-inf"), float("inf"), values[:, k - 1] - values[:, k])
    return ids.numpy().astype(np.int32), gap.numpy()


class Recorder:
    """Collects streams, routing and selections through forward hooks."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.config = model.config
        self.streams: list[np.ndarray] = []
        self.routing: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.csa_layers: list[int] = []
        self.csa: list[tuple[np.ndarray, np.ndarray]] = []
        layers = model.model.layers
        layers[0].register_forward_pre_hook(lambda _, args: self._stream(args[0]))
        for number, layer in enumerate(layers):
            layer.register_forward_hook(lambda _, args, out: self._stream(out))
            layer.mlp.gate.register_forward_hook(self._route)
            if self.config.layer_types[number] == SPARSE:
                self.csa_layers.append(number)
                layer.self_attn.compressor.indexer.scorer.register_forward_hook(self._select)
                layer.self_attn.compressor.indexer.register_forward_hook(self._check_selection)

    def _stream(self, value: torch.Tensor) -> None:
        self.streams.append(value[0].numpy().copy())

    def _route(self, gate: torch.nn.Module, args: tuple, out: tuple) -> None:
        logits, weights, ids = out
        order = ids.argsort(dim=-1)
        gap = np.full(len(ids), np.inf, np.float32)
        if hasattr(gate, "e_score_correction_bias"):
            biased = gate.score_fn(logits) + gate.e_score_correction_bias
            _, gap = select(biased, torch.ones_like(biased, dtype=torch.bool), gate.top_k)
        self.routing.append(
            (
                ids.gather(1, order).numpy().astype(np.int32),
                weights.gather(1, order).numpy(),
                gap,
            )
        )

    def _select(self, scorer: torch.nn.Module, args: tuple, scores: torch.Tensor) -> None:
        tokens, count = scores.shape[1:]
        complete = (torch.arange(tokens) + 1) // OVERLAPPED_RATIO
        visible = torch.arange(count)[None, :] < complete[:, None]
        self.csa.append(select(scores[0], visible, self.config.index_topk))

    def _check_selection(self, indexer: torch.nn.Module, args: tuple, out: torch.Tensor) -> None:
        """The sets written are recomputed from the scores; they must be the sets that were used."""
        chosen, gap = self.csa[-1]
        for row, used in enumerate(out[0].numpy()):
            wanted = set(chosen[row][chosen[row] >= 0].tolist())
            # An exact tie (gap 0) may fall either way; callers avoid such prompts by the gap.
            assert gap[row] == 0 or set(used[used >= 0].tolist()) == wanted, row


@torch.no_grad()
def run(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Computes every array of the module docstring for one case folder."""
    config = load_config(folder)
    model = load_model(folder, config)
    recorder = Recorder(model)
    tokens = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    experts, weights, gaps = (np.stack(column) for column in zip(*recorder.routing, strict=True))
    shape = (len(recorder.csa), len(tokens))  # np.stack refuses an empty list: reshape instead
    return {
        "streams": np.stack(recorder.streams),
        "logits": logits.numpy(),
        "router_experts": experts,
        "router_weights": weights,
        "router_gap": gaps,
        "csa_layers": np.asarray(recorder.csa_layers, np.int32),
        "csa_topk": np.asarray([ids for ids, _ in recorder.csa], np.int32).reshape(
            *shape, config.index_topk
        ),
        "csa_gap": np.asarray([gap for _, gap in recorder.csa], np.float32).reshape(shape),
        "versions": np.asarray([torch.__version__, transformers.__version__]),
    }


def main(arguments: list[str]) -> int:
    if not arguments or len(arguments) % 2:
        print(__doc__, file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for folder, out in zip(arguments[::2], arguments[1::2], strict=True):
        np.savez(out, **run(pathlib.Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
