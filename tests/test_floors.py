"""Draws the floors from the imports: an arrow points down, or it is wrong."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "ddiloco_jax"

FLOORS = {
  "train": 5,
  "cli": 5,
  "launch": 4,
  "chaos": 3,
  "report": 3,
  "config": 3,
  "syncer": 2,
  "learner": 2,
  "wire": 1,
  "models": 1,
  "data": 1,
  "training": 1,
  "algorithm": 0,
  "protocol": 0,
}
# Arrows within a floor: the trainer is made of a model and of data.
SIDEWAYS = {("training", "models"), ("training", "data")}

HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "chex"}
# What a learner without JAX imports, and what must start at once.
LIGHT = (
  "ddiloco_jax.algorithm.fragments",
  "ddiloco_jax.algorithm.delta",
  "ddiloco_jax.algorithm.quantize",
  "ddiloco_jax.algorithm.merge",
  "ddiloco_jax.wire",
  "ddiloco_jax.data.stream",
  "ddiloco_jax.launch.numpy_learner",
  "ddiloco_jax.launch.numpy_training",
  "ddiloco_jax.learner.learner",
  "ddiloco_jax.learner.link",
  "ddiloco_jax.learner.client",
  "ddiloco_jax.report",
  "ddiloco_jax.cli.status",
  "ddiloco_jax.cli.local",
)
# One library, one file that knows it.
ONLY_IN = {
  "orbax": {"ddiloco_jax.training.checkpoint"},
  "ml_collections": {"ddiloco_jax.config.flag"},
}


def module_name(path: pathlib.Path, root: pathlib.Path) -> str:
  parts = path.relative_to(root).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_sources(root: pathlib.Path) -> dict[str, tuple[str, str]]:
  """Module name -> (its package, its text), for every file of the package."""
  sources = {}
  for path in sorted((root / PACKAGE).rglob("*.py")):
    name = module_name(path, root)
    is_package = path.name == "__init__.py"
    package = name if is_package else name.rpartition(".")[0]
    sources[name] = (package, path.read_text(encoding="utf-8"))
  return sources


def imported_names(
  package: str, tree: ast.AST, *, top_only: bool = False
) -> Iterator[tuple[int, str]]:
  """(line, dotted name) of every import, wherever in the file it stands."""
  for node in walk_top(tree) if top_only else ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      above = package.split(".")[: len(package.split(".")) - node.level + 1]
      prefix = ".".join(above) if node.level else ""
      source = ".".join(part for part in (prefix, node.module) if part)
      for alias in node.names:
        yield node.lineno, f"{source}.{alias.name}"
    elif isinstance(node, ast.Call) and node.args:
      called = ast.unparse(node.func).rpartition(".")[2]
      first = node.args[0]
      if called in ("import_module", "__import__") and isinstance(
        first, ast.Constant
      ):
        yield node.lineno, str(first.value)


def walk_top(tree: ast.AST) -> Iterator[ast.AST]:
  """What runs when the module is imported: no function bodies, no types."""
  todo = [tree]
  while todo:
    node = todo.pop()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
      continue
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      todo.extend(node.orelse)
      continue
    yield node
    todo.extend(ast.iter_child_nodes(node))


def room_of(name: str) -> str | None:
  parts = name.split(".")
  return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def wrong_arrows(sources: dict[str, tuple[str, str]]) -> list[str]:
  """One sentence per import that points up, sideways or to no known room."""
  faults = []
  for module, (package, text) in sources.items():
    room = room_of(module)
    if room is None:
      room_floor = -1  # The package's own __init__ imports no room.
    elif room not in FLOORS:
      faults.append(f"{module} is in no room of the map")
      continue
    else:
      room_floor = FLOORS[room]
    for line, name in imported_names(package, ast.parse(text)):
      other = room_of(name)
      if other is None or other == room or is_attribute(other, sources):
        continue
      where = f"{module}:{line} imports {name}"
      if other not in FLOORS:
        faults.append(f"{where}, which is in no room of the map")
      elif FLOORS[other] > room_floor:
        faults.append(f"{where}, upwards")
      elif FLOORS[other] == room_floor and (room, other) not in SIDEWAYS:
        faults.append(f"{where}, sideways")
  return faults


def is_attribute(name: str, sources: dict[str, tuple[str, str]]) -> bool:
  """`from ddiloco_jax import __version__` names no room."""
  return name == "*" or (name.startswith("__") and name not in sources)


def libraries(
  module: str, sources: dict[str, tuple[str, str]]
) -> dict[str, str]:
  """Library -> the first module through which importing `module` loads it."""
  found: dict[str, str] = {}
  seen: set[str] = set()
  todo = [module]
  while todo:
    here = todo.pop()
    if here in seen or here not in sources:
      continue
    seen.add(here)
    package, text = sources[here]
    names = imported_names(package, ast.parse(text), top_only=True)
    for _, name in names:
      library = name.split(".")[0]
      if library != PACKAGE:
        found.setdefault(library, here)
      parts = name.split(".")
      todo += [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
  return found


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[str, str]]:
  return read_sources(ROOT)


def test_every_import_points_down(sources):
  assert not wrong_arrows(sources)


def test_the_map_is_drawn_from_real_files(sources):
  rooms = {room_of(module) for module in sources} - {None}

  assert {"algorithm", "protocol", "wire", "launch", "cli"} <= rooms


def test_the_protocol_needs_the_standard_library_only(sources):
  import sys

  for module in sources:
    if room_of(module) == "protocol":
      foreign = set(libraries(module, sources)) - sys.stdlib_module_names
      assert not foreign, f"{module} needs {foreign}"


def test_light_modules_do_not_load_jax(sources):
  for module in sources:
    if module.startswith(LIGHT):
      heavy = {
        library: via
        for library, via in libraries(module, sources).items()
        if library in HEAVY
      }
      assert not heavy, f"importing {module} loads {heavy}"


def test_a_library_with_one_home_is_imported_there_only(sources):
  for module, (package, text) in sources.items():
    for line, name in imported_names(package, ast.parse(text)):
      homes = ONLY_IN.get(name.split(".")[0])
      assert homes is None or module in homes, f"{module}:{line} {name}"


def test_configs_import_the_config_module_only():
  for path in sorted((ROOT / "configs").glob("*.py")):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for line, name in imported_names("configs", tree):
      ours = name.startswith((PACKAGE, "configs"))
      allowed = name.startswith((f"{PACKAGE}.config", "configs"))
      assert allowed or not ours, f"{path.name}:{line} imports {name}"


def bad(module: str, text: str) -> list[str]:
  package = module.rpartition(".")[0]
  return wrong_arrows({PACKAGE: (PACKAGE, ""), module: (package, text)})


@pytest.mark.parametrize(
  ("module", "text", "direction"),
  [
    ("ddiloco_jax.wire.port", "import ddiloco_jax.syncer.syncer", "upwards"),
    ("ddiloco_jax.wire.port", "from ddiloco_jax import learner", "upwards"),
    ("ddiloco_jax.wire.port", "from .. import config as c", "upwards"),
    ("ddiloco_jax.wire.pb.x", "from ...syncer import server", "upwards"),
    ("ddiloco_jax.syncer.syncer", "from ..learner import link", "sideways"),
    ("ddiloco_jax.data.stream", "import ddiloco_jax.models.moe", "sideways"),
    ("ddiloco_jax.protocol.quorum", "from ..algorithm import x", "sideways"),
    ("ddiloco_jax.report.html", "def f():\n  from ..launch import run", "up"),
    (
      "ddiloco_jax.models.vit",
      "if TYPE_CHECKING:\n  from ddiloco_jax.training import step",
      "sideways",
    ),
    (
      "ddiloco_jax.protocol.machine",
      "import importlib\nimportlib.import_module('ddiloco_jax.wire.port')",
      "upwards",
    ),
    ("ddiloco_jax.cli.local", "from ddiloco_jax import train", "sideways"),
    ("ddiloco_jax.cli.local", "import ddiloco_jax.odd", "no room"),
    ("ddiloco_jax.odd.thing", "", "no room"),
  ],
)
def test_a_wrong_arrow_is_found(module, text, direction):
  faults = bad(module, text)

  assert len(faults) == 1
  assert direction in faults[0]


@pytest.mark.parametrize(
  ("module", "text"),
  [
    ("ddiloco_jax.training.evaluate", "from ddiloco_jax.data import stream"),
    ("ddiloco_jax.launch.run", "from ..learner.client import Client"),
    ("ddiloco_jax.wire.messages", "from . import port"),
    ("ddiloco_jax.cli.local", "from ddiloco_jax import __version__"),
    ("ddiloco_jax.cli.local", "import numpy, jax.numpy"),
  ],
)
def test_a_right_arrow_passes(module, text):
  assert not bad(module, text)


def test_a_heavy_library_is_found_through_another_module():
  tree = {
    "ddiloco_jax": ("ddiloco_jax", ""),
    "ddiloco_jax.wire": ("ddiloco_jax.wire", ""),
    "ddiloco_jax.wire.a": ("ddiloco_jax.wire", "from .b import thing"),
    "ddiloco_jax.wire.b": (
      "ddiloco_jax.wire",
      "import jax.numpy as jnp\ndef f():\n  import optax",
    ),
  }

  assert libraries("ddiloco_jax.wire.a", tree) == {"jax": "ddiloco_jax.wire.b"}
