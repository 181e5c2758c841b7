"""A model whose layers are known: what a front end is to the oracle."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.observe import Probes
from kldwrm_jax.capture.readings import Options
from kldwrm_jax.capture.sites import Survey
from kldwrm_jax.capture.watch import Path, Watch, carried_weights
from kldwrm_jax.curvature import Layers


@dataclasses.dataclass(frozen=True, eq=False)
class Model(abc.ABC):
    """A model, its layers, and how to run it with and without probes.

    A front end says how a model is run, and how what is carried travels beside its parameters.

    Args:
      output: picks what the likelihood sees from what the model returns.
      options: how layers are read.
      found: its blocks, its sites, and what no site covers.
      mixing: paths of the layers in which the examples of the example call depend on each other.
    """

    output: Callable[[Any], jax.Array] | None
    options: Options
    found: Survey
    mixing: tuple[Path, ...]

    @abc.abstractmethod
    def run(self, params: Any, call: Call) -> tuple[Any, Any]:
        """What the model returns, and its other variables after the call."""

    @abc.abstractmethod
    def observed_run(
        self, params: Any, call: Call, carried: Mapping[Path, Probes]
    ) -> tuple[Any, Any, Watch]:
        """The same with something carried beside the parameters of layers."""

    def bind(self, params: Any, call: Call) -> tuple[Any, Call]:
        """Parameters and call as :meth:`run` wants them, from those of ``net.oracle``."""
        return params, call

    @property
    def layers(self) -> Layers:
        """Every curvature block."""
        return self.found.layers

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Paths of the parameters that no layer's rule covers."""
        return self.found.uncovered

    def outputs(self, params: Any, call: Call) -> jax.Array:
        """What the likelihood sees. Other variables are updated, and the updates dropped."""
        return self._picked(self.run(params, call)[0])

    def _picked(self, out: Any) -> jax.Array:
        out = out if self.output is None else self.output(out)
        if not hasattr(out, "shape"):
            raise ValueError(
                f"the model returns a {type(out).__name__}: say which array the likelihood sees, "
                f"as in instrument(..., output=lambda out: out[0])"
            )
        return out.astype(jnp.promote_types(out.dtype, jnp.float32))

    def probes(self) -> dict[str, Probes]:
        """Zero probes of every site, stacked as its parameters are."""
        return {
            site.name: {
                name: site.stack.spread(jnp.zeros(shape, float))
                for name, shape in site.role.observation.probes.items()
            }
            for site in self.found.sites
        }

    def observed_outputs(
        self, params: Any, call: Call, weights: jax.Array | None, probes: dict[str, Probes]
    ) -> tuple[jax.Array, Any, Watch]:
        """:meth:`outputs`, whose cotangents for ``probes`` are the statistics.

        With them the other variables as they are after the call.
        """
        beside = {} if weights is None else carried_weights(weights)
        carried = {
            site.path: probes[site.name]
            | {name: site.stack.spread(x) for name, x in beside.items()}
            for site in self.found.sites
        }
        out, variables, watch = self.observed_run(params, call, carried)
        return self._picked(out), variables, watch

    def check_reached(self, params: Any, call: Call, watch: Watch) -> None:
        """An error if a layer of this model was not met, or not in the way that was instrumented.

        Layers inside a function that was compiled before are not met again, and yet observed; so
        what the watch misses is counted, on zeros, before it is called missing.
        """
        changed = [
            site.name
            for site in self.found.sites
            if not all(site.role.covers(role) for role in watch.roles.get(site.path, []))
        ]
        if changed:
            raise ValueError(
                f"layers {', '.join(map(repr, changed))} are called in another way than they were "
                f"instrumented: call instrument with the arguments (train or eval mode, flags) "
                f"that the oracle is given"
            )
        missing = [site for site in self.found.sites if site.path not in watch.roles]
        if not missing:
            return
        with jax.ensure_compile_time_eval():
            zero_params, zero_call = jax.tree.map(_zero, (params, call))
            _, vjp = jax.vjp(
                lambda p: self.observed_outputs(zero_params, zero_call, None, p)[0], self.probes()
            )
            shape = jax.eval_shape(self.outputs, zero_params, zero_call)
            (seen,) = vjp(jnp.zeros(shape.shape, shape.dtype))
            hidden = [site.name for site in missing if not site.reached(seen[site.name])]
        if hidden:
            raise ValueError(
                f"layers {', '.join(map(repr, hidden))} were instrumented but are not called for "
                f"this batch: call instrument with the arguments (train or eval mode, flags) that "
                f"the oracle is given, and have the model call its submodules directly, not a "
                f"jitted apply of them"
            )

    def mixing_layers(self, watch: Watch) -> list[str]:
        """Layers in which examples depend on each other; those not met are as they were found."""
        unmet = [path for path in self.mixing if path not in watch.modules]
        return ["/".join(path) or "root" for path in (*watch.mixing, *unmet)]


def _zero(x: Any) -> jax.Array:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.zeros(jax.eval_shape(jax.random.key_data, x).shape, jnp.uint32),
            impl=jax.random.key_impl(x),
        )
    return jnp.zeros(x.shape, x.dtype)
