"""Decompositions of stacked matrices, one after another on a CPU.

For a batched LAPACK call JAX starts several threads, and LAPACK starts its own in each of them: two
such calls in one program can deadlock or corrupt memory (JAX issue 39292). One matrix at a time
avoids both and costs no more, since each call already uses every core.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Function = TypeVar("Function", bound=Callable[..., Any])


def sequential_on_cpu(function: Function) -> Function:
    """Extends a function of matrices to stacks of them: a loop on a CPU, batched elsewhere."""
    single = jax.custom_batching.custom_vmap(function)

    @single.def_vmap
    def stacked(axis_size: int, in_batched: list[bool], *args: jax.Array) -> tuple[Any, Any]:
        full = [
            x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, batched in zip(args, in_batched, strict=True)
        ]
        out = jax.lax.platform_dependent(
            *full,
            cpu=lambda *xs: jax.lax.map(lambda own: single(*own), xs),
            default=jax.vmap(function),
        )
        return out, jax.tree.map(lambda _: True, out)

    @functools.wraps(function)
    def any_stack(*args: jax.Array) -> Any:
        mapped: Callable[..., Any] = single
        for _ in range(args[0].ndim - 2):
            mapped = jax.vmap(mapped)
        return mapped(*args)

    return any_stack  # type: ignore[return-value]
