import jax

from ddiloco_jax.models import transformer
from ddiloco_jax.training import mesh, step

CONFIG = transformer.ModelConfig(
  embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=8
)


def test_a_blank_state_differs_from_a_fresh_one_in_the_parameters_only():
  model = transformer.make_model(CONFIG)
  devices = mesh.make_mesh(mesh.MeshConfig())
  for name in ("adamw", "sgd"):
    cfg = step.TrainConfig(batch_size=2, seq_len=8, optimizer=name)

    blank = step.blank_state(model, cfg, devices)

    fresh = step.init_state(model, cfg, devices, seed=0)
    assert jax.tree.structure(blank) == jax.tree.structure(fresh)
    assert blank.params.keys() == fresh.params.keys()
    zeroed = fresh.replace(params=jax.tree.map(lambda x: 0 * x, fresh.params))
    same = jax.tree.map(
      lambda a, b: a.dtype == b.dtype and (a == b).all(), blank, zeroed
    )
    assert all(jax.tree.leaves(same))
