"""Splits a list of layer costs over devices and hands activations from stage to stage.

Nothing is imported here: the launcher starts without JAX. Take names from the modules.

sharding.cost       LayerCost, DeviceCost, HostCost, PeerLink, Schedule, Problem: integer rows of
                    nanoseconds and bytes; make_schedules, micro_batches, uniform_links,
                    roofline_ns; PlanError.
sharding.split      plan_stages(problem) -> Plan: the exact best split, order of work, micro-batch
                    and residency. price_split(problem, schedule, stages): the same for a split by
                    hand. `str(plan)` is the report.
sharding.probe      probe() -> dict: measures a machine.
sharding.machine    read_machine(path), machine_rows(machine, ...): planner rows from its file.
sharding.schema     problem(value, form): the first thing in parsed JSON that a reader cannot take.
sharding.pipeline   Pipeline([Stage(name, run, device)]).run(units, source, sink) -> Timeline.
sharding.handoff    copy_tree(tree, device) within a process; Listener, connect, Sender, Receiver
                    between processes.
sharding.launcher   python -m sharding.launcher --processes=N -- COMMAND; join() in its processes.
sharding.expert_parallel   exchange_slots(...): experts of a layer over the devices of a stage.

A plan:

    machine = machine_rows(read_machine("machine.json"), expert_bytes=13_369_344)
    problem = Problem(
        layers=tuple(LayerCost(dense, state, workspace, experts=256) for ...),
        devices=machine.devices,
        schedules=make_schedules(
            [131_072], 8192, layers=43, compute_ns=..., distinct=..., stream_bytes=32_768
        ),
        expert_bytes=13_369_344,
        link_bytes_per_s=machine.link_bytes_per_s,
        upload_overhead_ns=machine.upload_overhead_ns,
        hosts=machine.hosts,
        peers=machine.peers,
    )
    plan = plan_stages(problem)
    for stage in plan.stages:
        stage.range.device, stage.range.begin, stage.range.end, stage.residents

Its stages, in one process:

    stages = [Stage(name, run, device, prefetch=..., abort=...) for ...]
    timeline = Pipeline(stages).run([Unit(0, 0), Unit(1, 0)], source, sink)

or one stage per process, with `source` receiving from the stage before and `sink` sending to the
one after:

    with join() as worker:
        listener = Listener(worker.host)
        worker.set(f"stage {worker.rank}", listener.address)
        sender = connect(worker.get(f"stage {worker.rank + 1}"), payload, stage=worker.rank + 1)
        receiver = listener.accept(payload, device, stage=worker.rank)
        Pipeline([stage]).run(
            units,
            lambda microbatch, chunk: receiver.receive(microbatch),
            lambda microbatch, chunk, outputs: sender.send(microbatch, outputs),
            abort=lambda: (receiver.close(), sender.close()),
        )
        sender.flush()
"""

# `ds4jax` checks this marker at import: other distributions install packages of the same name.
OWNER = "ds4jax"
