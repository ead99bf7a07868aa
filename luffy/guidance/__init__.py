"""What comes from the teacher: prefix ratios, the choice of traces, the plan of a step."""

from luffy.guidance.plan import Plan, Planner
from luffy.guidance.ratios import RatioSchedule

__all__ = ["Plan", "Planner", "RatioSchedule"]
