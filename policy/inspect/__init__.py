"""Reports on programs: their dtypes, hazards, errors and costs.

The functions are names of `policy`; the classes of what they return are here.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policy.inspect.audit.report import Audit as Audit
    from policy.inspect.audit.report import Finding as Finding
    from policy.inspect.compare.comparison import Comparison as Comparison
    from policy.inspect.estimate.report import Estimate as Estimate
    from policy.inspect.estimate.rows import PolicyCost as PolicyCost
    from policy.inspect.monitor.snapshot import Snapshot as Snapshot
    from policy.inspect.runs.run_log import RunLog as RunLog
    from policy.inspect.suggest.suggestion import Suggestion as Suggestion

# The modules that define the classes.
_MODULES = {
    "Audit": "policy.inspect.audit.report",
    "Comparison": "policy.inspect.compare.comparison",
    "Estimate": "policy.inspect.estimate.report",
    "Finding": "policy.inspect.audit.report",
    "PolicyCost": "policy.inspect.estimate.rows",
    "RunLog": "policy.inspect.runs.run_log",
    "Snapshot": "policy.inspect.monitor.snapshot",
    "Suggestion": "policy.inspect.suggest.suggestion",
}

__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'policy.inspect' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
