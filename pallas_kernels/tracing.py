"""Kernels that several programs call, or one program several times."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def traced_once(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function of arrays whose arguments named in `static` are hashable constants.

    It is traced once for equal shapes and constants, and its kernels are lowered once in a program,
    which has the same operations as without the decorator. Nothing but the arguments may decide
    what the function does: not the device.
    """
    return functools.partial(jax.jit, static_argnames=static, inline=True)
