"""JSON has no NaN and no infinity: nothing here may write them."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = [
  path
  for room in ("ddiloco_jax", "scripts", "configs", "docs")
  for path in sorted((ROOT / room).rglob("*.py"))
]


def lenient_dumps(text: str) -> list[int]:
  """Lines that write JSON in which a number need not be finite."""
  return [
    node.lineno
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Call)
    and ast.unparse(node.func) in ("json.dump", "json.dumps")
    and not any(
      keyword.arg == "allow_nan" and ast.unparse(keyword.value) == "False"
      for keyword in node.keywords
    )
  ]


def test_all_json_that_is_written_is_strict():
  assert len(SOURCES) > 80

  faults = [
    f"{path.relative_to(ROOT)}:{line}"
    for path in SOURCES
    for line in lenient_dumps(path.read_text("utf-8"))
  ]

  assert not faults, "say allow_nan=False, and write None for such a number"


@pytest.mark.parametrize(
  "text", ["json.dumps(x)", "json.dump(x, f, allow_nan=True)"]
)
def test_a_lenient_call_would_be_found(text):
  assert lenient_dumps(f"import json\n{text}") == [2]
  assert lenient_dumps("import json\njson.dumps(x, allow_nan=False)") == []
