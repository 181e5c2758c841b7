"""What a trace records, and that recording is of one trace and one thread."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from kldwrm_jax.capture.layer_call import Operands, Options, einsum
from kldwrm_jax.capture.trace import (
    PROBE,
    CallSite,
    capture,
    current_record,
    recording,
)

X = np.ones((4, 3))


def call(equation="bi,io->bo", shape=(3, 3)):
    return einsum(Operands("Einsum", X, {"kernel": shape}, Options()), equation)


def site(path="layer", kernel="layer/kernel", attached=None):
    return CallSite((path,), {"kernel": kernel}, {"kernel": (3, 3)}, attached or {})


def test_calls_are_recorded_by_path_with_shapes_and_no_arrays():
    made = call()
    with recording() as record:
        capture(made, site(attached={"sentinel:2.2": jnp.ones((5, 7))}), X)
        capture(made, site(), X)
    first, second = record.calls[("layer",)]
    assert first[0] == second[0] == made.spec
    assert first[1].parameters == {"kernel": "layer/kernel"}
    assert first[1].attached == {"sentinel:2.2": (5, 7)}
    assert not record.refused


def test_without_probes_the_output_is_returned_as_it_is():
    assert capture(call(), site(), X) is X


def test_probes_observe_the_output():
    made = call()
    zeros = {f"{PROBE}{k}.{len(s)}": jnp.zeros(s) for k, s in made.spec.probes.items()}
    zeros = {k: x.reshape(x.shape + (1,) * (2 - x.ndim)) for k, x in zeros.items()}
    out = capture(made, site(attached=zeros), jnp.asarray(X))
    np.testing.assert_array_equal(out, X)


def test_a_refused_call_names_the_reason_for_each_of_its_parameters():
    with recording() as record:
        assert capture("it is odd", site(), X) is X
    assert record.refused == {"layer/kernel": "it is odd"}
    assert not record.calls


def test_layers_that_share_some_of_their_parameters_are_refused():
    with recording() as record:
        capture(call(), site(), X)
        capture(call(), site(kernel="other/kernel"), X)
    assert set(record.refused) == {"layer/kernel", "other/kernel"}
    assert "shares some" in record.refused["layer/kernel"]


def test_recordings_nest_end_and_belong_to_one_thread():
    assert current_record() is None
    seen = []
    with recording() as outer:
        with recording() as inner:
            assert current_record() is inner
        assert current_record() is outer
        thread = threading.Thread(target=lambda: seen.append(current_record()))
        thread.start()
        thread.join()
    assert seen == [None]
    with pytest.raises(RuntimeError), recording():
        raise RuntimeError
    assert current_record() is None
