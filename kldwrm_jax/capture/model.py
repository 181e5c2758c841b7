"""Models: what the library asks of a way to write them, and one whose layers are known."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.captured_layer import NO_BASES, Bases, CapturedLayer
from kldwrm_jax.capture.layer_call import Options
from kldwrm_jax.capture.trace import Attached, Path, TraceRecord
from kldwrm_jax.curvature import Layers
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.curvature.layer_spec import Arrays
from kldwrm_jax.likelihoods.terms import Structure

ONE: Structure = jax.tree.structure(0)  # a single likelihood


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter(abc.ABC):
    """Runs a model, and attaches arrays beside the parameters of its layers."""

    options: Options

    @abc.abstractmethod
    def example(self, call: Call) -> tuple[Any, Call]:
        """Parameters (or their shapes) and call, from the example call of ``instrument``."""

    @abc.abstractmethod
    def bind(self, params: Any, call: Call) -> tuple[Any, Call]:
        """Parameters and call as :meth:`run` wants them, from those of ``net.oracle``."""

    @abc.abstractmethod
    def run(
        self, params: Any, call: Call, attached: Attached | None = None, label: str = ""
    ) -> tuple[Any, Any, TraceRecord]:
        """Calls the model, with arrays attached to its layers if any are given.

        Functions that are compiled within runs of one ``label`` serve no other.

        Returns:
          What the model returns, its other variables after the call, and the record of the layers
          that it met; the record is empty if nothing is attached.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model, its layers, and how it is run with probes."""

    adapter: Adapter
    output: Callable[[Any], Any] | None  # picks what the likelihood sees
    layers: Layers  # every curvature block
    captured: tuple[CapturedLayer, ...]
    uncovered: tuple[str, ...] = ()  # parameters that no captured layer has
    unseen: tuple[str, ...] = ()  # parameters that the likelihood does not see
    mixing: tuple[Path, ...] = ()  # layers in which examples depend on each other
    structure: Structure = ONE  # of the outputs, one for every likelihood
    # What makes the factors from a batch's oracle and its bases; None if they are made of probes.
    measure: Callable[[Any, Bases], dict[str, Factors]] | None = None
    batched: Any = None  # the arguments that have examples, as a prefix of them; None if not known

    def by_term(self) -> list["Model"]:
        """For every likelihood, the model of its outputs alone."""
        if self.structure == ONE:
            return [self]

        def picking(i: int) -> Callable[[Any], Any]:
            return lambda out: self._by_leaf(out)[i]

        terms = range(self.structure.num_leaves)
        return [dataclasses.replace(self, output=picking(i), structure=ONE) for i in terms]

    def outputs(self, params: Any, call: Call) -> Any:
        """What the likelihood sees. Updates of other variables are dropped."""
        return self.outputs_and_variables(params, call)[0]

    def outputs_and_variables(self, params: Any, call: Call) -> tuple[Any, Any]:
        """The same, with the other variables after the call."""
        out, variables, _ = self.adapter.run(params, call)
        return self._picked(out), variables

    def _picked(self, out: Any) -> Any:
        return jax.tree.unflatten(self.structure, map(_floating, self._by_leaf(out)))

    def _by_leaf(self, out: Any) -> list[Any]:
        """What every likelihood sees of what the model returns."""
        returned, source = type(out).__name__, "the model"
        if self.output is not None:
            source = "output"
            try:
                out = self.output(out)
            except Exception as error:
                error.add_note(f"output is given what the model returns, here a {returned}")
                raise
        try:
            leaves = self.structure.flatten_up_to(out)
        except ValueError as error:
            likelihoods = jax.tree.unflatten(self.structure, ["..."] * self.structure.num_leaves)
            raise ValueError(
                f"{source} returns a {type(out).__name__} whose structure is not that of the "
                f"likelihoods, {likelihoods}: {error}. Pass instrument(..., output=f) with an f "
                f"that makes it so"
            ) from error
        for leaf in leaves:
            if not hasattr(leaf, "shape"):
                raise ValueError(
                    f"{source} returns a {type(leaf).__name__}: pass instrument(..., output=f) "
                    f"with an f that picks the array that the likelihood sees, such as "
                    f"lambda out: out[0], or a tree of likelihoods of its structure"
                )
        return leaves

    def probes(self, bases: Bases = NO_BASES) -> dict[Path, Arrays]:
        """Zero probes for every captured layer."""
        return {layer.path: layer.probes(bases) for layer in self.captured}

    def observed_outputs(
        self,
        params: Any,
        call: Call,
        probes: dict[Path, Arrays],
        weights: jax.Array | None = None,
        bases: Bases = NO_BASES,
        label: str = "observed",
    ) -> tuple[Any, TraceRecord]:
        """:meth:`outputs`, whose cotangents for ``probes`` are the statistics.

        Returns:
          The outputs, and the record of the layers met.
        """
        attached = {
            layer.path: probes[layer.path] | layer.constants(weights, bases)
            for layer in self.captured
        }
        out, _, record = self.adapter.run(params, call, attached, label)
        return self._picked(out), record

    def factors(self, collected: dict[Path, Arrays], scale: float) -> dict[str, Factors]:
        """The factors of every block of a captured layer, from the cotangents of the probes."""
        made: dict[str, Factors] = {}
        for layer in self.captured:
            made |= layer.factors(collected[layer.path], scale)
        return made

    def check_reached(self, params: Any, call: Call, record: TraceRecord) -> None:
        """An error if a captured layer was not met, or not in the way that was instrumented.

        Layers inside a function that was compiled before are observed without being met again; so
        those that the record misses are counted, on zeros, before they are called missing.
        """
        calls = {layer.path: record.calls.get(layer.path, []) for layer in self.captured}
        changed = [
            layer.name
            for layer in self.captured
            if any(layer.spec.merge(spec) != layer.spec for spec, _ in calls[layer.path])
        ]
        if changed:
            raise ValueError(
                f"layers {', '.join(map(repr, changed))} are called in another way than they were "
                f"instrumented: call instrument with the arguments (train or eval mode, flags) "
                f"that the oracle is given"
            )
        missing = [layer for layer in self.captured if not calls[layer.path]]
        if not missing:
            return
        with jax.ensure_compile_time_eval():
            zero_params, zero_call = jax.tree.map(_zero, (params, call))

            def outputs(probes: dict[Path, Arrays]) -> Any:
                return self.observed_outputs(zero_params, zero_call, probes)[0]

            out, vjp = jax.vjp(outputs, self.probes())
            (collected,) = vjp(jax.tree.map(jnp.zeros_like, out))
            hidden = [own.name for own in missing if not own.reached(collected[own.path])]
        if hidden:
            raise ValueError(
                f"layers {', '.join(map(repr, hidden))} were instrumented but are not called for "
                f"this batch: call instrument with the arguments (train or eval mode, flags) that "
                f"the oracle is given, and have the model call its submodules directly, not a "
                f"jitted apply of them"
            )

    def mixing_layers(self, record: TraceRecord) -> list[str]:
        """Layers in which examples depend on each other; those not met are as they were found."""
        unmet = [path for path in self.mixing if path not in record.calls]
        return ["/".join(path) or "root" for path in (*record.mixing, *unmet)]


def _floating(out: Any) -> Any:
    return out.astype(jnp.promote_types(out.dtype, jnp.float32))


def _zero(x: Any) -> jax.Array:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.zeros(jax.eval_shape(jax.random.key_data, x).shape, jnp.uint32)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.zeros(x.shape, x.dtype)
