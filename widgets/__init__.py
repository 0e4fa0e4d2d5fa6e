"""Interactive pictures that also work without a kernel. Engine-free: they read records, recordings and the planner."""

from widgets.context_frontier import ContextFrontier
from widgets.gradient_scope import GradientScope
from widgets.group_serialization import GroupSerialization
from widgets.plan import Plan
from widgets.prefix_reuse_drift import PrefixReuseDrift
from widgets.replay_timeline import ReplayTimeline
from widgets.run_monitor import RunMonitor

__all__ = [
    "ContextFrontier",
    "GradientScope",
    "GroupSerialization",
    "Plan",
    "PrefixReuseDrift",
    "ReplayTimeline",
    "RunMonitor",
]
