"""The examples in CONTRIBUTING, followed."""

import pathlib
import re

import jax
import numpy as np
import small_nets

import kldwrm_jax as kw

PAGE = pathlib.Path(__file__).parent.parent / "CONTRIBUTING.md"


def test_a_fifth_member_is_put_together_from_the_pieces():
    """With beta = 1 it is Q-KLD-WRM as on steps without a refresh, where B is the average."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": "contributing"}
    exec(compile(block, str(PAGE), "exec"), names)
    problem = small_nets.problem(norm=False)
    settings = {"rho": 0.6, "damping": 0.05, "refresh_every": 10}
    staggered = kw.Inverse(stagger=True)  # takes the average for B at the refresh, too
    reference = kw.q_kldwrm(problem.layers, 0.3, inverse=staggered, **settings)
    for beta, same in ((1.0, True), (3.0, False)):
        tx = names["proportional"](problem.layers, 0.3, beta=beta, **settings)
        ends = []
        for own in (tx, reference):
            step = small_nets.jit(problem.step(own))
            params, state = problem.params, own.init(problem.params)
            for k in range(5):
                params, state = step(params, state, k)
            ends.append(params)
        close = jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-5, atol=1e-6), *ends)
        assert all(jax.tree.leaves(close)) == same
