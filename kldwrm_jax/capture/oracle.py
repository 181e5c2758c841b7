"""The oracle: a batch's curvature, outputs and divergences, computed when asked for."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.captured_layer import NO_BASES, Bases
from kldwrm_jax.capture.forward_pass import run_forward
from kldwrm_jax.capture.model import Model
from kldwrm_jax.curvature.blocks import Factors
from kldwrm_jax.likelihoods.term import LikelihoodTerm
from kldwrm_jax.paths import Leaves, leaves_by_path, replace_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Oracle:
    """A batch bound to parameters. A pytree: it crosses ``jit``, ``scan`` and ``vmap`` as it is.

    It computes nothing before one of its methods is called, so that a step without a refresh pays
    nothing for it.
    """

    model: Model = dataclasses.field(metadata={"static": True})
    term: LikelihoodTerm
    params: Any
    call: Call
    after: Any = None  # other variables after the pass of ``net.value_and_grad``

    def factors(self, bases: Bases | None = None) -> dict[str, Factors]:
        r"""Every block's curvature on this batch.

        Args:
          bases: for some blocks by name, orthogonal matrices ``(U_A, U_G)`` shaped like the
            factors; None for a side is the identity. The second moment of the per-example gradient
            is measured in the basis: :math:`S = \sum_n (U_A' \nabla_n U_G)^2` elementwise,
            EK-FAC's scaling.

        Returns:
          ``{"path/to/layer": (A, G)}``, scaled so that ``kron(A, G)`` is the layer's K-FAC block of
          the Fisher of the mean loss, for the row-major flattening of ``[W; b]``; ``(A, G, S)``
          where a basis was given; one array, shaped like its parameter, for a diagonal block.
        """
        bases = bases or NO_BASES
        for name in bases:
            self.model.layers[name]  # an error if there is no such block
        self._check_axis()
        paths, term, axis = self.model.uncovered, self.term, self.term.axis
        params, probes = axis.varying((self.params, self.model.probes(bases)))
        run = run_forward(self.model, params, self.call, paths, probes, term.weights, bases)
        leaves = leaves_by_path(self.params)
        directions, scale = term.directions(run.outputs, run.mixing)
        collected = axis.sum(run.statistics(directions, term.positions(run.outputs)))
        made = self.model.factors(collected, scale)
        if self.model.uncovered:
            signs = term.random_signs(directions)
            _, gradients = run.vjp(jnp.sum(signs * directions, axis=0))
            for path in self.model.uncovered:
                made[path] = scale * axis.sum(gradients[path].astype(float) ** 2)
        made |= {path: jnp.ones(jnp.shape(leaves[path])) for path in self.model.unseen}
        return {block.name: made[block.name] for block in self.model.layers}

    def value_and_grad(self) -> tuple[jax.Array, Any, "Oracle"]:
        """Loss and gradient at the oracle's parameters, and the oracle with the variables after."""
        self._check_axis()
        loss, gradient, variables = self._value_and_grad_here()
        loss, gradient = self.term.axis.sum((loss, gradient))
        return loss, gradient, dataclasses.replace(self, after=self.term.axis.mean(variables))

    def _value_and_grad_here(self) -> tuple[jax.Array, Any, Any]:
        """This replica's part of loss and gradient, and its other variables after the pass."""
        params = self.term.axis.varying(self.params)

        def loss(leaves: Leaves) -> tuple[jax.Array, Any]:
            own = replace_leaves(params, leaves)
            outputs, variables = self.model.outputs_and_variables(own, self.call)
            return self.term.loss_here(outputs), variables

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(leaves_by_path(params))
        return value, replace_leaves(params, gradients), after

    @property
    def variables(self) -> Any:
        """The collections given as ``variables``, such as ``batch_stats``, after the pass."""
        if self.after is None:
            raise ValueError(
                "an oracle made by net.oracle(...) has done no pass yet: make it by "
                "net.value_and_grad(...), or take the updated variables from your own loss"
            )
        return self.after

    @property
    def event_size(self) -> int:
        """How many numbers the outputs have for one sample."""
        return self.term.event_size(jax.eval_shape(self.outputs, self.params))

    def outputs(self, params: Any) -> jax.Array:
        """The network's outputs on this batch at other parameters, with the same dropout masks.

        Where the batch is split over replicas, these are the outputs of the part that is here.
        """
        return self.model.outputs(params, self.call)

    def loss(self, params: Any) -> jax.Array:
        """Mean negative log-likelihood of the targets at other parameters."""
        return self.term.loss(self.outputs(self.averaging_gradient(params)))

    def averaging_gradient(self, params: Any) -> Any:
        """The same parameters, for functions of ``outputs`` that end in a mean over replicas.

        Their gradient by the parameters is then that mean's, too, and the same on every replica.
        """
        self._check_axis()
        return self.term.axis.averaging_gradient(params)

    def divergence(self, outputs1: jax.Array, outputs2: jax.Array) -> jax.Array:
        """Mean symmetric KL divergence between two networks' outputs on this batch."""
        self._check_axis()
        return self.term.divergence(outputs1, outputs2)

    def _check_axis(self) -> None:
        """An error if the batch is split over an axis that ``instrument`` was not told of."""
        term = self.term
        term.axis.check(self.params, (self.call, term.targets, term.weights))

    def quadratic(self, step: Any) -> jax.Array:
        r""":math:`\frac12 s'F s`: the divergence of a step to second order.

        ``F`` is the exact Fisher of the whole network on this batch at the oracle's parameters.

        Args:
          step: of the parameters' structure; masked parameters do not move.
        """
        return 0.5 * self.gram([step])[0][0, 0]

    def gram(self, directions: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
        r""":math:`V'FV` for the exact Fisher of the whole network on this batch.

        One JVP per direction, and the second derivative of the divergence along them.

        Args:
          directions: the columns of ``V``, each of the parameters' structure; masked parameters do
            not move.

        Returns:
          The matrix, and the number of samples that it is a mean over.
        """
        leaves = leaves_by_path(self.params)
        columns = [leaves_by_path(direction) for direction in directions]

        def stack(path: str, p: jax.Array) -> jax.Array:
            return jnp.stack(
                [v[path].astype(p.dtype) if path in v else jnp.zeros_like(p) for v in columns]
            )

        tangents = {path: stack(path, p) for path, p in leaves.items()}
        outputs, jvp = jax.linearize(
            lambda leaves: self.outputs(replace_leaves(self.params, leaves)), leaves
        )
        outputs, changes = optax.tree.cast((outputs, jax.vmap(jvp)(tangents)), float)
        slope = jax.grad(lambda h: self.term.divergence_here(outputs, h))
        _, output_fisher = jax.linearize(slope, outputs)
        curved = jax.vmap(output_fisher)(changes)
        k = len(columns)
        highest = jax.lax.Precision.HIGHEST
        gram = jnp.matmul(changes.reshape(k, -1), curved.reshape(k, -1).T, precision=highest)
        return self.term.axis.sum(gram), self.term.samples(outputs)

    @property
    def batch_size(self) -> int:
        """The length of the first axis of the outputs."""
        known = self.term.weights if self.term.targets is None else self.term.targets
        return jnp.shape(known)[0] if known is not None else self.sample_shape[0]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The outputs' axes that are samples; the first of them is the batch's."""
        outputs = jax.eval_shape(self.model.outputs, self.params, self.call)
        return self.term.sample_shape(outputs)

    def part(self, take: Callable[[jax.Array], jax.Array]) -> "Oracle":
        """The oracle of some examples.

        Args:
          take: takes them from an array whose first axis is the batch's; applied to all arguments
            of the model, targets and weights that have as many entries as the batch.
        """
        batch = self.batch_size

        def cut(x: Any) -> Any:
            if getattr(x, "ndim", 0) == 0 or x.shape[0] != batch:
                return x
            return take(jnp.asarray(x))

        call = dataclasses.replace(
            self.call,
            args=jax.tree.map(cut, self.call.args),
            kwargs=jax.tree.map(cut, self.call.kwargs),
        )
        targets, weights = jax.tree.map(cut, (self.term.targets, self.term.weights))
        term = dataclasses.replace(self.term, targets=targets, weights=weights)
        return Oracle(self.model, term, self.params, call)

    def thinned(self, examples: int) -> "Oracle":
        """The oracle of every n-th example, so that ``examples`` are left.

        The examples of a batch that is sharded over devices come from all of them.
        """
        every = self.batch_size // examples
        if every <= 1:
            return self
        return self.part(lambda x: x[: every * examples : every])
