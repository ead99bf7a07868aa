"""What comes from the teacher: prefix ratios, the choice of traces, hints, the plan of a step, further rounds."""

from luffy.guidance import built_in_gates  # noqa: F401  (registers them)
from luffy.guidance.gate import FirstRound, Gate, SecondRound, gate_function
from luffy.guidance.plan import Plan, Planner
from luffy.guidance.ratios import RatioSchedule

__all__ = ["FirstRound", "Gate", "Plan", "Planner", "RatioSchedule", "SecondRound", "gate_function"]
