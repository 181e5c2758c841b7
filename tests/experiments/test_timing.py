import jax.numpy as jnp
import numpy as np

from kldwrm_jax.experiments.timing import Compiled, compile_step, interleaved, relative


def seconds(wall, base):
    """The array of a case whose process time is twice its wall-clock time."""
    wall, base = np.array(wall), np.array(base)
    return np.stack([wall, 2 * wall, base, base])


def test_every_round_is_compared_with_the_baseline_before_it_and_the_median_counts():
    found = relative(
        seconds([[1.0, 5.0], [10.0, 1000.0], [1.0, 4.0]], [[1.0, 1.0], [10.0, 10.0], [0.5, 0.5]])
    )
    assert found["ratio_of_each_round"] == [3.0, 50.5, 5.0]
    assert found["ratio"] == 5.0
    assert found["process_ratio"] == 10.0
    assert found["usual_step"] == 5.0
    assert found["slowest_step"] == 8.0
    assert found["step_seconds"] == 3.0
    assert found["process_seconds"] == 6.0


def test_the_slowest_step_is_one_that_is_slow_in_most_rounds():
    found = relative(seconds([[9.0, 2.0], [1.0, 2.0], [1.0, 9.0]], [[1.0, 1.0]] * 3))
    assert found["slowest_step"] == 2.0


def test_the_baseline_runs_right_before_every_case():
    order = []

    def case(name):
        def step(state, batch):
            order.append(name)
            return state + batch

        return Compiled(step, jnp.zeros(()), 0.0, None)

    rounds = list(interleaved({"a": case("a"), "b": case("b")}, case("base"), 1.0, 2, rounds=1))
    one_round = ["base", "a", "a", "base", "b", "b"]
    assert order == 2 * one_round  # the first round warms up
    assert [own["a"].shape for own in rounds] == [(4, 0, 2), (4, 1, 2)]
    assert (rounds[-1]["b"][[0, 2]] > 0).all()


def test_a_step_is_compiled_with_its_memory_and_donates_its_state():
    batch = jnp.ones((64, 64))
    found = compile_step(lambda state, batch: state + batch @ batch @ batch, batch + 1, batch)
    assert found.seconds > 0
    assert found.temporary_bytes is None or found.temporary_bytes >= 64 * 64 * 4
    state = found.step(found.state, batch)
    assert found.state.is_deleted()
    assert state.shape == (64, 64)
