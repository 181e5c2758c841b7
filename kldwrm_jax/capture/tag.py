"""``tag``: how a plain JAX function says where its layers are.

While a function is traced for its layers, the leaves of its parameters are :class:`TaggedLeaf`:
small pytree nodes that hold a leaf and the arrays attached to it, and act as the leaf. So ``scan``
slices both, ``jit`` never mistakes one program for the other, and a tag knows its parameter.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from kldwrm_jax.capture.layer_call import Options
from kldwrm_jax.capture.layouts import Layout, TaggedCall, kernel_name, layer_type, read
from kldwrm_jax.capture.trace import CallSite, TraceRecord, capture, current_record
from kldwrm_jax.curvature.layer_spec import Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TaggedLeaf:
    """A leaf and the arrays attached to it. Acts as the leaf in operators and ``jax.numpy``.

    Compiled functions serve one leaf and one kind of run, which are part of the tree's structure.
    """

    value: Any
    attached: Arrays
    path: str = dataclasses.field(metadata={"static": True})
    options: Options = dataclasses.field(metadata={"static": True})
    label: str = dataclasses.field(metadata={"static": True})

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


def _as_value(operator: str) -> Callable[..., Any]:
    def method(self: TaggedLeaf, *others: Any) -> Any:
        return getattr(jnp.asarray(self.value), operator)(*map(_value_of, others))

    return method


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("matmul", "rmatmul", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(TaggedLeaf, f"__{_name}__", _as_value(f"__{_name}__"))


def as_leaf(x: Any) -> TaggedLeaf | None:
    """What is given to a tag, if it is a leaf of a function's parameters."""
    return x if isinstance(x, TaggedLeaf) else None


def _value_of(x: Any) -> Any:
    x = x.get_raw_value() if isinstance(x, nnx.Variable) else x
    return x.value if isinstance(x, TaggedLeaf) else x


# A layer is where the first of these parameters is that it has.
_PARAMETERS = ("kernel", "embedding", "scale", "bias")


def tagged_site(parameters: Mapping[str, Any]) -> CallSite | None:
    """Where in a function a layer with these parameters, by its own names, is called.

    Its parameters are those among them that the function's parameters have. None if the first that
    a layer has, its kernel, is not one of them.
    """
    first = next((name for name in _PARAMETERS if name in parameters), None)
    leaf = None if first is None else parameters[first]
    if not isinstance(leaf, TaggedLeaf):
        return None
    own = {name: leaf for name, leaf in parameters.items() if isinstance(leaf, TaggedLeaf)}
    paths = {name: leaf.path for name, leaf in own.items()}
    shapes = {name: leaf.shape for name, leaf in own.items()}
    values = tuple(jnp.asarray(leaf) for leaf in own.values())
    return CallSite((leaf.path,), paths, shapes, leaf.attached, values)


def tag(
    kernel: jax.Array,
    inputs: jax.Array,
    outputs: jax.Array | Callable[[jax.Array, jax.Array], jax.Array],
    *,
    bias: jax.Array | None = None,
    layout: Layout = "io",
) -> jax.Array:
    r"""Tags a layer of a plain JAX function: ``outputs`` is ``inputs`` times ``kernel``.

    It is the identity on ``outputs`` and has no effect outside an oracle: a function with tags
    compiles to the same program as one without. A parameter that is not tagged gets a diagonal
    block, and ``net.layers`` says so.

    Args:
      kernel: a leaf of the function's parameters itself, not a transpose or a cast of it. Under
        ``scan`` or ``vmap`` over stacked parameters, the slice.
      inputs: the other operand of the product; tokens for a look-up. A product that is computed
        once for the whole batch counts as one row.
      outputs: the product, with or without the bias; or a function of inputs and kernel that
        computes it. The function is given plain arrays, which ``jax.lax`` functions need.
        Convolutions require it.
      bias: the leaf that is added to the product, if any. It joins the kernel's block.
      layout: how ``outputs`` follows from inputs and kernel:

        * ``"io"``: ``inputs @ kernel``, a kernel of shape (in, out);
        * ``"oi"``: ``inputs @ kernel.T``, as Equinox and PyTorch have it;
        * an einsum of inputs and kernel, such as ``"btd,dhk->bthk"``;
        * a convolution's ``dimension_numbers``, such as ``("NHWC", "HWIO", "NHWC")``; without the
          ``N`` if the function sees one example;
        * ``"lookup"``: ``kernel[inputs]``, and ``"attend"``: ``inputs @ kernel.T`` with the same
          table, a tied head;
        * ``"scale"``: ``inputs * kernel``, with normalised inputs.

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
    inputs = _value_of(inputs)
    z: Any = outputs if product is None else product(inputs, _value_of(kernel))
    given: dict[str, Any] = {kernel_name(layout): kernel}
    given |= {} if bias is None else {"bias": bias}
    find_leaf = (current_record() or TraceRecord()).find_leaf
    if find_leaf is None and not isinstance(kernel, TaggedLeaf):
        return z
    leaves: dict[str, TaggedLeaf] = {}
    for name, leaf in given.items():
        found = (find_leaf or as_leaf)(leaf)
        if found is None:
            argument = "bias" if name == "bias" else "kernel"
            raise ValueError(
                f"{argument} must be a leaf of the function's parameters, tagged in the example "
                f"call of instrument already, got an array of shape {jnp.shape(leaf)}: give tag "
                f"the leaf itself, and transpose, cast or reshape it within the product only "
                f"(layout describes its axes). In a Linen module the leaf is what self.param "
                f"returns, in an NNX module the variable itself, self.kernel"
            )
        leaves[name] = found
    inputs, z = jnp.asarray(inputs), jnp.asarray(_value_of(z))
    site = cast(CallSite, tagged_site(leaves))
    options: Options = leaves[kernel_name(layout)].options
    call = TaggedCall(layer_type(layout), inputs, site.shapes, options, z, product, layout)
    return capture(read(call), site, z)
