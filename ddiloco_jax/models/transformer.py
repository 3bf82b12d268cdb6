"""A decoder-only transformer, whose tree paths are what fragments are made of.

Linen, not nnx: parameters are a plain nested dict, apply is a pure function of
it, and a path in that dict ("layers_0/attention/query") names the same array in
a fragment, a checkpoint and a sharding rule. RoPE, RMSNorm, SwiGLU and grouped
queries. (arXiv 2604.21428, Sec. 4: dense decoders.)
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import unfreeze

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
  """The shape of a model.

  Attributes:
    vocab_size: Rows of the embedding.
    embed_dim: Width of the residual stream.
    num_layers: Blocks; without scan each has nine arrays.
    num_heads: Query heads.
    num_kv_heads: Key and value heads; divides `num_heads`.
    head_dim: Width of a head; even, for RoPE turns pairs.
    mlp_dim: Width of the gated hidden layer.
    rope_theta: Base of the RoPE wavelengths.
    norm_eps: Added to the mean square in RMSNorm.
    tie_embeddings: The head is the transposed embedding; there is no "head".
    compute_dtype: Of activations and matrix products; logits are float32.
    param_dtype: Of the parameters.
    remat: Recompute a block's activations in the backward pass.
    scan_layers: Stack the blocks' arrays under "layers" and scan over them:
      compile time does not grow with depth, but a fragment can no longer hold
      a single block.
  """

  vocab_size: int = 256
  embed_dim: int = 128
  num_layers: int = 4
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 32
  mlp_dim: int = 384
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  compute_dtype: str = "float32"
  param_dtype: str = "float32"
  remat: bool = False
  scan_layers: bool = False

  def __post_init__(self):
    for name in (
      "vocab_size",
      "embed_dim",
      "num_layers",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "mlp_dim",
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f"model.{name} is {getattr(self, name)}: it must be at least 1."
        )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"model.num_kv_heads is {self.num_kv_heads}: it must divide "
        f"model.num_heads ({self.num_heads}); change one of them."
      )
    if self.head_dim % 2:
      raise ValueError(
        f"model.head_dim is {self.head_dim}: RoPE turns pairs, so it must be "
        f"even; use {self.head_dim + 1}."
      )
    for name in ("compute_dtype", "param_dtype"):
      if getattr(self, name) not in DTYPES:
        raise ValueError(
          f"model.{name} is {getattr(self, name)!r}: use one of "
          f"{', '.join(DTYPES)}."
        )
    for name in ("rope_theta", "norm_eps"):
      if not getattr(self, name) > 0:
        raise ValueError(
          f"model.{name} is {getattr(self, name)}: it must be above 0."
        )


def make_model(cfg: ModelConfig) -> "Transformer":
  """Returns the model; it holds no arrays."""
  return Transformer(cfg)


def init_params(model: "Transformer", seed: int) -> dict[str, Any]:
  """Returns fresh parameters, a plain nested dict.

  They depend on the seed and the shape, not on `scan_layers`.
  """
  return _init(model, jax.random.key(seed))


def num_params(cfg: ModelConfig) -> int:
  """Counts a model's parameters without making them."""
  heads = 2 * cfg.num_heads + 2 * cfg.num_kv_heads
  block = (
    cfg.embed_dim * cfg.head_dim * heads
    + 3 * cfg.embed_dim * cfg.mlp_dim
    + 2 * cfg.embed_dim
  )
  tables = (1 if cfg.tie_embeddings else 2) * cfg.vocab_size * cfg.embed_dim
  return cfg.num_layers * block + tables + cfg.embed_dim


def rotate(x_BxTxNxH: jax.Array, theta: float) -> jax.Array:
  """Turns pairs (i, i + H/2) of each head by an angle that grows with t.

  In float32: at t = 10,000 a bfloat16 angle would be off by whole turns.
  """
  T, H = x_BxTxNxH.shape[1], x_BxTxNxH.shape[3]
  frequency = theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
  angle = jnp.arange(T, dtype=jnp.float32)[:, None, None] * frequency
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  a, b = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x_BxTxNxH.dtype)


# Drawing an array costs a fifth of a second of compile time on CPU, so layers
# are drawn by a scan, and taken apart if they are not to be scanned.
@functools.partial(jax.jit, static_argnums=0)
def _init(model: "Transformer", key: jax.Array) -> dict[str, Any]:
  cfg = model.cfg
  stacked = model.clone(cfg=dataclasses.replace(cfg, scan_layers=True))
  params = unfreeze(stacked.init(key, jnp.zeros((1, 1), jnp.int32))["params"])
  if not cfg.scan_layers:
    layers = params.pop("layers")
    for i in range(cfg.num_layers):
      params[f"layers_{i}"] = jax.tree.map(operator.itemgetter(i), layers)
  return params


def _leave(x: jax.Array) -> jax.Array:
  return x


class RMSNorm(nn.Module):
  """x / rms(x) * scale, with the mean square in float32."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    cfg = self.cfg
    scale = self.param(
      "scale", nn.initializers.ones, (cfg.embed_dim,), cfg.param_dtype
    )
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(mean_square + cfg.norm_eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


class Attention(nn.Module):
  """Causal self-attention, N query heads on K key and value heads."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.cfg
    D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    wide = _matrix(in_axis=0, out_axis=(1, 2))
    query = self.param("query", wide, (D, N, H), cfg.param_dtype)
    key = self.param("key", wide, (D, K, H), cfg.param_dtype)
    value = self.param("value", wide, (D, K, H), cfg.param_dtype)
    output = self.param(
      "output",
      _matrix(in_axis=(0, 1), out_axis=2, num_layers=cfg.num_layers),
      (N, H, D),
      cfg.param_dtype,
    )
    dtype = x_BxTxD.dtype
    q_BxTxNxH = jnp.einsum("btd,dnh->btnh", x_BxTxD, query.astype(dtype))
    k_BxTxKxH = jnp.einsum("btd,dkh->btkh", x_BxTxD, key.astype(dtype))
    v_BxTxKxH = jnp.einsum("btd,dkh->btkh", x_BxTxD, value.astype(dtype))
    mixed_BxTxNxH = jax.nn.dot_product_attention(
      rotate(q_BxTxNxH, cfg.rope_theta),
      rotate(k_BxTxKxH, cfg.rope_theta),
      v_BxTxKxH,
      is_causal=True,
    )
    return jnp.einsum("btnh,nhd->btd", mixed_BxTxNxH, output.astype(dtype))


class MLP(nn.Module):
  """SwiGLU: down(silu(gate(x)) * up(x))."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.cfg
    D, F, dtype = cfg.embed_dim, cfg.mlp_dim, x_BxTxD.dtype
    gate = self.param("gate", _matrix(), (D, F), cfg.param_dtype)
    up = self.param("up", _matrix(), (D, F), cfg.param_dtype)
    down = self.param(
      "down", _matrix(num_layers=cfg.num_layers), (F, D), cfg.param_dtype
    )
    hidden_BxTxF = nn.silu(x_BxTxD @ gate.astype(dtype)) * (
      x_BxTxD @ up.astype(dtype)
    )
    return hidden_BxTxF @ down.astype(dtype)


class Block(nn.Module):
  """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

  cfg: ModelConfig
  place: Callable[[jax.Array], jax.Array] = _leave

  @nn.compact
  def __call__(self, x_BxTxD: jax.Array) -> tuple[jax.Array, None]:
    normed = RMSNorm(self.cfg, name="attention_norm")(x_BxTxD)
    x_BxTxD = x_BxTxD + Attention(self.cfg, name="attention")(normed)
    normed = RMSNorm(self.cfg, name="mlp_norm")(x_BxTxD)
    x_BxTxD = x_BxTxD + MLP(self.cfg, name="mlp")(normed)
    return self.place(x_BxTxD), None


class Transformer(nn.Module):
  """Tokens int32 [B, T] to logits float32 [B, T, V].

  Attributes:
    cfg: The shape.
    place: Applied to the residual stream after each block; a trainer on a
      mesh puts a sharding constraint there.
  """

  cfg: ModelConfig
  place: Callable[[jax.Array], jax.Array] = _leave

  @nn.compact
  def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
    cfg = self.cfg
    # 0.02 as in GPT-2: logits start near 0, the loss near log(vocab_size).
    table = nn.initializers.normal(0.02)
    embedding_VxD = self.param(
      "embedding", table, (cfg.vocab_size, cfg.embed_dim), cfg.param_dtype
    )
    x_BxTxD = self.place(
      embedding_VxD[tokens_BxT].astype(jnp.dtype(cfg.compute_dtype))
    )
    x_BxTxD = self._blocks(x_BxTxD)
    x_BxTxD = RMSNorm(cfg, name="final_norm")(x_BxTxD)
    if cfg.tie_embeddings:
      head_DxV = embedding_VxD.T
    else:
      head_DxV = self.param(
        "head", table, (cfg.embed_dim, cfg.vocab_size), cfg.param_dtype
      )
    return jnp.matmul(
      x_BxTxD,
      head_DxV.astype(x_BxTxD.dtype),
      preferred_element_type=jnp.float32,
    )

  def _blocks(self, x_BxTxD: jax.Array) -> jax.Array:
    cfg = self.cfg
    # A scan's body is its own computation already: nothing to keep apart.
    block = (
      nn.remat(Block, prevent_cse=not cfg.scan_layers) if cfg.remat else Block
    )
    if cfg.scan_layers:
      stack = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=cfg.num_layers,
      )
      return stack(cfg, self.place, name="layers")(x_BxTxD)[0]
    for i in range(cfg.num_layers):
      x_BxTxD, _ = block(cfg, self.place, name=f"layers_{i}")(x_BxTxD)
    return x_BxTxD


def _matrix(
  *,
  in_axis: int | tuple[int, ...] = 0,
  out_axis: int | tuple[int, ...] = 1,
  num_layers: int = 0,
) -> nn.initializers.Initializer:
  """Unit gain; what feeds the residual stream shrinks with its 2 L additions."""
  return nn.initializers.variance_scaling(
    1.0 / (2 * num_layers) if num_layers else 1.0,
    "fan_in",
    "truncated_normal",
    in_axis=in_axis,
    out_axis=out_axis,
  )
