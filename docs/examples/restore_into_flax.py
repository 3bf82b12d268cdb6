"""Samples text from a run of bytes: restore_into_flax.py RUN [PROMPT]."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from ddiloco_jax.models import transformer  # A plain flax module, no more.

run = pathlib.Path(sys.argv[1]).absolute()
prompt = (sys.argv[2] if len(sys.argv) > 2 else "def ").encode()
steps = [p for p in (run / "checkpoints").iterdir() if p.name.isdigit()]
newest = max(steps, key=lambda step: int(step.name))
cfg = json.loads((run / "config.json").read_text())["model"]

model = transformer.Transformer(transformer.ModelConfig(**cfg))
tokens = jnp.zeros((1, 256), jnp.int32)
tokens = tokens.at[0, : len(prompt)].set(jnp.array(list(prompt)))
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
  jax.eval_shape(model.init, jax.random.key(0), tokens)["params"],
)
params = ocp.StandardCheckpointer().restore(newest / "params", target)


def extend(t, tokens):
  logits_BxTxV = jnp.asarray(model.apply({"params": params}, tokens))
  logits_V = logits_BxTxV[0, t - 1] / 0.8
  byte = jax.random.categorical(jax.random.key(t), logits_V)
  return tokens.at[0, t].set(byte)


tokens = jax.lax.fori_loop(len(prompt), tokens.shape[1], extend, tokens)
print(bytes(tokens[0].tolist()).decode(errors="replace"))
