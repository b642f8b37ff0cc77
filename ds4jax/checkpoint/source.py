"""What a checkpoint is to the rest of the program: named tensors that can be read in parts."""

import abc
import concurrent.futures
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import ml_dtypes
import numpy as np

from ds4jax.config import ModelConfig

READ_THREADS = min(16, 2 * (os.cpu_count() or 1))
READ_BYTES = 64 << 20  # one task reads at most this much, so that threads finish together

# safetensors dtype names. V4 stores packed FP4 codes as I8 because the format has no FP4.
DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}


LISTED_PROBLEMS = 100


class CheckpointError(ValueError):
    """A checkpoint or saved state that cannot be used as it is.

    problems  every finding, one line each.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)

    @classmethod
    def listing(cls, title: str, problems: Sequence[str]) -> "CheckpointError":
        """An error whose message has one line for every problem.

        When there are more than 100, those that differ only in numbers share a line.
        """
        lines = list(problems)
        if len(lines) > LISTED_PROBLEMS:
            groups: dict[str, list[str]] = {}
            for line in lines:
                groups.setdefault(re.sub(r"\d+", "#", line), []).append(line)
            lines = [
                group[0] if len(group) == 1 else f"{group[0]} (and {len(group) - 1} more like it)"
                for group in groups.values()
            ]
        noun = "problem" if len(problems) == 1 else "problems"
        return cls("\n  ".join([f"{title} ({len(problems)} {noun}):", *lines]), problems)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a header says about a tensor: safetensors dtype name and shape as stored."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        """The numpy (or ml_dtypes) dtype of the elements."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


class TensorSource(abc.ABC):
    """Named tensors of one model; safe to read from several threads at once.

    config  the model the tensors belong to
    """

    config: ModelConfig

    @abc.abstractmethod
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its published name. Reads no data."""

    @abc.abstractmethod
    def read_into(self, name: str, buffer: np.ndarray, start: int = 0) -> None:
        """Fills `buffer` (uint8 [n], contiguous) with bytes start..start+n of a tensor."""

    @abc.abstractmethod
    def provenance(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Where these tensors come from, as JSON: equal values mean unchanged origins."""

    def expert_origin(self, layer: int) -> int:
        """The first layer whose routed experts have the bytes of this one's: mostly itself."""
        return layer

    def close(self) -> None:  # noqa: B027  (most sources hold nothing)
        """Releases files. Reading afterwards is an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def config_text(self) -> str:
        """The model's `config.json`."""
        return config_text(self.config)

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self.infos())

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor; CheckpointError when there is none of that name."""
        try:
            return self.infos()[name]
        except KeyError:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}: run ds4jax-inspect on it for the full list"
            ) from None

    def require_range(self, name: str, buffer: np.ndarray, start: int) -> None:
        """Raises ValueError unless bytes start..start+n of a tensor exist, n those of `buffer`."""
        nbytes = self.info(name).nbytes
        if start < 0 or start + buffer.nbytes > nbytes:
            raise ValueError(
                f"{name} has {nbytes} bytes, bytes {start}..{start + buffer.nbytes} were asked for"
            )

    def read(self, name: str) -> np.ndarray:
        """The whole tensor, in a fresh array of its stored dtype."""
        return self.read_many([name])[name]

    def read_many(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Several whole tensors, read in parallel."""
        arrays = {}
        for name in names:
            info = self.info(name)
            arrays[name] = np.empty(info.shape, info.numpy_dtype)
        self.fill(arrays.items())
        return arrays

    def fill(self, targets: Iterable[tuple[str, np.ndarray]]) -> None:
        """Reads whole tensors into given contiguous arrays of the same number of bytes.

        The arrays may have another dtype or shape: bytes are copied. Reads run in parallel; the
        first error is raised once all have ended.
        """
        tasks = []
        for name, array in targets:
            wanted = self.info(name).nbytes
            if array.nbytes != wanted or not array.flags.c_contiguous:
                raise ValueError(
                    f"{name} has {wanted} bytes, the given array {array.nbytes} "
                    f"(contiguous: {array.flags.c_contiguous}): expected a contiguous array of "
                    "the same size"
                )
            data = array.reshape(-1).view(np.uint8)
            for start in range(0, wanted, READ_BYTES):
                tasks.append((name, data[start : start + READ_BYTES], start))
        if len(tasks) == 1:  # threads cost more than a small tensor
            self.read_into(*tasks[0])
            return
        with concurrent.futures.ThreadPoolExecutor(READ_THREADS) as pool:
            futures = [pool.submit(self.read_into, *task) for task in tasks]
        for future in futures:
            future.result()


_FIXED_KEYS = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
_QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def config_text(config: ModelConfig, experts: str | None = "fp4") -> str:
    """A `config.json` with the published keys; `ModelConfig.from_json` of it gives `config`.

    experts  "fp4" or "fp8": how the experts of a quantised checkpoint are stored; None: nothing
             in the checkpoint is quantised.
    """
    keys = {**_FIXED_KEYS, **dataclasses.asdict(config)}
    if experts is not None:
        keys |= {"quantization_config": _QUANTIZATION, "expert_dtype": experts}
    return json.dumps(keys, indent=2, sort_keys=True) + "\n"
