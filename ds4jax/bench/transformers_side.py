"""Times transformers' DeepSeek-V4 on random bfloat16 weights; run by `beside_transformers`.

    python transformers_side.py CONFIG.json OUT.json LENGTHS REPEATS

CONFIG is a published config.json whose layers are the ones to run. Weights are made on the GPU with
the library's own initialisation, in the dtypes that it loads: bfloat16, and float32 where it keeps
that. A time goes from the token ids in host memory to the logits of the last one there. Lengths are
tried in ascending order; OUT is rewritten after each, with the error of what did not run. Needs
torch and transformers and nothing else.
"""

import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention"}
COARSE = "heavily_compressed_attention"
# The library's ways to compute the routed experts, the fastest that runs is reported.
EXPERTS = ("grouped_mm", "eager")


def build(raw: dict[str, Any], experts: str, device: str) -> Any:
    """A model of the layers of `raw` with random weights on `device`."""
    torch, transformers = _libraries()

    values = {
        key: value
        for key, value in raw.items()
        if key not in ("compress_ratios", "quantization_config", "num_nextn_predict_layers")
    }
    ratios = raw["compress_ratios"][: raw["num_hidden_layers"]]
    values["layer_types"] = [LAYER_TYPES.get(ratio, COARSE) for ratio in ratios]
    config = transformers.DeepseekV4Config.from_dict(values)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.DeepseekV4ForCausalLM._from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation="eager",
            experts_implementation=experts,
        )
    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    # Older versions list norms whose float32 weights make float32 activations, which their own
    # bfloat16 linears refuse.
    norm = model.model.norm.float()
    if norm(torch.zeros(1, config.hidden_size, device=device, dtype=torch.bfloat16)).dtype != (
        torch.bfloat16
    ):
        wide -= {name for name in wide if name.endswith("norm")}
        norm.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if wide.intersection(name.split(".")):
            parameter.data = parameter.data.float()
    return model.eval()


def measure(model: Any, ids: Any, repeats: int) -> dict[str, Any]:
    """Seconds of `repeats` runs after one that warms up, and the peak of the device's memory."""
    torch, _ = _libraries()

    cuda = next(model.parameters()).is_cuda
    seconds: list[float] = []
    logits = None
    for run in range(repeats + 1):
        began = time.perf_counter()
        placed = ids.to(next(model.parameters()).device)
        with torch.no_grad():
            output = model(input_ids=placed[None], use_cache=True, logits_to_keep=1)
        logits = output.logits[0, -1].float().cpu()
        if run:
            seconds.append(time.perf_counter() - began)
        del output
    assert logits is not None
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "rate_tokens_per_s": len(ids) / statistics.median(seconds),
        "finite": bool(torch.isfinite(logits).all()),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def main(arguments: list[str]) -> int:
    """Runs the command."""
    torch, transformers = _libraries()

    raw = json.loads(Path(arguments[0]).read_text())
    lengths = sorted(int(part) for part in arguments[2].split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "rows": [],
    }
    model = None
    for experts in EXPERTS:
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        try:
            model = build(raw, experts, device)
        except Exception as error:  # a way that this version does not know
            model = None
            record["rows"].append({"experts": experts, "error": _told(error)})
            continue
        for length in lengths:
            row: dict[str, Any] = {"experts": experts, "prompt_tokens": length}
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, raw["vocab_size"], (length,), generator=generator)
            try:
                row.update(measure(model, ids, int(arguments[3])))
            except Exception as error:
                row["error"] = _told(error)
            record["rows"].append(row)
            Path(arguments[1]).write_text(json.dumps(record, indent=2))
            print(json.dumps(row), file=sys.stderr, flush=True)
            if "error" in row:
                break
    Path(arguments[1]).write_text(json.dumps(record, indent=2))
    return 0


def _libraries() -> tuple[Any, Any]:
    """torch and transformers, which ds4jax itself does without."""
    return importlib.import_module("torch"), importlib.import_module("transformers")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
