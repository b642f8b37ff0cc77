"""Named shapes shared by tests, tuning and benchmarks.

flash and pro are the layer shapes of the released models, tiny is what interpreters can run.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shapes of one model's layers, in the words of its published config."""

    name: str
    hidden: int
    experts: int
    experts_per_token: int
    expert_width: int
    heads: int
    head_dim: int
    rope_dim: int
    window: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    streams: int = 4
    swiglu_limit: float = 10.0


TINY = Spec(
    name="tiny",
    hidden=256,
    experts=8,
    experts_per_token=3,
    expert_width=128,
    heads=4,
    head_dim=32,
    rope_dim=16,
    window=16,
    index_heads=16,
    index_head_dim=32,
    index_topk=8,
)
FLASH = Spec(
    name="flash",
    hidden=4096,
    experts=256,
    experts_per_token=6,
    expert_width=2048,
    heads=64,
    head_dim=512,
    rope_dim=64,
    window=128,
    index_heads=64,
    index_head_dim=128,
    index_topk=512,
)
PRO = Spec(
    name="pro",
    hidden=7168,
    experts=384,
    experts_per_token=6,
    expert_width=3072,
    heads=128,
    head_dim=512,
    rope_dim=64,
    window=128,
    index_heads=64,
    index_head_dim=128,
    index_topk=1024,
)

SPECS = {spec.name: spec for spec in (TINY, FLASH, PRO)}
