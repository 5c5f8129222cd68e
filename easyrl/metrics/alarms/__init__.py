"""Collapse alarms: rules over the history of a run's metrics, each with its source and remedy.

Consumes: the metrics of each batch, after a resume those in ``metrics.jsonl`` first. Produces: the
metric ``alarm/NAME`` (0 or 1), and once per alarm a warning and the event ``alarm``. What follows
from an alarm, a checkpoint or the run's end, is ``easyrl/trainer/alarm_actions.py``.
"""
