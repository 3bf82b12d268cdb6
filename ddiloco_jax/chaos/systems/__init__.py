"""The systems that are compared on one tape of interruptions, a module each.

Each has `simulate(scenario) -> Tally`.
"""
