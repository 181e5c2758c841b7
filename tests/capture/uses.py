"""Every product with a kernel in a program, found in its jaxpr, and the K-FAC of them all.

It knows nothing of derivatives: whatever a model differentiates, its program is sums of products
with the kernels, each with rows on one side and, on the other, the cotangents of its result.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal


def run(function, params, x, added):
    """The outputs, with arrays added to the products; and the products."""
    leaves, treedef = jax.tree.flatten(params)
    program = jax.make_jaxpr(lambda *leaves: function(treedef.unflatten(leaves), x))(*leaves)
    products, kernels = [], {}

    def evaluate(jaxpr, consts, args):
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(v):
            return v.val if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            # A kernel is known by its variable, which only its transposes and calls pass on.
            own = [kernels.get(v) for v in eqn.invars if not isinstance(v, Literal)]
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name in ("jit", "pjit"):
                for v, outer in zip(inner.jaxpr.invars, eqn.invars, strict=True):
                    if not isinstance(outer, Literal) and outer in kernels:
                        kernels[v] = kernels[outer]
                results = evaluate(inner.jaxpr, inner.consts, operands)
            elif eqn.primitive.name == "transpose" and own[0] is not None:
                kernels[eqn.outvars[0]] = (own[0][0], own[0][1][::-1])
                results = [operands[0].T]
            elif eqn.primitive.name == "dot_general" and any(own):
                results = [_product(eqn, operands, own, products, added)]
            else:
                assert not any(own), eqn.primitive
                out = eqn.primitive.bind(*operands, **eqn.params)
                results = out if eqn.primitive.multiple_results else [out]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    for i, v in enumerate(program.jaxpr.invars):
        kernels[v] = (i, (0, 1))
    (out,) = evaluate(program.jaxpr, program.consts, leaves)
    return out, products


def _product(eqn, operands, own, products, added):
    """``rows @ kernel`` or ``rows @ kernel.T``, recorded."""
    side = 0 if own[0] is not None else 1
    (layer, axes), contracting = own[side], eqn.params["dimension_numbers"][0]
    (axis,), (other,) = contracting[side], contracting[1 - side]
    rows = jnp.moveaxis(operands[1 - side], other, -1)
    kernel = operands[side] if axis == 0 else operands[side].T
    out = rows @ kernel + added.get(len(products), 0)
    products.append((layer, axes[axis] == 1, rows, out.shape))
    # dot_general has the axes of its first operand first.
    return out if side == 1 else jnp.moveaxis(out, -1, 0)


def terms(function, params, x, directions):
    """``(A, G, A_back, G_back)`` of every kernel, for cotangents of the outputs."""
    _, products = run(function, params, x, {})
    zeros = {i: jnp.zeros(shape) for i, (*_, shape) in enumerate(products)}
    _, vjp = jax.vjp(lambda added: run(function, params, x, added)[0], zeros)
    made = []
    for layer in range(len(jax.tree.leaves(params))):
        sums = {False: [0, 0, 0], True: [0, 0, 0]}
        for direction in directions:
            (cotangents,) = vjp(direction)
            for i, (own, backwards, rows, shape) in enumerate(products):
                if own == layer:
                    c = np.reshape(cotangents[i], (-1, shape[-1]))
                    every = np.broadcast_to(rows, (*shape[:-1], rows.shape[-1]))
                    data = np.reshape(every, (len(c), -1))
                    live = np.any(c != 0, axis=1) & np.any(data != 0, axis=1)
                    s = sums[backwards]
                    s[0] += data[live].T @ data[live]
                    s[1] += c[live].T @ c[live]
                    s[2] += live.sum()
        (a, g, n), (g_back, a_back, m) = sums[False], sums[True]
        made.append((a / max(n, 1), g, a_back, g_back / max(m, 1)))
    return made
