"""Training: the LightningModule, the DataModule, and what a run leaves on disk."""

from trace_pl.training.credit_assigner import CreditAssigner, CreditObserver
from trace_pl.training.datamodule import RolloutDataModule
from trace_pl.training.export import export
from trace_pl.training.metrics import EpochMetrics
from trace_pl.training.module import TraceModule

__all__ = [
    "CreditAssigner",
    "CreditObserver",
    "EpochMetrics",
    "RolloutDataModule",
    "TraceModule",
    "export",
]
