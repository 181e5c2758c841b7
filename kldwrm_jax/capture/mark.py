"""``tag``: the mark by which a plain JAX function says where its layers are.

While a function is looked at, the leaves of its parameters are :class:`Marked`: small pytree nodes
that hold a leaf and what is carried beside it, and act as the leaf. So ``scan`` slices both,
``jit`` never mistakes one program for the other, and a mark knows its parameter by itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.layouts import Layout, MarkedCall, read
from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.readings import Options
from kldwrm_jax.capture.watch import Watch, current_watch, observed


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Which leaf of the parameters it is. Static: compiled functions are of one leaf, and one run.

    Args:
      path: in the tree of parameters.
      options: how layers are read.
      label: the kind of run.
    """

    path: str
    options: Options
    label: str


class Marks(Watch):
    """A watch for the marks of a function."""


@jax.tree_util.register_pytree_node_class
class Marked:
    """A leaf and what is carried beside it. Acts as the leaf in operators and ``jax.numpy``."""

    def __init__(self, value: Any, carried: Probes, leaf: Leaf):
        self.value, self.carried, self.leaf = value, carried, leaf

    def tree_flatten(self) -> tuple[tuple[Any, Probes], Leaf]:
        """The leaf and what is carried travel together."""
        return (self.value, self.carried), self.leaf

    @classmethod
    def tree_unflatten(cls, leaf: Leaf, children: tuple[Any, Probes]) -> "Marked":
        """The node again, whatever its leaves have become."""
        return cls(*children, leaf)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Any:
        return iter(self.value)

    __hash__ = object.__hash__


def _as_value(operator: str) -> Callable[..., Any]:
    def method(self: Marked, *others: Any) -> Any:
        return getattr(jnp.asarray(self.value), operator)(*map(value_of, others))

    return method


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("matmul", "rmatmul", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(Marked, f"__{_name}__", _as_value(f"__{_name}__"))


def value_of(x: Any) -> Any:
    """An array, or the array that a node acts as."""
    return x.value if isinstance(x, Marked) else x


def tag(
    kernel: jax.Array,
    inputs: jax.Array,
    outputs: jax.Array | Callable[[jax.Array, jax.Array], jax.Array],
    *,
    bias: jax.Array | None = None,
    layout: Layout = "io",
) -> jax.Array:
    r"""Marks a layer of a plain JAX function: ``outputs`` is ``inputs`` times ``kernel``.

    The identity on ``outputs``, and nothing at all outside an oracle: a function with marks
    compiles to the same program as one without. A parameter that no mark names gets a diagonal
    block, and is named in ``net.layers``.

    Args:
      kernel: a leaf of the function's parameters, as it is: not its transpose, nor a cast of it.
        Under ``scan`` or ``vmap`` over stacked parameters, the slice.
      inputs: what multiplies it, before the product; tokens for a look-up. A product that is
        computed once for the whole batch counts as one row.
      outputs: the product, with the bias added or not; or a function of inputs and kernel that
        computes it, which is then given bare arrays: ``jax.lax`` functions want those, and
        convolutions need it.
      bias: the leaf that is added to the product, if any: it joins the kernel's block.
      layout: what ``outputs`` is, and how the kernel's axes lie:

        * ``"io"``: ``inputs @ kernel``, a kernel of shape (in, out);
        * ``"oi"``: ``inputs @ kernel.T``, as Equinox and PyTorch have it;
        * an einsum of inputs and kernel, such as ``"btd,dhk->bthk"``;
        * a convolution's ``dimension_numbers``, such as ``("NHWC", "HWIO", "NHWC")``; without the
          ``N`` if the function sees one example;
        * ``"lookup"``: ``kernel[inputs]``, and ``"attend"``: ``inputs @ kernel.T`` with the same
          table, a tied head;
        * ``"scale"``: ``inputs * kernel``, with inputs that are normalised.

    Returns:
      ``outputs``, or what the function returns.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> def network(params, x):
      ...     for w, b in params[:-1]:
      ...         x = jnp.tanh(kw.tag(w, x, x @ w + b, bias=b))
      ...     w, b = params[-1]
      ...     return kw.tag(w, x, x @ w + b, bias=b)
      >>> params = [(jnp.ones((4, 5)), jnp.zeros(5)), (jnp.ones((5, 3)), jnp.zeros(3))]
      >>> x = jnp.ones((8, 4))
      >>> net = kw.instrument(network, kw.Categorical(), params, x)
      >>> print(net.layers)
      ┌───────┬──────────┬────────────┬─────────────────┬───────┐
      │ layer │ kind     │ parameters │ factors         │ state │
      ├───────┼──────────┼────────────┼─────────────────┼───────┤
      │ 0     │ product  │         25 │ (5, 5) x (5, 5) │ 400 B │
      │ 1     │ product  │         18 │ (6, 6) x (3, 3) │ 360 B │
      ├───────┼──────────┼────────────┼─────────────────┼───────┤
      │ total │ 2 blocks │         43 │                 │ 760 B │
      └───────┴──────────┴────────────┴─────────────────┴───────┘
      >>> oracle = net.oracle(params, x, key=jax.random.key(0))
      >>> oracle.factors()["1"][0].shape
      (6, 6)
    """
    product = outputs if callable(outputs) else None
    inputs = value_of(inputs)
    z: Any = outputs if product is None else product(inputs, value_of(kernel))
    watch = current_watch()
    if not isinstance(kernel, Marked):
        if isinstance(watch, Marks):
            raise ValueError(_no_leaf("kernel", kernel))
        return z
    if bias is not None and not isinstance(bias, Marked):
        raise ValueError(_no_leaf("bias", bias))
    shape = None if bias is None else bias.shape
    inputs, z = jnp.asarray(inputs), jnp.asarray(value_of(z))
    reading = read(MarkedCall(kernel.shape, shape, inputs, z, product, layout), kernel.leaf.options)
    if watch is not None:
        leaves: dict[str, Any] = {
            part: bias if part == "bias" else kernel for part in reading.role.parameters
        }
        watch.note(
            (kernel.leaf.path,),
            reading.role,
            {part: leaf.leaf.path for part, leaf in leaves.items()},
            {part: leaf.shape for part, leaf in leaves.items()},
            kernel.carried,
        )
    return observed(reading, z, kernel.carried)


def _no_leaf(name: str, value: Any) -> str:
    shape = getattr(value, "shape", None)
    what = type(value).__name__ if shape is None else f"an array of shape {shape}"
    return (
        f"{name} must be a leaf of the function's parameters, and marked already in the example "
        f"call of instrument; got {what} that is not: give tag the leaf itself, and transpose, "
        f"cast or reshape it in the product alone (layout says how its axes lie)"
    )
