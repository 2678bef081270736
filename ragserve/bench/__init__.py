"""Load generation: workloads as token ids, a closed loop of clients, figures of a run."""

from .load import Figures, Record, closed_loop, figures
from .workloads import WORKLOADS, BenchRequest, build_workload, read_workload

__all__ = [
    "WORKLOADS",
    "BenchRequest",
    "Figures",
    "Record",
    "build_workload",
    "closed_loop",
    "figures",
    "read_workload",
]
