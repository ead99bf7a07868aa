"""What comes from the teacher: prefix ratios, the choice of traces, hints, the plan of a step, further rounds."""

from luffy.guidance import built_in_gates  # noqa: F401  (registers them)
from luffy.guidance.gate import GATES, FirstRound, Gate, SecondRound, gate_function
from luffy.guidance.plan import Planner, given
from luffy.guidance.ratios import SCHEDULES, RatioSchedule
from luffy.guidance.trace_choice import ORDERS, choose

__all__ = [
    "GATES",
    "ORDERS",
    "SCHEDULES",
    "FirstRound",
    "Gate",
    "Planner",
    "RatioSchedule",
    "SecondRound",
    "choose",
    "gate_function",
    "given",
]
