"""How a model is run: the frozen `RunConfig`, read from TOML, with dotted overrides.

A key is called `config.SECTION.NAME` everywhere: in error messages, on the command line and, with
SECTION as a table, in the TOML file.
"""

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds4jax.config import KV_FORMS, PRESETS, SIMULATIONS, ConfigError, Numerics

LOGITS_MODES = ("last", "all", "none", "logprobs")
EXCHANGES = ("copy", "collective")
PROMPT_FORMS = ("text", "chat", "thinking")
ORDERS = ("auto", "chunk_major", "layer_major")
STREAM_MODES = ("auto", "whole", "routed")
PLACES = ("auto", "device", "host")
TIERS = ("auto", "ram", "disk")
READERS = ("preadv", "direct", "mmap")
NUMA_POLICIES = ("auto", "bind", "interleave", "off")
NOTES = ("fetch", "callback")
ROUTINGS = ("uniform", "zipf")
HANDOFFS = ("auto", "permute", "transfer", "device_put", "socket")
EFFORTS = ("none", "high", "max")
EFFORT_TEXTS = ("original", "0731")
MOST_TOKENS = 2**31 - 1  # positions are int32
_MOST = 2**53  # of any whole number: plans and reports hold them in floats, too


def _key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
) -> Any:
    """A leaf of the run configuration: default, help text and the values it may take."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


class _Section:
    """Checks the leaves of a section against the limits that `_key` declares."""

    prefix = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(typing.cast(Any, self)):
            _check_limits(f"{self.prefix}.{field.name}", getattr(self, field.name), field.metadata)


@dataclasses.dataclass(frozen=True)
class NumericsConfig(_Section):
    """Which roundings are made; `resolve` gives the setting itself."""

    prefix = "config.numerics"

    preset: str = _key(
        "official",
        "Named roundings: oracle = float32 without simulations, bfloat16 = bfloat16 without "
        "simulations, official = bfloat16 with q1, q2 and q3.",
        choices=tuple(PRESETS),
    )
    compute: str | None = _key(
        None, "Replaces the preset's compute dtype.", choices=("float32", "bfloat16")
    )
    simulate: tuple[str, ...] | None = _key(
        None,
        "Replaces the preset's simulated quantisations: any of q1, q2, q3, comma separated, or "
        "none.",
        choices=(*SIMULATIONS, "none"),
    )

    kv: str = _key(
        "plain",
        "How compressed KV entries are kept: plain = in the compute dtype; fp8 = 584 instead of "
        "1,024 bytes each, with equal results (needs q2).",
        choices=KV_FORMS,
    )

    def resolve(self) -> Numerics:
        """The preset with the replacements applied."""
        preset = PRESETS[self.preset]
        simulate = preset.simulate if self.simulate is None else self.simulate
        if "none" in simulate and len(simulate) > 1:
            raise ConfigError(
                f"config.numerics.simulate is {','.join(simulate)!r}: 'none' stands alone, "
                f"expected it or any of {', '.join(SIMULATIONS)}"
            )
        return Numerics(
            self.compute or preset.compute,
            () if simulate == ("none",) else tuple(simulate),
            self.kv,
        )


@dataclasses.dataclass(frozen=True)
class PrefillConfig(_Section):
    """How prompts are read and what is kept of the result."""

    prefix = "config.prefill"

    chunk_tokens: int = _key(
        8192,
        "Tokens per chunk. Part of what fixes the output bits: equal bits are promised for equal "
        "chunk_tokens only.",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    logits: str = _key(
        "last",
        "last = logits of the last token; all = of every token (4 * vocab bytes each); logprobs = "
        "log-probability of every next token and the most likely ones; none.",
        choices=LOGITS_MODES,
    )
    top_logprobs: int = _key(
        8, "How many of the most likely next tokens logits=logprobs keeps per token.", minimum=1
    )
    save_state: bool = _key(
        False, "Whether the state after each prompt is saved in the output folder."
    )
    max_tokens: int | None = _key(
        None,
        "Tokens that the state has room for. Default: the smallest of 8192 * 4^k that holds the "
        "prompt.",
        minimum=1,
        maximum=MOST_TOKENS,
    )


@dataclasses.dataclass(frozen=True)
class PromptConfig(_Section):
    """The prompts of a run and the form in which text is put to the model."""

    prefix = "config.prompt"

    text: tuple[str, ...] = _key((), "Prompt texts; on the command line repeat the flag.")
    file: str | None = _key(None, "UTF-8 file with one prompt.")
    prompts_file: str | None = _key(
        None,
        'JSON lines, one prompt each: {"text": ...}, {"messages": [...], "tools": [...]} or '
        '{"tokens": [...]}; "name" is optional.',
    )
    tokens: str | None = _key(None, "A .npy file with the token ids of one prompt.")
    form: str = _key(
        "text",
        "text = the text after the begin-of-sentence mark; chat or thinking = a user turn that the "
        "assistant answers without or with reasoning.",
        choices=PROMPT_FORMS,
    )
    effort: str = _key("none", "Reasoning effort of the form thinking.", choices=EFFORTS)
    effort_texts: str = _key(
        "original",
        "Whose wording of the effort paragraph: the first V4 releases or the 0731 revision.",
        choices=EFFORT_TEXTS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.sources()
        if len(given) > 1:
            raise ConfigError(
                f"the prompt is given {len(given)} times, by "
                f"{' and '.join(f'config.prompt.{name}' for name in given)}: give it once"
            )
        if self.effort != "none" and self.form != "thinking":
            raise ConfigError(
                f"config.prompt.effort is {self.effort!r} with config.prompt.form {self.form!r}, "
                "expected the form 'thinking'"
            )

    def sources(self) -> list[str]:
        """Names of the fields that give a prompt."""
        names = ("text", "file", "prompts_file", "tokens")
        return [name for name in names if getattr(self, name)]


@dataclasses.dataclass(frozen=True)
class MemoryConfig(_Section):
    """How much of the device a run may use."""

    prefix = "config.memory"

    device_bytes: int | None = _key(
        None,
        "Device memory of the run: weights, state, workspace, experts and slabs together. Default: "
        "all that is free.",
        minimum=1,
    )


@dataclasses.dataclass(frozen=True)
class MachineConfig(_Section):
    """What is known of the machine."""

    prefix = "config.machine"

    file: str | None = _key(
        None,
        "Machine file that python -m ds4jax.cli.probe wrote: its rates decide plans and their "
        "predictions. Default: those of an H200.",
    )


@dataclasses.dataclass(frozen=True)
class StreamingConfig(_Section):
    """Where routed experts are kept, and how the others come to the device. Never changes bits."""

    prefix = "config.streaming"

    order: str = _key(
        "auto",
        "chunk_major = a chunk goes through all layers before the next one; layer_major = all "
        "chunks of a micro-batch go through a layer before the next one, so that a streamed expert "
        "moves once per micro-batch; auto = layer_major when experts are streamed.",
        choices=ORDERS,
    )
    micro_batch_tokens: int | None = _key(
        None,
        "Tokens of a layer_major micro-batch, of one or several prompts; rounded up to whole "
        "chunks. Default: the longest prompt, as far as memory allows.",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    activations: str = _key(
        "auto",
        "Where a layer_major micro-batch waits between two layers: device, host (page-locked "
        "memory; chunks come and go beside the compute), or auto = device while the prompt fits "
        "there, else where the plan expects less time.",
        choices=PLACES,
    )
    window: int | None = _key(
        None,
        "Slabs that are copied ahead. Default: as the plan expects the least time, at least 1 from "
        "host memory and 2 from disk.",
        minimum=0,
    )
    mode: str = _key(
        "auto",
        "whole = all streamed experts of a layer move ahead of it; routed = only those that the "
        "router asks for, after it has run; auto = by the distinct experts measured or expected.",
        choices=STREAM_MODES,
    )
    resident_fraction: float | None = _key(
        None,
        "Share of the experts of every layer that stays on the device. Default: what fits.",
        minimum=0,
        maximum=1,
    )
    resident_bytes: int | None = _key(
        None, "Bytes of experts that stay on the device, spread evenly over layers.", minimum=0
    )
    resident_profile: str | None = _key(
        None,
        "File of measured counts (profile.json of an earlier run): the most used experts stay on "
        "the device. Default: the lowest ids.",
    )
    slab_bytes: int | None = _key(
        None,
        "Device memory for slabs on their way; less than whole layers take is cut into waves.",
        minimum=1,
    )
    tier: str = _key(
        "auto",
        "Where streamed experts are kept: ram, disk (the files of the checkpoint), or auto = ram "
        "when they fit.",
        choices=TIERS,
    )
    reader: str = _key(
        "preadv",
        "How experts are read from disk: preadv = through the page cache; direct = past it; mmap = "
        "by page faults, for comparison.",
        choices=READERS,
    )
    numa: str = _key("auto", "NUMA placement of experts in host memory.", choices=NUMA_POLICIES)
    notes: str = _key(
        "fetch",
        "How counts of used experts come to the host: fetch = copied beside the compute; callback "
        "= a host callback after every router.",
        choices=NOTES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resident_fraction is not None and self.resident_bytes is not None:
            raise ConfigError(
                f"config.streaming.resident_fraction is {self.resident_fraction} and "
                f"config.streaming.resident_bytes is {self.resident_bytes}: give one of them"
            )


@dataclasses.dataclass(frozen=True)
class PipelineConfig(_Section):
    """How layers are divided over devices. Never changes bits on devices of one kind."""

    prefix = "config.pipeline"

    split: str | None = _key(
        None,
        "Layers of each stage, for example 22,21; they add up to the layers of the model. auto = "
        "what is predicted to be fastest. Default: all layers on one device.",
    )
    devices: str | None = _key(
        None,
        "Device of each stage by its index among JAX's local devices, for example 0,1; stages may "
        "share a device. Default: one device after the other. In a run of several processes the "
        "indices are those of the process that has the stage.",
    )
    handoff: str = _key(
        "auto",
        "How streams get from one process to the next: permute = a collective of the two devices "
        "(NCCL, Gloo); transfer = jax.experimental.transfer; device_put = jax.device_put, with two "
        "processes only; socket = through host memory; auto = permute, and transfer on CPUs.",
        choices=HANDOFFS,
    )
    handoff_timeout_s: int = _key(
        1800,
        "Longest wait of a process for the next micro-batch of the one before, and for the one "
        "after to take it.",
        minimum=1,
    )

    @property
    def automatic(self) -> bool:
        """Whether the planner splits the layers."""
        return self.split == "auto"

    def candidates(self, devices: int) -> list[int]:
        """The devices that an automatic split may use; raises ConfigError for others."""
        if self.devices is None:
            return list(range(devices))
        indices = _integers("config.pipeline.devices", self.devices)
        if len(set(indices)) < len(indices) or any(not 0 <= each < devices for each in indices):
            raise ConfigError(
                f"config.pipeline.devices is {self.devices} with config.pipeline.split auto, "
                f"expected different indices from 0 to {devices - 1}"
            )
        return indices

    def stages(self, layers: int) -> list[range]:
        """The layers of each stage; raises ConfigError unless they are a split of `layers`."""
        if self.split is None:
            return [range(layers)]
        if self.automatic:
            raise ConfigError(
                "config.pipeline.split is auto: expected the layers of each stage, or a run that "
                "is planned for prompts"
            )
        sizes = _integers("config.pipeline.split", self.split)
        if min(sizes) < 1 or sum(sizes) != layers:
            raise ConfigError(
                f"config.pipeline.split is {self.split!r} with {sum(sizes)} layers, expected at "
                f"least 1 layer per stage and {layers} together"
            )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def device_indices(
        self, stages: int, devices: int, own: Sequence[int] | None = None
    ) -> list[int]:
        """The device of each of `stages` stages; raises ConfigError for devices that are not.

        own  numbers of the stages of this process, whose devices are asked for; None for all
        """
        own = range(stages) if own is None else own
        indices = list(range(len(own)))
        if self.devices is not None:
            given = _integers("config.pipeline.devices", self.devices)
            indices = [given[stage] for stage in own] if len(given) == stages else []
        if len(indices) != len(own) or any(not 0 <= index < devices for index in indices):
            raise ConfigError(
                f"config.pipeline.devices is {self.devices or indices} for {stages} stages, "
                f"expected {stages} indices from 0 to {devices - 1}: JAX has {devices} devices here"
            )
        return indices


@dataclasses.dataclass(frozen=True)
class PeerConfig(_Section):
    """What a second device does for a stage. Never changes bits on devices of one kind."""

    prefix = "config.peer"

    devices: str = _key(
        "auto",
        "The neighbour of each stage: its index among JAX's local devices, or cpu; for example 1 "
        "or 2,3. none = no neighbours; auto = devices without a stage hold or pass on streamed "
        "experts where the machine file has their links and the plan expects less time.",
    )
    compute_fraction: float = _key(
        0.0,
        "Share of the experts of every layer that the neighbour keeps and computes.",
        minimum=0,
        maximum=1,
    )
    exchange: str = _key(
        "copy",
        "How activations reach the neighbour's share: copy = from device to device, beside the "
        "stage's own share; collective = both devices in one program, each with half of the "
        "experts of every layer and none of them streamed.",
        choices=EXCHANGES,
    )
    memory_fraction: float = _key(
        0.0,
        "Share of the streamed experts that wait in the neighbour's memory instead of the host's.",
        minimum=0,
        maximum=1,
    )
    relay_fraction: float = _key(
        0.0,
        "Share of the streamed experts that come from host memory through the neighbour.",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_fraction + self.relay_fraction > 1:
            raise ConfigError(
                f"config.peer.memory_fraction is {self.memory_fraction} and "
                f"config.peer.relay_fraction is {self.relay_fraction}, expected at most 1 together"
            )
        shares = (self.compute_fraction, self.memory_fraction, self.relay_fraction)
        if not self.by_hand and any(shares):
            raise ConfigError(
                "config.peer has shares for a neighbour, but config.peer.devices is "
                f"{self.devices}: expected the device of each stage's neighbour"
            )

    @property
    def by_hand(self) -> bool:
        """Whether the configuration names the neighbours and their shares."""
        return self.devices not in ("auto", "none")

    @property
    def automatic(self) -> bool:
        """Whether the planner may use devices without a stage."""
        return self.devices == "auto"

    def device(self, stage: int, stages: int) -> str | None:
        """The neighbour that a stage was given; raises ConfigError unless every one has one."""
        if not self.by_hand:
            return None
        names = self.devices.split(",")
        if len(names) != stages or any(name != "cpu" and not name.isdecimal() for name in names):
            raise ConfigError(
                f"config.peer.devices is {self.devices!r} for {stages} stages, expected as many "
                "device indices, or cpu, with commas between"
            )
        return names[stage]


def _integers(key: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{key} is {text!r}, expected whole numbers with commas between"
        ) from None


@dataclasses.dataclass(frozen=True)
class SyntheticConfig(_Section):
    """Weights made up instead of read (checkpoints synthetic:...); other checkpoints ignore it."""

    prefix = "config.synthetic"

    distinct_layers: int | None = _key(
        None,
        "How many layers have routed experts of their own: layer l has those of layer l modulo "
        "this number, and the host keeps them once. Default: all.",
        minimum=1,
    )
    routing: str = _key(
        "uniform",
        "Which experts tokens choose: uniform, or zipf = shares of 1 / rank, and prompts of the "
        "bench with runs of equal tokens.",
        choices=ROUTINGS,
    )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything about a run that is neither the checkpoint nor the machine."""

    numerics: NumericsConfig = dataclasses.field(default_factory=NumericsConfig)
    prefill: PrefillConfig = dataclasses.field(default_factory=PrefillConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    machine: MachineConfig = dataclasses.field(default_factory=MachineConfig)
    streaming: StreamingConfig = dataclasses.field(default_factory=StreamingConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    peer: PeerConfig = dataclasses.field(default_factory=PeerConfig)
    synthetic: SyntheticConfig = dataclasses.field(default_factory=SyntheticConfig)
    prompt: PromptConfig = dataclasses.field(default_factory=PromptConfig)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "config") -> "RunConfig":
        """Builds the configuration from nested tables; missing keys take their defaults.

        Raises ConfigError for unknown keys (with the nearest name), wrong types and values that
        are out of range. `where` names the origin of the values in messages.
        """
        return _build(cls, values, where, "config")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "RunConfig":
        """Reads a TOML file whose tables are the sections."""
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except FileNotFoundError:
            raise ConfigError(
                f"--config: {os.fspath(path)} does not exist; the files that come with ds4jax are "
                "in configs/runs"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"--config: {os.fspath(path)} cannot be read ({error.strerror}): expected a TOML "
                "file"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{os.fspath(path)} is not TOML: {error}; expected tables such as [prefill]"
            ) from None
        return cls.from_mapping(values, os.fspath(path))

    def replace(self, overrides: Mapping[str, Any]) -> "RunConfig":
        """The same configuration with some leaves changed.

        overrides: dotted keys, with or without the leading `config.`, for example
        {"prefill.chunk_tokens": 1024}.
        """
        tree: dict[str, Any] = {}
        for key, value in overrides.items():
            *sections, name = key.removeprefix("config.").split(".")
            table = tree
            for section in sections:
                table = table.setdefault(section, {})
            table[name] = value
        return _build(type(self), tree, "override", "config", base=self)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as `from_mapping` takes them; unset keys are left out."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items() if item is not None}
            return list(value) if isinstance(value, tuple) else value

        return plain(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One key of a configuration: dotted name, plain type, whether it may be unset, limits."""

    key: str
    type: Any
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None
    minimum: int | None
    maximum: int | None


def leaves(cls: type = RunConfig, prefix: str = "config") -> Iterator[Leaf]:
    """All keys below the dataclass `cls`, in order of declaration."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}.{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], key)
            continue
        kind, optional = _plain_type(hints[field.name])
        limits = {name: field.metadata[name] for name in ("help", "choices", "minimum", "maximum")}
        yield Leaf(key, kind, optional, field.default, **limits)


def _nearest(name: str, cls: Any, prefix: str) -> str:
    """What to say of an unknown `name` in section `prefix`: a similar key here, then anywhere."""
    here = {field.name: f"{prefix}.{field.name}" for field in dataclasses.fields(cls)}
    anywhere = {leaf.key.rpartition(".")[2]: leaf.key for leaf in leaves()}
    for known in (here, anywhere):
        near = difflib.get_close_matches(name, known, n=1)
        if near:
            return f"did you mean {known[near[0]]}?"
    return f"expected one of {', '.join(here.values())}"


def _plain_type(hint: Any) -> tuple[Any, bool]:
    """(type without None, whether None was allowed)."""
    if isinstance(hint, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        return members[0], True
    return hint, False


def _build(cls: Any, values: Any, where: str, prefix: str, base: Any = None) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: {prefix} is {values!r}, expected a table of keys")
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if name not in hints:
            raise ConfigError(f"{where}: unknown key {key}, {_nearest(name, cls, prefix)}")
        if dataclasses.is_dataclass(hints[name]):
            part = getattr(base, name) if base is not None else None
            arguments[name] = _build(hints[name], value, where, key, part)
        else:
            arguments[name] = _convert(value, hints[name], where, key)
    return dataclasses.replace(base, **arguments) if base is not None else cls(**arguments)


def _convert(value: Any, hint: Any, where: str, key: str) -> Any:
    kind, optional = _plain_type(hint)
    if value is None and optional:
        return None
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        wanted = "a list of strings"
    elif isinstance(value, (int, float) if kind is float else kind) and not (
        kind is not bool and isinstance(value, bool)
    ):
        return value
    else:
        names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        wanted = names[kind]
    raise ConfigError(f"{where}: {key} is {value!r}, expected {wanted}")


def _check_limits(key: str, value: Any, limits: Mapping[str, Any]) -> None:
    choices, minimum, maximum = limits["choices"], limits["minimum"], limits["maximum"]
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item is not None and item not in choices:
            raise ConfigError(f"{key} is {item!r}, expected one of {', '.join(choices)}")
        # Negated, as NaN is neither more nor less.
        if minimum is not None and item is not None and not item >= minimum:
            kind = "a number" if isinstance(item, float) else "a whole number"
            raise ConfigError(f"{key} is {item}, expected {kind} of at least {minimum}")
        most = _MOST if maximum is None and isinstance(item, int) else maximum
        if most is not None and item is not None and not item <= most:
            raise ConfigError(f"{key} is {item}, expected at most {most}")
