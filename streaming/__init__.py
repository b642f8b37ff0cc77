"""Moves named byte ranges from disk or host memory to devices ahead of the compute that needs them.

What moves is an item: a few named arrays, the same for all items (`SlabLayout`). Items belong to
layers, layers are visited in steps, and a step's slab has to be on the device when the step runs.

    gate_up = Component("gate_up", (4096, 2048), np.uint8)
    layout = SlabLayout(layers=43, items=256, components=(gate_up, ...))
    residency = even(43, 256, resident_per_layer(43, 256, layout.item_bytes, fraction=0.5))
    store = HostStore(layout, residency.streamed, pinner=Pinner(CudaDriver()))
    store.fill(fill)                      # fill(layer, item, component, buffer), on many threads
    with Streamer(layout, residency.streamed, device, store=store) as streamer:
        streamer.start(Step(layer) for chunk in chunks for layer in range(43))
        for step in steps:
            streamer.issue_ahead(step)                # before anything of the step is dispatched
            routing = route(attend(...))
            slots = experts(routing, resident, resident_where)         # hits, while misses arrive
            for wave in range(streamer.waves(step)):
                if wave:
                    streamer.issue_ahead(step, wave)
                slab = streamer.take(step, wave)
                slots, done = experts(routing, slab.arrays, slab.where, slots)
                streamer.computed(step, done, wave, reached=routing.ids)
        ledger = streamer.finish()

Where only the items that the router asks for shall move, the step is Step(layer, "routed"), and
`streamer.routed(step, ids)` comes between the router and the experts. Items that are known ahead
are Step(layer, "exact", items).

Host values given to a program between `issue_ahead` and the end of the step are copies of their
own and wait in line behind the slabs: put positions, tables and scalars on the device beforehand,
and let programs return small outputs such as `done` (indexing an array outside sends the index).

Modules: slab (layout), store (host memory), numa, pinned (page-locking), readers (of files), disk
(the ring that they fill), window (arithmetic), residency (which items stay), link (host to
device), uploader and streamer (the machine), peers and tiers (several paths at once), owners (two
devices), notes (messages from programs), trace and ledger (what happened), testing (doubles), bench
(measurements on a GPU).
"""

from streaming.disk import DiskRing
from streaming.errors import (
    BudgetError,
    LedgerError,
    ReadError,
    StreamCancelled,
    StreamError,
    StreamStalled,
)
from streaming.ledger import Ledger, Prediction
from streaming.notes import Note, Notes, Usage, item_counts, prefer_routed
from streaming.numa import device_node, read_topology
from streaming.owners import ColdFirst, Readiness
from streaming.peers import PEER_TIER, RELAY_TIER, PeerLink, PeerStore
from streaming.pinned import CudaDriver, PinError, Pinner
from streaming.readers import FileRange, open_reader
from streaming.residency import (
    Residency,
    even,
    load_profile,
    resident_per_layer,
    save_profile,
    split_owners,
)
from streaming.slab import Component, Slab, SlabLayout
from streaming.store import HostStore
from streaming.streamer import Step, Streamer
from streaming.tiers import Tiers
from streaming.trace import write_timeline

# `ds4jax` checks this marker at import: other distributions install packages of the same name.
OWNER = "ds4jax"

__all__ = [
    "PEER_TIER",
    "RELAY_TIER",
    "BudgetError",
    "ColdFirst",
    "Component",
    "CudaDriver",
    "DiskRing",
    "FileRange",
    "HostStore",
    "Ledger",
    "LedgerError",
    "Note",
    "Notes",
    "PeerLink",
    "PeerStore",
    "PinError",
    "Pinner",
    "Prediction",
    "ReadError",
    "Readiness",
    "Residency",
    "Slab",
    "SlabLayout",
    "Step",
    "StreamCancelled",
    "StreamError",
    "StreamStalled",
    "Streamer",
    "Tiers",
    "Usage",
    "device_node",
    "even",
    "item_counts",
    "load_profile",
    "open_reader",
    "prefer_routed",
    "read_topology",
    "resident_per_layer",
    "save_profile",
    "split_owners",
    "write_timeline",
]
