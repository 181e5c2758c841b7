"""``instrument``: a model, a likelihood and an example call, made ready for natural gradients."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from kldwrm_jax.arguments import check_choice, check_count, is_known
from kldwrm_jax.batch_axis import BatchAxis
from kldwrm_jax.capture.call import Call
from kldwrm_jax.capture.dense_structure import with_dense_blocks
from kldwrm_jax.capture.examples import check_batched
from kldwrm_jax.capture.function import FunctionAdapter
from kldwrm_jax.capture.layer_call import Options
from kldwrm_jax.capture.linen import LinenAdapter
from kldwrm_jax.capture.micro_batches import SplitOracle
from kldwrm_jax.capture.model import Adapter, Model
from kldwrm_jax.capture.nnx import adapt_nnx, fork_streams
from kldwrm_jax.capture.oracle import Oracle
from kldwrm_jax.capture.survey import survey
from kldwrm_jax.curvature import Layers
from kldwrm_jax.likelihoods import Likelihood
from kldwrm_jax.likelihoods.term import LikelihoodTerm
from kldwrm_jax.likelihoods.terms import Structure, likelihood_leaves, make_terms


@dataclasses.dataclass(frozen=True, eq=False)
class Instrumented:
    """A model whose layers are known. Made by :func:`instrument`.

    ``layers`` is the table of curvature blocks, which optimizers are built from; ``likelihood`` is
    that of the outputs, or the tree of those; ``oracle`` binds parameters and a batch.
    """

    layers: Layers
    likelihood: Any
    fisher: str
    model: Model
    axis: BatchAxis

    def oracle(
        self,
        params: Any,
        *args: Any,
        targets: Any = None,
        key: jax.Array | None = None,
        weights: Any = None,
        variables: Mapping[str, Any] | None = None,
        rngs: Mapping[str, jax.Array] | jax.Array | None = None,
        micro_batches: int = 1,
        **kwargs: Any,
    ) -> Oracle:
        """Binds parameters and a batch; nothing is computed until a method is called.

        Args:
          params: the ``params`` of a Linen model; an NNX model itself, as it is now, or its
            ``nnx.state(model, nnx.Param)``; the parameters of a function.
          *args: the batch, as the model takes it.
          targets: labels; needed by ``fisher="empirical"`` and by ``oracle.loss``. Of several
            likelihoods, a tree of their structure, with None for residuals; likewise ``weights``.
          key: a PRNG key; needed by ``fisher="sampled"``.
          weights: of examples or tokens, over the outputs' leading axes; 0 for padding. Negative
            ones are an error, and inside ``jit``, where nobody can look, the loss is NaN. Layers
            under a scan over time see an example's weights only, summed over its tokens. Every
            layer must see the examples along the first axis of its input, or one by one under a
            ``vmap``.
          variables: other collections of a Linen model, such as ``batch_stats``; they run mutable
            and their updates are dropped. An NNX model brings its own.
          rngs: as in ``model.apply``; for an NNX model, its argument ``rngs``, keys or an
            ``nnx.Rngs``. Every method of this oracle uses the same dropout masks: those that the
            model itself would have next, if ``nnx.Rngs`` are given here or among the arguments.
          micro_batches: the number of parts in which the batch is processed, one after another, to
            save memory. Unlike with ``optax.MultiSteps``, gradients and statistics are those of the
            whole batch. Arguments whose first axis has the length of the batch are split, or those
            that ``instrument(..., batched=...)`` names.
          **kwargs: keyword arguments of the model. Python bools, strings, None and callables among
            the arguments are part of the oracle's structure, not leaves.

        Returns:
          An :class:`~kldwrm_jax.capture.oracle.Oracle`, for ``tx.update(..., oracle=oracle)``.
        """
        check_count("micro_batches", micro_batches)
        terms = make_terms(self.likelihood, self.fisher, targets, key, weights, self.axis)
        params, call = self.model.adapter.bind(params, Call(args, kwargs, variables or {}, rngs))
        call = call if is_known(params) else call.unfolded()
        if micro_batches == 1:
            return Oracle(self.model, terms, params, call)
        return SplitOracle(self.model, terms, params, call, parts=micro_batches)

    def value_and_grad(
        self, params: Any, *args: Any, targets: Any = None, **kwargs: Any
    ) -> tuple[jax.Array, Any, Oracle]:
        """Loss, gradient and oracle of a batch.

        The loss is ``oracle.loss``, the mean negative log-likelihood. If yours is another one,
        take its gradient yourself and use :meth:`oracle`. Arguments are those of :meth:`oracle`.
        It costs what ``jax.value_and_grad(oracle.loss)`` does, and also gives the other variables
        after the pass. With ``refresh_every=1``, XLA shares the forward pass with the statistics,
        and with ``fisher="empirical"`` the backward pass, too.

        Returns:
          The loss; its gradient, shaped like ``params``; the oracle. ``oracle.variables`` are the
          collections given as ``variables`` after the pass; for an NNX model, take them over by
          ``nnx.update(model, oracle.variables)``. ``nnx.Rngs`` among the arguments are forked, so
          that the next call has other dropout masks.

        Example:
          >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
          >>> import kldwrm_jax as kw
          >>> model, x, y = nn.Dense(3), jnp.eye(4), jnp.array([0, 1, 2, 0])
          >>> net = kw.instrument(model, kw.Categorical(), x)
          >>> tx = kw.kfac(net.layers)
          >>> params = model.init(jax.random.key(0), x)["params"]
          >>> state = tx.init(params)
          >>> @jax.jit
          ... def step(params, state, key):
          ...     loss, grads, oracle = net.value_and_grad(params, x, targets=y, key=key)
          ...     updates, state = tx.update(grads, state, params, oracle=oracle)
          ...     return optax.apply_updates(params, updates), state, loss
          >>> for i in range(20):
          ...     params, state, loss = step(params, state, jax.random.key(i))
          >>> bool(loss < 0.05)
          True
        """
        args, kwargs = fork_streams((args, kwargs))
        return self.oracle(params, *args, targets=targets, **kwargs).value_and_grad()


def instrument(
    model: nn.Module | nnx.Module | Callable[..., Any],
    likelihood: Any,
    *args: Any,
    structure: str = "kronecker",
    fisher: str | None = None,
    bias: str = "joint",
    sharing: str = "expand",
    uncovered: str = "diagonal",
    max_factor: int = 4096,
    output: Callable[[Any], Any] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    batched: Any = None,
    variables: Mapping[str, Any] | None = None,
    rngs: Mapping[str, jax.Array] | jax.Array | None = None,
    **kwargs: Any,
) -> Instrumented:
    r"""Finds a model's layers and chooses a curvature block for each.

    The model is traced with shapes alone and is not changed. Layers of Flax Linen and NNX are found
    automatically; a plain function tags its own with :func:`~kldwrm_jax.tag`. Dense or Linear,
    DenseGeneral (and so attention), Einsum, Conv and ConvTranspose, recurrent cells and Embed get
    Kronecker blocks :math:`A \otimes G`; normalisations get diagonal blocks of squared per-example
    gradients. Every other parameter gets, by ``uncovered``, an error or a diagonal block: the
    squared gradient of :math:`\sum_n \epsilon_n \sqrt{w_n/W}\, \ell_n` with random signs
    :math:`\epsilon`, an unbiased but noisy estimate of the Fisher's diagonal.

    Args:
      model: a Flax Linen module; a Flax NNX module; or a function of parameters and a batch.
      likelihood: of the outputs, such as :class:`~kldwrm_jax.Categorical`; or a tree of
        likelihoods, such as ``{"policy": Categorical(), "value": Gaussian()}``. The model's
        outputs, ``targets`` and ``weights`` then have that structure. Every term is a mean over its
        own leading axes, whose lengths may differ; loss, Fisher and divergence are sums over terms.
        A layer's block is the Kronecker product with the partial traces of the sum of the terms'.
      *args: an example call of the model: arrays or ``jax.ShapeDtypeStruct``. Only shapes matter,
        and the batch size may differ later. For a function, the first argument is its parameters:
        any pytree, whose floating-point leaves are trained.
      structure: ``"kronecker"``, blocks as above; ``"layer"``, the Fisher of each layer as one
        dense matrix (of each copy of a stacked layer; a parameter that no rule covers is a layer of
        its own); or ``"network"``, that of all parameters. Dense blocks are exact and average
        Fishers, not factors: the propositions as they are written. They are for networks of up to
        some thousand parameters, whose examples do not depend on each other, without dropout.
      fisher: ``"sampled"`` (labels drawn from the model: the Fisher of the paper's definition),
        ``"empirical"`` (the data's labels) or ``"exact"`` (the full expectation). None is
        ``"sampled"`` with Kronecker blocks; dense ones are always ``"exact"``.
      bias: ``"joint"`` (kernel and bias in one block) or ``"separate"``.
      sharing: ``"expand"`` (every place where weights are shared is a sample) or ``"reduce"``
        (inputs are averaged, output gradients summed over the axes after the first). Embed always
        expands.
      uncovered: ``"diagonal"`` or ``"error"``, for parameters that no rule covers. These are also
        parameters that are used outside their layer, too, and those that the likelihood does not
        see (a head that ``output`` leaves out): their block is the identity, and they have no part
        in ``kl_clip``.
      max_factor: larger sides of a block are kept as their diagonal.
      output: picks what the likelihood sees from what the model returns.
      axis_name: the axis, or axes, of ``jax.pmap`` or ``jax.shard_map`` over which batches are
        split. Whatever is measured on a batch is then that of the whole batch, the same on every
        replica: loss and gradient of ``net.value_and_grad`` and ``oracle.loss``, statistics,
        divergences, calibration, and ``oracle.variables``. ``weights`` count by their sum over all
        replicas, and each draws labels of its own from the same ``key``. ``()`` says that replicas
        are independent, such as seeds.
      batched: the arguments of the model whose first axis is the batch, where its examples may be
        taken apart: by ``micro_batches``, and by optimizers that measure on a part of the batch.
        True or False for all, or a tuple with an entry for every positional argument, which may be
        a tree of bools, as ``in_axes`` of ``jax.vmap``: ``batched=(True, False)``. A function's
        parameters have no entry; arguments given by name are kept whole. Without it,
        ``micro_batches`` splits all arguments that are as long as the batch, and a part is measured
        only if a trace of the model proves that its examples are independent (see
        :meth:`~kldwrm_jax.capture.oracle.Oracle.thinned`), otherwise the whole batch.
      variables: the model's variables, or their shapes, if ``model.init`` cannot be called with
        these arguments.
      rngs: keys by name, if a Linen model needs others than ``params`` and ``dropout``, or an NNX
        model takes them as its argument ``rngs``.
      **kwargs: keyword arguments of the example call.

    Returns:
      An object with ``layers``, ``oracle`` and ``likelihood``.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> import kldwrm_jax as kw
      >>> model = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(3)])
      >>> x, y = jnp.ones((4, 5)), jnp.array([0, 1, 2, 0])
      >>> net = kw.instrument(model, kw.Categorical(), x)
      >>> print(net.layers)
      ┌──────────┬──────────┬────────────┬─────────────────┬────────┐
      │ layer    │ kind     │ parameters │ factors         │  state │
      ├──────────┼──────────┼────────────┼─────────────────┼────────┤
      │ layers_0 │ Dense    │         48 │ (6, 6) x (8, 8) │  800 B │
      │ layers_2 │ Dense    │         27 │ (9, 9) x (3, 3) │  720 B │
      ├──────────┼──────────┼────────────┼─────────────────┼────────┤
      │ total    │ 2 blocks │         75 │                 │ 1.5 kB │
      └──────────┴──────────┴────────────┴─────────────────┴────────┘
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> oracle = net.oracle(params, x, targets=y, key=jax.random.key(1))
      >>> a, g = oracle.factors()["layers_0"]
      >>> a.shape, g.shape
      ((6, 6), (8, 8))

    References:
      Martens, Grosse, `Optimizing Neural Networks with Kronecker-factored Approximate Curvature
      <https://arxiv.org/abs/1503.05671>`_, 2015; Eschenhagen et al., `Kronecker-Factored
      Approximate Curvature for Modern Neural Network Architectures
      <https://arxiv.org/abs/2311.00636>`_, 2023 (``sharing``).
    """
    check_choice("structure", structure, ("kronecker", "layer", "network"))
    fisher = _fisher_of(structure, fisher)
    check_choice("bias", bias, ("joint", "separate"))
    check_choice("sharing", sharing, ("expand", "reduce"))
    check_choice("uncovered", uncovered, ("diagonal", "error"))
    check_count("max_factor", max_factor)
    options = Options(bias, sharing, max_factor)
    if structure != "kronecker":
        _check_no_factors(structure, options)
    likelihoods, tree = likelihood_leaves(likelihood)
    if output is not None and not callable(output):
        raise ValueError(
            f"output must be a function of what the model returns, such as lambda out: out[0], "
            f"got {output!r}"
        )
    adapter = _adapter(model, options)
    axis, call = BatchAxis.named(axis_name), Call(args, kwargs, variables or {}, rngs)
    batched = check_batched(batched, args[isinstance(adapter, FunctionAdapter) :])
    found, outputs = _surveyed(adapter, output, call, tree, axis)
    found = dataclasses.replace(found, batched=batched)
    found = found if structure == "kronecker" else with_dense_blocks(found, structure)
    missed = (*found.uncovered, *found.unseen)
    if uncovered == "error" and missed:
        notes = "; ".join(f"{path} ({found.layers[path].note})" for path in missed)
        raise ValueError(
            f"uncovered='error' and no rule covers {notes}. Pass uncovered='diagonal' to give them "
            f"diagonal blocks, or train them with another optimizer through optax.partition"
        )
    for own, seen in zip(likelihoods, tree.flatten_up_to(outputs), strict=True):
        _check_outputs(own, fisher, seen, structure)
    return Instrumented(found.layers, likelihood, fisher, found, axis)


def _fisher_of(structure: str, fisher: str | None) -> str:
    """What ``fisher`` names, or its default."""
    if fisher is None:
        return "sampled" if structure == "kronecker" else "exact"
    check_choice("fisher", fisher, ("sampled", "empirical", "exact"))
    if structure != "kronecker" and fisher != "exact":
        raise ValueError(
            f"structure={structure!r} computes the exact Fisher, from the jacobian of the outputs, "
            f"got fisher={fisher!r}: leave it out, or use structure='kronecker'"
        )
    return fisher


def _check_no_factors(structure: str, options: Options) -> None:
    """An error if anything is said of Kronecker factors where there are none."""
    for name, given in dataclasses.asdict(options).items():
        if given != getattr(Options(), name):
            raise ValueError(
                f"{name}={given!r} says how Kronecker factors are made, and structure="
                f"{structure!r} has none: leave it out, or use structure='kronecker'"
            )


def _surveyed(
    adapter: Adapter,
    output: Callable[[Any], Any] | None,
    call: Call,
    structure: Structure,
    axis: BatchAxis,
) -> tuple[Model, Any]:
    try:
        return axis.bound(lambda: survey(adapter, output, call, structure))
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            f"the model uses a named axis, as BatchNorm(axis_name='batch') does, that instrument "
            f"does not know: pass instrument(..., axis_name='batch'), got axis_name="
            f"{axis.names!r} ({str(error).splitlines()[0]})"
        ) from error


_MANY_PASSES = 1000


def _check_outputs(likelihood: Likelihood, fisher: str, outputs: Any, structure: str) -> None:
    """An error if the likelihood cannot take these outputs, a warning if they make it slow."""
    if outputs.ndim < likelihood.event_ndim:
        raise ValueError(
            f"the likelihood sees an array of shape {outputs.shape}, and its events have "
            f"{likelihood.event_ndim} axes: output must pick outputs of shape (*samples, *event)"
        )
    passes = LikelihoodTerm(likelihood, fisher, None, None, None).backward_passes(outputs)
    if passes > _MANY_PASSES:
        cheaper = "" if structure == "kronecker" else "structure='kronecker', "
        warnings.warn(
            f"fisher='exact' takes {passes:,} backward passes at every refresh for outputs of "
            f"shape {outputs.shape}, one for each dimension of an event and each position of an "
            f"example: {cheaper}fisher='sampled' takes one",
            stacklevel=3,
        )


def _adapter(model: Any, options: Options) -> Adapter:
    if isinstance(model, nn.Module):
        return LinenAdapter(options, model)
    if isinstance(model, nnx.Module):
        return adapt_nnx(model, options)
    if callable(model) and not isinstance(model, type):
        return FunctionAdapter(options, model)
    raise ValueError(
        f"model must be a flax.linen.Module, a flax.nnx.Module or a function of parameters and a "
        f"batch, got {type(model).__name__}"
    )
