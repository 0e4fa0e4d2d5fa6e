"""The planner: what fits, how long it takes, and how sure we are, before anyone rents a machine.

    plan("Qwen3.6-27B", "H200", positions=2**20, group_size=8, response_tokens=8192, context_parallel=8)

Formulas are small functions: exact sizes in `sizes`, what an implementation decides in `graph`, operations in `flops`;
`terms` puts them together by phase. It imports no engine: a machine's own figures come in as a `Calibration`.
"""

from workbench.planner.counterparts import accelerate_estimate, common_mistakes, counterpart_table
from workbench.planner.measured import Calibration, Line
from workbench.planner.published import PublishedRun, post_hoc_choices, published_runs, published_table
from workbench.planner.questions import best_chunk, largest_group, largest_positions, smallest_context_parallel
from workbench.planner.request import Request
from workbench.planner.shapes import ModelShape
from workbench.planner.sources import Gpu, catalogue, find_gpu, find_model, this_machine
from workbench.planner.step_plan import FRAGMENTATION, Plan, plan, plan_request, seconds_lines
from workbench.planner.terms import PHASES, TERMS, Term

__all__ = [
    "FRAGMENTATION",
    "PHASES",
    "TERMS",
    "Calibration",
    "Gpu",
    "Line",
    "ModelShape",
    "Plan",
    "PublishedRun",
    "Request",
    "Term",
    "accelerate_estimate",
    "best_chunk",
    "catalogue",
    "common_mistakes",
    "counterpart_table",
    "find_gpu",
    "find_model",
    "largest_group",
    "largest_positions",
    "plan",
    "plan_request",
    "post_hoc_choices",
    "published_runs",
    "published_table",
    "seconds_lines",
    "smallest_context_parallel",
    "this_machine",
]
