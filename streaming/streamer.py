"""The streamer: a plan of steps becomes slabs on a device, just in time and no earlier."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from streaming import ledger as accounts
from streaming import window as arithmetic
from streaming.disk import DiskRing
from streaming.errors import BudgetError
from streaming.ledger import Ledger, Prediction, SystemCounters
from streaming.link import DeviceLink, Link
from streaming.monitor import Monitor
from streaming.peers import PeerStore
from streaming.slab import Slab, SlabLayout
from streaming.store import HostStore
from streaming.trace import Trace
from streaming.uploader import Unit, Uploader

RAM_WINDOW, DISK_WINDOW = 1, 2  # default windows; a disk's jitter needs one more


@dataclasses.dataclass(frozen=True)
class Step:
    """One visit of a layer.

    mode   "whole": all streamed items of the layer move, ahead of time
           "exact": of `items`, those that are streamed; known in advance, so ahead of time as well
           "routed": as exact, but the items are known only when `Streamer.routed` tells them
    """

    layer: int
    mode: Literal["whole", "exact", "routed"] = "whole"
    items: tuple[int, ...] = ()


@dataclasses.dataclass
class _Run:
    """What belongs to one start..finish.

    expanded  steps that have been cut into units
    first     unit number of wave 0 of each of them; waves how many there are
    needs     items that each of them moves
    opened_s  when the next routed step was announced
    """

    steps: tuple[Step, ...]
    predicted: Prediction
    began_s: float
    system: SystemCounters
    files: tuple[int, int, int]
    expanded: int = 0
    first: list[int] = dataclasses.field(default_factory=list)
    waves: list[int] = dataclasses.field(default_factory=list)
    needs: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    distinct: dict[int, int] = dataclasses.field(default_factory=dict)
    opened_s: float | None = None


class Streamer:
    """Brings the items of each step's layer to a device while earlier steps compute.

    items          streamed items of each layer; with a store, consecutive in its order
    store          layers in host memory; other layers come from `ring`
    window         units that are copied ahead; default 1, with a ring 2. A unit is a layer's
                   share, or a wave of it where the budget holds no more
    budget_bytes   device memory for slabs; None for no limit
    tier           what the ledger calls the items of the store
    timeout_s      no call waits longer than this without progress

    One thread calls `start`, `prefetch` if it likes, then for every step in order `issue_ahead`,
    `take` and `computed`, and at last `finish`. After an error, `abort`; then `start` works again.
    `cancel` may come from any thread. Raises BudgetError or ValueError for a plan that cannot work.
    """

    def __init__(
        self,
        layout: SlabLayout,
        items: Sequence[Sequence[int]],
        device: jax.Device | None = None,
        *,
        store: HostStore | PeerStore | None = None,
        ring: DiskRing | None = None,
        window: int | None = None,
        budget_bytes: int | None = None,
        tier: str = "ram",
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
        link: Link | None = None,
    ):
        if len(items) != layout.layers:
            raise ValueError(f"items name {len(items)} layers, expected {layout.layers}")
        self.layout, self.store, self.ring = layout, store, ring
        self._store_tier = tier
        self.window = (RAM_WINDOW if ring is None else DISK_WINDOW) if window is None else window
        if self.window < 0:
            raise ValueError(f"window is {window}, expected at least 0")
        self.budget_bytes = budget_bytes
        self.items = tuple(self._share(layer, chosen) for layer, chosen in enumerate(items))
        share = max(map(len, self.items))
        self.wave_items = arithmetic.wave_items(share, layout.item_bytes, self.window, budget_bytes)
        # A partial slab is put together on the device from pieces, which are alive beside it.
        self._partial_budget_error: BudgetError | None = None
        try:
            self.partial_items = arithmetic.wave_items(
                share, 2 * layout.item_bytes, self.window, budget_bytes
            )
        except BudgetError as error:
            self.partial_items, self._partial_budget_error = 0, error
        if ring is not None:
            largest = max(self.wave_items, self.partial_items)
            if any(chosen and not self._in_ram(n) for n, chosen in enumerate(self.items)) and (
                ring.rows < largest
            ):
                raise ValueError(
                    f"the ring has slots of {ring.rows} items, waves are {largest} items: "
                    "make the slots larger or the budget smaller"
                )
        self._clock = clock
        self._link = link or DeviceLink(device or jax.local_devices()[0])
        self._monitor = Monitor(timeout_s)
        self._trace = Trace()
        self._uploader = Uploader(
            layout,
            self._link,
            store,
            ring,
            window=self.window,
            budget_bytes=budget_bytes,
            monitor=self._monitor,
            trace=self._trace,
            clock=clock,
        )
        self._run: _Run | None = None

    def predict(self, steps: Iterable[Step]) -> Prediction:
        """What `steps` will move; exact unless there are routed steps."""
        items: dict[str, int] = {}
        most, exact = 0, True
        for step in steps:
            known = self._known_items(step)
            if known is None:
                exact = False
                most += len(self.items[step.layer])
            elif known:
                tier = self._tier(step.layer)
                items[tier] = items.get(tier, 0) + len(known)
        most += sum(items.values())
        size = self.layout.item_bytes
        return Prediction(
            items, {tier: count * size for tier, count in items.items()}, most, most * size, exact
        )

    def start(self, steps: Iterable[Step]) -> Prediction:
        """Begins a run; files are read from now on. Returns the prediction."""
        if self._run is not None:
            raise RuntimeError("a run is under way: finish() or abort() it first")
        self._monitor.check()
        plan = tuple(steps)
        predicted = self.predict(plan)
        if self._partial_budget_error is not None and any(step.mode != "whole" for step in plan):
            raise self._partial_budget_error
        self._uploader.begin()
        system = SystemCounters.read()
        self._run = _Run(plan, predicted, self._clock(), system, self._file_counters())
        self._expand()
        return predicted

    def prefetch(self) -> None:
        """Issues the first copies of a run that has been started, before anything computes.

        For a device that is still waiting for its inputs. Does nothing where the first step is
        routed.
        """
        run = self._active()
        if run.expanded:
            self._uploader.issue_to(run.first[0] + self.window)

    def issue_ahead(self, step: int, wave: int = 0) -> None:
        """Issues the copies that have to be under way before `step` computes.

        Call it before anything of the step is dispatched, and again before each further wave.
        May wait: for the output of an earlier step (memory), or for files.
        """
        run = self._active()
        if step == run.expanded < len(run.steps):
            # A routed step: its copies, and those after them, are issued by routed().
            run.opened_s = self._clock()
            return
        unit = self._unit(step, wave)
        self._uploader.issue_to(unit.index + self.window)
        self._uploader.opened(unit)

    def routed(self, step: int, ids: np.ndarray) -> int:
        """Tells the items of a routed step and issues their copies; returns the number of waves.

        ids  integers of any shape, -1 for none; resident ones are fine, they do not move
        Call it when the router has run, before dispatching what the copies shall hide under.
        """
        run = self._active()
        if step != run.expanded or run.steps[step].mode != "routed":
            raise RuntimeError(
                f"routed({step}): expected the next routed step, which is {run.expanded}"
                if run.expanded < len(run.steps)
                else f"routed({step}): no routed step is left"
            )
        layer = run.steps[step].layer
        flat = np.asarray(ids).reshape(-1)
        if (most := int(flat.max(initial=-1))) >= self.layout.items:
            self.layout.check_items(layer, [most])
        used = np.flatnonzero(np.bincount(flat[flat >= 0], minlength=self.layout.items)).tolist()
        run.distinct[step] = len(used)
        wanted = frozenset(used)
        self._add_step(step, tuple(item for item in self.items[layer] if item in wanted))
        self._expand()
        unit = self._unit(step, 0)
        unit.opened_s, run.opened_s = run.opened_s, None
        self._uploader.issue_to(unit.index + self.window)
        return run.waves[step]

    def observed(self, step: int, distinct: int) -> None:
        """Notes for the ledger how many distinct items a step used, resident ones included."""
        self._active().distinct[step] = distinct

    def waves(self, step: int) -> int:
        """Into how many slabs a step is cut, at least 1; of a routed step after `routed`."""
        run = self._active()
        if step >= run.expanded:
            raise RuntimeError(f"the items of step {step} are not known yet: call routed() first")
        return run.waves[step]

    def take(self, step: int, wave: int = 0) -> Slab:
        """The slab of a step, to be passed to the programs that are dispatched next.

        Does not wait for the copy: the device does. Raises the error of any earlier copy or read.
        """
        return self._uploader.take(self._unit(step, wave))

    def computed(self, step: int, output: Any, wave: int = 0, *, reached: Any = None) -> None:
        """All programs that use the slab have been dispatched; the slab is released.

        output   array, or tree of arrays, that is ready when they have run. It must not be donated
                 to a later program; make it small, it is kept until it is ready.
        reached  array that is ready when the step comes to need its slab (the router's output);
                 with it the ledger tells waiting from computing
        """
        self._uploader.computed(self._unit(step, wave), output, reached)

    def finish(self) -> Ledger:
        """Waits for the last outputs and closes the run.

        Raises LedgerError when what moved is not what was predicted.
        """
        run = self._active()
        units = self._uploader.units
        if run.expanded < len(run.steps) or self._uploader.last_computed + 1 < len(units):
            raise RuntimeError(
                f"finish() after {self._uploader.last_computed + 1} of {len(units)} known units, "
                f"{run.expanded} of {len(run.steps)} steps: compute all steps, or abort()"
            )
        self._uploader.drain()
        result = self._settle(run, complete=True)
        self._run = None
        accounts.require_equal(accounts.problems(self.layout, run.predicted, units, run.needs))
        return result

    def abort(self) -> Ledger | None:
        """Ends a run early, after an error too, and waits for what is under way.

        Returns the account of the part that ran, None when there was no run. Afterwards `start`
        begins afresh. Raises StreamStalled when copies, reads or programs do not end.
        """
        run, result = self._run, None
        if run is not None:
            self._monitor.cancel()
            self._uploader.abort()
            result = self._settle(run, complete=False)
            self._run = None
        self._monitor.clear()
        return result

    def cancel(self) -> None:
        """Makes the current and all later calls raise StreamCancelled, until `abort`."""
        self._monitor.cancel()

    def describe(self) -> str:
        """What waits for what, for a stalled run."""
        with self._monitor.changed:
            return self._uploader.describe()

    def violations(self) -> list[str]:
        """Where the current or last run broke the rules of the window; empty if nowhere."""
        return arithmetic.violations(self._trace.events, self.window, self.budget_bytes)

    def close(self) -> None:
        """Ends the threads of the streamer and of its ring; the store stays with its owner."""
        self.abort()
        self._uploader.close()
        if self.ring is not None:
            self.ring.close()

    def __enter__(self) -> "Streamer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _active(self) -> _Run:
        self._monitor.check()
        if self._run is None:
            raise RuntimeError("no run is under way: start() one")
        return self._run

    def _unit(self, step: int, wave: int) -> Unit:
        run = self._active()
        if not 0 <= wave < self.waves(step):
            raise RuntimeError(f"step {step} has {self.waves(step)} waves, {wave} was asked for")
        return self._uploader.units[run.first[step] + wave]

    def _in_ram(self, layer: int) -> bool:
        return self.store is not None and self.store.holds(layer)

    def _tier(self, layer: int) -> str:
        return "disk" if self.items[layer] and not self._in_ram(layer) else self._store_tier

    def _share(self, layer: int, items: Sequence[int]) -> tuple[int, ...]:
        chosen = self.layout.check_items(layer, items)
        if not chosen:
            return chosen
        if not self._in_ram(layer):
            if self.ring is None:
                raise ValueError(f"layer {layer} is in no host store and there is no disk ring")
            return chosen
        assert self.store is not None
        chosen = self.store.arrange(layer, chosen)
        if len(self.store.pieces(layer, chosen)) > 1:
            raise ValueError(
                f"the streamed items of layer {layer} are not consecutive in the host store: give "
                "the store an order in which they are"
            )
        return chosen

    def _known_items(self, step: Step) -> tuple[int, ...] | None:
        """Items that a step moves, in store order; None when the router decides."""
        if not 0 <= step.layer < self.layout.layers:
            raise ValueError(f"{step}: expected a layer 0..{self.layout.layers - 1}")
        if step.mode == "routed":
            return None
        if step.mode == "whole":
            return self.items[step.layer]
        wanted = frozenset(self.layout.check_items(step.layer, step.items))
        return tuple(item for item in self.items[step.layer] if item in wanted)

    def _expand(self) -> None:
        """Cuts steps into units up to the next one whose items are not known."""
        run = self._active()
        while run.expanded < len(run.steps):
            step = run.steps[run.expanded]
            items = self._known_items(step)
            if items is None:
                return
            if step.mode == "exact":
                run.distinct[run.expanded] = len(set(step.items))
            self._add_step(run.expanded, items)

    def _add_step(self, number: int, items: tuple[int, ...]) -> None:
        run = self._active()
        step = run.steps[number]
        share = self.items[step.layer]
        if len(items) == len(share) or step.mode == "whole":
            items, most, direct = share, self.wave_items, True
        else:
            most, direct = self.partial_items, False
        run.first.append(len(self._uploader.units))
        size = self.layout.item_bytes
        ranges = arithmetic.wave_ranges(len(items), most)
        for wave, (begin, end) in enumerate(ranges):
            count = end - begin
            self._uploader.add(
                Unit(
                    index=len(self._uploader.units),
                    step=number,
                    wave=wave,
                    layer=step.layer,
                    items=items[begin:end],
                    rows=count if direct else most,
                    direct=direct,
                    price_bytes=count * size if direct else (most + count) * size,
                    tier=self._tier(step.layer),
                )
            )
        run.waves.append(len(ranges))
        run.needs[number] = set(items)
        run.expanded = number + 1

    def _file_counters(self) -> tuple[int, int, int]:
        if self.ring is None:
            return 0, 0, 0
        return self.ring.needed_bytes, self.ring.asked_bytes, self.ring.slow_fills

    def _settle(self, run: _Run, *, complete: bool) -> Ledger:
        before, after = run.files, self._file_counters()
        registered = self.store.registered_bytes if self.store is not None else 0
        if self.ring is not None:
            registered += self.ring.registered_bytes
        return accounts.settle(
            layout=self.layout,
            predicted=run.predicted,
            complete=complete,
            steps=len(run.steps),
            units=self._uploader.units,
            waits=self._uploader.waits,
            distinct=run.distinct,
            after_compute=self._link.after_compute,
            spans=self._trace.spans,
            began_s=run.began_s,
            ended_s=self._clock(),
            system=(run.system, SystemCounters.read()),
            files=(after[0] - before[0], after[1] - before[1], after[2] - before[2]),
            peak_live_bytes=self._uploader.peak_bytes,
            peak_live_units=self._uploader.peak_units,
            budget_bytes=self.budget_bytes,
            registered_bytes=registered,
        )
