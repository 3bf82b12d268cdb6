"""`cli.simulate`: its flags, its studies, its figures."""

import json
import re

import pytest
from rich.console import Console

from ddiloco_jax.chaos import studies
from ddiloco_jax.chaos.studies import heterogeneous, table1
from ddiloco_jax.cli import simulate
from ddiloco_jax.launch import exits, simulating

SINGLE = "configs/sim/single.py"
SHORT = (
  "--config.run.duration_s=600.0",
  "--config.learners.num=2",
  "--config.learners.step_s=5.0",
)


def read(path, *overrides):
  return simulating.read_scenario(path, overrides)


@pytest.mark.parametrize("name", studies.NAMES)
def test_every_study_has_a_config_and_can_be_cut_into_cells(name):
  scenario = read(f"configs/sim/{name}.py")

  cells = simulating._study(name).cells(scenario)

  assert scenario.run.study == name
  assert len({cell[0] for cell in cells}) == len(cells) > 0


def test_it_ends_in_one_line_of_json_with_what_it_came_from(capsys):
  argv = [f"--config={SINGLE}", "--json", *SHORT]

  codes = [simulate.main([*argv, f"--processes={n}"]) for n in (1, 2)]
  told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

  assert codes == [exits.OK, exits.OK]
  for each in told:
    assert each.pop("seconds") > 0
  assert told[0] == told[1]
  assert 0.5 < told[0]["goodput"] < 1
  assert told[0]["scenario"]["learners"]["num"] == 2
  assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", told[0]["commit"])


def test_people_get_a_line_for_each_figure(capsys):
  simulate.main([f"--config={SINGLE}", *SHORT])

  out = capsys.readouterr().out
  assert re.search(r"^goodput +0\.\d+$", out, re.MULTILINE)
  assert re.search(r"^    num +2$", out, re.MULTILINE)


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    (("--config.run.study=tabel1",), "one of single, table1"),
    (("--config.fleet.chip=3",), "nearest is 'fleet.chips'"),
    (("--config.fleet.chips=0",), "at least 1"),
    (("--processes=0",), "at least 1"),
    (("--json=yes",), "json"),
    (("more",), "more"),
  ],
)
def test_what_cannot_be_is_told_in_a_line(changes, told, capsys):
  with pytest.raises(SystemExit) as caught:
    simulate.main([f"--config={SINGLE}", *SHORT, *changes])

  assert caught.value.code == exits.BAD_USAGE
  assert told in capsys.readouterr().err


def test_the_table_is_compared_cell_by_cell_and_half_of_it_is_held_out():
  scenario = read("configs/sim/table1.py")
  played = {
    f"{system}/{chips}": {"goodput": paper / 100, "uptime": 1.0, "events": 1}
    for system, row in table1.PAPER.items()
    for chips, paper in zip(table1.SIZES, row)
  }
  played["decoupled, M=2/150000"]["goodput"] = 0.92  # Held out; 94.
  played["decoupled, M=8/300000"]["goodput"] = 0.97  # Fitted; 96.
  played["decoupled, M=4/600000"]["uptime"] = 0.995

  told = table1.conclude(scenario, played)

  fitted = [
    table1.is_fitted(system, chips)
    for system in table1.PAPER
    for chips in table1.SIZES
  ]
  assert sum(fitted) == len(fitted) / 2 == 15
  assert told["worst_cell_points"] == pytest.approx(2.0)
  assert told["heldout_worst_points"] == pytest.approx(2.0)
  assert told["fitted_worst_points"] == pytest.approx(1.0)
  assert told["mean_points"] == pytest.approx(3 / 30)
  assert (told["uptime_min_m4"], told["uptime_min_m8"]) == (0.995, 1.0)
  assert told["table"]["decoupled, M=2"]["150000"] == pytest.approx(92.0)


def test_small_cells_of_the_table_come_near_the_paper():
  scenario = read("configs/sim/table1.py")
  cells = dict(table1.cells(scenario))
  played = {
    name: table1.play((name, cells[name]))
    for name in ("data-parallel, elastic/1200000", "decoupled, M=16/2400000")
  }

  goodputs = [100 * figures["goodput"] for figures in played.values()]
  assert goodputs == pytest.approx([58, 86], abs=3.5)
  assert played["decoupled, M=16/2400000"]["uptime"] >= 0.9999


def test_the_fast_wait_for_a_quorum_of_all_and_grace_brings_in_the_others():
  scenario = read(
    "configs/sim/heterogeneous.py", "--config.run.duration_s=3000.0"
  )

  told = simulating.play(scenario, 1, Console(quiet=True))

  assert told["worst_points"] < 3
  assert told["grace_over_none_contributors"] > 1.2
  assert set(told["table"]) == set(heterogeneous.PAPER)
