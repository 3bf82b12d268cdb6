"""By how much one arm is better: over windows, over seeds, and as a table."""

import statistics

from scipy import stats


def improvement(losses, lone_losses):
  """By how much a mean loss is below another, in per cent of that other.

  Returns:
    That, and its standard error over the windows, which are paired.
  """
  ratio = losses.mean() / lone_losses.mean()
  residual = (
    losses - ratio * lone_losses
  )  # Of a ratio of means, to first order.
  error = residual.std(ddof=1) / len(losses) ** 0.5 / lone_losses.mean()
  return float(100 * (1 - ratio)), float(100 * error)


def over_seeds(rows):
  """Mean and 95 % interval (Student's t) of the improvement over the seeds."""
  if not rows:
    return {}
  values = [row["improvement_percent"] for row in rows]
  mean, low, high = statistics.mean(values), None, None
  if len(values) > 1:
    error = statistics.stdev(values) / len(values) ** 0.5
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    low, high = mean - half, mean + half
  return {
    "improvement_percent": mean,
    "improvement_low": low,
    "improvement_high": high,
  }


def to_markdown(settings, rows, imposed):
  """All results as tables.

  Args:
    settings: One line on what the rows have in common.
    rows: What `quality.compare` gives, for each seed; may be empty.
    imposed: What `quality.run_imposed` gives; may be empty.
  """
  lines = []
  if rows:
    lines = [
      settings,
      "",
      "| seed | steps of each learner | lone steps | loss | lone loss"
      " | better by (± its standard error over windows)"
      " | contributors per merge | realised H | commit |",
      "|---|---|---|---|---|---|---|---|---|",
      *(_row(row) for row in rows),
      "",
      _over_seeds_text(rows),
    ]
  if imposed:
    lines += [
      "",
      f"Imposed tape, commit {imposed['commit']}: {imposed['num_merges']}"
      f" merges, largest difference {imposed['largest_difference']:.2e} of the"
      " largest movement of a tensor.",
    ]
  return "\n".join(lines).strip()


def _row(row):
  steps = ", ".join(str(n) for n in row["steps_by_learner"])
  return (
    f"| {row['seed']} | {steps} | {row['lone_steps']} | {row['loss']:.4f}"
    f" | {row['lone_loss']:.4f} | {row['improvement_percent']:.2f} ±"
    f" {row['standard_error_percent']:.2f} % | {row['contributors_mean']:.2f}"
    f" | {row['realised_h_mean']:.1f} | {row['commit']} |"
  )


def _over_seeds_text(rows):
  figures = over_seeds(rows)
  text = f"Better by {figures['improvement_percent']:.2f} % on average"
  if len(rows) == 1:
    return f"{text}, of one seed."
  return (
    f"{text}; 95 % interval {figures['improvement_low']:.2f} to"
    f" {figures['improvement_high']:.2f} % (Student's t, {len(rows)} seeds)."
  )
