"""The rows that the planner reads, made from a checkpoint's header, a run configuration, a machine.

Everything is an integer: bytes are exact but for the workspace, nanoseconds come from `costs`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

import streaming
from ds4jax import admission, costs, peers
from ds4jax.activations import HOST_POOL_BYTES, LIVE_CHUNKS
from ds4jax.cache import state_bytes
from ds4jax.checkpoint import keys
from ds4jax.checkpoint.source import TensorInfo, TensorSource
from ds4jax.config import ModelConfig, Numerics
from ds4jax.experts import LAYER_SECONDS, default_window
from ds4jax.machine import Machine
from ds4jax.run_config import RunConfig
from sharding.cost import (
    WHOLE_LAYER,
    HostCost,
    LayerCost,
    PlanError,
    Problem,
    Ring,
    Schedule,
    ceil_div,
    micro_batches,
    transfer_ns,
)
from streaming.window import live_bound

_PART_NS = 190_000  # what every further part of a layer's experts adds for a chunk of 8,192 rows
# Experts of a slab where whole layers do not fit, and slabs that may be copied ahead: as many as
# hold a whole layer, since more would not hide more. A partial slab is put together from pieces
# that are alive beside it, so slabs of one would hold nothing.
_WAVES = {
    128: (1, 2),
    64: (1, 2, 3),
    32: (1, 3, 5, 7),
    16: (1, 4, 8, 12),
    8: (1, 4),
    4: (1,),
    2: (1,),
}
_PEER_RING = 6  # a slab over three paths: each rounds its part up, and holds two at least


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What is going to be read: (first position, tokens) of each sequence."""

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, *tokens: int) -> "Prompts":
        """Whole prompts of these lengths."""
        return cls(tuple((0, count) for count in tokens))

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(count for _, count in self.spans)


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """The chunks of all prompts in order: arrays of one value each."""

    prompt: np.ndarray
    position: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, prompts: Prompts, chunk_tokens: int) -> "_Chunks":
        shapes = np.array(costs.row_shapes(chunk_tokens))
        prompt, position, tokens = [], [], []
        for number, (start, count) in enumerate(prompts.spans):
            begins = np.arange(0, count, chunk_tokens)
            prompt.append(np.full(len(begins), number))
            position.append(start + begins)
            tokens.append(np.minimum(chunk_tokens, count - begins))
        joined = np.concatenate(tokens)
        rows = shapes[np.searchsorted(shapes, joined)]
        return cls(np.concatenate(prompt), np.concatenate(position), joined, rows)

    def most_sequences(self, chunks: int) -> int:
        """Sequences that a micro-batch of so many chunks is of, at most."""
        starts = range(0, len(self.prompt), chunks)
        return max(len(set(self.prompt[i : i + chunks].tolist())) for i in starts)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run is made of; `problem` gives the planner's rows of it.

    capacity  tokens that the state of a sequence has room for
    infos     header of the checkpoint
    origins   of each layer: the first one whose experts have the same bytes
    """

    model: ModelConfig
    infos: Mapping[str, TensorInfo]
    origins: tuple[int, ...]
    config: RunConfig
    machine: Machine
    capacity: int

    @classmethod
    def of(cls, source: TensorSource, config: RunConfig, machine: Machine, capacity: int) -> "Run":
        """The run of a checkpoint."""
        origins = tuple(map(source.expert_origin, range(source.config.num_hidden_layers)))
        return cls(source.config, source.infos(), origins, config, machine, capacity)

    @property
    def numerics(self) -> Numerics:
        return self.config.numerics.resolve()

    @property
    def item_bytes(self) -> int:
        """Bytes of one routed expert."""
        return keys.expert_bytes(self.model, self.infos)

    @property
    def experts(self) -> int:
        """Routed experts of every layer that the stage itself has to do with."""
        cold = peers.cold_experts(self.config.peer, self.model.n_routed_experts)
        return self.model.n_routed_experts - cold

    def _rings(self, tier: str, waves: bool) -> list[Ring]:
        """What streamed experts may pass through; slabs are copied ahead as the tier needs."""
        options, paths = self.config.streaming, peers.path_count(self.config.peer)
        usual = default_window(tier) if options.window is None else options.window

        def ring(experts: int, ahead: int) -> Ring:
            # Several paths divide the slabs' memory by size, which rounds.
            return Ring(experts, live_bound(ahead) * min(paths, 2), ahead)

        if options.slab_bytes is not None:
            live = live_bound(usual) * min(paths, 2)
            unit = options.slab_bytes // (live * self.item_bytes)
            unit -= _PEER_RING if self.machine.peers else 0
            if unit < 2 * paths:
                raise PlanError(
                    f"config.streaming.slab_bytes is {options.slab_bytes}, slabs of {live} x "
                    f"{2 * paths} experts need {live * 2 * paths * self.item_bytes}: raise it"
                )
            return [ring(unit, usual)]
        if not waves:
            return [ring(WHOLE_LAYER, usual)]
        if options.window is not None:
            return [ring(experts, usual) for experts in _WAVES]
        return [
            ring(experts, max(ahead, usual)) for experts, some in _WAVES.items() for ahead in some
        ]

    def asked_residents(self) -> int | None:
        """Residents of every layer where the configuration decides them."""
        options = self.config.streaming
        if options.resident_fraction is None and options.resident_bytes is None:
            return self.experts if self.machine.one_memory else None
        per_layer = streaming.resident_per_layer(
            self.model.num_hidden_layers,
            self.model.n_routed_experts,
            self.item_bytes,
            fraction=options.resident_fraction,
            total_bytes=options.resident_bytes,
        )
        return min(per_layer, self.experts)

    def problem(
        self,
        prompts: Prompts,
        *,
        tier: str = "ram",
        waves: bool = False,
        layers: range | None = None,
        stages: int = 1,
        chunks: int | None = None,
        activations: str = "device",
    ) -> Problem:
        """The rows of reading `prompts`.

        tier    where streamed experts are kept
        waves   slabs of a few experts, for which all chunks of a micro-batch keep their inputs and
                results beside their streams; otherwise the slabs of whole layers
        layers  of the model that are planned for; None for all
        stages  most stages that there may be: more than one hold all sequences until the end
        chunks  of a micro-batch, where that was decided before
        activations  where a micro-batch of several chunks waits between layers: "device" or "host"
        """
        chosen = range(self.model.num_hidden_layers) if layers is None else layers
        parts = keys.resident_parts(self.model, self.infos)
        first, last = 0 in chosen, self.model.num_hidden_layers - 1 in chosen
        work = _Chunks.of(prompts, self.config.prefill.chunk_tokens)
        machine = self.machine
        link = machine.disk_bytes_per_s if tier == "disk" else None
        if link is not None:  # relayed experts would wait in host memory
            holds = any(each.holds for each in machine.peers)
            machine = machine.serving(holds=holds, relays=False)
        return Problem(
            layers=tuple(
                LayerCost(
                    dense_bytes=parts.layers[layer],
                    state_bytes=state_bytes(
                        self.model, self.numerics, self.capacity, range(layer, layer + 1)
                    ),
                    workspace_bytes=self._workspace(layer, int(work.rows.max()), 1),
                    experts=self.experts,
                )
                for layer in chosen
            ),
            devices=tuple(
                device
                if link is None
                else dataclasses.replace(
                    device, host_link_bytes_per_s=min(device.host_link_bytes_per_s, link)
                )
                for device in machine.devices
            ),
            schedules=tuple(
                self._schedules(work, chosen, waves, tier, stages, chunks, activations)
            ),
            expert_bytes=self.item_bytes,
            link_bytes_per_s=machine.link_bytes_per_s,
            rings=tuple(self._rings(tier, waves)),
            ring_least=2 * peers.path_count(self.config.peer),
            upload_overhead_ns=machine.upload_overhead_ns,
            layer_residents=self.asked_residents(),
            peer_ring_experts=_PEER_RING,
            embed_bytes=parts.embed if first else 0,
            head_bytes=parts.head if last else 0,
            # All devices of a host read one disk.
            hosts=machine.hosts
            if link is None
            else tuple(HostCost("disk", link) for _ in machine.hosts),
            peers=machine.peers,
            in_order=machine.in_order,
        )

    def _schedules(
        self,
        work: _Chunks,
        layers: range,
        waves: bool,
        tier: str,
        stages: int,
        chunks: int | None,
        activations: str,
    ) -> Iterator[Schedule]:
        total, rows = len(work.rows), int(work.rows.max())
        model, hidden = self.model, self.model.hidden_size * self.numerics.dtype.itemsize
        streams = model.hc_mult * hidden
        # Normed inputs and slots of a chunk.
        beside = (1 + model.num_experts_per_tok) * hidden
        by_kind = {model.layer_ratios[layer]: self._layer_ns(layer, work) for layer in layers}
        first, last = 0 in layers, model.num_hidden_layers - 1 in layers
        for count, passes in self._candidates(total, chunks):
            several = count > 1
            tokens = count * self.config.prefill.chunk_tokens
            per_pass = ceil_div(int(work.tokens.sum()), passes)
            moved = self._distinct(per_pass, tier)
            in_parts = waves or moved < self.experts
            place = activations if several else "device"
            if place == "host" and self.waiting_bytes(tokens) > self._waiting_limit():
                continue
            on_device = count if place == "device" else min(count, LIVE_CHUNKS)
            together = ceil_div(total, passes)  # chunks: a prompt may be shorter than a micro-batch
            wave_ns, crossing = together * _PART_NS, 0
            if place == "host":
                # Streams come to attend, and to finish once more where slabs are parts of a layer.
                crossing = streams
                if in_parts:
                    crossing += streams + 2 * beside
                    wave_ns += together * transfer_ns(rows * beside, self._host_rate())
            buffers = count * rows * streams if stages > 1 else 0
            yield Schedule(
                order="layer_major" if several else "chunk_major",
                micro_batch_tokens=tokens,
                passes=passes,
                compute_ns=tuple(
                    ceil_div(sum(by_kind[model.layer_ratios[layer]]), passes) for layer in layers
                ),
                expert_ns=tuple(
                    by_kind[model.layer_ratios[layer]][1] // passes for layer in layers
                ),
                distinct=(moved,) * len(layers),
                activation_bytes=on_device * rows * streams if several else 0,
                workspace_bytes=tuple(
                    self._workspace(layer, rows, on_device, in_parts=in_parts) for layer in layers
                ),
                handoff_bytes=ceil_div(int(work.rows.sum()) * streams, passes),
                receive_bytes=buffers,
                send_bytes=buffers,
                embed_ns=self._embed_ns(work, passes) if first else 0,
                head_ns=self._head_ns(work, passes) if last else 0,
                wave_ns=wave_ns,
                layer_link_bytes=ceil_div(int(work.rows.sum()) * crossing, passes),
                activations=place,
                sequences=int(work.prompt[-1]) + 1 if stages > 1 else work.most_sequences(count),
            )

    def waiting_bytes(self, tokens: int) -> int:
        """Host memory of a micro-batch that waits there: streams, inputs and slots of all rows."""
        chunks = ceil_div(tokens, self.config.prefill.chunk_tokens)
        rows = chunks * max(costs.row_shapes(self.config.prefill.chunk_tokens))
        width = self.model.hc_mult + 1 + self.model.num_experts_per_tok
        return rows * width * self.model.hidden_size * self.numerics.dtype.itemsize

    def _waiting_limit(self) -> int:
        """Host memory that activations may take where nobody asks for more."""
        if self.config.streaming.micro_batch_tokens is not None:
            return self.machine.host_bytes
        return min(self.machine.host_bytes // 2, HOST_POOL_BYTES)

    def _host_rate(self) -> int:
        return min(device.host_link_bytes_per_s for device in self.machine.devices)

    def _candidates(self, total: int, chunks: int | None) -> list[tuple[int, int]]:
        """(chunks of a micro-batch, passes) that the configuration leaves open, smallest first."""
        options, chunk = self.config.streaming, self.config.prefill.chunk_tokens
        if options.order == "chunk_major":
            chunks = 1
        elif chunks is None and options.micro_batch_tokens is not None:
            chunks = ceil_div(options.micro_batch_tokens, chunk)
        if chunks is not None:
            return [(chunks, ceil_div(total, chunks))]
        found = list(micro_batches([total], 1))
        if options.order == "layer_major" and len(found) > 1:
            found = found[1:]
        return found

    def _layer_ns(self, layer: int, work: _Chunks) -> tuple[int, int]:
        """Time of a layer on all chunks: all but its routed experts, and these."""
        total = dict.fromkeys(costs.PARTS, 0.0)
        machine = self.machine
        for rows in sorted(set(work.rows.tolist())):
            positions = work.position[work.rows == rows]
            times = machine.table.seconds(
                self.model, layer, rows, positions, machine.rates, q1=self.numerics.q1
            )
            for part, each in times.items():
                total[part] += float(each.sum())
        experts = total.pop("experts")
        return math.ceil(1e9 * sum(total.values())), math.ceil(1e9 * experts)

    def _distinct(self, tokens: int, tier: str) -> int:
        """Experts of a layer that a pass over so many tokens moves if none is resident."""
        mode, everything = self.config.streaming.mode, self.experts
        expected = costs.uniform_distinct(self.model, tokens) * everything
        expected /= self.model.n_routed_experts
        if mode == "auto":
            rate = self._host_rate()
            routed = streaming.prefer_routed(
                distinct_misses=expected,
                share=everything,
                item_bytes=self.item_bytes,
                link_bytes_per_s=self.machine.disk_bytes_per_s if tier == "disk" else rate,
                compute_s=LAYER_SECONDS,
            )
            mode = "routed" if routed else "whole"
        return everything if mode == "whole" else min(math.ceil(expected), everything)

    def _workspace(self, layer: int, rows: int, chunks: int, *, in_parts: bool = False) -> int:
        table, known = self.machine.table, {}
        estimates = admission.estimated_temporaries(self.model, self.numerics, rows)
        for part in costs.PARTS:
            found = table.temp_bytes(self.model, layer, part, rows, self.capacity)
            if found is not None:
                # Fewer rows than any that were measured need no more than those.
                known[part] = min(found, estimates[part]) if rows < table.least_rows else found
        return admission.workspace_bytes(
            self.model, self.numerics, rows, chunks, known, in_parts=in_parts
        )

    def _embed_ns(self, work: _Chunks, passes: int) -> int:
        """Writing the streams."""
        nbytes = self.model.hc_mult * self.model.hidden_size * self.numerics.dtype.itemsize
        written = int(work.rows.sum()) * nbytes
        return ceil_div(transfer_ns(written, int(self.machine.rates.bytes_per_s)), passes)

    def _head_ns(self, work: _Chunks, passes: int) -> int:
        """The head on tiles of rows: one per prompt for its last token, or over all tokens."""
        mode, rows = self.config.prefill.logits, admission.HEAD_ROWS
        if mode == "none":
            return 0
        tiles = int(work.prompt[-1]) + 1
        if mode != "last":
            tiles = int((-(-work.tokens // rows)).sum())
        flops = 2.0 * rows * self.model.vocab_size * self.model.hidden_size
        seconds = tiles * flops / self.machine.rates.float32_flops_per_s
        return ceil_div(math.ceil(1e9 * seconds), passes)
