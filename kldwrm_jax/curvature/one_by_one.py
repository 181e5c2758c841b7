"""Decompositions of a stack of matrices, which on a CPU are done one after another.

JAX hands a stack of matrices to LAPACK on several threads at once, and LAPACK starts threads of its
own: two such calls in one program may wait for each other for ever, or corrupt memory (JAX's issue
39292). One matrix at a time has neither fault, and costs no more: each uses every core by itself.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Function = TypeVar("Function", bound=Callable[..., Any])


def one_by_one(function: Function) -> Function:
    """A function of matrices, for stacks of them: in a loop on a CPU, batched elsewhere."""
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
