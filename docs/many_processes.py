"""One of several processes that train together: many_processes.py PROCESS PROCESSES PORT STEPS."""

import pathlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kldwrm_jax as kw

process, processes, port, steps = map(int, sys.argv[1:])
if processes > 1:
    jax.distributed.initialize(
        f"localhost:{port}", processes, process, heartbeat_timeout_seconds=10
    )
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
everywhere, by_example = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))

model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(10)])
example = jax.ShapeDtypeStruct((128, 20), jnp.float32)
net = kw.instrument(model, kw.Categorical(), example)
tx = kw.so_kldwrm(net.layers, 0.03, refresh_every=10, inverse=kw.Inverse(mesh=mesh, axis="data"))


def init():
    """Parameters and optimizer state before the first step."""
    params = model.init(jax.random.key(0), jnp.zeros((1, 20)))["params"]
    return {"params": params, "opt_state": tx.init(params)}


@jax.jit
def train_step(state, x, y, key):
    """A step on a batch that is sharded over all devices of all processes."""
    oracle = net.oracle(state["params"], x, targets=y, key=key)
    loss, grads = jax.value_and_grad(oracle.loss)(state["params"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"], oracle=oracle)
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def batch(step):
    """This process's part of a batch; a batch depends on its step only."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(128, 20)).astype(np.float32)
    y = np.abs(x[:, :10]).argmax(-1)
    mine = slice(process * 128 // processes, (process + 1) * 128 // processes)
    return [jax.make_array_from_process_local_data(by_example, a[mine]) for a in (x, y)]


state = jax.jit(init, out_shardings=everywhere)()
with ocp.CheckpointManager(pathlib.Path("checkpoints").absolute()) as manager:
    done = manager.latest_step() or 0
    if done:  # written by any number of processes
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), state
        )
        state = manager.restore(done, args=ocp.args.StandardRestore(like))
    for i in range(done, steps):
        state, loss = train_step(state, *batch(i), jax.random.key(i))
        if (i + 1) % 20 == 0:
            manager.save(i + 1, args=ocp.args.StandardSave(state))
print(f"{done} to {steps}: loss {loss:.4f}")
