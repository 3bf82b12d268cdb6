"""What is simulated to show something, a module each.

A study is cut into cells that do not depend on each other:
  cells(scenario) -> names of the cells, each with its scenario
  play(cell) -> figures of one, anywhere
  conclude(scenario, figures by cell) -> what the study says, as JSON values
"""

NAMES = ("single", "table1", "heterogeneous")
