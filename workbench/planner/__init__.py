"""The planner: what fits, how long it takes, and how sure we are, before anyone rents a machine.

    plan("Qwen3.6-27B", "H200", positions=2**20, group_size=8, response_tokens=8192, context_parallel=8)

Formulas are small functions: exact sizes in `sizes`, what an implementation decides in `graph`, operations in `flops`;
`terms` puts them together by phase. It imports no engine: a machine's own figures come in as a `Calibration`.
"""

from workbench.planner.measured import Calibration, Line
from workbench.planner.plan import Plan, plan, plan_request
from workbench.planner.request import Request
from workbench.planner.shapes import ModelShape
from workbench.planner.sources import Gpu, catalogue, find_gpu, find_model
from workbench.planner.terms import PHASES, TERMS, Term

__all__ = [
    "PHASES", "TERMS", "Calibration", "Gpu", "Line", "ModelShape", "Plan", "Request", "Term", "catalogue", "find_gpu",
    "find_model", "plan", "plan_request",
]  # fmt: skip
