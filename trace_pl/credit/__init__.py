"""Credit assignment: pure functions on tensors, the stages that call them, and their order."""
