"""Random schedules of the state machine among learners, links and crashes."""
