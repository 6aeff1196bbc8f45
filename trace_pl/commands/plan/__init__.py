"""`trace-pl plan`: will a run fit, and how long does it take? Asked before anything is loaded."""

from trace_pl.commands.plan.arguments import split_arguments


def command(arguments: list[str]) -> int:
    """Run `trace-pl plan`: print the plan; 1 if the run does not fit."""
    assumptions, device, rest = split_arguments(arguments)
    from trace_pl.commands.plan.planning import plan  # takes seconds, which --help does not need

    return plan(assumptions, device, rest)
