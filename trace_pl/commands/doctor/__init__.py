"""`trace-pl doctor`: does this machine do what a run asks of it? Asked before the run."""

from trace_pl.commands.parser import PlainParser


def command(arguments: list[str]) -> int:
    """Run `trace-pl doctor`; 1 if a check failed."""
    parser = PlainParser(
        "trace-pl doctor",
        description="Starts the engine of a config, pushes weights, compares both sides, trains a "
        "few layers, and says of each part whether it works here and what to change. Takes every "
        "argument of `trace-pl fit` beside these; without --config it examines the quickstart.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=4,
        help="layers of the configured model that are made, with random weights; a model that has "
        "no more is taken as it is (default: 4)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=None,
        help="tokens of a forward (default: data.tokens_per_forward; at most 2,048 on a CPU)",
    )
    own, rest = parser.parse_known_args(arguments)
    if own.layers < 1 or (own.tokens is not None and own.tokens < 64):
        parser.error(
            f"expected --layers of at least 1 and --tokens of at least 64, got {own.layers} and "
            f"{own.tokens}"
        )
    from trace_pl.commands.doctor.examination import examine  # takes seconds, unlike --help

    if not any(each == "--config" or each.startswith("--config=") for each in rest):
        rest = ["--config", "quickstart", *rest]
    return examine(rest, own.layers, own.tokens)
